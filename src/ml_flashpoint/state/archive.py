"""Python objects as archives of ``torch.save``, read by ``torch.load(weights_only=True)`` without trusting them.

Allowed are the types that torch allows, plain values of the standard library, NumPy arrays and scalars, dataclasses,
namedtuples and enums of modules that this process has imported, and types that users list. NumPy's values and
instances are written as calls of functions of this module, which check their arguments: no pickle of NumPy is read, no
constructor of a dataclass runs, and no module is imported because an archive names it.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import copyreg
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import io
import logging
import math
import operator
import pathlib
import pickle
import pickletools
import re
import sys
import threading
import types
import uuid
import zipfile
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.lib.format import descr_to_dtype
from torch.torch_version import TorchVersion

from ml_flashpoint.copy.tensors import copied_whole, is_plain_strided
from ml_flashpoint.format.errors import (
    DamagedError,
    FlashpointError,
    InvalidArgumentError,
    SaveError,
    UnsafeContentError,
    text_of,
)
from ml_flashpoint.state.private import tree_leaves

SafeGlobal = Callable[..., Any] | tuple[Callable[..., Any], str]
Listed = Mapping[str, Callable[..., Any]]
"""What the user allows, by the names that archives have for it."""

_log = logging.getLogger(__name__)
_INLINE_BYTES = 8192
_MOST_OF_A_NAME = 256  # of a dtype, or of a field
_SAFE_SINCE = "2.10"
_HINT = "keep plain values in it, or list the type as safe_globals=[{}] where it is saved and loaded, if you trust it"


class Leaves(Protocol):
    """Tensors that are kept outside of an archive."""

    def take(self, tensor: torch.Tensor) -> tuple[Any, ...] | None:
        """Keep a tensor. Return what the archive holds in its place; None if the archive is to hold the tensor."""

    def give(self, *described: Any) -> Any:
        """Return the tensor that ``take`` described so. The description is not trusted."""


@contextlib.contextmanager
def plain_modes() -> Iterator[None]:
    """Have torch's own functions make tensors on the CPU, tracked by autograd, whatever the program has set. Tensors of
    this package name their device and dtype."""
    with contextlib.ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            # Nothing else lets tensors that are made now be changed in place later.
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield


# ---- writing ------------------------------------------------------------------------------------------------------


def save_archive(
    value: Any, name: str, *, allowed: Sequence[SafeGlobal] | None = (), leaves: Leaves | None = None
) -> bytes:
    """Return the archive of a value that `load_archive` accepts with the same ``allowed``.

    Args:
        name: what errors call the value.
        allowed: further types that may be in it; None if nothing is to be refused.
        leaves: keeps tensors. Also asked for them, since the archive is loaded once.

    Raises:
        UnsafeContentError: it holds something that cannot be pickled, or a type that is not allowed. Names the place.
    """
    make = partial(_archive, allowed=allowed, leaves=leaves)
    try:
        return make(value)
    except UnsafeContentError:
        raise
    except RecursionError:
        raise UnsafeContentError(f"the state of {name!r} is nested too deeply, or contains itself") from None
    except Exception as error:  # of whatever kind pickling raises
        where = place_of(value, name, partial(raises, make))
        if not isinstance(error, _UnknownNameError):
            raise UnsafeContentError(f"the state of {where!r} cannot be saved: {text_of(error)}") from error
        text = f"the state of {where!r} holds {error}, which loading would refuse, because such types may run code"
        raise UnsafeContentError(text, hint=_HINT.format(error)) from None


def _archive(value: Any, allowed: Sequence[SafeGlobal] | None, leaves: Leaves | None) -> bytes:
    pickler: Any = _Pickler
    stream = io.BytesIO()
    if leaves is not None:
        pickler = type("_Pickler", (_Pickler,), {"dispatch_table": _Reducers(leaves)})
    try:
        pickler(stream, protocol=2).dump(value)
        pickled = stream.getvalue()
        stream = _zipped({"data.pkl": pickled, "byteorder": sys.byteorder.encode(), "version": b"3\n"})
    except _HoldsMemoryError:
        stream = io.BytesIO()
        with plain_modes():
            torch.save(value, stream, pickle_module=types.SimpleNamespace(__name__="pickle", Pickler=pickler))
        with zipfile.ZipFile(stream) as file:
            pickled = _read(file, file.getinfo("archive/data.pkl"))
    data = stream.getvalue()
    # Values of the same types load alike, except for integers that torch has no opcode for, and what torch calls.
    kinds = frozenset(_GLOBALS.findall(pickled)), b"\x8b" in pickled, tuple(allowed or ())
    if allowed is not None and (_CALLS in pickled or kinds not in _loadable):
        _load(data, allowed, None, leaves)
        if len(_loadable) >= _MOST_LOADABLE:
            _loadable.clear()
        _loadable.add(kinds)
    return data


# Most items that are no tensors are of the same types in every save, such as the settings of an optimizer.
_loadable: set[tuple[Any, ...]] = set()
_MOST_LOADABLE = 10_000


def raises(call: Callable[[Any], object], value: Any) -> bool:
    """Return True if a call with a value raises."""
    try:
        call(value)
    except Exception:  # of whatever kind
        return True
    return False


def place_of(value: Any, name: str, is_bad: Callable[[Any], bool]) -> str:
    """Return the name of the innermost bad value in dicts, lists and tuples. ``value`` itself is bad."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    for key, each in items:
        if is_bad(each):
            return place_of(each, f"{name}.{key}" if name else str(key), is_bad)
    return name


