"""A copy of a plain state is what pickling it would give, and nothing that is not plain is taken for it."""

from __future__ import annotations

import io
from collections import OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ml_flashpoint.facade.packed_state import PackedState, item_bytes
from ml_flashpoint.facade.plain_copy import NotPlainError, plain_copy

_atoms = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=3), st.binary()
)
_plain: Any = st.recursive(
    _atoms,
    lambda each: st.one_of(
        st.lists(each, max_size=4),
        st.dictionaries(st.one_of(st.integers(), st.text(max_size=2)), each, max_size=4),
        st.lists(each, max_size=3).map(tuple),
    ),
    max_leaves=20,
)


def _pickled(value: Any) -> Any:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


@given(_plain)
def test_a_copy_is_what_pickling_gives(state: Any) -> None:
    assert repr(plain_copy(state)) == repr(_pickled(state)) == repr(state)


def test_a_copy_shares_nothing_that_can_change_and_keeps_what_is_shared_in_it() -> None:
    inner: list[Any] = [1.0]
    state: dict[str, Any] = {"a": inner, "b": {"c": inner}, "t": (inner, 2), "n": np.ones(2), "x": torch.ones(2)}
    state["self"] = state
    copy = plain_copy(state)
    inner.append(2.0)
    state["n"][0] = state["x"][0] = 5
    assert copy["a"] == [1.0]
    assert copy["a"] is copy["b"]["c"] is copy["t"][0]
    assert copy["self"] is copy
    assert copy["n"].tolist() == copy["x"].tolist() == [1.0, 1.0]


_base = torch.ones(4)


class _Float(float):
    pass


@pytest.mark.parametrize(
    "state",
    [
        OrderedDict(a=1), defaultdict(int), {1, 2}, object(), len, _Float(1), [_Float(1)], {_Float(1): 1}, {(1,): 2},
        np.float64(1), np.array([None]), np.ma.masked_array([1]), np.ones(1 << 16), [[] for _ in range(2000)],
        nn.Parameter(torch.ones(1)), torch.ones(1, requires_grad=True), torch.ones(1, device="meta"), _base[1:],
        [_base, _base.view(2, 2)], torch.ones(3, 2).t(), torch.ones(2).to_sparse(),
        torch.ones(2, dtype=torch.cfloat).conj(), torch.ones(1 << 16),
    ],
    ids=lambda state: type(state).__name__,
)  # fmt: skip
def test_what_is_not_plain_is_told(state: Any) -> None:
    with pytest.raises(NotPlainError):
        plain_copy(state)


def test_what_is_packed_later_is_what_it_was() -> None:
    state = {"a": [1, 2], "b": torch.ones(2)}
    packed = PackedState.later(plain_copy(state))
    state["a"].append(3)  # type: ignore[attr-defined]
    found = torch.load(io.BytesIO(item_bytes("x.y", packed)), weights_only=True)
    assert found["a"] == [1, 2]
    assert found["b"].tolist() == [1.0, 1.0]
