"""State of what is neither module nor optimizer, and everything else that is saved as bytes.

Owns when such bytes are refused: what could not be loaded again is not saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ml_flashpoint.state.archive import SafeGlobal, check_archive, save_archive

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
    hint = "keep plain values in it, or pass Flashpoint(..., safe_globals=[{}]) if you trust that"
    if not isinstance(value, PackedState):
        return save_archive(value, fqn, allowed=allowed, hint=hint)
    name = fqn.rpartition(".")[2]
    if not value.is_packed:
        return save_archive(value.made_of, name, allowed=allowed, hint=hint)
    check_archive(value, value.made_of, name, allowed=allowed, hint=hint)
    return value