def by_name(allowed: Iterable[SafeGlobal]) -> tuple[tuple[Callable[..., Any], str], ...]:
    """Return types with the names that they have in archives."""
    return tuple(
        each if isinstance(each, tuple) else (each, f"{each.__module__}.{each.__qualname__}") for each in allowed
    )


@dataclasses.dataclass(frozen=True, eq=False)
class PackedState:
    """State that is one item of a checkpoint. It is archived on the committing executor, and nothing changes it, unless
    it ``is_live``: then `packed` copies it once the save has a slot."""

    value: Any = None
    name: str = ""  # in errors
    is_live: bool = False


def packed(value: Any, name: str) -> PackedState:
    """Return a copy of a value, to be archived while training goes on. Raises a `SaveError` that names the place."""
    try:
        made, devices = _copied(value)
    except Exception as error:  # of whatever kind a value's own copying raises
        where = place_of(value, name, partial(raises, _copied)) if not isinstance(error, RecursionError) else name
        raise SaveError(f"the state of {where!r} cannot be saved: {text_of(error)}") from error
    for device in devices:  # another thread writes the copy, for which the device works in another order
        torch.cuda.current_stream(device).synchronize()
    return PackedState(made, name)


def _copied(value: Any) -> tuple[Any, set[torch.device]]:
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    known: dict[int, Any] = {
        id(each): copied_whole(each, stays=True).requires_grad_(each.requires_grad)
        for each in tensors
        if each.grad_fn is not None or not is_plain_strided(each)  # of which torch makes no deep copies
    }
    return copy.deepcopy(value, known), {each.device for each in tensors if each.is_cuda}


# ---- reading ------------------------------------------------------------------------------------------------------


def load_archive(
    data: Any,
    key: str,
    *,
    path: str,
    allowed: Sequence[SafeGlobal] = (),
    device_of: Callable[[str], torch.device] | None = None,
    leaves: Leaves | None = None,
) -> Any:
    """Return the value in an archive, in memory of its own.

    Args:
        key: what errors call the archive. path: of the object that holds it.
        allowed: types it may be made of, beyond those that always are allowed.
        device_of: where a tensor is loaded to that was on the device of this name; the CPU if it is None.
        leaves: has the tensors that were kept outside.

    Raises:
        UnsafeContentError: it names something that is not allowed, or is no archive of ``torch.save``.
        DamagedError: it makes no sense.
    """
    try:
        return _load(data, allowed, device_of, leaves)
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
            hint="import its module if it is a dataclass, namedtuple or enum; else list it in safe_globals to trust it",
        ) from None
    except FlashpointError:
        raise
    except Exception as error:
        raise DamagedError(f"item {key!r} is not readable: {text_of(error)}", path=path) from error


