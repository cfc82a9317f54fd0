"""Archives of ``torch.save``, read without trusting a word of them.

Owns the allow-list, and the archive around the pickle. ``torch.load`` is not asked: without ``weights_only`` it runs
whatever a pickle says, and with it, it still believes sizes of storages and calls what is listed with any arguments.
Here, names stand for what `safe_tensors` and `safe_numpy` make, for plain values, which are checked, and for the types
that the caller listed, which are trusted with whatever arguments and state the archive has for them.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import io
import pathlib
import struct
import uuid
import zipfile
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from ml_flashpoint.format.errors import DamagedError, UnsafeContentError
from ml_flashpoint.unpickling import safe_numpy, safe_tensors
from ml_flashpoint.unpickling.unpickling_machine import Machine

SafeGlobal = Callable[..., Any] | tuple[Callable[..., Any], str]
DeviceOf = Callable[[str], torch.device]


def load_archive(
    data: Any, key: str, *, path: str, allowed: Sequence[SafeGlobal] = (), device_of: DeviceOf | None = None
) -> Any:
    """The value in an archive of ``torch.save``, in memory of its own.

    Args:
        data: the archive, any buffer of bytes.
        key: what it is called in errors. path: of the object that holds it.
        allowed: types it may be made of, beyond plain values, tensors and NumPy arrays.
        device_of: where a tensor is loaded to that was on the device of this name; the CPU if it is None.

    Raises:
        UnsafeContentError: it names something that is not allowed, or is no archive of ``torch.save``.
        DamagedError: it makes no sense.
    """
    words = _Words(allowed, device_of or (lambda _: torch.device("cpu")))
    try:
        with memoryview(data) as octets, octets.cast("B") as whole:
            return _run(whole, words)
    except _NoArchiveError:
        raise UnsafeContentError(
            f"item {key!r} was not written by torch.save, so it cannot be checked",
            path=path,
            hint="pass trust_bytes=True to the reader if its planner does not unpickle it",
        ) from None
    except _UnknownNameError as error:
        raise UnsafeContentError(
            f"item {key!r} needs {error}, which may run code when it is loaded",
            path=path,
            hint="pass these types as safe_globals to the reader if you trust them",
        ) from None
    except Exception as error:
        raise DamagedError(f"item {key!r} is not readable: {type(error).__name__}: {error}", path=path) from error


def refused_names(data: Any, *, allowed: Sequence[SafeGlobal] = ()) -> set[str]:
    """Names for which `load_archive` would refuse an archive. Nothing in it is made, and no type is asked.

    Raises:
        Exception: it would refuse the archive for another reason, or it is none.
    """
    words = _DryWords(allowed)
    with memoryview(data) as octets, octets.cast("B") as whole:
        _run(whole, words)
    return words.refused


class _NoArchiveError(Exception):
    pass


class _UnknownNameError(Exception):
    pass


# ---- the archive --------------------------------------------------------------------------------------------------


def _run(whole: memoryview, words: _Words) -> Any:
    records = _records(whole)
    if bytes(records.get("byteorder", b"little")) != b"little":
        raise ValueError("it is of a machine with another order of bytes")
    words.records = records
    try:
        return Machine(bytes(records["data.pkl"]), words).run()
    finally:
        words.forget()


def _records(whole: memoryview) -> dict[str, memoryview]:
    if bytes(whole[:4]) != b"PK\x03\x04":
        raise _NoArchiveError
    try:
        entries = zipfile.ZipFile(_Window(whole)).infolist()
    except zipfile.BadZipFile:
        raise _NoArchiveError from None
    found: dict[str, memoryview] = {}
    for entry in entries:
        name = entry.filename.partition("/")[2]
        head = struct.unpack("<4s22xHH", whole[entry.header_offset : entry.header_offset + 30])
        begin = entry.header_offset + 30 + head[1] + head[2]
        data = whole[begin : begin + entry.file_size]
        if head[0] != b"PK\x03\x04" or entry.compress_type != zipfile.ZIP_STORED or len(data) != entry.file_size:
            raise ValueError(f"its record {entry.filename!r} is not stored plainly")
        if name in found:
            raise ValueError(f"it has two records {name!r}")
        found[name] = data
    if "constants.pkl" in found or "data.pkl" not in found:
        raise _NoArchiveError
    return found


class _Window(io.RawIOBase):
    """Bytes as a file, without a copy of them."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, len(self._data))[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        piece = self._data[self._at : self._at + len(buffer)]
        buffer[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)


