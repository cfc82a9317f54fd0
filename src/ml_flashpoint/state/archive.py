"""Python objects as archives of ``torch.save``, read by ``torch.load(weights_only=True)`` without trusting them.

Owns the allow-list. Always allowed are what torch allows, plain values of the standard library, NumPy arrays and
scalars, and dataclasses, namedtuples and enums of modules that this process has imported; users list other types. A
name in an archive never leads to code that is not on this list, and no module is imported because an archive names it.

Some values are written otherwise than pickle would write them, so that nothing of NumPy is ever unpickled and no
constructor of a dataclass runs: as a call of a function below, which checks its arguments. An archive that pickle wrote
(DCP's planners write those) is read as well, unless it holds such values.
"""

from __future__ import annotations

import collections
import contextlib
import copyreg
import dataclasses
import datetime
import decimal
import enum
import fractions
import io
import itertools
import logging
import operator
import pathlib
import pickle
import pickletools
import re
import struct
import sys
import threading
import types
import uuid
import zipfile
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import xxhash

from ml_flashpoint.format.errors import DamagedError, FlashpointError, UnsafeContentError
from ml_flashpoint.format.numpy_values import array_of, describe_dtype, dtype_of, scalar_of
from ml_flashpoint.staging.plain_modes import plain_modes

SafeGlobal = Callable[..., Any] | tuple[Callable[..., Any], str]
Leaf = Callable[..., Any]

_log = logging.getLogger(__name__)
_INLINE_BYTES = 1024
_MOST_CHECKED = 100_000
_SAFE_SINCE = (2, 10)
HINT = "keep plain values in it, or pass safe_globals=[{}] if you trust that"


# ---- writing ------------------------------------------------------------------------------------------------------


def save_archive(
    value: Any,
    name: str,
    *,
    allowed: Sequence[SafeGlobal] | None = (),
    leaf: Callable[[torch.Tensor], tuple[Any, ...] | None] | None = None,
    hint: str = HINT,
) -> bytes:
    """Return the archive of a value that `load_archive` accepts with the same ``allowed``.

    Args:
        name: what errors call the value.
        allowed: further types that may be in it; None if `check_archive` follows.
        leaf: called for each tensor. Returns what the archive holds in its place, as arguments of the ``leaf`` that
            `load_archive` is given; None for a tensor that the archive is to hold itself.
        hint: of the error for a type that is not allowed; ``{}`` stands for the type.

    Raises:
        UnsafeContentError: it holds a type that is not allowed. Names the place and the type.
        Exception: pickling it fails.
    """
    data, pickled = _pickled(value, leaf)
    if allowed is not None:
        # Values of the same types are loaded alike, but for integers that torch has no opcode for.
        seen = (frozenset(_GLOBALS.findall(pickled)), b"\x8b" in pickled, _names(allowed))
        _check(seen, data, value, name, allowed, leaf, hint)
    return data


def check_archive(data: bytes, value: Any, name: str, *, allowed: Sequence[SafeGlobal] = (), hint: str = HINT) -> None:
    """Raise if `load_archive` would refuse what `save_archive` has returned.

    Raises:
        UnsafeContentError: it would. Names the place and the type.
    """
    _check((xxhash.xxh3_128_digest(data), _names(allowed)), data, value, name, allowed, None, hint)


def _check(seen: Any, data: bytes, value: Any, name: str, allowed: Sequence[SafeGlobal], leaf: Any, hint: str) -> None:
    if seen in _checked:
        return
    why = _refusal(data, allowed, None if leaf is None else _nothing)
    if why is None:
        _note(seen)
        return
    where = place_of(value, name, lambda each: _is_refused(each, allowed, leaf))
    if isinstance(why, _UnknownNameError):
        text = f"the state of {where!r} holds {why}, which loading would refuse, because such types may run code"
        raise UnsafeContentError(text, hint=hint.format(why))
    raise UnsafeContentError(f"the state of {where!r} could not be loaded: {_text(why)}") from why