def check_bytes(data: Any, key: str, *, path: str, allowed: Sequence[SafeGlobal] = ()) -> io.BytesIO:
    """Return an item as a plain archive, for a planner that unpickles it without restriction, as DCP's do: the item is
    loaded here and saved again by this process. Raises what `load_archive` raises."""
    value = load_archive(data, key, path=path, allowed=allowed)
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


def warn_of_old_torch() -> None:
    """Log one warning in this process if torch reads forged archives less safely than it should."""
    if TorchVersion(torch.__version__) < _SAFE_SINCE:
        _warn_once(
            "torch %s can be made to write outside of its memory by a forged checkpoint (CVE-2026-24747): use torch %s"
            " or later where others can write to checkpoints",
            torch.__version__,
            _SAFE_SINCE,
        )


_warn_once = functools.cache(_log.warning)
_lock = threading.RLock()


class _NoArchiveError(Exception):
    pass


class _UnknownNameError(Exception):
    pass


class _HoldsMemoryError(Exception):
    """A value has the memory of tensors, which only `torch.save` writes."""


# In a pickle, and in the text of torch's errors.
_GLOBALS = re.compile(rb"c([\w.\x80-\xff]+\n[\w.\x80-\xff]+)\n")
_REFUSED = re.compile(r"GLOBAL ([^\s]+)")
# Torch calls whatever this function of its own is given.
_CALLS = b"_rebuild_from_type"
# Torch would call these: of NumPy if the program has allowed it, the others unchecked.
_NEVER = re.compile(rb"cnumpy[\w.]*\n|ctorch[.\n]_utils[.\n]_rebuild_(nested_tensor|qtensor)\n")


def _load(data: Any, allowed: Sequence[SafeGlobal], device_of: Any, leaves: Leaves | None) -> Any:
    with memoryview(data) as octets, octets.cast("B") as whole:
        records = _records(whole)
    pickled = records["data.pkl"]
    _check_names(pickled)
    listed = {name: kind for kind, name in by_name(allowed)}
    # Torch calls whatever instance an archive with these calls gives it.
    words = _WORDS | listed | {f"{__name__}._instance": partial(_instance, listed, _CALLS not in pickled)}
    if leaves is not None:
        words[f"{__name__}._leaf"] = leaves.give
    # Torch leaves sparse tensors unchecked unless it is asked to check them.
    sparse = torch.sparse.check_sparse_tensor_invariants(enable=True)  # type: ignore[no-untyped-call]
    with _lock, plain_modes(), sparse:
        # The list is the process's: what the program has put there must still be there afterwards.
        present = set(torch.serialization.get_safe_globals())
        further: list[Any] = [word for word in zip(words.values(), words, strict=True) if word not in present]
        with torch.serialization.safe_globals(further):
            try:
                return torch.load(_zipped(records), map_location=_Devices(device_of), weights_only=True, mmap=False)
            except pickle.UnpicklingError as error:
                if (found := _REFUSED.search(str(error))) is not None:
                    raise _UnknownNameError(found[1].rstrip(".")) from None
                raise


def _records(whole: memoryview) -> dict[str, bytes]:
    """Return the records of an archive by their names. Torch is given an archive of them that is written here: it reads
    archives in its own way, and so cannot find others in them."""
    if bytes(whole[:4]) != b"PK\x03\x04":
        raise _NoArchiveError
    try:
        with zipfile.ZipFile(io.BytesIO(whole)) as file:
            entries = file.infolist()
            for entry in entries:
                if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > len(whole):
                    raise ValueError(f"its record {entry.filename!r} is not stored plainly")
            found = {entry.filename.partition("/")[2]: _read(file, entry) for entry in entries}
    except zipfile.BadZipFile:
        raise _NoArchiveError from None
    if len({name.lower() for name in found}) < len(entries):  # torch finds records by names in any case
        raise ValueError("it has two records of one name")
    if "constants.pkl" in found or "data.pkl" not in found:
        raise _NoArchiveError
    return {"version": b"3\n", **found}


