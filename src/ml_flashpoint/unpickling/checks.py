"""Whether what is saved could be loaded again, and loading without trust what somebody else will unpickle.

Owns the errors that name what is refused and where in a state it is. What is allowed is `safe_archive`'s.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import xxhash

from ml_flashpoint.format.errors import UnsafeContentError
from ml_flashpoint.unpickling.safe_archive import SafeGlobal, load_archive, refused_names


def check_bytes(data: Any, key: str, *, path: str, allowed: Sequence[SafeGlobal] = ()) -> io.BytesIO:
    """A non-tensor item, for a planner that will unpickle it, which DCP's do without restriction.

    It is loaded here, without trust, and saved again: what the planner gets was written by this process.

    Raises:
        UnsafeContentError: it names something that is not allowed.
        DamagedError: it makes no sense.
    """
    value = load_archive(data, key, path=path, allowed=allowed)
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


def refuse_unloadable(data: bytes, what: str, *, allowed: Sequence[SafeGlobal] = ()) -> None:
    """Check, when an item is saved, that :func:`check_bytes` would let it pass with the same ``allowed``.

    Args:
        data: an archive of ``torch.save``.
        what: it is, for the error.

    Raises:
        UnsafeContentError: it would not.
    """
    seen = (xxhash.xxh3_128_digest(data), frozenset(name for _, name in by_name(allowed)))
    if seen in _loadable:
        return
    try:
        names = ", ".join(sorted(refused_names(data, allowed=allowed)))
    except Exception as error:
        raise UnsafeContentError(
            f"{what} is nothing that torch.save wrote of plain values, so loading would refuse it ({error})",
            hint="pass trust_bytes=True to writer and reader if their planners write bytes that are never unpickled",
        ) from error
    if names:
        raise UnsafeContentError(
            f"{what} holds {names}, which loading would refuse, because such types may run code",
            hint=f"keep plain values in it, or pass safe_globals=[{names}] to writer and reader if you trust that",
        )
    if len(_loadable) >= _MOST_KNOWN:
        _loadable.clear()
    _loadable.add(seen)


_MOST_KNOWN = 100_000
# Most items that are no tensors are the same in every save, such as the settings of an optimizer.
_loadable: set[tuple[bytes, frozenset[str]]] = set()


def by_name(allowed: Iterable[SafeGlobal]) -> tuple[tuple[Callable[..., Any], str], ...]:
    """Types and the names that they are known by in archives."""
    return tuple(
        each if isinstance(each, tuple) else (each, f"{each.__module__}.{each.__qualname__}") for each in allowed
    )


def unsafe_globals(stream: io.BytesIO, *, allowed: Sequence[SafeGlobal] = ()) -> set[str]:
    """Names in an archive of ``torch.save`` for which loading would refuse it. The stream is left at its start.

    Raises:
        Exception: loading would refuse it for another reason, or it is no such archive.
    """
    stream.seek(0)
    return refused_names(stream.getbuffer(), allowed=allowed)


def place_of(value: Any, name: str, is_bad: Callable[[Any], bool]) -> str:
    """The name of the innermost value of a kind, in dicts, lists and tuples; ``value`` itself is of it."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    for key, each in items:
        if is_bad(each):
            return place_of(each, f"{name}.{key}", is_bad)
    return name


def cannot_be_pickled(value: Any) -> bool:
    """Whether ``torch.save`` fails."""
    try:
        torch.save(value, io.BytesIO())
    except Exception:  # of whatever kind pickling raises
        return True
    return False
