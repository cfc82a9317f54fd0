"""Keys as bytes, and which manager has which key.

Owns the encoding of keys. Keys that are equal in a `dict` have the same bytes in every process: managers compare
bytes, and never learn what a key means. Only clients turn bytes back into keys.

An encoded key is one byte that says what it is, and the rest:

======= ==================================================================================
``s``   text, UTF-8
``b``   bytes
``i``   an integer, in decimal; `True`, `2.0` and numpy's integers are the integers they equal
``f``   any other float, 8 bytes
``n``   `None`
``t``   a tuple: for each element the length of its encoding (4 bytes), then the encoding
``z``   a frozenset: likewise, in the order of the encodings
``p``   anything else, pickled by cloudpickle
======= ==================================================================================

What is pickled must be written alike by all processes in order to be found: a frozen dataclass of a module, or of the
script that runs (``__main__``), is. Classes are named, never pickled by value. One that was defined in a function is
refused: it has no name that another process can find it by.
"""

from __future__ import annotations

import io
import math
import numbers
import struct
import sys
from collections.abc import Hashable, Iterable, Iterator
from operator import attrgetter
from typing import Any, Final

import cloudpickle
import xxhash

from ml_flashpoint.format.errors import DamagedError, InvalidArgumentError

MAX_KEY_BYTES: Final = 64 << 10  # longest encoded key

_FLOAT: Final = struct.Struct(">d")
_LENGTH: Final = struct.Struct(">I")
_MAX_DEPTH: Final = 32
_NAN: Final = _FLOAT.pack(math.nan)


def encode_key(key: Hashable) -> bytes:
    """The bytes of a key. Subclasses of `str`, `int`, `tuple` and so on that are equal to a plain one are it."""
    if type(key) is str:
        data = b"s" + key.encode("utf-8", "surrogatepass")
    elif type(key) is int:
        data = _encode_int(key)
    elif isinstance(key, Unreadable) and key.encoded is not None:
        data = key.encoded
    else:
        data = _encode(key, 0)
    if len(data) > MAX_KEY_BYTES:
        raise InvalidArgumentError(
            f"a key must not take more than {MAX_KEY_BYTES} bytes, this one takes {len(data)}",
            argument="key",
            value=key,
        )
    return data


def decode_key(data: bytes) -> Hashable:
    """The key that these bytes stand for. For clients only: it may unpickle. Raises `DamagedError`: they are no key."""
    try:
        return _decode(bytes(data), 0)
    except (ValueError, IndexError, struct.error, RecursionError) as error:
        raise DamagedError(f"not an encoded key: {error}") from error


class Unreadable:
    """A key or value that cannot be made here: its class cannot be imported, or raises an error.

    `keys`, `values` and `items` have this in its place. One that stands for a key can be used as that key: to read its
    value, or to delete it.

    Attributes:
        error: Why it cannot be made.
        encoded: The bytes of a key; see the module. None: it stands for a value.
    """

    def __init__(self, error: Exception, encoded: bytes | None = None) -> None:
        self.error, self.encoded = error, encoded

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Unreadable) and self.encoded is not None and self.encoded == other.encoded
        )

    def __hash__(self) -> int:
        return hash(self.encoded)

    def __repr__(self) -> str:
        return f"<cannot be read here: {type(self.error).__name__}: {self.error}>"


def readable_key(data: bytes) -> Hashable:
    """Return the key that these bytes stand for; an `Unreadable` where it cannot be made here."""
    try:
        return decode_key(data)
    except Exception as error:  # whatever unpickling raises
        return Unreadable(error, bytes(data))


def described(key: bytes) -> str:
    """An encoded key for a message. Unpickles nothing: managers may call it."""
    return repr(key[1:].decode("utf-8", "replace")) if key[:1] == b"s" else repr(key)


def place(key: bytes, managers: int) -> int:
    """Return which of the managers, numbered from 0, has an encoded key."""
    return xxhash.xxh3_64_intdigest(key) % managers


