"""Values taken apart and put together: what comes back is what was put, in either form, and damage is told."""

from __future__ import annotations

import dataclasses
import math
import mmap
import pickle
import struct
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ml_flashpoint.ddict.client.values import (
    INLINE_LIMIT,
    Encoded,
    encode,
    from_inline,
    object_blobs,
    object_size,
    read_object,
    to_inline,
    write_object,
)
from ml_flashpoint.ddict.errors import StaleValueError
from ml_flashpoint.ddict.manager.store import VALUE_AT, inline_number, number_to_inline, slot_header
from ml_flashpoint.format.errors import DamagedError, FlashpointError, InvalidArgumentError

Way = Callable[[object], object]
ID = "v-0123456789abcdef-000000000001"


def inline(value: object) -> object:
    return from_inline(to_inline(encode(value)))


def inline_copy(value: object) -> object:
    return from_inline(memoryview(bytearray(to_inline(encode(value)))), copy=True)


def encoded_large(value: object) -> Encoded:
    """A value in the form of large ones, which no number takes by itself."""
    encoded = encode(value)
    return Encoded([], [], pickle.dumps(value, 5)) if encoded.is_number else encoded


def written(value: object) -> bytearray:
    encoded = encoded_large(value)
    size = object_size(encoded)
    buffer = bytearray(b"\xaa" * (size + 5000))
    assert write_object(encoded, torch.frombuffer(buffer, dtype=torch.uint8), ID) == size
    return buffer


def in_slot(value: object) -> object:
    return read_object(written(value), ID)


def in_slot_copy(value: object) -> object:
    return read_object(written(value), ID, copy=True)


def from_elsewhere(value: object) -> object:
    """As clients on another node send and get it."""
    encoded = encoded_large(value)
    data = b"".join(object_blobs(encoded, ID))
    assert len(data) == object_size(encoded)
    return read_object(data, ID)


WAYS = [inline, inline_copy, in_slot, in_slot_copy, from_elsewhere]
every_way = pytest.mark.parametrize("way", WAYS)
TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "float32": lambda: torch.randn(3, 5),
    "no dimension": lambda: torch.tensor(2.5),
    "empty": lambda: torch.empty(0, 4, dtype=torch.int64),
    "bool": lambda: torch.tensor([True, False, True]),
    "bfloat16": lambda: torch.randn(7).bfloat16(),
    "float8": lambda: torch.randn(9).to(torch.float8_e4m3fn),
    "complex128": lambda: torch.randn(2, 3, dtype=torch.complex128),
    "uint16": lambda: torch.arange(9).to(torch.uint16),
    "transposed": lambda: torch.arange(12.0).view(3, 4).t(),
    "one element, and its stride": lambda: torch.arange(12.0).as_strided((1,), (3,)),
    "sliced": lambda: torch.arange(100.0)[10:90:3],
    "expanded": lambda: torch.arange(4.0).expand(3, 4),
    "conjugated": lambda: torch.randn(4, dtype=torch.complex64).conj(),
    "negated": lambda: torch.randn(4, dtype=torch.complex64).conj().imag,
    "requires grad": lambda: torch.randn(4, requires_grad=True),
    "large": lambda: torch.randn(70_000),
}


@every_way
@pytest.mark.parametrize("name", TENSORS)
def test_tensors_come_back(way: Way, name: str) -> None:
    value = TENSORS[name]()
    before = value.detach().clone()
    found = way(value)
    assert type(found) is torch.Tensor
    assert (found.dtype, found.shape, found.requires_grad) == (value.dtype, value.shape, False)
    assert found.is_contiguous()
    assert torch.equal(found.to(torch.complex128), before.to(torch.complex128))
    if found.numel():
        found.view(-1).view(torch.uint8).fill_(1)  # may be written to, and nobody sees it
    assert torch.equal(value.detach().to(torch.complex128), before.to(torch.complex128))


@pytest.mark.cuda
@every_way
def test_tensors_on_a_gpu_come_back_on_the_cpu(way: Way) -> None:
    value = torch.randn(1000, 300, device="cuda").t()
    found: Any = way([value, "text"])
    assert found[0].device.type == "cpu"
    assert torch.equal(found[0], value.cpu())
    assert torch.equal(way(value), value.cpu())  # type: ignore[arg-type]


ARRAYS: dict[str, Callable[[], np.ndarray[Any, Any]]] = {
    "float64": lambda: np.arange(6.0).reshape(2, 3),
    "no dimension": lambda: np.array(5, np.int16),
    "empty": lambda: np.empty((3, 0), np.float32),
    "fortran": lambda: np.asfortranarray(np.arange(12).reshape(3, 4)),
    "backwards": lambda: np.arange(12)[::-1],
    "big endian": lambda: np.arange(5, dtype=">i4"),
    "text": lambda: np.array(["a", "äöü", ""]),
    "bytes": lambda: np.array([b"a", b"xyz"]).reshape(2, 1),
    "dates": lambda: np.array(["2020-01-02", "2021-05-06"], "datetime64[D]"),
    "long double": lambda: np.arange(4, dtype=np.longdouble),
    "half": lambda: np.arange(4, dtype=np.float16),
    "broadcast": lambda: np.broadcast_to(np.arange(3.0), (4, 3)),
    "field": lambda: np.zeros(5, np.dtype([("a", "u1"), ("b", "<f8")]))["b"],
    "read-only": lambda: np.frombuffer(b"abcdefgh", np.uint16),
    "large": lambda: np.arange(50_000.0),
}


