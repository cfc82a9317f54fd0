"""State of what is neither module nor optimizer, and everything else that is saved as bytes.

Owns when such bytes are refused: what could not be loaded again is not saved.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import torch

from ml_flashpoint.format.errors import UnsafeContentError
from ml_flashpoint.unpickling.checks import place_of, refuse_unloadable, unsafe_globals
from ml_flashpoint.unpickling.safe_archive import SafeGlobal

PACKED = "_flashpoint"
"""Top-level key of the packed items, ``_flashpoint.rank-00003.<name>``; no tracked name starts like it."""


class PackedState(bytes):
    """State of one tracked object on one rank: an archive of ``torch.save``, made when the save began; or nothing yet,
    if it can be made later.

    Attributes:
        made_of: what was packed, to say where in it something is that cannot be saved; or what is to be packed, a copy
            of the state as it was when the save began.
        is_packed: whether it has the archive.
    """

    made_of: Any = None
    is_packed = True

    @classmethod
    def later(cls, state: Any) -> PackedState:
        """To be packed when its bytes are asked for.

        Args:
            state: nothing changes it any more.
        """
        packed = cls()
        packed.made_of, packed.is_packed = state, False
        return packed


def item_bytes(fqn: str, value: Any, *, allowed: Sequence[SafeGlobal] = ()) -> bytes:
    """The bytes that are saved of a value: what ``torch.save`` writes.

    Args:
        fqn: its name, for errors.
        value: a `PackedState`, a tensor that is more than its memory, or anything else.
        allowed: further types that may be saved, see `Flashpoint`.

    Raises:
        UnsafeContentError: it holds a type that loading does not allow.
    """
    if isinstance(value, torch.Tensor):
        content = _archive(value)
        refuse_unloadable(content.getvalue(), f"tensor {fqn!r}", allowed=allowed)
        return content.getvalue()
    if isinstance(value, PackedState):
        content = io.BytesIO(value) if value.is_packed else _archive(value.made_of)
        name, made_of = fqn.rpartition(".")[2], value.made_of
    else:
        content, name, made_of = _archive(value), fqn, value
    try:
        unsafe = ", ".join(sorted(unsafe_globals(content, allowed=allowed)))
    except Exception as error:
        raise UnsafeContentError(
            f"the state of {name!r} cannot be checked, so it could not be loaded: {error}"
        ) from error
    if unsafe:
        name = place_of(made_of, name, lambda each: _is_refused(each, allowed))
        raise UnsafeContentError(
            f"the state of {name!r} holds {unsafe}, which loading would refuse, because such types may run code",
            hint=f"keep plain values in it, or pass Flashpoint(..., safe_globals=[{unsafe}]) if you trust that",
        )
    return content.getvalue()


def _archive(value: Any) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream


def _is_refused(value: Any, allowed: Sequence[SafeGlobal]) -> bool:
    try:
        return bool(unsafe_globals(_archive(value), allowed=allowed))
    except Exception:  # of whatever kind pickling raises
        return True