def _read(file: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    entry.CRC = None  # type: ignore[assignment] # torch can be told to write none
    return file.read(entry)


def _check_names(pickled: bytes) -> None:
    """Raise if a pickle names something that torch must not be asked for."""
    if _NEVER.search(pickled):
        for code, argument, _ in pickletools.genops(pickled):
            found = str(argument).replace(" ", "\n")
            if code.name == "GLOBAL" and _NEVER.match(f"c{found}\n".encode()):
                raise _UnknownNameError(found.replace("\n", "."))


def _zipped(records: Mapping[str, Any]) -> io.BytesIO:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        for name, data in records.items():
            with file.open(f"archive/{name}", "w", force_zip64=len(data) >= 1 << 31) as record:
                record.write(data)
    stream.seek(0)
    return stream


class _Devices(dict[str, str]):
    """The ``map_location`` of `torch.load`, which takes no function for tensors of other classes."""

    def __init__(self, device_of: Callable[[str], torch.device] | None) -> None:
        super().__init__()
        self._device_of = device_of

    def get(self, location: Any, default: Any = None) -> str:
        name = str(location)
        if name in ("cpu", "meta"):
            return name
        return "cpu" if self._device_of is None else str(self._device_of(name))


# ---- what values are pickled as: calls of functions of the next section ---------------------------------------------


class _Reducers(dict[type, Any]):
    """Functions that pickle values, by type; for pickle, which asks for each type that it has no opcode for."""

    def __init__(self, leaves: Leaves | None = None) -> None:
        super().__init__(_REDUCERS)
        self._leaves = leaves

    def __missing__(self, kind: type) -> Any:
        if issubclass(kind, type):
            raise KeyError  # a class, which is pickled by its name
        reducer: Any = copyreg.dispatch_table.get(kind, operator.methodcaller("__reduce_ex__", 2))
        if issubclass(kind, torch.Tensor):
            reducer = partial(_of_tensor, self._leaves)
        elif issubclass(kind, (torch.UntypedStorage, torch.TypedStorage)):
            reducer = _of_memory
        elif issubclass(kind, np.dtype):
            reducer = lambda value: (dtype_of, (describe_dtype(value),))  # noqa: E731
        elif issubclass(kind, np.generic):
            reducer = _of_scalar
        elif issubclass(kind, enum.Enum) or is_namedtuple(kind) or is_plain(kind):
            reducer = _of_instance
        self[kind] = reducer
        return reducer


def _of_memory(value: Any) -> Any:
    raise _HoldsMemoryError


def _of_tensor(leaves: Leaves | None, value: torch.Tensor) -> Any:
    if leaves is not None and (described := leaves.take(value)) is not None:
        return _leaf, described
    if value.requires_grad and value.layout is not torch.strided and type(value) in (torch.Tensor, torch.nn.Parameter):
        return _gradient, (value.detach(), type(value) is torch.nn.Parameter)  # which torch forgets
    if type(value) is torch.Tensor and value.is_quantized and value.dtype in (torch.quint8, torch.qint8, torch.qint32):
        if value.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            return _quantized, (value.int_repr(), value.dtype, value.q_scale(), value.q_zero_point())
        channels = value.q_per_channel_scales(), value.q_per_channel_zero_points(), value.q_per_channel_axis()
        return _quantized, (value.int_repr(), value.dtype, *channels)
    return value.__reduce_ex__(2)  # type: ignore[no-untyped-call]


def _of_array(value: Any) -> Any:
    if value.dtype == object and value.dtype.names is None:
        return _objects, (value.shape, list(value.flat))
    octets, described = value.tobytes(), describe_dtype(value.dtype)
    if len(octets) > _INLINE_BYTES:
        tensor = torch.frombuffer(bytearray(octets), dtype=torch.uint8)
        return _array, (tensor, described, value.shape)
    # Text, since pickled bytes are longer or shorter by what they are. In capitals: `_GLOBALS` looks for a small c.
    return _array, (octets.hex().upper(), described, value.shape)


def _of_scalar(value: Any) -> Any:
    if type(value) in (np.str_, np.bytes_):  # an array's lose trailing zeros
        return _string, (str.__str__(value) if isinstance(value, str) else bytes(value),)
    if type(value) is not value.dtype.type:
        return value.__reduce_ex__(2)
    return scalar_of, (value.tobytes(), describe_dtype(value.dtype))


def _of_instance(value: Any) -> Any:
    kind = type(value)
    if not isinstance(value, enum.Enum):
        return _instance, (_checked_name(kind), tuple(value) if is_namedtuple(kind) else attributes_of(value))
    if kind._member_map_.get(value.name or "") is not value:  # a combination of flags
        return value.__reduce_ex__(2)
    return _instance, (_checked_name(kind), value.name)


def _of_defaultdict(value: Any) -> Any:
    factory = value.default_factory
    name = next((name for name, each in _FACTORIES.items() if each is factory), None)
    return _defaultdict, (name or factory, dict(value))


# As protocol 4 has them, with `fold`.
_of_time = operator.methodcaller("__reduce_ex__", 4)
_FACTORIES: dict[Any, Any] = {each.__name__: each for each in (dict, list, set, int, float, str)}
_REDUCERS: dict[type, Any] = {
    np.ndarray: _of_array,
    collections.defaultdict: _of_defaultdict,
    collections.deque: lambda value: (collections.deque, (list(value), value.maxlen)),
    datetime.time: _of_time,
    datetime.datetime: _of_time,
    io.BytesIO: lambda value: (_stream, (value.getvalue(), value.tell())),
    torch.Generator: lambda value: (_generator, (str(value.device), value.get_state())),
}


class _Pickler(pickle.Pickler):
    dispatch_table = _Reducers()


# ---- NumPy's dtypes, described as in .npy files: by a text, or a list of fields ------------------------------------


def describe_dtype(dtype: np.dtype[Any]) -> Any:
    """Return the description of a dtype. Raise an `InvalidArgumentError` if the dtype cannot be made again: it holds
    Python objects, or belongs to another package."""
    try:
        described = dtype.descr if dtype.names is not None else dtype.str
        if dtype.names is None and np.dtype(dtype.str).char != dtype.char:
            described = dtype.byteorder.strip("=|") + dtype.char  # "<i8" is a long, and a long long another type
        if (made := dtype_of(described)) == dtype and _has_types_of(made, dtype):
            return described
    except (TypeError, ValueError):
        pass
    raise InvalidArgumentError(
        "a NumPy dtype that is not made of plain bytes cannot be stored",
        argument="dtype",
        value=dtype,
        hint="convert the array, to a dtype of NumPy's own without objects in it",
    )


def _has_types_of(made: np.dtype[Any], dtype: np.dtype[Any]) -> bool:
    """Return True if an equal dtype has no other subclass of `np.void`, such as `np.record`, for itself or a field."""
    is_same = made.type is dtype.type or dtype.kind != "V"
    return is_same and all(_has_types_of(made[name].base, dtype[name].base) for name in dtype.names or ())


def dtype_of(described: Any) -> np.dtype[Any]:
    """Return the dtype of a description. Raise a `TypeError` or `ValueError` if it is none of plain bytes."""
    if type(described) not in (str, list):
        raise TypeError("no dtype")
    _check_described(described)
    try:
        made: np.dtype[Any] = descr_to_dtype(described)
    except SyntaxError as error:  # NumPy parses it
        raise ValueError(str(error)) from error
    if made.hasobject or made.subdtype is not None:
        raise TypeError("no dtype of plain bytes")
    return made


def _check_described(described: Any, *, is_name: bool = False) -> None:
    """Raise unless this is text, the sizes of a shape, a tuple of such, or a list of fields."""
    if isinstance(described, tuple) and all(type(size) is int for size in described):
        _checked_shape(described)
    elif isinstance(described, list):
        for name, *rest in described:
            _check_described(name, is_name=True)
            _check_described(tuple(rest))
    elif isinstance(described, tuple):
        for each in described:
            _check_described(each, is_name=is_name)
    elif type(described) is not str or len(described) > _MOST_OF_A_NAME:
        raise TypeError("no dtype")
    elif "/" in described.partition("[")[2] and not is_name:  # "M8[Y/0]": NumPy divides by zero, and the process ends
        raise ValueError("a dtype with a divisor")


def _checked_shape(shape: Sequence[int]) -> tuple[int, ...]:
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"no shape: {shape!r}")
    return tuple(shape)


