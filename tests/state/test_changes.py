"""What is saved is the state, whatever a program does to its objects between two saves."""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from ml_flashpoint.state.archive import PackedState, save_archive
from ml_flashpoint.state.plan import Offer, Plan, Share, Tree
from ml_flashpoint.state.tracked import TrackedState

WIDTH = 4


class Net(nn.Module):
    """With all kinds of entries in its tables."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.last, self.tied = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.first.weight
        self.again = self.last
        self.spare: nn.Module | None = None
        self.register_buffer("kept", torch.zeros(3))
        self.register_buffer("shared", torch.zeros(3))
        self.register_buffer("twin", self.shared)
        self.register_buffer("absent", None)
        self.register_buffer("passing", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.tied(self.again(self.norm(self.first(x))))
        return out


class Job:
    """What a program has, and counts what it makes."""

    def __init__(self) -> None:
        self.model = Net()
        self.parameters = list(self.model.parameters())
        groups: Any = [{"params": self.parameters[:2]}, {"params": self.parameters[2:], "lr": 0.2}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.count = itertools.count()
        self.step()
        self.counts[1]["step"] = self.counts[0]["step"]

    def step(self) -> None:
        for parameter in self.parameters:
            parameter.grad = torch.rand_like(parameter)
        self.optimizer.step()
        self.scheduler.step()
        self.model.norm.num_batches_tracked.add_(1)

    def tracked(self) -> TrackedState:
        tracked = TrackedState(0, 1)
        for name in ("model", "optimizer", "scheduler"):
            tracked.add(name, getattr(self, name))
        return tracked

    @property
    def counts(self) -> list[dict[str, Any]]:
        """The states of two parameters, which have one tensor in common."""
        return [self.optimizer.state[parameter] for parameter in self.parameters[:2]]

    @property
    def moments(self) -> dict[str, Any]:
        """The state of one parameter."""
        moments: dict[str, Any] = self.optimizer.state[self.parameters[0]]
        return moments


Change = Callable[[Job], object]


def _data(make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def change(job: Job) -> None:
        weight = job.model.last.weight
        weight.data = make(weight.data)

    return change


def _moment(make: Callable[[torch.Tensor], Any]) -> Change:
    def change(job: Job) -> None:
        job.moments["exp_avg"] = make(torch.as_tensor(job.moments["exp_avg"]))

    return change


def _moment_data(make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def change(job: Job) -> None:
        tensor = torch.as_tensor(job.moments["exp_avg"])
        job.moments["exp_avg"] = tensor
        tensor.data = make(tensor.data)

    return change


def _buffer(make: Callable[[torch.Tensor], torch.Tensor | None]) -> Change:
    return lambda job: setattr(job.model, "kept", make(torch.ones(3)))


def _swap_names(job: Job) -> None:
    one, other = job.model.first, job.model.last
    one.weight, other.weight = other.weight, one.weight


def _swap_states(job: Job) -> None:
    one, other = job.parameters[0], job.parameters[3]
    state = job.optimizer.state
    state[one], state[other] = state[other], state[one]


def _swap_persistence(job: Job) -> None:
    job.model._non_persistent_buffers_set ^= {"kept", "passing"}


def _other_order(table: Callable[[Job], Any]) -> Change:
    def change(job: Job) -> None:
        entries = table(job)
        first = next(iter(entries))
        entries[first] = entries.pop(first)

    return change


def _as_double(value: Any) -> Any:
    return {key: each * 2 if isinstance(each, torch.Tensor) else each for key, each in value.items()}


def _post_hook(job: Job) -> None:
    def hook(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[f"{prefix}hooked"] = torch.ones(next(job.count) % 2 + 1)

    job.model.first.register_state_dict_post_hook(hook)


def _optimizer_hook(job: Job) -> None:
    def hook(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        groups = [{**group, "lr": group["lr"] * 2} for group in state["param_groups"]]
        return {"state": {n: _as_double(each) for n, each in state["state"].items()}, "param_groups": groups}

    job.optimizer.register_state_dict_post_hook(hook)


def _add_group(job: Job) -> None:
    parameter = nn.Parameter(torch.ones(2))
    job.model.register_parameter(f"extra{next(job.count)}", parameter)
    job.optimizer.add_param_group({"params": [parameter]})
    job.parameters.append(parameter)


def _move_between_groups(job: Job) -> None:
    groups = [group["params"] for group in job.optimizer.param_groups]
    groups.sort(key=len)
    groups[0].append(groups[-1].pop())


def _reverse_group(job: Job) -> None:
    job.optimizer.param_groups[1]["params"].reverse()


def _set_group(**values: Any) -> Change:
    return lambda job: job.optimizer.param_groups[0].update(values)


CHANGES: dict[str, Change] = {
    "nothing": lambda job: None,
    "step": Job.step,
    "swap names": _swap_names,
    "no parameter": lambda job: setattr(job.model.first, "bias", None),
    "data": _data(torch.clone),
    "data of another dtype": _data(lambda data: data.half()),
    "data of another shape": _data(lambda data: data[:2]),
    "frozen": lambda job: job.model.last.weight.requires_grad_(not job.model.last.weight.requires_grad),
    "tie": lambda job: setattr(job.model.last, "weight", job.model.first.weight),
    "share memory": lambda job: setattr(job.model.last.weight, "data", job.model.first.weight.data),
    "other order of modules": _other_order(lambda job: job.model._modules),
    "other order of states": _other_order(lambda job: job.optimizer.state),
    "other module": lambda job: setattr(job.model, "norm", nn.BatchNorm1d(WIDTH)),
    "wrapped module": lambda job: setattr(job.model, "norm", nn.Sequential(job.model.norm)),
    "buffer": _buffer(torch.clone),
    "double buffer": _buffer(torch.Tensor.double),
    "sparse buffer": _buffer(torch.Tensor.to_sparse),
    "conjugated buffer": _buffer(lambda buffer: (buffer + 1j * buffer).conj()),
    "negated buffer": _buffer(lambda buffer: (buffer + 1j * buffer).conj().imag),
    "strided buffer": _buffer(lambda buffer: torch.ones(3, 2)[:, 0]),
    "buffer that is shared": lambda job: setattr(job.model, "kept", job.model.norm.running_mean),
    "shared buffer of another dtype": lambda job: setattr(job.model, "twin", torch.ones(3).double()),
    "shared moment of another dtype": lambda job: job.counts[1].update(step=torch.tensor(3.0).double()),
    "buffer in place": lambda job: job.model.kept is None or job.model.kept.zero_(),
    "further buffer": lambda job: job.model.register_buffer(f"extra{next(job.count)}", torch.ones(2)),
    "other persistence": _swap_persistence,
    "moment": _moment(torch.clone),
    "moment of another shape": _moment(lambda moment: moment.reshape(-1)),
    "moment that is a number": _moment(lambda moment: 1.0),
    "moment with other data": _moment_data(lambda data: data.double()),
    "further moment": lambda job: job.moments.update({f"extra{next(job.count)}": torch.ones(1)}),
    "no moment": lambda job: job.moments.pop("exp_avg_sq", None),
    "number among moments": lambda job: job.moments.update(count=next(job.count)),
    "swap states": _swap_states,
    "no state": lambda job: job.optimizer.state.pop(job.parameters[1], None),
    "load state": lambda job: job.optimizer.load_state_dict(job.optimizer.state_dict()),
    "lr": _set_group(lr=0.3),
    "lr that is a tensor": _set_group(lr=torch.tensor(0.3)),
    "further option": _set_group(option="yes"),
    "tensors as an option": _set_group(option=[torch.ones(1)]),
    "add group": _add_group,
    "move between groups": _move_between_groups,
    "reverse group": _reverse_group,
    "post hook": _post_hook,
    "optimizer's hook": _optimizer_hook,
}


def _is_same(saved: Any, state: Any) -> bool:
    if isinstance(state, torch.Tensor):
        saved, state = (each.detach().to_dense().resolve_conj().resolve_neg() for each in (saved, state))
        return saved.dtype == state.dtype and torch.equal(saved, state)
    return repr(saved) == repr(state)


class Checked:
    """Saves as a façade does, and compares what is saved with the state."""

    def __init__(self, tracked: TrackedState) -> None:
        self.tracked = tracked
        self.offer: Offer | None = None
        self.share: Share | None = None
        self.plan: Plan | None = None

    def save(self) -> bool:
        """Return True if the plan was that of the save before."""
        try:
            tree = Tree(self.tracked.to_save())
        except Exception:  # of whatever kind torch raises of what it has no names for
            return False
        if self.offer is None or self.offer.structure != tree.structure:
            self.offer = None
            self.offer = Offer(tree)
            self.share = Share(self.offer, range(len(self.offer.plan.items)))
        assert self.share is not None
        before, captured = self.plan, self.share.capture(tree)
        self.plan = captured.plan
        self.share.copy_values(captured, tree)
        copies = [tensor.detach().clone() for _, tensor in captured.tensors]
        tensors, items = self.share.named(captured, copies, save_archive)
        saved = {**dict(tensors), **{key: torch.load(io.BytesIO(data), weights_only=False) for key, data in items}}
        flat, _ = flatten_state_dict(dict(tree.state))
        assert saved.keys() == flat.keys()
        for key, value in flat.items():
            assert _is_same(saved[key], value.value if isinstance(value, PackedState) else value), key
        fresh = Offer(tree)
        assert fresh.plan == self.offer.plan, "a plan that no longer fits would be used"
        return self.plan is before


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_saved_as_it_is(name: str) -> None:
    job = Job()
    checked = Checked(job.tracked())
    assert not checked.save()
    assert checked.save()
    for _ in range(3):
        CHANGES[name](job)
        checked.save()


@settings(max_examples=50)
@given(st.lists(st.sampled_from(sorted(CHANGES)), max_size=12))
def test_any_changes_are_saved_as_they_are(names: list[str]) -> None:
    job = Job()
    checked = Checked(job.tracked())
    checked.save()
    for name in names:
        with contextlib.suppress(Exception):  # of torch, where one change stands in the way of another
            CHANGES[name](job)
        checked.save()


@pytest.mark.parametrize("name", ["nothing", "step", "buffer in place", "moment", "data", "lr", "buffer", "load state"])
def test_what_loops_do_at_every_step_leaves_the_plan_as_it_is(name: str) -> None:
    job = Job()
    checked = Checked(job.tracked())
    checked.save()
    for _ in range(3):
        CHANGES[name](job)
        assert checked.save()