# ---- what a name stands for ---------------------------------------------------------------------------------------


class _Token:
    """Stands for a function that is never handed out."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make


class _Words:
    """What archives can say, see `unpickling_machine.Vocabulary`."""

    def __init__(self, allowed: Sequence[SafeGlobal], device_of: DeviceOf) -> None:
        self.records: dict[str, memoryview] = {}
        self._device_of = device_of
        self._storages: dict[str, torch.storage.TypedStorage] = {}
        self._listed = _by_name([*allowed, *torch.serialization.get_safe_globals()])
        self._tokens = {
            **{name: _Token(make) for name, make in safe_tensors.makers(device_of).items()},
            "torch._utils._rebuild_parameter_with_state": _Token(self._parameter_with_state),
            "torch._utils._rebuild_wrapper_subclass": _Token(self._wrapper),
            "torch._tensor._rebuild_from_type_v2": _Token(self._from_type),
            **_TOKENS,
        }

    def forget(self) -> None:
        """Let go of the archive and of what was made of it: this refers to itself, so nobody knows when it goes."""
        self.records, self._storages = {}, {}

    def find(self, name: str) -> Any:
        if name in self._tokens:
            return self._tokens[name]
        if name in _TYPES:
            return _TYPES[name]
        constant = _constant(name)
        if constant is not None:
            return constant
        if name in self._listed:
            return self.listed(name)
        return self.unknown(name)

    def listed(self, name: str) -> Any:
        return self._listed[name]

    def unknown(self, name: str) -> Any:
        raise _UnknownNameError(name)

    def _trusts(self, kind: Any) -> bool:
        return any(kind is each for each in self._listed.values())

    def call(self, function: Any, args: tuple[Any, ...]) -> Any:
        if isinstance(function, _Token):
            return function.make(*args)
        make = _CALLS.get(id(function))
        if make is not None:
            return make(*args)
        if not self._trusts(function):
            raise TypeError(f"{function!r} may not be called")
        return function(*args)

    def new(self, kind: Any, args: tuple[Any, ...]) -> Any:
        if kind is MetadataIndex or kind is uuid.UUID or kind is io.BytesIO:
            return kind.__new__(kind)
        if not isinstance(kind, type) or not self._trusts(kind):
            return self.call(kind, args)
        return kind.__new__(kind, *args)

    def set_state(self, instance: Any, state: Any) -> None:
        kind = type(instance)
        if kind is collections.OrderedDict or kind is MetadataIndex:
            instance.__dict__.update(_names(state))
        elif kind is io.BytesIO:
            data, position, _ = state
            instance.write(data)
            instance.seek(position)
        elif kind is uuid.UUID:
            if not 0 <= state["int"] < 1 << 128:
                raise ValueError("no UUID")
            instance.__setstate__({"int": state["int"]})
        elif not self._trusts(kind):
            raise TypeError(f"the state of a {kind.__name__} may not be set")
        else:
            _set_state(instance, state)

    def may_hold(self, holder: Any) -> bool:
        return self._trusts(type(holder))

    def persistent(self, identity: Any) -> Any:
        kind, stored, key, location, numel = identity
        if kind != "storage" or type(key) is not str or not isinstance(stored, _StorageType):
            raise ValueError("it refers to something that is no storage")
        if key not in self._storages:
            device = torch.device("cpu") if location == "cpu" else self._device_of(location)
            self._storages[key] = safe_tensors.storage(self.records[f"data/{key}"], stored.dtype, numel, device)
        return self._storages[key]

    # Those that name a type, which has to be a tensor's or listed.

    def _from_type(self, function: Any, kind: Any, args: Any, state: Any) -> Any:
        made = self.call(function, args)
        if not isinstance(made, torch.Tensor) or not (kind in (torch.Tensor, torch.nn.Parameter) or self._trusts(kind)):
            raise TypeError(f"a tensor of the type {kind!r}")
        if type(made) is not kind:
            made = made.as_subclass(kind)
        return self._with_state(made, state)

    def _parameter_with_state(self, data: Any, requires_grad: Any, hooks: Any, state: Any) -> Any:
        return self._with_state(safe_tensors.parameter(data, requires_grad, hooks), state)

    def _with_state(self, tensor: torch.Tensor, state: Any) -> torch.Tensor:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            _set_state(tensor, state)
            return tensor
        plain, slots = state if type(state) is tuple else (state, None)
        if slots:
            raise ValueError("a plain tensor with slots")
        tensor.__dict__.update(_names(plain or {}))
        return tensor

    def _wrapper(self, kind: Any, *args: Any) -> Any:
        if not self._trusts(kind):
            raise TypeError(f"a tensor of the type {kind!r}")
        return torch._utils._rebuild_wrapper_subclass(kind, *args)  # type: ignore[no-untyped-call]


class _Inert:
    """Stands for everything that is only looked at."""

    def __call__(self) -> None:
        """For defaultdict, which wants one that it can call."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Takes no notice."""

    def extend(self, items: Any) -> None:
        """Takes no notice."""


