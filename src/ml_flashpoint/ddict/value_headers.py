"""What managers know of values: the header of a large one, and numbers. They need no torch for that.

Owns these two readings. All other forms of values are `values`' and `value_objects`'.
"""

from __future__ import annotations

import pickle
import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from ml_flashpoint.ddict.errors import StaleValueError
from ml_flashpoint.format.errors import DamagedError, ObjectFormatError
from ml_flashpoint.format.object_format import Layout, ParsedHeader, encode_header, header_length, parse_header

if TYPE_CHECKING:
    from typing_extensions import Buffer

_NO_LENGTH: Final = bytes(8)
_MAX_KEPT: Final = 16 << 10
_MAX_INT_BITS: Final = 4096
_FLOAT: Final = struct.Struct(">d")


@lru_cache(maxsize=128)
def _parse_again(header: bytes, file_size: int) -> ParsedHeader:
    # The same values are read again and again.
    return parse_header(header, file_size)


def check_header(buffer: Buffer, value_id: str, file_size: int | None = None) -> tuple[Layout, str]:
    """Where everything of this value lies, and its kind, from the object's header.

    Args:
        buffer: the file, or the part of it that is in use.
        file_size: bytes of the file, if `buffer` is only the part in use.

    Raises:
        StaleValueError: it holds another value, or none.
        ObjectFormatError: it is damaged.
    """
    with memoryview(buffer) as view:
        if view.nbytes < 8 or view[:8] == _NO_LENGTH:
            raise StaleValueError(f"there is no value here, {value_id} was expected")
        if file_size is None:
            file_size = view.nbytes
        length = header_length(view, file_size)
        header = bytes(view[:length])
        parsed = (_parse_again if length <= _MAX_KEPT else parse_header)(header, file_size)
        found = parsed.metadata.get("value")
        if found != value_id:
            raise StaleValueError(f"value {found} is here, {value_id} was expected")
        if parsed.layout.size > view.nbytes:
            raise ObjectFormatError("the object is truncated")
    return parsed.layout, parsed.metadata.get("kind", "")


def header_anew(buffer: Buffer, was: str, value_id: str, file_size: int) -> bytes:
    """The header of an object that was taken out of its file, for another file and under another value id.

    Args:
        buffer: the object, whole and without the unused rest of its file.
        was: id of the value so far.
        file_size: bytes of the other file.

    Raises:
        ObjectFormatError: it is not the object of that value.
    """
    with memoryview(buffer) as view:
        parsed = parse_header(view, None)
        if parsed.layout.size != view.nbytes or parsed.metadata.get("value") != was:
            raise ObjectFormatError(f"not the object of value {was}")
    return encode_header(parsed.layout, file_size, {**parsed.metadata, "value": value_id})


def encode_number(value: float) -> bytes | None:
    """The inline form of an integer or a float; None for an integer that is huge."""
    if isinstance(value, int):
        return b"i%d" % value if value.bit_length() <= _MAX_INT_BITS else None
    return b"f" + _FLOAT.pack(value)


def number_to_inline(value: float) -> bytes:
    """The inline form of any integer or float."""
    return encode_number(value) or b"p" + pickle.dumps(value, 5)


def decode_number(data: bytes) -> int | float:
    """What `encode_number` encoded. Raises ValueError or struct.error."""
    if data[:1] == b"i":
        return int(data[1:])
    number: float = _FLOAT.unpack(data[1:])[0]
    return number


def inline_number(data: bytes) -> int | float | None:
    """The integer or float in a small value, None if it is something else.

    Raises:
        DamagedError: it is marked as a number and is none.
    """
    if data[:1] not in (b"i", b"f"):
        return None
    try:
        return decode_number(data)
    except (ValueError, struct.error) as error:
        raise DamagedError(f"not an encoded number: {error}") from error
