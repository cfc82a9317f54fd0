"""Whatever a state may hold comes back with the same value and the same type, or is refused when it is saved."""

from __future__ import annotations

import datetime
import enum
import io
from collections import OrderedDict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from ml_flashpoint.copy.dtypes import STORABLE_DTYPES
from ml_flashpoint.format.errors import InvalidArgumentError, UnsafeContentError
from ml_flashpoint.local import BasicTensorAwareStateDict, CheckpointingException, LocalCheckpointManager
from ml_flashpoint.state.archive import array_of, dtype_of
from tests.local.states import Colour, Frozen, Ordinary, Pair, Plain, assert_equal


@pytest.fixture
def manager(tmpfs: Path) -> Iterator[LocalCheckpointManager]:
    made = LocalCheckpointManager(tmpfs / "job")
    yield made
    made.close()


def round_trip(manager: LocalCheckpointManager, value: Any) -> Any:
    manager.save(BasicTensorAwareStateDict({"v": value}), manager.latest_iteration + 1)
    loaded, _ = manager.load()
    return loaded.state_dict["v"]  # type: ignore[attr-defined]


def refusal(manager: LocalCheckpointManager, value: Any) -> str | None:
    try:
        manager.save(BasicTensorAwareStateDict({"v": value}), manager.latest_iteration + 1)
    except CheckpointingException as error:
        return str(error)
    return None


X = torch.tensor([1 + 2j, 3 - 4j, complex("nan")])
RECORD = np.dtype([("a", "<i4"), ("b", ">f8", (2,)), (("title", "c"), "U3"), ("d", [("e", "S2")])], align=True)


class Bits(enum.Flag):
    A = 1
    B = 2


VALUES: dict[str, Any] = {
    "conjugate": [X, X.conj(), X.conj().imag, X.imag, X],
    "one memory, two gradients": [X, X.detach().requires_grad_(), torch.nn.Parameter(X), X],
    "no elements": [torch.empty(0), torch.empty(3, 0, dtype=torch.bool), torch.empty(0, dtype=torch.complex32)],
    "sparse": [torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(), torch.eye(3).to_sparse().requires_grad_()],
    "uncoalesced": torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (2,), check_invariants=False),
    "meta": torch.empty(3, device="meta"),
    "arrays without bytes": [np.empty(2, "V0"), np.empty((0, 3)), np.empty((2, 0), "<M8[s]"), np.ndarray((2,), "<U0")],
    "types of C": [
        np.longlong(1),
        np.array([1], "q"),
        np.array([1], ">q"),
        np.ulonglong(3),
        np.intc(1),
        np.longdouble(1),
    ],
    "records": [np.zeros(3, RECORD), np.ones(2, RECORD)[0], np.zeros(0, RECORD)],
    "dtypes of numpy": [RECORD, np.dtype(">f4"), np.dtype([])],
    "array of objects": np.array([None, 2**70, "a", {"n": [1]}, torch.ones(2), np.float32(1)], dtype=object),
    "large array": [np.arange(3000.0)[::2], np.asfortranarray(np.ones((40, 50))), np.frombuffer(b"x" * 5000, "V5")],
    "flags of an array": [np.array(3), np.array("é"), np.broadcast_to(np.arange(3), (1000, 3))],
    "numpy keys": {np.int64(1): 1, np.str_("a\0"): 2, (np.float32(1), None): 3, b"b" * 2000: 4},
}


@pytest.mark.parametrize("name", VALUES)
def test_it_comes_back(manager: LocalCheckpointManager, name: str) -> None:
    assert_equal(round_trip(manager, VALUES[name]), VALUES[name])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_of_every_dtype_come_back_bit_for_bit(manager: LocalCheckpointManager) -> None:
    dtypes = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
    held = {}
    for dtype in dtypes:
        try:
            made = (torch.arange(0, 64, dtype=torch.uint8) % 2).view(dtype)
        except RuntimeError:
            continue
        if dtype in STORABLE_DTYPES:
            held[str(dtype)] = [made, made[::2], made[:0]]
    assert len(held) > 20
    held["quantized"] = [torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)]
    assert_equal(round_trip(manager, held), held)


class Tagged(torch.Tensor):
    pass


class Number(int):
    pass


class Loose(tuple):  # type: ignore[type-arg]
    _fields = ("a",)


_loose = Loose((1,))
_loose.more = 2  # type: ignore[attr-defined]

REFUSED: dict[str, Any] = {
    "class": Ordinary(1),
    "tensor subclass": torch.ones(2).as_subclass(Tagged),
    "int subclass": Number(1),
    "tuple with attributes": _loose,
    "combined flags": Bits.A | Bits.B,
    "view": memoryview(b"a"),
    "strings of numpy": np.array(["a"], dtype=getattr(getattr(np, "dtypes", None), "StringDType", lambda: object)()),
    "masked": np.ma.masked_array([1], [True]),
    "objects in records": np.zeros(1, [("a", object)]),
    "record of NumPy's own class": np.rec.array([(1, 2.0)])[0],
}
if not hasattr(np, "dtypes") or not hasattr(np.dtypes, "StringDType"):
    del REFUSED["strings of numpy"]


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_not_come_back_is_refused_with_its_place(manager: LocalCheckpointManager, name: str) -> None:
    state = BasicTensorAwareStateDict({"model": torch.ones(1), "part": {"key": [0, REFUSED[name]]}})
    with pytest.raises(CheckpointingException, match=r"part\.key\.1") as refused:
        manager.save(state, 1)
    assert isinstance(refused.value.__cause__, (InvalidArgumentError, UnsafeContentError))
    assert manager.find_latest() == -1


