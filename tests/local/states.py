"""States for the tests of local checkpoints, and what it means for two of them to be equal."""

from __future__ import annotations

import enum
import io
import struct
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, fields, is_dataclass
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import torch

from ml_flashpoint.copy.cpu import copy_all
from ml_flashpoint.local import TensorAwareStateDict


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Plain:
    content: Any
    note: str = "none"


@dataclass(frozen=True, slots=True)
class Frozen:
    content: Any
    more: Any = None


class Colour(enum.Enum):
    RED = 1
    BLUE = "b"


class Ordinary:
    """Neither a dataclass nor anything else that may be made freely."""

    def __init__(self, content: Any) -> None:
        self.content = content


class Hooked:
    """Made by pickle's hooks."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def __reduce__(self) -> Any:
        return Hooked, (self.content,)


class WholeState(TensorAwareStateDict):
    """Implements only what it must."""

    def __init__(self, content: Any) -> None:
        self.content = content
        self.restored = 0

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        raise AssertionError("saving copies nothing but into the checkpoint")

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        self.restored += 1


class HookedState(WholeState):
    """Would run code of its own when it is made again."""

    def __reduce__(self) -> Any:
        return HookedState, (self.content,)


def everything() -> dict[Any, Any]:
    """Every kind of value that a state may hold without being asked for more."""
    weight = torch.randn(5, 7)
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    noted = Plain([torch.ones(2)])
    noted.added = torch.zeros(3)  # type: ignore[attr-defined]
    return {
        "module": module.state_dict(),
        "tied": [weight, weight.detach(), (weight.view(-1)[:3], Pair(weight, 3))],
        "transposed": weight.t(),
        "dataclasses": Frozen({1: noted, (2, "a"): Frozen(weight)}),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "frozen parameter": torch.nn.Parameter(torch.ones(3), requires_grad=False),
        "wants grad": torch.ones(3, requires_grad=True),
        "dtypes": [
            torch.ones(3, dtype=d) for d in (torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.uint16)
        ],
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(7),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
        "sparse": torch.eye(3).to_sparse(),
        "numpy": np.random.default_rng(3).normal(size=(2, 3)),
        "large numpy": np.arange(5000),
        "numpy scalar": np.float32(2.5),
        "generators": (np.random.get_state(), torch.get_rng_state()),
        "large bytes": b"\x00\xff" * 4000,
        "bytes": [b"", b"\x00\xff", bytearray(b"xyz")],
        "stream": io.BytesIO(b"content"),
        "numbers": [0, -1, 2**63, -(2**500), 1.5, float("inf"), -0.0, 1e-320, 3 + 4j, True, None],
        "text": ["", "é", "\ud800", "line\nend"],
        "torch": [torch.float16, torch.strided, torch.device("cpu"), weight.shape],
        "sets": [{1, 2}, frozenset({"a"}), slice(1, None, 2), range(0, 9, 3)],
        "enum": {Colour.RED: Colour.BLUE},
        "ordered": OrderedDict(b=1, a=2),
        "default": defaultdict(list, {"a": [torch.ones(1)]}),
        "__dunder__": torch.ones(1),
        "local_structure.json": torch.ones(2),
        "a.b": torch.ones(3),
        "a": {"b": torch.zeros(4)},
        "": torch.ones(5),
    }


def assert_equal(one: Any, other: Any, where: str = "state") -> None:
    """Equal in types and in every bit."""
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        _assert_equal_tensors(one, other, where)
    elif isinstance(one, dict):
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_equal(left, right, f"{where}: key {index}")
            assert_equal(one[left], other[right], f"{where}[{left!r}]")
        if isinstance(one, defaultdict):
            assert one.default_factory is other.default_factory, where
        if isinstance(one, OrderedDict):
            assert_equal(vars(one), vars(other), f"{where}.__dict__")
    elif isinstance(one, (list, tuple, deque)):
        assert len(one) == len(other), where
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_equal(left, right, f"{where}[{index}]")
        assert getattr(one, "maxlen", None) == getattr(other, "maxlen", None), where
    elif isinstance(one, (set, frozenset)):
        assert one == other, where
        assert sorted(map(repr, map(type, one))) == sorted(map(repr, map(type, other))), where
    elif is_dataclass(one):
        for field in fields(one):
            assert_equal(getattr(one, field.name), getattr(other, field.name), f"{where}.{field.name}")
        assert_equal(getattr(one, "__dict__", None), getattr(other, "__dict__", None), f"{where}.__dict__")
    elif isinstance(one, (np.ndarray, np.generic)):
        assert (one.dtype, one.dtype.char, one.shape) == (other.dtype, other.dtype.char, other.shape), where
        if one.dtype == object:
            assert_equal(list(one.flat), list(other.flat), where)
        else:
            # Between the fields of a record, and beside the bits of a long double, are bytes of no value.
            plain = one.dtype.names is None and one.dtype.char not in "gG"
            assert one.tobytes() == other.tobytes() if plain else _texts(one) == _texts(other), where
        if isinstance(one, np.ndarray):
            assert one.flags.writeable, where
        if isinstance(one, (str, bytes)):
            assert one == other, where
    elif isinstance(one, io.BytesIO):
        assert (one.getvalue(), one.tell()) == (other.getvalue(), other.tell()), where
    elif isinstance(one, float):
        assert struct.pack("d", one) == struct.pack("d", other), where
    elif isinstance(one, complex):
        assert_equal((one.real, one.imag), (other.real, other.imag), where)
    elif isinstance(one, Decimal):
        assert str(one) == str(other), where
    else:
        assert one == other, where
        assert getattr(one, "fold", None) == getattr(other, "fold", None), where


def _texts(value: Any) -> str:
    with np.printoptions(threshold=2**31):
        return repr(value.tolist())


def _assert_equal_tensors(one: torch.Tensor, other: torch.Tensor, where: str) -> None:
    assert (one.dtype, one.shape, one.layout) == (other.dtype, other.shape, other.layout), where
    assert one.requires_grad == other.requires_grad, where
    assert one.device == other.device, where
    one, other = one.detach(), other.detach()
    if one.is_quantized:
        one, other = one.int_repr(), other.int_repr()
    if one.is_meta:
        return
    if one.layout is torch.sparse_coo:
        assert one.is_coalesced() == other.is_coalesced(), where
        one, other = one.coalesce(), other.coalesce()
        assert torch.equal(one.indices(), other.indices()), where
        one, other = one.values(), other.values()
    assert torch.equal(_bits(one.to_dense()), _bits(other.to_dense())), where


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.resolve_conj().resolve_neg() if tensor.numel() else torch.empty(0)
    if not plain.is_contiguous():
        copied = torch.empty(plain.shape, dtype=plain.dtype)
        copy_all([copied], [plain])
        plain = copied
    return plain.reshape(-1).view(torch.uint8)
