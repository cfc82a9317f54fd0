"""What torch's DCP keeps with our checkpoints: where each item lies, and items that are no tensors.

Owns the check that no such item is unpickled beyond an allow-list. DCP's metadata is `metadata_format`'s.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from ml_flashpoint.core.errors import DamagedError, UnsafeContentError

METADATA_KEY = "__dcp_metadata__"
"""Item of the coordinator's object that holds DCP's metadata."""

METADATA_SCOPE = "dcp_metadata"
"""Manifest label of a part whose object has that item: ``global`` or, for saves without collectives, ``rank``."""

SafeGlobal = Callable[..., Any] | tuple[Callable[..., Any], str]


@dataclass(frozen=True, slots=True)
class ItemPlace:
    """Where an item of a checkpoint lies: the part of a rank, and the key in its object. The same for every save
    of one structure, because DCP may reuse it from a cached plan."""

    rank: int
    key: str


def check_bytes(data: memoryview, key: str, *, path: str, allowed: Sequence[SafeGlobal] = ()) -> io.BytesIO:
    """A non-tensor item, after checking that loading it can only make allowed types.

    DCP's planners unpickle such items without restriction; this check comes before.

    Raises:
        UnsafeContentError: it names something that is not allowed.
        DamagedError: it is no archive of ``torch.save``.
    """
    stream = io.BytesIO(data)
    if not zipfile.is_zipfile(stream):
        raise UnsafeContentError(
            f"item {key!r} was not written by torch.save, so it cannot be checked",
            path=path,
            hint="pass trust_bytes=True to the reader if its planner does not unpickle it",
        )
    try:
        names = unsafe_globals(stream, allowed=allowed)
    except Exception as error:
        raise DamagedError(f"item {key!r} is not readable: {error}", path=path) from error
    if names:
        raise UnsafeContentError(
            f"item {key!r} needs {', '.join(sorted(names))}, which may run code when it is loaded",
            path=path,
            hint="pass these types as safe_globals to the reader if you trust them",
        )
    return stream


def allowing(types: Iterable[Any]) -> AbstractContextManager[None]:
    """Within, ``torch.load`` may make these types, too.

    Unlike ``torch.serialization.safe_globals``, this does not forbid at its end what was allowed before.
    """
    before = torch.serialization.get_safe_globals()
    return torch.serialization.safe_globals([each for each in types if each not in before])


def unsafe_globals(stream: io.BytesIO, *, allowed: Sequence[SafeGlobal] = ()) -> set[str]:
    """Names that unpickling an archive of ``torch.save`` would look up and that are not allowed.

    Unlike ``torch.serialization.safe_globals``, this changes nothing that other threads see. The stream is
    left at its start.

    Raises:
        Exception: it is no such archive.
    """
    stream.seek(0)
    needed = torch.serialization.get_unsafe_globals_in_checkpoint(stream)
    stream.seek(0)
    # Pickle calls the builtins what Python 2 did; not every torch translates that.
    names = {re.sub("^__builtin__[.]", "builtins.", name) for name in needed}
    return names - _SAFE_NAMES - {_name_of(each) for each in allowed}


# Of what numpy and the standard library's plain values pickle to; none of it can run anything.
_SAFE_NAMES = frozenset(
    {
        "builtins.bytes",
        "builtins.complex",
        "builtins.set",
        "builtins.frozenset",
        "builtins.slice",
        "builtins.range",
        "builtins.bytearray",
        "collections.OrderedDict",
        "collections.defaultdict",
        "collections.deque",
        "datetime.date",
        "datetime.datetime",
        "datetime.timedelta",
        "datetime.timezone",
        "decimal.Decimal",
        "fractions.Fraction",
        "pathlib.Path",
        "pathlib.PosixPath",
        "pathlib.PurePosixPath",
        "uuid.UUID",
        "numpy.core.multiarray._reconstruct",
        "numpy._core.multiarray._reconstruct",
        "numpy.core.multiarray.scalar",
        "numpy._core.multiarray.scalar",
        "numpy.ndarray",
        "numpy.dtype",
        "_codecs.encode",
        "torch.distributed.checkpoint.metadata.MetadataIndex",
    }
)


def _name_of(item: SafeGlobal) -> str:
    if isinstance(item, tuple):
        return item[1]
    return f"{item.__module__}.{item.__qualname__}"