@every_way
@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_come_back(way: Way, name: str) -> None:
    value = ARRAYS[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of arrays that are read-only
        found = way(value)
    assert type(found) is np.ndarray
    assert (found.dtype, found.shape) == (value.dtype, value.shape)
    assert np.array_equal(found, value)
    assert found.flags.writeable == (way in (inline_copy, in_slot_copy))


@every_way
@settings(max_examples=40)
@given(array=hnp.arrays(hnp.scalar_dtypes(), hnp.array_shapes(min_dims=0, min_side=0, max_side=4)))
def test_any_array_comes_back(way: Way, array: np.ndarray[Any, Any]) -> None:
    found = way(array)
    assert isinstance(found, np.ndarray)
    assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())


@dataclasses.dataclass
class Record:
    name: str
    weights: torch.Tensor
    table: np.ndarray[Any, Any]


@every_way
def test_tensors_inside_other_objects_never_pass_through_pickle(way: Way) -> None:
    weights = torch.randn(1000)
    value = {"record": Record("r", weights, np.arange(1000)), "list": [weights, (weights[:10], None)]}
    encoded = encode(value)
    assert len(encoded.pickled) < 1000
    assert [tensor.nbytes for tensor in encoded.tensors] == [4000, 8000, 40]
    found: Any = way(value)
    assert torch.equal(found["record"].weights, weights)
    assert np.array_equal(found["record"].table, np.arange(1000))
    assert found["list"][0] is found["record"].weights
    assert torch.equal(found["list"][1][0], weights[:10])


@every_way
def test_what_shares_memory_is_stored_once(way: Way) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model[1].weight = model[0].weight
    state = model.state_dict()
    array = np.arange(5)
    value = [state, model, array, array[:], torch.empty(0), torch.empty(0)]
    assert len(encode(value).tensors) == 3 + 1 + 2
    found: Any = way(value)
    assert found[0]["0.weight"] is found[0]["1.weight"]
    assert found[2] is found[3]
    assert found[1][0].weight is found[1][1].weight
    assert type(found[1][0].weight) is torch.nn.Parameter
    assert found[1][0].weight.requires_grad
    for key, tensor in state.items():
        assert torch.equal(found[0][key], tensor)
        assert torch.equal(found[1].state_dict()[key], tensor)


@every_way
@pytest.mark.filterwarnings("ignore:.*quantized tensor creation", "ignore:TypedStorage")
def test_what_is_not_plain_is_left_to_pickle(way: Way) -> None:
    sparse = torch.eye(4).to_sparse()
    structured = np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")])
    objects = np.array([{"a": 1}, None], dtype=object)
    masked = np.ma.masked_array([1, 2, 3], mask=[0, 1, 0])
    parameter = torch.nn.Parameter(torch.randn(3))
    quantized = torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8)
    found: Any = way([sparse, structured, objects, masked, parameter, quantized, np.float32(1.5), lambda x: x + 1])
    assert torch.equal(found[0].to_dense(), torch.eye(4))
    assert found[1].dtype == structured.dtype
    assert np.array_equal(found[1], structured)
    assert list(found[2]) == [{"a": 1}, None]
    assert found[3].mask.tolist() == [False, True, False]
    assert torch.equal(found[4], parameter)
    assert torch.equal(found[5].dequantize(), quantized.dequantize())
    assert type(found[6]) is np.float32
    assert found[7](1) == 2


@pytest.mark.slow
@settings(max_examples=40)
@given(
    st.recursive(
        st.none() | st.integers() | st.text() | st.binary() | st.floats(allow_nan=False),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    )
)
def test_any_tree_comes_back(value: object) -> None:
    for way in WAYS:
        assert way(value) == value


def test_what_cannot_be_pickled_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="cannot be pickled"):
        encode(i for i in range(3))


def test_size_decides_about_the_form() -> None:
    assert encode(torch.zeros(INLINE_LIMIT - 1, dtype=torch.uint8)).inline
    assert not encode(torch.zeros(INLINE_LIMIT, dtype=torch.uint8)).inline
    assert not encode(bytes(INLINE_LIMIT)).inline
    assert encode([1]).pickled == pickle.dumps([1], 5)