def array_of(data: bytes | memoryview, described: Any, shape: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return an array with memory of its own. Raise a `TypeError` or `ValueError` if the description is none, or does
    not fit the bytes."""
    dtype, sizes = dtype_of(described), _checked_shape(shape)
    expected = math.prod(sizes) * dtype.itemsize
    if len(data) != expected:
        raise ValueError(f"an array of {expected} bytes, and there are {len(data)}")
    made: np.ndarray[Any, Any]
    made = np.ndarray(sizes, dtype, buffer=bytearray(data)) if expected else np.ndarray(sizes, dtype)
    return made


def scalar_of(data: bytes | memoryview, described: Any) -> Any:
    """Return a scalar. Raises what `array_of` raises."""
    return array_of(data, described, ())[()]


# ---- functions that make values, and do not trust their arguments --------------------------------------------------


def _leaf(*described: Any) -> Any:
    raise ValueError("a tensor is kept outside of the archive")


def _array(octets: Any, described: Any, shape: Any) -> Any:
    octets = bytes.fromhex(octets) if isinstance(octets, str) else _exactly(octets).numpy().tobytes()
    return array_of(octets, described, shape)


def _objects(shape: Any, values: Any) -> Any:
    flat = np.empty(len(values), dtype=object)
    for place, value in enumerate(values):
        flat[place] = value
    return flat.reshape(shape)


def _string(value: Any) -> Any:
    return np.str_(value) if type(value) is str else np.bytes_(value)


def _quantized(values: Any, dtype: Any, scale: Any, zero: Any, axis: Any = None) -> torch.Tensor:
    if axis is None:
        made = torch._make_per_tensor_quantized_tensor(_exactly(values), float(scale), int(zero))
    else:
        sizes = {tuple(_exactly(each).shape) for each in (scale, zero)}
        if type(axis) is not int or not 0 <= axis < _exactly(values).dim() or sizes != {(values.shape[axis],)}:
            raise ValueError("a quantized tensor without a scale for each channel")
        made = torch._make_per_channel_quantized_tensor(values, scale, zero, axis)
    if made.dtype is not dtype:
        raise ValueError(f"a quantized tensor of {made.dtype}, not {dtype}")
    return made


def _gradient(value: Any, is_parameter: Any) -> torch.Tensor:
    return torch.nn.Parameter(_exactly(value)) if is_parameter else _exactly(value).requires_grad_()


def _generator(device: Any, state: Any) -> torch.Generator:
    made = torch.Generator(str(device))
    made.set_state(_exactly(state))
    return made


def _defaultdict(factory: Any, items: Any) -> Any:
    return collections.defaultdict(_FACTORIES[factory] if type(factory) is str else factory, items)


def _stream(data: Any, position: Any) -> io.BytesIO:
    made = io.BytesIO(data)
    made.seek(position)
    return made


def _exactly(value: Any) -> torch.Tensor:
    if type(value) is not torch.Tensor:
        raise TypeError(f"a {type(value).__name__} in the place of a tensor")
    return value


def _instance(listed: Listed, may_be_callable: bool, name: Any, content: Any) -> Any:
    """Make an instance of the type that the user lists by a name, which may have moved, or else of the imported one."""
    dotted = name.replace(":", ".")
    found = listed.get(dotted, imported(name))
    if not isinstance(found, type):
        raise _UnknownNameError(dotted)
    kind: Any = found
    if issubclass(kind, enum.Enum):
        made = kind._member_map_[content]
    elif is_namedtuple(kind):
        if type(content) is not tuple or len(content) != len(kind._fields):
            raise TypeError(f"{name} has other fields")
        made = tuple.__new__(kind, content)
    elif is_plain(kind):
        if type(content) is not dict or not all(type(each) is str for each in content):
            raise TypeError("attributes that are no dict")
        made = new_instance(kind, content)
    else:
        raise _UnknownNameError(dotted)
    if callable(made) and not may_be_callable:
        raise TypeError(f"{name} can be called, and the archive has a tensor with attributes or of another class")
    return made


_MAKERS = (_array, scalar_of, dtype_of, _objects, _string, _quantized, _gradient, _generator, _defaultdict, _stream)
_TIMES = (datetime.date, datetime.time, datetime.datetime, datetime.timedelta, datetime.timezone)
_NUMBERS = (decimal.Decimal, fractions.Fraction, uuid.UUID)
_VALUES = (frozenset, slice, range, collections.deque, *_TIMES, *_NUMBERS, Namespace)
_PATHS = (pathlib.Path, pathlib.PosixPath, pathlib.PurePosixPath)
_WORDS: dict[str, Callable[..., Any]] = {
    "builtins.bytes": lambda: b"",  # called for no bytes alone
    **{name: each for each, name in by_name((*_MAKERS, *_VALUES))},
    # Of Python 3.13, too.
    **{f"pathlib{sub}.{kind.__name__}": kind for sub in ("", "._local") for kind in _PATHS},
}


def is_namedtuple(kind: type) -> bool:
    """Return True if `collections.namedtuple` or `typing.NamedTuple` has made a type."""
    fields = getattr(kind, "_fields", None)
    if kind.__dictoffset__:  # may have attributes besides
        return False
    return tuple in kind.__bases__ and isinstance(fields, tuple) and all(isinstance(name, str) for name in fields)


def is_plain(kind: type) -> bool:
    """Return True for a dataclass, or a subclass of `PLAIN_BASES`, that is no container and has no hook of pickle."""
    if not dataclasses.is_dataclass(kind) and not issubclass(kind, tuple(PLAIN_BASES)):
        return False
    inherited = all(getattr(kind, name) is getattr(object, name) for name in ("__new__", "__reduce__", "__reduce_ex__"))
    return inherited and not any(_has_hook(kind, name) for name in _HOOKS)


PLAIN_BASES: list[type] = []
"""Types beside dataclasses that are always allowed, with their subclasses, if instances are their attributes."""
_HOOKS = ("__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__", "__del__")


def _has_hook(kind: type, name: str) -> bool:
    hook = getattr(kind, name, None)
    # Frozen dataclasses with slots get hooks of the standard library's, which do no more than is done here.
    return hook not in (None, getattr(object, name, None)) and getattr(hook, "__module__", "") != "dataclasses"


def attributes_of(instance: object) -> dict[str, Any]:
    """Return the attributes of an instance, in its dict and its slots. Properties are not asked."""
    found = dict(getattr(instance, "__dict__", {}))
    for name, slot in _slots_of(type(instance)).items():
        with contextlib.suppress(AttributeError):  # never set
            found[name] = slot.__get__(instance)
    return found


def new_instance(kind: type, attributes: Mapping[str, Any]) -> Any:
    """Return an instance with these attributes, made without running anything of the type's own."""
    instance: Any = object.__new__(kind)
    slots = _slots_of(kind)
    for name, value in attributes.items():
        if name in slots:
            slots[name].__set__(instance, value)
        else:
            instance.__dict__[name] = value
    return instance


def _slots_of(kind: type) -> dict[str, types.MemberDescriptorType]:
    every = (item for base in reversed(kind.__mro__) for item in vars(base).items())
    return {name: value for name, value in every if isinstance(value, types.MemberDescriptorType)}


def imported(name: str) -> type | None:
    """Return the type ``module:qualified.name``; None if this process has not imported the module."""
    module, _, qualified = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        # Not getattr: modules and classes may run code for names that they do not have.
        found = getattr(found, "__dict__", {}).get(part)
    return found if isinstance(found, type) else None


def _checked_name(kind: type) -> str:
    name = f"{kind.__module__}:{kind.__qualname__}"
    if imported(name) is not kind:
        text = f"the type {name.replace(':', '.')} cannot be found again by its name"
        raise UnsafeContentError(text, hint="define it at the top level of a module")
    return name