class _DryWords(_Words):
    """Makes nothing but plain values, and remembers what it would refuse."""

    def __init__(self, allowed: Sequence[SafeGlobal]) -> None:
        super().__init__(allowed, lambda _: torch.device("cpu"))
        self.refused: set[str] = set()

    def unknown(self, name: str) -> Any:
        self.refused.add(name)
        return _Inert()

    def listed(self, name: str) -> Any:
        return _Inert()

    def find(self, name: str) -> Any:
        return _Inert() if name in self._tokens and name.startswith("torch._") else super().find(name)

    def call(self, function: Any, args: tuple[Any, ...]) -> Any:
        return (
            _Inert() if isinstance(function, _Inert) or function is torch.nn.Parameter else super().call(function, args)
        )

    def new(self, kind: Any, args: tuple[Any, ...]) -> Any:
        return _Inert() if isinstance(kind, _Inert) else super().new(kind, args)

    def set_state(self, instance: Any, state: Any) -> None:
        if not isinstance(instance, _Inert):
            super().set_state(instance, state)

    def may_hold(self, holder: Any) -> bool:
        return isinstance(holder, _Inert)

    def persistent(self, identity: Any) -> Any:
        return _Inert()


def _by_name(allowed: Iterable[Any]) -> dict[str, Any]:
    return {
        each[1] if isinstance(each, tuple) else f"{each.__module__}.{each.__qualname__}": (
            each[0] if isinstance(each, tuple) else each
        )
        for each in allowed
    }


def _names(state: Any) -> dict[str, Any]:
    if type(state) is not dict or any(type(name) is not str or name.startswith("__") for name in state):
        raise TypeError("a state that is no dict of attributes")
    return state


def _set_state(instance: Any, state: Any) -> None:
    """Set the state of an instance of a type that the caller trusts, as pickle would."""
    setter = getattr(type(instance), "__setstate__", None)
    if setter is not None and setter is not torch.Tensor.__setstate__:
        instance.__setstate__(state)
        return
    plain, slots = state if type(state) is tuple and len(state) == 2 else (state, None)
    if plain:
        instance.__dict__.update(_names(plain))
    for name, value in _names(slots or {}).items():
        setattr(instance, name, value)


class _StorageType:
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