def _encode(key: object, depth: int) -> bytes:
    if depth > _MAX_DEPTH:
        raise InvalidArgumentError(f"a key must not be nested more than {_MAX_DEPTH} deep", argument="key")
    # Where numpy is not imported, as in managers, there is no such key.
    if (np := sys.modules.get("numpy")) is not None and isinstance(key, np.generic):
        # Those that equal, and hash as, a scalar of Python. Others (datetimes, records) are left as they are.
        key = key.item() if isinstance(key, (np.number, np.bool_, np.str_, np.bytes_)) else key
    kind = type(key)
    if isinstance(key, str) and _compares_as(kind, str):
        return b"s" + str.encode(key, "utf-8", "surrogatepass")
    if isinstance(key, bytes) and _compares_as(kind, bytes):
        return b"b" + bytes(key)
    if key is None:
        return b"n"
    if isinstance(key, tuple) and _compares_as(kind, tuple):
        return b"t" + _joined(_encode(each, depth + 1) for each in key)
    if isinstance(key, frozenset) and _compares_as(kind, frozenset):
        return b"z" + _joined(sorted(_encode(each, depth + 1) for each in key))
    if isinstance(key, numbers.Number):
        number = _encode_number(key)
        if number is not None:
            return number
    hash(key)
    return b"p" + _pickle(key)


def _compares_as(kind: type[Any], base: type[Any]) -> bool:
    return kind is base or (kind.__eq__ is base.__eq__ and kind.__hash__ is base.__hash__)


def _encode_int(key: int) -> bytes:
    try:
        return b"i%d" % key
    except ValueError:  # Python's limit on decimal digits
        raise InvalidArgumentError("an integer with so many digits cannot be a key", argument="key") from None


def _encode_number(key: Any) -> bytes | None:
    """A number as the integer or float that it equals; None: it equals no float."""
    if isinstance(key, int) and _compares_as(type(key), int):
        return _encode_int(int(key))
    try:
        real = float(key.real if isinstance(key, complex) else key)
        if math.isnan(real):
            return b"f" + _NAN if isinstance(key, float) else None
        if real != key or hash(real) != hash(key):
            return None
    except (TypeError, ValueError, ArithmeticError):
        return None
    return _encode_int(int(real)) if real.is_integer() else b"f" + _FLOAT.pack(real)


def _joined(encodings: Iterable[bytes]) -> bytes:
    return b"".join(_LENGTH.pack(len(each)) + each for each in encodings)


class _KeyPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Names classes of the script that runs by that, where `cloudpickle` would take them along, each time others."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type):
            if "<locals>" in obj.__qualname__:
                raise InvalidArgumentError("its class was defined in a function", argument="key", value=obj)
            if obj.__module__ in ("__main__", "__mp_main__"):
                return _class_of_main, (obj.__qualname__,)
        return super().reducer_override(obj)


def _class_of_main(name: str) -> type:
    found: type = attrgetter(name)(sys.modules["__main__"])
    return found


def _pickle(key: object, *, fast: bool = True) -> bytes:
    # Without the memo, since with it equal keys differ in which of their equal parts are one and the same object.
    file = io.BytesIO()
    pickler = _KeyPickler(file, protocol=5)
    pickler.fast = fast
    try:
        pickler.dump(key)
    except Exception as error:
        if fast and isinstance(error, (ValueError, RecursionError)):
            return _pickle(key, fast=False)  # it refers to itself
        raise InvalidArgumentError(f"a key that cannot be pickled: {error}", argument="key", value=key) from error
    return file.getvalue()


def _decode(data: bytes, depth: int) -> Hashable:
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deep")
    tag, rest = data[:1], data[1:]
    if tag == b"s":
        return rest.decode("utf-8", "surrogatepass")
    if tag == b"i":
        return int(rest)
    if tag == b"b":
        return rest
    if tag == b"f":
        return float(_FLOAT.unpack(rest)[0])
    if tag == b"t":
        return tuple(_decode(each, depth + 1) for each in split_joined(rest))
    if tag == b"z":
        return frozenset(_decode(each, depth + 1) for each in split_joined(rest))
    if data == b"n":
        return None
    if tag == b"p":
        key: Hashable = cloudpickle.loads(rest)
        return key
    raise ValueError(f"there is no tag {tag!r}")


def split_joined(data: bytes) -> Iterator[bytes]:
    """Encodings that were joined, each with its length before it. Raises ValueError."""
    at = 0
    while at < len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if at + length > len(data):
            raise ValueError("an element is cut off")
        yield data[at : at + length]
        at += length