# ---- anything, in any nesting -----------------------------------------------------------------------------

_scalar_dtypes = (
    npst.scalar_dtypes()
    | npst.byte_string_dtypes()
    | npst.unicode_string_dtypes()
    | npst.datetime64_dtypes()
    | npst.timedelta64_dtypes()
)
_arrays = (_scalar_dtypes | npst.array_dtypes(_scalar_dtypes, max_size=3, allow_subarrays=True)).flatmap(
    lambda dtype: npst.arrays(dtype, npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
)


_torch_dtypes = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.uint8, torch.bool
]  # fmt: skip


def _tensor(drawn: tuple[torch.dtype, list[int], int]) -> torch.Tensor:
    dtype, shape, seed = drawn
    generator = torch.Generator().manual_seed(seed)
    made = torch.randint(0, 2 if dtype is torch.bool else 100, shape, generator=generator).to(dtype)
    ways = [
        lambda: made,
        lambda: made.conj() if dtype.is_complex else made.t() if made.dim() == 2 else made,
        lambda: made.expand(3, *made.shape),
        lambda: torch.nn.Parameter(made, dtype.is_floating_point),
        lambda: made.to_sparse() if made.dim() else made,
        lambda: made.conj().imag if dtype.is_complex else made[:1] if made.dim() else made,
    ]
    return ways[seed % len(ways)]()


_tensors = st.builds(
    lambda *drawn: _tensor(drawn),
    st.sampled_from(_torch_dtypes),
    st.lists(st.integers(0, 4), max_size=3),
    st.integers(0, 99),
)
_hashable = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters(codec=None, categories=None), max_size=6)
    | st.text(st.sampled_from("\ud83d\ude00a"), max_size=4)
    | st.binary(max_size=8)
    | st.datetimes(timezones=st.just(datetime.timezone.utc) | st.none())
    | st.timedeltas()
    | st.decimals(allow_nan=False)
    | st.fractions()
    | st.uuids()
    | st.sampled_from([*Colour, torch.float32, torch.Size([1, 2]), torch.device("cpu"), torch.strided])
    | st.builds(range, st.integers(), st.integers(), st.integers(1))
)
_leaves = (
    _hashable
    | _tensors
    | _arrays
    | _arrays.map(lambda array: array.T[..., ::2] if array.ndim else array)
    | _arrays.filter(lambda array: array.size).map(lambda array: array.ravel()[0])
    | _arrays.map(lambda array: array.dtype)
    | st.binary(max_size=2000).map(bytearray)
    | st.binary(max_size=2000).map(io.BytesIO)
    | st.slices(8)
    | st.sets(_hashable.filter(lambda v: v == v), max_size=3)
    | st.frozensets(_hashable.filter(lambda v: v == v), max_size=3)
    | st.sampled_from([Ordinary(1), len, Number(3)])
)
_nests = st.recursive(
    _leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.lists(inner, max_size=3).map(lambda held: [held, held])
        | st.lists(inner, max_size=3).map(deque)
        | st.dictionaries(_hashable.filter(lambda v: v == v), inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3).map(OrderedDict)
        | st.builds(Pair, inner, inner)
        | st.builds(Frozen, inner, inner)
        | st.builds(Plain, inner)
    ),
    max_leaves=10,
)
_UNABLE = (Ordinary, type(len), Number)


def _check_any(manager: LocalCheckpointManager, examples: int) -> None:
    @settings(max_examples=examples, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
    @given(_nests)
    def check(nest: Any) -> None:
        if any(type(each) in _UNABLE for each in _everything_in(nest)):
            refused = refusal(manager, nest)
            assert refused is not None
            assert "loading would refuse" in refused or "cannot be saved" in refused or "could not be loaded" in refused
        else:
            assert_equal(round_trip(manager, nest), nest)

    check()


def _everything_in(nest: Any) -> Iterator[Any]:
    yield nest
    if isinstance(nest, dict):
        nest = list(nest.values())
    elif isinstance(nest, (Frozen, Plain)):
        nest = [nest.content, getattr(nest, "more", None)]
    if isinstance(nest, (list, tuple, deque)):
        for each in nest:
            yield from _everything_in(each)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_anything_comes_back_or_is_refused(manager: LocalCheckpointManager) -> None:
    _check_any(manager, 100)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_anything_comes_back_or_is_refused_at_length(manager: LocalCheckpointManager) -> None:
    _check_any(manager, 5000)


# ---- descriptions of dtypes -------------------------------------------------------------------------------


def test_forged_dtypes_and_shapes_are_refused() -> None:
    dtypes = [
        "O",
        "no such",
        None,
        ("<f4", [-1]),
        ("O", [1]),
        [("a", "O")],
        [("a", "<f8", (-1,))],
        [("a", [("b", "O")])],
    ]
    dtypes += [[("a", "<f8"), ("a", "<f8")], "<M8[Y/0]", [("a", [(("b", "c"), ("i4,m8[W/-0]", (2,)))])]]  # type: ignore[list-item]
    for described in dtypes:
        with pytest.raises((TypeError, ValueError)):
            dtype_of(described)
    for shape in ([2], [-1], [1, 0], ["1"], [2**62, 4]):
        with pytest.raises((TypeError, ValueError)):
            array_of(b"12345678", "<f8", shape)  # type: ignore[arg-type]
