"""What is planned once is used only for state dicts that would be planned alike, and then finds the same data."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess

from ml_flashpoint.adapter.megatron.save_plan import Data, LocalPlan, Plans
from ml_flashpoint.copy.cpu import view_identity
from ml_flashpoint.format.errors import SaveError
from tests.support.megatron import Layout, sharded_state, without_cuda

without_cuda()
pytestmark = pytest.mark.usefixtures("process_group")


class State:
    """What a program saves; a sharded state dict of it is made for each save."""

    def __init__(self) -> None:
        self.rows = 2
        self.weight = torch.rand(4, 3)
        self.layers = [torch.rand(5) for _ in range(3)]
        self.names = {"weight": "weight", "twin": "twin"}
        self.twin: torch.Tensor | None = None
        self.replica: Any = 0
        self.value: Any = {"step": 1}
        self.more: dict[str, Any] = {}
        self.as_objects = False

    def described(self) -> dict[str, Any]:
        weight: Any = ShardedTensor.from_rank_offsets(
            self.names["weight"], self.weight, (0, 0, self.rows), replica_id=self.replica
        )
        if self.as_objects:
            weight = ShardedObject("weight", self.weight, (1,), (0,))
        layers = [
            ShardedTensor.from_rank_offsets("layers", layer, (0, number, len(self.layers)), prepend_axis_num=1)
            for number, layer in enumerate(self.layers)
        ]
        state: dict[str, Any] = {"model": {"weight": weight, "layers": layers}, **self.more}
        if self.twin is not None:
            state["twin"] = ShardedTensor.from_rank_offsets(self.names["twin"], self.twin)
        state["extra"] = ShardedObject("extra", self.value, (2,), (0,))
        state["same"] = ShardedObject("extra", [self.value], (2,), (0,))
        return state


Change = Callable[[State], object]


def _set(**values: Any) -> Change:
    return lambda state: vars(state).update(values)


def _weight(make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda state: setattr(state, "weight", make(state.weight))


def _tie(state: State) -> None:
    state.twin = state.weight


def _swap_names(state: State) -> None:
    state.names = {"weight": state.names["twin"], "twin": state.names["weight"]}


CHANGES: dict[str, Change] = {
    "nothing": lambda state: None,
    "content": lambda state: state.weight.add_(1),
    "other memory": _weight(torch.clone),
    "other strides": _weight(lambda tensor: tensor.t().contiguous().t()),
    "double": _weight(torch.Tensor.double),
    "float": _weight(torch.Tensor.float),
    "larger": _weight(lambda tensor: torch.cat([tensor, tensor])),
    "smaller": _weight(lambda tensor: tensor[:2]),
    "empty": _weight(lambda tensor: tensor[:0]),
    "a parameter": _weight(lambda tensor: torch.nn.Parameter(tensor.float().detach())),
    "conjugated": _weight(lambda tensor: (tensor + 1j * tensor).conj()),
    "sparse": _weight(lambda tensor: tensor.to_dense().detach().to_sparse()),
    "dense": _weight(torch.Tensor.to_dense),
    "no data": _set(weight=torch.empty(4, 3, device="meta")),
    "data": _set(weight=torch.ones(4, 3)),
    "other shards": lambda state: setattr(state, "rows", state.rows % 3 + 1),
    "another rank's": _set(replica=1),
    "this rank's": _set(replica=0),
    "in part this rank's": _set(replica=(0, 0, 0)),
    "tied": _tie,
    "twin": _set(twin=torch.ones(2, 2)),
    "no twin": _set(twin=None),
    "names swapped": _swap_names,
    "further layer": lambda state: state.layers.append(torch.rand(5)),
    "layers in another order": lambda state: state.layers.reverse(),
    "layer less": lambda state: len(state.layers) > 1 and state.layers.pop(),
    "one memory for two layers": lambda state: state.layers.__setitem__(0, state.layers[-1]),
    "other memory for a layer": lambda state: state.layers.__setitem__(0, torch.rand(5)),
    "other object": lambda state: setattr(state, "value", {"step": state.value["step"] + 1}),
    "object for a tensor": lambda state: setattr(state, "as_objects", not state.as_objects),
    "further object": lambda state: state.more.update(more=ShardedObject("more", 3, (1,), (0,))),
    "nested": lambda state: state.more.update(deep={"er": [ShardedTensor.from_rank_offsets("deep", torch.ones(3))]}),
    "nothing more": lambda state: state.more.clear(),
}


def _outcome(exchange: Plans, state: State) -> tuple[LocalPlan, list[Data]] | str:
    sharded, _ = save_preprocess(state.described(), validate_access_integrity=False)
    try:
        return exchange.plan(sharded)
    except SaveError as error:
        return str(error)  # of whatever it is refused for


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, io.BytesIO):
        return one.getvalue() == other.getvalue()
    if one.layout is not torch.strided or one.is_meta or not one.numel():
        return bool(one.layout is other.layout and one.shape == other.shape and one.dtype is other.dtype)
    return view_identity(one) == view_identity(other)


def _check(exchange: Plans, state: State) -> None:
    found, fresh = _outcome(exchange, state), _outcome(Plans(0), state)
    if isinstance(fresh, str):
        assert found == fresh
        return
    assert isinstance(found, tuple), found
    (plan, data), (fresh_plan, fresh_data) = found, fresh
    assert plan.plan.items == fresh_plan.plan.items
    assert (plan.keys, plan.digest) == (fresh_plan.keys, fresh_plan.digest)
    assert len(data) == len(fresh_data)
    assert all(map(_is_same, data, fresh_data))


def _compare(begins: Sequence[str], changes: Sequence[str]) -> None:
    state, exchange = State(), Plans(0)
    for number, change in enumerate([*begins, "nothing", *changes]):
        with contextlib.suppress(RuntimeError), torch.no_grad():  # what torch refuses of some tensors is no change
            CHANGES[change](state)
        if number >= len(begins):
            _check(exchange, state)


_SOME = st.lists(st.sampled_from(sorted(CHANGES)), max_size=8)


@given(_SOME, _SOME)
def test_a_plan_that_is_kept_is_what_planning_anew_would_give(begins: list[str], changes: list[str]) -> None:
    _compare(begins, changes)


def test_each_change_by_itself() -> None:
    for change in CHANGES:
        _compare(["nothing"], [change])
    _compare(["one memory for two layers"], ["other memory for a layer"])
    _compare(["tied"], ["twin"])
    _compare(["tied"], ["other memory"])
    _compare(["a parameter", "smaller"], ["content"])  # torch refuses further views of it, but for detached ones


@pytest.mark.parametrize("make", [lambda: State().described(), lambda: sharded_state(Layout(), 1)])
def test_what_is_described_as_before_has_the_same_plan(make: Callable[[], dict[str, Any]]) -> None:
    exchange = Plans(0)
    plans = [exchange.plan(save_preprocess(make(), validate_access_integrity=False)[0])[0] for _ in range(3)]
    assert plans[0] is plans[1] is plans[2]