def _constant(name: str) -> Any:
    """A dtype, layout or type of storage of torch, None if this is the name of none."""
    module, _, last = name.rpartition(".")
    found = vars(torch).get(last) if module in ("torch", "torch.storage") else None
    if isinstance(found, (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)):
        return found
    if found is torch.UntypedStorage:
        return _StorageType(torch.uint8)
    dtype = torch.storage._storage_type_to_dtype_map().get(last) if found is not None else None
    return _StorageType(dtype) if dtype is not None else None


def _layout(name: str) -> torch.layout:
    found = _constant(name)
    if not isinstance(found, torch.layout):
        raise ValueError(f"no layout: {name!r}")
    return found


def _encode(text: Any, encoding: Any) -> bytes:
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise ValueError(f"bytes in the encoding {encoding!r}")
    return text.encode("latin1")


def _bytes(data: Any = b"", encoding: Any = "latin1") -> bytes:
    if type(data) is bytes:
        return data
    return _encode(data, encoding)


def _items(items: Any = ()) -> Any:
    if type(items) not in (list, tuple, dict):
        raise TypeError("items that are no list")
    return items


# Both are made again from their fields, since what they are pickled as is taken for valid.
def _date(data: Any) -> datetime.date:
    made = datetime.date(data) if type(data) is bytes else None  # type: ignore[call-arg, arg-type]
    return datetime.date(made.year, made.month, made.day)  # type: ignore[union-attr]


def _datetime(data: Any, *zone: Any) -> datetime.datetime:
    if type(data) is not bytes:
        raise TypeError("a date that is no bytes")
    at = datetime.datetime(data, *zone)  # type: ignore[arg-type]
    fields = (at.year, at.month, at.day, at.hour, at.minute, at.second, at.microsecond)
    return datetime.datetime(*fields, tzinfo=at.tzinfo, fold=at.fold)


_TOKENS: dict[str, _Token] = {
    **{
        f"numpy.{core}.multiarray.{name}": _Token(make)
        for core in ("core", "_core")
        for name, make in (("_reconstruct", safe_numpy.array_shell), ("scalar", safe_numpy.scalar))
    },
    "_codecs.encode": _Token(_encode),
    "torch.serialization._get_layout": _Token(_layout),
}

# Plain types, and what makes values of them. Those without are made by `_Words.new`, or can only be named.
_MAKERS: dict[Any, Callable[..., Any] | None] = {
    bytes: _bytes,
    bytearray: lambda *args: bytearray(_bytes(*args)),
    complex: complex,
    set: lambda items=(): set(_items(items)),
    frozenset: lambda items=(): frozenset(_items(items)),
    slice: slice,
    range: range,
    collections.OrderedDict: lambda items=(): collections.OrderedDict(_items(items)),
    collections.Counter: lambda items=(): collections.Counter(_items(items)),
    collections.defaultdict: lambda *args: collections.defaultdict(*args),
    collections.deque: lambda items=(), limit=None: collections.deque(_items(items), limit),
    datetime.date: _date,
    datetime.datetime: _datetime,
    datetime.timedelta: datetime.timedelta,
    datetime.timezone: datetime.timezone,
    decimal.Decimal: decimal.Decimal,
    fractions.Fraction: fractions.Fraction,
    **{kind: kind for kind in (pathlib.Path, pathlib.PosixPath, pathlib.PurePosixPath)},
    uuid.UUID: None,
    io.BytesIO: None,
    np.ndarray: None,
    np.dtype: safe_numpy.dtype_shell,
    torch.Size: lambda size=(): torch.Size(_items(size)),
    torch.device: torch.device,
    torch.Tensor: None,
    torch.nn.Parameter: None,
    MetadataIndex: None,
}
_TYPES = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in _MAKERS}
# What other versions of Python and of NumPy call them.
_TYPES |= {
    f"pathlib{sub}.{kind.__name__}": kind
    for sub in ("", "._local")
    for kind in _MAKERS
    if issubclass(kind, pathlib.PurePath)
}
_CALLS = {id(kind): make for kind, make in _MAKERS.items() if make is not None}