def test_a_manager_reads_numbers_without_unpickling() -> None:
    numbers = [0, -5, 1 << 100, 0.25, math.inf]
    assert [inline_number(to_inline(encode(number))) for number in numbers] == numbers
    assert all(number_to_inline(number) == to_inline(encode(number)) for number in (*numbers, 1 << 5000))
    for other in (True, None, "7", 1 << 20_000, np.float32(1), torch.tensor(1), [1]):
        assert inline_number(to_inline(encode(other))) is None
    for damaged in (b"i", b"ix", b"f123", b"i1 2"):
        with pytest.raises(DamagedError):
            inline_number(damaged)


# ---- objects ----------------------------------------------------------------------------------------------------


def test_views_share_the_buffers_memory_and_copies_do_not() -> None:
    value = [torch.zeros(3), np.zeros(3)]
    buffer = written(value)
    views: Any = read_object(buffer, ID)
    copies: Any = read_object(buffer, ID, copy=True)
    end = object_size(encode(value))
    for begin, nbytes in ((end - 24 - 64, 12), (end - 24, 24)):
        buffer[begin : begin + nbytes] = b"\1" * nbytes
    assert views[0].any()
    assert views[1].any()
    assert not copies[0].any()
    assert not copies[1].any()
    copies[1][0] = 1
    with pytest.raises(ValueError, match="read-only"):
        views[1][0] = 1


def test_a_view_can_be_saved_and_sent_without_its_neighbours() -> None:
    found: Any = read_object(written([torch.zeros(3), torch.zeros(100_000), torch.zeros(2, 2)]), ID)
    assert [tensor.untyped_storage().nbytes() for tensor in found] == [12, 400_000, 16]
    found[0].requires_grad_().sum().backward()
    found[2].mul_(2)


def test_a_value_is_there_when_the_first_bytes_of_its_slot_say_so() -> None:
    # A writer that is killed: whatever it has written up to then, there is no value.
    complete = written([torch.arange(5), "text"])
    for buffer in (bytes(8) + complete[8:], bytearray(len(complete))):
        with pytest.raises(StaleValueError):
            read_object(buffer, ID)


def test_another_value_is_not_mistaken_for_this_one() -> None:
    with pytest.raises(StaleValueError, match="was expected"):
        read_object(written(torch.zeros(3)), ID[:-1] + "2")
    with pytest.raises(StaleValueError):
        read_object(b"", ID)


def test_a_value_has_the_room_that_it_needs_though_its_pickle_has_4_gib() -> None:
    length = 1 << 32
    with mmap.mmap(-1, length) as pickled:  # none of which takes memory
        assert length < object_size(Encoded([], [], pickled)) - VALUE_AT < length + 100  # type: ignore[arg-type]


@given(at=st.integers(0, VALUE_AT + 40), byte=st.integers(0, 255))
def test_a_damaged_header_gives_a_typed_error_or_the_value(at: int, byte: int) -> None:
    value = {"a": torch.arange(3), "b": np.arange(2)}
    buffer = bytearray(written(value))
    buffer[at] = byte
    try:
        found: Any = read_object(buffer, ID)
    except (FlashpointError, pickle.UnpicklingError):  # which users get as a `DDictError`
        return
    assert found.keys() == value.keys()


# ---- small values -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", [torch.arange(4), np.arange(4), {"a": torch.arange(4), "b": np.arange(3)}], ids=["T", "A", "P"]
)
def test_truncated_small_values_are_told(value: object) -> None:
    data = to_inline(encode(value))
    for end in range(len(data)):
        with pytest.raises(DamagedError):
            from_inline(data[:end])
    with pytest.raises(DamagedError):
        from_inline(data + b"x")


def _single(tag: bytes, text: bytes, raw: bytes, count: int = 1) -> bytes:
    head = b"P" + struct.pack(">IQ", count, 0) + count * struct.pack(">cQH", tag, len(raw), len(text)) + count * text
    return head + count * (bytes(-len(head) % 64) + raw)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x",
        b"T\0\x03abc",
        _single(b"T", b"abc", b""),
        _single(b"A", b"O 1", bytes(8)),
        _single(b"A", b"<f4 -4", bytes(16)),
        _single(b"A", b"nonsense 4", bytes(16)),
        _single(b"A", b"<f4,( 4", bytes(16)),
        _single(b"A", b"<f4,,<f4 2", bytes(16)),
        _single(b"A", b"<M8[Y/0] 2", bytes(16)),
        _single(b"A", b"\xff", bytes(16)),
        _single(b"T", b"float32 99,99", b""),
        _single(b"A", b"<f4 ", b""),
        _single(b"x", b"float32 1", bytes(4)),
        _single(b"T", b"float32 1", bytes(4), 0),
        _single(b"T", b"float32 1", bytes(4), 2),
    ],
)
def test_what_is_no_value_is_refused(data: bytes) -> None:
    good = _single(b"T", b"float32 1", bytes(4))
    for way in (from_inline, lambda its: read_object(slot_header(ID, VALUE_AT + len(its)) + its, ID)):
        assert torch.equal(way(good), torch.zeros(1))  # type: ignore[arg-type]
        with pytest.raises(FlashpointError):
            way(data)