def refuse_unloadable(data: bytes, what: str, *, allowed: Sequence[SafeGlobal] = ()) -> None:
    """Raise if `load_archive` would refuse an archive with the same ``allowed``.

    Args:
        what: what errors call the archive.

    Raises:
        UnsafeContentError: it would.
    """
    seen = (xxhash.xxh3_128_digest(data), _names(allowed))
    if seen in _checked:
        return
    why = _refusal(data, allowed, None)
    if isinstance(why, _UnknownNameError):
        raise UnsafeContentError(
            f"{what} holds {why}, which loading would refuse, because such types may run code",
            hint=f"keep plain values in it, or pass safe_globals=[{why}] to writer and reader if you trust that",
        )
    if why is not None:
        raise UnsafeContentError(
            f"{what} is nothing that torch.save wrote of plain values, so loading would refuse it ({_text(why)})",
            hint="pass trust_bytes=True to writer and reader if their planners write bytes that are never unpickled",
        ) from why
    _note(seen)


# Most items that are no tensors are the same in every save, such as the settings of an optimizer.
_checked: set[tuple[Any, ...]] = set()


def _note(seen: tuple[Any, ...]) -> None:
    if len(_checked) >= _MOST_CHECKED:
        _checked.clear()
    _checked.add(seen)


def _pickled(value: Any, leaf: Any) -> tuple[bytes, bytes]:
    """An archive, and the pickle in it."""
    table, buffers = _Reducers(leaf), []

    class Pickler(pickle.Pickler):
        dispatch_table = table

        def __init__(self, file: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(file, *args, **kwargs)
            buffers.append(file)

    stream = io.BytesIO()
    with _plain():
        torch.save(value, stream, pickle_module=types.SimpleNamespace(__name__="pickle", Pickler=Pickler))
    return stream.getvalue(), buffers[0].getvalue()


def _refusal(data: bytes, allowed: Sequence[SafeGlobal], leaf: Leaf | None) -> Exception | None:
    """Why an archive that was just written would not be loaded."""
    try:
        _load(data, allowed, None, leaf)
    except Exception as error:
        return error
    return None


def _is_refused(value: Any, allowed: Sequence[SafeGlobal], leaf: Any) -> bool:
    try:
        data, _ = _pickled(value, leaf)
    except Exception:  # of whatever kind pickling raises
        return True
    return _refusal(data, allowed, None if leaf is None else _nothing) is not None


def _nothing(*args: Any) -> None:
    return None


def place_of(value: Any, name: str, is_bad: Callable[[Any], bool]) -> str:
    """Return the name of the innermost value of a kind, in dicts, lists and tuples; ``value`` itself is of it."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    for key, each in items:
        if is_bad(each):
            return place_of(each, f"{name}.{key}" if name else str(key), is_bad)
    return name


def cannot_be_pickled(value: Any) -> bool:
    """Return whether `save_archive` fails, whatever is allowed."""
    try:
        _pickled(value, None)
    except Exception:  # of whatever kind pickling raises
        return True
    return False


def by_name(allowed: Iterable[SafeGlobal]) -> tuple[tuple[Callable[..., Any], str], ...]:
    """Return types with the names that they have in archives."""
    return tuple(
        each if isinstance(each, tuple) else (each, f"{each.__module__}.{each.__qualname__}") for each in allowed
    )


def _names(allowed: Sequence[SafeGlobal]) -> frozenset[str]:
    return frozenset(name for _, name in by_name(allowed))


# ---- reading ------------------------------------------------------------------------------------------------------


def load_archive(
    data: Any,
    key: str,
    *,
    path: str,
    allowed: Sequence[SafeGlobal] = (),
    device_of: Callable[[str], torch.device] | None = None,
    leaf: Leaf | None = None,
) -> Any:
    """Return the value in an archive, in memory of its own.

    Args:
        data: the archive, any buffer of bytes.
        key: what errors call the archive. path: of the object that holds it.
        allowed: types it may be made of, beyond those that always are allowed.
        device_of: where a tensor is loaded to that was on the device of this name; the CPU if it is None.
        leaf: makes the tensors that `save_archive` left out.

    Raises:
        UnsafeContentError: it names something that is not allowed, or is no archive of ``torch.save``.
        DamagedError: it makes no sense.
    """
    try:
        return _load(data, allowed, device_of, leaf)
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
            hint="import its module if it is a dataclass, namedtuple or enum; "
            "else pass it as safe_globals to the reader if you trust it",
        ) from None
    except FlashpointError:
        raise
    except Exception as error:
        raise DamagedError(f"item {key!r} is not readable: {_text(error)}", path=path) from error


def check_bytes(data: Any, key: str, *, path: str, allowed: Sequence[SafeGlobal] = ()) -> io.BytesIO:
    """Return an item as a plain archive, for a planner that unpickles it without restriction, as DCP's do.

    The item is loaded here and saved again: what the planner gets was written by this process.

    Raises:
        UnsafeContentError: it names something that is not allowed.
        DamagedError: it makes no sense.
    """
    value = load_archive(data, key, path=path, allowed=allowed)
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


def warn_of_old_torch() -> None:
    """Log one warning in this process if torch reads forged archives less safely than it should."""
    global _warned
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if _warned or found is None or (int(found[1]), int(found[2])) >= _SAFE_SINCE:
        return
    _warned = True
    _log.warning(
        "torch %s can be made to write outside of its memory by a forged checkpoint (CVE-2026-24747): use torch %d.%d "
        "or later where others can write to checkpoints",
        torch.__version__,
        *_SAFE_SINCE,
    )


_warned = False
_lock = threading.RLock()


class _NoArchiveError(Exception):
    pass


class _UnknownNameError(Exception):
    pass


# In a pickle, and in the text of torch's errors.
_GLOBALS = re.compile(rb"c([\w.]+\n[\w.<>]+)\n")
_REFUSED = re.compile(r"GLOBAL ([^\s]+)")
# Torch would call these: of NumPy if the program has allowed it, the others unchecked.
_NEVER = re.compile(rb"cnumpy[\w.]*\n|ctorch\._utils\n_rebuild_(nested_tensor|qtensor)\n")


def _load(data: Any, allowed: Sequence[SafeGlobal], device_of: Any, leaf: Leaf | None) -> Any:
    with memoryview(data) as octets, octets.cast("B") as whole:
        stream = _rewritten(_records(whole))
    words = _words(allowed, leaf)
    with _lock, _plain():
        # The list is the process's: what the program has put there must still be there afterwards.
        present = set(torch.serialization.get_safe_globals())
        with torch.serialization.safe_globals([word for word in words if word not in present]):
            try:
                return torch.load(stream, map_location=partial(_on_device, device_of), weights_only=True, mmap=False)
            except pickle.UnpicklingError as error:
                if (found := _REFUSED.search(str(error))) is not None:
                    raise _UnknownNameError(found[1].rstrip(".")) from None
                raise


@contextlib.contextmanager
def _plain() -> Iterator[None]:
    # Torch leaves sparse tensors unchecked unless it is asked for.
    with plain_modes(), torch.sparse.check_sparse_tensor_invariants(enable=True):  # type: ignore[no-untyped-call]
        yield


def _records(whole: memoryview) -> dict[str, memoryview]:
    """The records of an archive, by their names in it."""
    if bytes(whole[:4]) != b"PK\x03\x04":
        raise _NoArchiveError
    try:
        with zipfile.ZipFile(io.BytesIO(whole)) as file:
            entries = file.infolist()
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


def _rewritten(records: Mapping[str, memoryview]) -> io.BytesIO:
    """An archive of these records. Torch reads archives in its own way, and so cannot find others in them.

    Raises:
        _UnknownNameError: its pickle names something that torch must not be asked for.
    """
    pickled = bytes(records["data.pkl"])
    if _NEVER.search(pickled):
        for code, argument, _ in pickletools.genops(pickled):
            found = str(argument).replace(" ", "\n")
            if code.name == "GLOBAL" and _NEVER.match(f"c{found}\n".encode()):
                raise _UnknownNameError(found.replace("\n", "."))
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        for name, data in records.items():
            with file.open(f"archive/{name}", "w") as record:
                record.write(data)
        if "version" not in records:
            file.writestr("archive/version", b"3\n")
    stream.seek(0)
    return stream


def _on_device(device_of: Callable[[str], torch.device] | None, storage: Any, location: str) -> Any:
    device = torch.device("cpu") if device_of is None or location == "cpu" else device_of(location)
    if device.type == "cpu":
        return storage
    octets = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
    return octets.to(device=device).untyped_storage()


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


# ---- what a name stands for ---------------------------------------------------------------------------------------


def _words(allowed: Sequence[SafeGlobal], leaf: Leaf | None) -> list[SafeGlobal]:
    """What an archive may name."""
    listed = {name: kind for kind, name in by_name(allowed)}
    trusted = [*listed.values(), *(kind for kind, _ in by_name(torch.serialization.get_safe_globals()))]
    words = [*_WORDS, *by_name(allowed)]
    words += [(partial(make, listed), f"{__name__}.{make.__name__}") for make in (_instance, _named, _member)]
    words.append((partial(_filled, trusted), f"{__name__}._filled"))
    if leaf is not None:
        words.append((leaf, f"{__name__}._leaf"))
    return words


class _Reducers(dict[type, Any]):
    """How values of a type are pickled, by the type; for pickle, which asks for each type that it has no opcode for."""

    def __init__(self, leaf: Any) -> None:
        super().__init__(_REDUCERS)
        self._leaf = leaf

    def __missing__(self, kind: type) -> Any:
        reducer: Any
        if issubclass(kind, type):
            raise KeyError  # a class, which is pickled by its name
        if issubclass(kind, torch.Tensor):
            reducer = partial(_of_tensor, self._leaf)
        elif issubclass(kind, np.dtype):
            reducer = _of_dtype
        elif issubclass(kind, np.generic):
            reducer = _of_scalar
        elif issubclass(kind, enum.Enum):
            reducer = _of_enum
        elif is_namedtuple(kind):
            reducer = lambda value: (_named, (_checked_name(type(value)), tuple(value)))  # noqa: E731
        elif is_plain_dataclass(kind):
            reducer = lambda value: (_instance, (_checked_name(type(value)), attributes_of(value)))  # noqa: E731
        elif kind in copyreg.dispatch_table:
            reducer = copyreg.dispatch_table[kind]
        elif issubclass(kind, (list, dict)) and kind not in (collections.OrderedDict, collections.Counter):
            reducer = _of_container
        else:
            reducer = operator.methodcaller("__reduce_ex__", 2)
        self[kind] = reducer
        return reducer


def _leaf(*args: Any) -> Any:
    raise ValueError("a tensor of the archive is kept elsewhere")


def _of_tensor(leaf: Any, value: torch.Tensor) -> Any:
    if leaf is not None and (args := leaf(value)) is not None:
        return _leaf, args
    if type(value) is torch.Tensor and value.is_quantized:
        scales: tuple[Any, ...] = ()
        if value.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            scales = (value.q_scale(), value.q_zero_point())
        elif value.qscheme() in (torch.per_channel_affine, torch.per_channel_affine_float_qparams):
            scales = (value.q_per_channel_scales(), value.q_per_channel_zero_points(), value.q_per_channel_axis())
        if scales:
            return _quantized, (value.int_repr(), value.dtype, *scales)
    if type(value) is torch.Tensor and value.is_nested and value.layout is torch.strided:
        return _nested, ([each.detach() for each in value.detach().unbind()], value.dtype, value.requires_grad)
    return value.__reduce_ex__(2)  # type: ignore[no-untyped-call]


def _quantized(values: Any, dtype: Any, *scales: Any) -> torch.Tensor:
    made: torch.Tensor
    if len(scales) == 2:
        made = torch._make_per_tensor_quantized_tensor(_exactly(values), float(scales[0]), int(scales[1]))
    else:
        scale, zero, axis = scales
        if type(axis) is not int or not 0 <= axis < _exactly(values).dim():
            raise ValueError("a quantized tensor without its axis")
        for each in (scale, zero):
            if tuple(_exactly(each).shape) != (values.shape[axis],):
                raise ValueError("a quantized tensor without a scale for each channel")
        made = torch._make_per_channel_quantized_tensor(values, scale, zero, axis)
    if made.dtype is not dtype:
        raise ValueError(f"a quantized tensor of {made.dtype}, not {dtype}")
    return made


def _nested(parts: Any, dtype: Any, requires_grad: Any) -> torch.Tensor:
    return torch.nested.nested_tensor(
        [_exactly(each) for each in parts],
        dtype=dtype,
        device=parts[0].device if parts else "cpu",
        requires_grad=bool(requires_grad),
    )


def _exactly(value: Any) -> torch.Tensor:
    if type(value) is not torch.Tensor:
        raise TypeError(f"a {type(value).__name__} in the place of a tensor")
    return value


def _generator(device: Any, state: Any) -> torch.Generator:
    made = torch.Generator(str(device))
    made.set_state(_exactly(state))
    return made


def _constant(name: Any) -> Any:
    value = vars(torch).get(name)
    if not isinstance(value, (torch.memory_format, torch.layout, torch.qscheme, torch.dtype)):
        raise ValueError(f"torch has no constant {name!r}")
    return value


# NumPy.


def _of_array(value: Any) -> Any:
    if value.dtype == object and value.dtype.names is None:
        return _objects, (value.shape, list(value.flat))
    by_columns = value.flags.f_contiguous and not value.flags.c_contiguous
    plain = np.ascontiguousarray(value.T if by_columns else value)
    octets: Any = plain.tobytes()
    if len(octets) > _INLINE_BYTES:
        octets = torch.frombuffer(bytearray(octets), dtype=torch.uint8)
    shape = value.T.shape if by_columns else value.shape
    return _array, (octets, describe_dtype(value.dtype), shape, by_columns)


def _array(octets: Any, described: Any, shape: Any, by_columns: Any) -> Any:
    if isinstance(octets, torch.Tensor):
        octets = _exactly(octets).numpy().tobytes()
    made = array_of(octets, described, shape)
    return made.T if by_columns else made


def _objects(shape: Any, values: Any) -> Any:
    flat = np.empty(len(values), dtype=object)
    for place, value in enumerate(values):
        flat[place] = value
    return flat.reshape(shape)


def _of_scalar(value: Any) -> Any:
    if type(value) in (np.str_, np.bytes_):  # an array's lose trailing zeros
        return _string, (str.__str__(value) if isinstance(value, str) else bytes(value),)
    if type(value) is not value.dtype.type:
        return value.__reduce_ex__(2)
    return _scalar, (value.tobytes(), describe_dtype(value.dtype))


def _scalar(octets: Any, described: Any) -> Any:
    return scalar_of(octets, described)


def _string(value: Any) -> Any:
    if type(value) not in (str, bytes):
        raise TypeError("no string")
    return np.str_(value) if type(value) is str else np.bytes_(value)


def _of_dtype(value: Any) -> Any:
    return _dtype, (describe_dtype(value),)


def _dtype(described: Any) -> Any:
    return dtype_of(described)


# Types that are found by their names.


def is_namedtuple(kind: type) -> bool:
    """Return whether a type is what `collections.namedtuple` or `typing.NamedTuple` makes."""
    fields = getattr(kind, "_fields", None)
    if kind.__dictoffset__:  # may have attributes besides
        return False
    return tuple in kind.__bases__ and isinstance(fields, tuple) and all(isinstance(name, str) for name in fields)


def is_plain_object(kind: type) -> bool:
    """Return whether instances are their attributes and nothing else: no container, and none of pickle's hooks."""
    inherited = all(getattr(kind, name) is getattr(object, name) for name in ("__new__", "__reduce__", "__reduce_ex__"))
    return inherited and not any(_has_hook(kind, name) for name in _HOOKS)


_HOOKS = ("__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__", "__del__")


def _has_hook(kind: type, name: str) -> bool:
    hook = getattr(kind, name, None)
    if hook is None or hook is getattr(object, name, None):
        return False
    # Frozen dataclasses with slots get hooks of the standard library's, which do no more than is done here.
    return getattr(hook, "__module__", "") != "dataclasses"


def is_plain_dataclass(kind: type) -> bool:
    """Return whether a type is a dataclass whose instances are their attributes."""
    return dataclasses.is_dataclass(kind) and is_plain_object(kind)


def _slots_of(kind: type) -> dict[str, types.MemberDescriptorType]:
    return {
        name: value
        for base in reversed(kind.__mro__)
        for name, value in vars(base).items()
        if isinstance(value, types.MemberDescriptorType)
    }


def attributes_of(instance: object) -> dict[str, Any]:
    """Return the attributes of an instance, in its dict and its slots. Properties are not asked."""
    found = dict(getattr(instance, "__dict__", {}))
    for name, slot in _slots_of(type(instance)).items():
        with contextlib.suppress(AttributeError):  # never set
            found[name] = slot.__get__(instance)
    return found


def new_instance(kind: type, attributes: Mapping[str, Any]) -> Any:
    """Return an instance with these attributes, made without running anything of the type's own.

    Raises:
        TypeError, AttributeError: it cannot have them.
    """
    instance: Any = object.__new__(kind)
    slots = _slots_of(kind)
    for name, value in attributes.items():
        if name in slots:
            slots[name].__set__(instance, value)
        else:
            instance.__dict__[name] = value
    return instance


def name_of(kind: type) -> str:
    """Return the full name of a type: ``module:qualified.name``."""
    return f"{kind.__module__}:{kind.__qualname__}"


def imported(name: Any) -> type | None:
    """Return the type of this name in a module that this process has imported, None if there is none."""
    module, _, qualified = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        # Not getattr: modules and classes may run code for names that they do not have.
        found = getattr(found, "__dict__", {}).get(part)
    return found if isinstance(found, type) else None


def _checked_name(kind: type) -> str:
    name = name_of(kind)
    if imported(name) is not kind:
        raise UnsafeContentError(
            f"the type {name.replace(':', '.')} cannot be found again by its name",
            hint="define it at the top level of a module",
        )
    return name


def _found(listed: Mapping[str, Any], name: Any, is_such: Callable[[type], bool]) -> Any:
    kind = listed.get(name.replace(":", ".")) or imported(name)
    if not isinstance(kind, type) or not is_such(kind):
        raise _UnknownNameError(name.replace(":", "."))
    return kind


def _instance(listed: Mapping[str, Any], name: Any, attributes: Any) -> Any:
    if type(attributes) is not dict or not all(type(each) is str for each in attributes):
        raise TypeError("attributes that are no dict")
    return new_instance(_found(listed, name, is_plain_dataclass), attributes)


def _named(listed: Mapping[str, Any], name: Any, values: Any) -> Any:
    kind = _found(listed, name, is_namedtuple)
    if type(values) is not tuple or len(kind._fields) != len(values):
        raise TypeError(f"{name} is no namedtuple of these fields")
    return tuple.__new__(kind, values)


def _of_enum(value: Any) -> Any:
    if type(value)._member_map_.get(value.name or "") is not value:  # a combination of flags
        return value.__reduce_ex__(2)
    return _member, (_checked_name(type(value)), value.name)


def _member(listed: Mapping[str, Any], name: Any, member: Any) -> Any:
    return _found(listed, name, lambda kind: issubclass(kind, enum.Enum))._member_map_[member]


# Containers that torch fills no items into.


def _of_container(value: Any) -> Any:
    reduced = value.__reduce_ex__(2)
    make, args, *rest = reduced if isinstance(reduced, tuple) else (None, ())
    state, items, pairs = itertools.islice(itertools.chain(rest, (None,) * 3), 3)
    if make is not copyreg.__newobj__ or (items is None and pairs is None):  # type: ignore[attr-defined]
        return reduced
    return _filled, (*args, list(items or ()), dict(pairs or ())), state


def _filled(trusted: Sequence[Any], kind: Any, *content: Any) -> Any:
    *args, items, pairs = content
    if not any(kind is each for each in trusted) or type(items) is not list or type(pairs) is not dict:
        raise TypeError(f"{kind!r} may not be made")
    made = kind.__new__(kind, *args)
    if items:
        made.extend(items)
    for key, value in pairs.items():
        made[key] = value
    return made


_FACTORIES: dict[Any, Any] = {each.__name__: each for each in (dict, list, set, int, float, str)}


def _of_defaultdict(value: Any) -> Any:
    factory = value.default_factory
    name = next((name for name, each in _FACTORIES.items() if each is factory), None)
    return _defaultdict, (name or factory, dict(value))


def _defaultdict(factory: Any, items: Any) -> Any:
    return collections.defaultdict(_FACTORIES[factory] if type(factory) is str else factory, items)


# The standard library. Where pickle's own way is kept, these stand behind its names; they believe no internal form.


def _bytes(data: Any = b"", encoding: Any = "latin1") -> bytes:
    if type(data) is bytes:
        return data
    if type(data) is not str or encoding not in ("latin1", "latin-1"):
        raise ValueError(f"bytes in the encoding {encoding!r}")
    return data.encode("latin1")


def _frozenset(items: Any = ()) -> frozenset[Any]:
    if type(items) not in (list, tuple):
        raise TypeError("items that are no list")
    return frozenset(items)


def _date(data: Any) -> datetime.date:
    made = datetime.date(_bytes(data))  # type: ignore[call-arg, arg-type]
    return datetime.date(made.year, made.month, made.day)


def _time(data: Any, *zone: Any) -> datetime.time:
    at = datetime.time(_bytes(data), *zone)  # type: ignore[arg-type]
    return datetime.time(at.hour, at.minute, at.second, at.microsecond, at.tzinfo, fold=at.fold)


def _datetime(data: Any, *zone: Any) -> datetime.datetime:
    at = datetime.datetime(_bytes(data), *zone)  # type: ignore[arg-type]
    fields = (at.year, at.month, at.day, at.hour, at.minute, at.second, at.microsecond)
    return datetime.datetime(*fields, tzinfo=at.tzinfo, fold=at.fold)


def _fraction(numerator: Any, denominator: Any = 1) -> fractions.Fraction:
    if type(numerator) is str:  # of Python 3.11 and older
        numerator, _, denominator = numerator.partition("/")
    return fractions.Fraction(int(numerator), int(denominator or 1))


def _stream(data: Any, position: Any) -> io.BytesIO:
    made = io.BytesIO(_bytes(data))
    made.seek(position)
    return made


def _deque(items: Any, most: Any) -> Any:
    return collections.deque(_bytes(items) if type(items) is bytes else items, most)


_REDUCERS: dict[type, Any] = {
    np.ndarray: _of_array,
    collections.defaultdict: _of_defaultdict,
    collections.deque: lambda value: (_deque, (list(value), value.maxlen)),
    io.BytesIO: lambda value: (_stream, (value.getvalue(), value.tell())),
    torch.Generator: lambda value: (_generator, (str(value.device), value.get_state())),
    torch.memory_format: lambda value: (_constant, (str(value).removeprefix("torch."),)),
    torch.qscheme: lambda value: (_constant, (str(value).removeprefix("torch."),)),
    type(...): lambda value: (_ellipsis, ()),
}


def _ellipsis() -> Any:
    return ...


_WORDS: list[SafeGlobal] = [
    *(_quantized, _nested, _generator, _constant, _array, _objects, _scalar, _string, _dtype, _defaultdict, _stream),
    *(_deque, _ellipsis),
    (_bytes, "builtins.bytes"),
    (_frozenset, "builtins.frozenset"),
    (slice, "builtins.slice"),
    (range, "builtins.range"),
    (_date, "datetime.date"),
    (_time, "datetime.time"),
    (_datetime, "datetime.datetime"),
    (_fraction, "fractions.Fraction"),
    *(datetime.timedelta, datetime.timezone, decimal.Decimal, uuid.UUID, Namespace),
    *(
        (kind, f"pathlib{sub}.{kind.__name__}")
        for sub in ("", "._local")  # of Python 3.13
        for kind in (pathlib.Path, pathlib.PosixPath, pathlib.PurePosixPath)
    ),
]
