"""Training goes on while the state is copied: what is saved is what it was, or the save fails."""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ml_flashpoint import Flashpoint
from ml_flashpoint.core import overlap as overlap_module
from ml_flashpoint.core.overlap import Overlap
from ml_flashpoint.format.errors import InvalidArgumentError, SaveError
from ml_flashpoint.staging import late_copy

WIDTH = 192


@pytest.fixture
def nobody_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that copies gets no processor time before a step waits for it."""
    monkeypatch.setattr(Overlap, "_start", lambda self, late: None)


class Net(nn.Module):
    """With parameters, statistics that change in forward, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.tied(self.last(self.norm(self.first(x))))
        return out


class Job:
    """A loop with everything that changes: parameters, optimizer state, statistics, and an average of the weights."""

    def __init__(self) -> None:
        self.model, self.average = Net(), Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.tracked: dict[str, Any] = {
            "model": self.model, "average": self.average, "optimizer": self.optimizer
        }  # fmt: skip

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, WIDTH)).square().mean().backward()
        self.optimizer.step()
        with torch.no_grad():
            for mine, theirs in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mine.lerp_(theirs, 0.5)

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of all tensors."""
        found = {f"model.{name}": t for name, t in self.model.state_dict().items()}
        found |= {f"average.{name}": t for name, t in self.average.state_dict().items()}
        for number, values in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{number}.{key}": value for key, value in values.items()}
        return {name: tensor.clone() for name, tensor in found.items()}


def _loaded(base: Path) -> tuple[int, dict[str, torch.Tensor]]:
    again = Job()
    with Flashpoint(base) as fp:
        step = fp.track(**again.tracked).resume()
        return step, again.state()


def _is_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _check_random_saves(base: Path, rounds: int, **options: Any) -> None:
    rng = random.Random(7)
    job, step = Job(), 0
    for _ in range(rounds):
        with Flashpoint(base, strict=True, **options) as fp:
            assert fp.track(**job.tracked).resume() == step
            saved: dict[str, torch.Tensor] = {}
            for _ in range(rng.randint(1, 4)):
                job.step()
                saved, step = job.state(), fp.step()
            for _ in range(rng.randint(0, 2)):  # steps that nobody counts
                job.step()
            # What the last version holds is known only once it is copied, whoever does that.
            fp.before_update()
            job.step()
        found, state = _loaded(base)
        assert found == step
        assert _is_same(state, saved)


def test_each_version_is_the_state_of_its_step(base: Path) -> None:
    _check_random_saves(base, 6)


def test_each_version_is_the_state_of_its_step_if_nothing_is_copied_before_the_step_waits(
    base: Path, nobody_copies: None
) -> None:
    _check_random_saves(base, 6, verify_staging=True)


@pytest.mark.slow
@pytest.mark.soak
def test_a_thousand_versions_are_the_states_of_their_steps(base: Path) -> None:
    _check_random_saves(base, 400)


def test_only_what_optimizers_update_is_copied_late(base: Path, nobody_copies: None) -> None:
    job = Job()
    with Flashpoint(base) as fp:
        fp.track(**job.tracked).resume()
        job.step()
        saved = job.state()
        fp.step()
        late = fp._saves.overlap._late
        assert late is not None
        assert not late.over
        with torch.no_grad():  # all but what the optimizer updates may change in any way
            for tensor in (*job.average.parameters(), *job.model.buffers()):
                tensor.zero_()
        job.optimizer.step()
        assert late.over
        assert fp.wait()
        assert fp.health.failures == 0
    assert _is_same(_loaded(base)[1], saved)


def _in_place(job: Job) -> None:
    with torch.no_grad():
        job.model.last.bias.add_(1)


def _through_data(job: Job) -> None:
    for parameter in job.model.parameters():
        parameter.data.mul_(2)


@pytest.mark.parametrize("change", [_in_place, _through_data])
def test_a_change_that_nobody_announced_fails_the_save_and_no_later_one(
    base: Path, nobody_copies: None, change: Callable[[Job], None], caplog: pytest.LogCaptureFixture
) -> None:
    job = Job()
    with Flashpoint(base) as fp:
        fp.track(**job.tracked).resume()
        job.step()
        fp.step()
        change(job)
        job.step()
        fp.wait()
        assert fp.health.failures == 1
        assert "was changed while it was copied" in str(fp.health.last_error)
        for _ in range(2):
            saved = job.state()
            fp.step()
            change(job)
            job.step()
        assert fp.wait()
        assert (fp.health.saves, fp.health.failures) == (2, 1)
    assert _is_same(_loaded(base)[1], saved)


@pytest.mark.parametrize(
    "part", [lambda whole: whole, lambda whole: whole.to_local(), lambda whole: whole._local_tensor]
)
def test_operations_on_a_sharded_parameter_are_counted(
    base: Path, nobody_copies: None, monkeypatch: pytest.MonkeyPatch, part: Callable[[Any], torch.Tensor]
) -> None:
    """Those on the part of this rank, too, whose counter is another one."""
    monkeypatch.setattr(overlap_module, "_content", lambda tensor, most: 0)  # the counters alone
    monkeypatch.setattr(overlap_module, "_samples", lambda *_: [])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.AdamW(model.parameters())
        with Flashpoint(base) as fp:
            fp.track(model=model, optimizer=optimizer).resume()
            for changes in (False, True, False):
                model(torch.ones(2, 8)).sum().backward()
                optimizer.step()
                fp.step()
                if changes:
                    with torch.no_grad():
                        part(model[1].bias).add_(1)
            fp.before_update()
            fp.wait()
            assert (fp.health.saves, fp.health.failures) == (2, 1)
            assert "'model.1.bias' was changed" in str(fp.health.last_error)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("change", [_in_place, _through_data])
def test_a_change_that_was_announced_is_none_of_the_version(
    base: Path, nobody_copies: None, change: Callable[[Job], None]
) -> None:
    job = Job()
    with Flashpoint(base, strict=True, verify_staging=True) as fp:
        fp.track(**job.tracked).resume()
        for _ in range(3):
            job.step()
            saved = job.state()
            fp.step()
            fp.before_update()
            change(job)
    step, state = _loaded(base)
    assert step == 3
    assert _is_same(state, saved)


def test_a_change_of_one_tensor_is_found_where_all_are_compared(base: Path, nobody_copies: None) -> None:
    job = Job()
    with Flashpoint(base, verify_staging=True) as fp:
        fp.track(**job.tracked).resume()
        job.step()
        fp.step()
        job.model.last.bias.data.add_(1)
        job.step()
        fp.wait()
        assert "'model.last.bias' was changed" in str(fp.health.last_error)


def test_without_overlap_all_is_copied_before_a_save_returns(base: Path) -> None:
    job = Job()
    with Flashpoint(base, strict=True, overlap=False) as fp:
        fp.track(**job.tracked).resume()
        job.step()
        saved = job.state()
        fp.step()
        assert fp._saves.overlap._late is None
        _through_data(job)
    assert _is_same(_loaded(base)[1], saved)


class Wrapper(torch.optim.Optimizer):
    """An optimizer that has not called the constructor of its base, as wrappers of some libraries have not."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.defaults = inner.defaults
        self.param_groups = inner.param_groups
        self.state = inner.state

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def test_the_state_of_an_optimizer_without_hooks_is_not_copied_late(base: Path) -> None:
    job = Job()
    job.tracked["optimizer"] = Wrapper(job.optimizer)
    with Flashpoint(base) as fp:
        fp.track(**job.tracked)
        job.step()
        fp.step()
        assert fp._saves.overlap._late is None


def test_hooks_go_with_the_flashpoint(base: Path) -> None:
    job = Job()
    with Flashpoint(base) as fp:
        fp.track(**job.tracked)
        assert len(job.optimizer._optimizer_step_pre_hooks) == 1
    assert not job.optimizer._optimizer_step_pre_hooks


def test_time_that_a_step_is_held_back_counts(base: Path, nobody_copies: None) -> None:
    job = Job()
    with Flashpoint(base) as fp:
        fp.track(**job.tracked).resume()
        job.step()
        fp.step()
        before = fp.health
        job.step()
        after = fp.health
        waited = after.blocked_s - before.blocked_s
        assert waited > 0
        assert after.blocked_total_s == pytest.approx(before.blocked_total_s + waited)


@pytest.mark.parametrize("argument", ["overlap", "verify_staging"])
def test_bad_arguments(base: Path, argument: str) -> None:
    options: dict[str, Any] = {argument: 1}
    with pytest.raises(InvalidArgumentError, match=f"{argument}=1"):
        Flashpoint(base, **options)


def test_proof_tells_what_changed() -> None:
    tensors = [("a", torch.ones(3)), ("b", torch.ones(3, 3).t())]
    of = [tensor for _, tensor in tensors]
    for change in (of[0].add_, of[1].add_):
        check = Overlap().proof(tensors, of, [tensor.clone() for tensor in of])
        check()
        change(1)
        with pytest.raises(SaveError):
            check()


@pytest.mark.parametrize("number", [0, 1])
def test_proof_tells_what_was_not_copied(number: int) -> None:
    tensors = [("a", torch.ones(3)), ("b", torch.ones(3, 3).t())]
    of, copies = [tensor for _, tensor in tensors], list[torch.Tensor]()
    check = Overlap(verify=True).proof(tensors, of, copies)
    copies += [tensor.clone() for tensor in of]
    check()
    copies[number][-1] = 0
    with pytest.raises(SaveError, match=f"'{tensors[number][0]}' was changed"):
        check()


def test_a_program_that_is_interrupted_while_a_step_waits_commits_nothing_of_the_save(
    base: Path, nobody_copies: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job()
    with Flashpoint(base) as fp:
        fp.track(**job.tracked).resume()
        job.step()
        saved = job.state()
        fp.step()
        job.step()
        fp.step()
        copied = late_copy.copy_all

        def interrupted(targets: Any, sources: Any) -> None:
            copied(targets[:1], sources[:1])
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(late_copy, "copy_all", interrupted)
            with pytest.raises(KeyboardInterrupt):
                job.step()
        assert fp.wait(30)
        assert (fp.health.saves, fp.health.failures) == (1, 1)
        assert "interrupted" in str(fp.health.last_error)
    step, state = _loaded(base)
    assert step == 1
    assert _is_same(state, saved)


def test_sigterm_while_a_step_waits_waits_for_the_save(
    base: Path, nobody_copies: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, job = list[int](), Job()
    before = signal.signal(signal.SIGTERM, lambda *_: known.append(fp.health.saves))
    slices = late_copy.slices

    def terminated(*args: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)  # with the lock of the copy
        yield from slices(*args)

    monkeypatch.setattr(late_copy, "slices", terminated)
    try:
        with Flashpoint(base) as fp:
            fp.track(**job.tracked).resume()
            job.step()
            fp.step()
            job.step()
            assert known == [1]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_save_that_cannot_begin_fails_and_training_goes_on(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()

    def fail(**_: Any) -> None:
        raise SaveError("the saver is closed")

    with Flashpoint(base) as fp:
        fp.track(**job.tracked).resume()
        with monkeypatch.context() as patched:
            patched.setattr(fp._engine.saver, "begin", fail)
            fp.save(1)
        assert "the saver is closed" in str(fp.health.last_error)
        fp.save(2)
        assert fp.wait(30)
        assert (fp.health.saves, fp.health.failures) == (1, 1)


def test_an_interrupt_in_the_midst_of_a_save_holds_up_no_later_one(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    with Flashpoint(base, strict=True) as fp:
        fp.track(**job.tracked).resume()
        fp.save(1)
        with monkeypatch.context() as patched:

            def interrupted(*_: Any) -> None:
                raise KeyboardInterrupt

            patched.setattr(fp._saves, "_stage", interrupted)
            with pytest.raises(KeyboardInterrupt):
                fp.save(2)
        fp.save(3)
        assert fp.wait(30)
        assert fp._engine.saver.stats.last_verified == 3


def test_without_overlap_optimizers_are_left_alone(base: Path) -> None:
    job = Job()
    with Flashpoint(base, overlap=False) as fp:
        fp.track(**job.tracked)
        assert not job.optimizer._optimizer_step_pre_hooks


@pytest.mark.slow
def test_compiled_steps_wait_too(base: Path, nobody_copies: None) -> None:
    job = Job()
    compiled = torch.compile(job.optimizer.step, backend="eager")
    with Flashpoint(base, strict=True, verify_staging=True) as fp:
        fp.track(**job.tracked).resume()
        for _ in range(3):
            job.step()
            saved = job.state()
            fp.step()
            compiled()
    step, state = _loaded(base)
    assert step == 3
    assert _is_same(state, saved)


@pytest.mark.parametrize("overlapping_pays", [True, False])
def test_what_takes_less_of_the_loop_is_done(
    base: Path, monkeypatch: pytest.MonkeyPatch, overlapping_pays: bool
) -> None:
    clock, late = [0.0], list[bool]()
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    job = Job()
    with Flashpoint(base, strict=True) as fp:
        fp.track(**job.tracked).resume()
        job.step()
        for _ in range(16):
            saved = job.state()
            fp.step()
            late.append(fp._saves.overlap._late is not None)
            clock[0] += 1.0 if late[-1] == overlapping_pays else 2.0
            job.step()
        fp.before_update()
        health = fp.health
    assert late == [True] * 7 + [False] * 4 + [overlapping_pays] * 5
    assert (health.overlapped_s, health.blocking_s) == ((1.0, 2.0) if overlapping_pays else (2.0, 1.0))
    assert _is_same(_loaded(base)[1], saved)


def test_a_parameter_of_one_element_with_any_stride_is_saved(base: Path, nobody_copies: None) -> None:
    model = nn.Module()
    model.one = nn.Parameter(torch.zeros(4, 3).as_strided((1,), (3,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step, verify in enumerate((False, True)):
        with Flashpoint(base, strict=True, verify_staging=verify) as fp:
            assert fp.track(model=model, optimizer=optimizer).resume() == step
            model.one.grad = torch.ones(1)
            optimizer.step()
            fp.step()
            optimizer.step()
            fp.wait()


@pytest.mark.parametrize("when", ["before", "after", "both"])
def test_other_data_given_to_tensors_whose_aliases_are_kept(base: Path, nobody_copies: None, when: str) -> None:
    job, saved = Job(), dict[str, torch.Tensor]()
    with Flashpoint(base, strict=True, verify_staging=True) as fp:
        fp.track(**job.tracked).resume()
        for number in range(6):
            job.step()
            parameters = [*job.model.parameters()]
            own = [each.data for each in parameters]
            if number > 3 and when != "after":  # as for saving an average in their place
                for each in parameters:
                    each.data = each.data + 1
            saved, step = job.state(), fp.step()
            if number > 3 and when != "before":
                for each in parameters:
                    each.data = each.data + 2
            fp.before_update()
            if number > 3:
                for each, data in zip(parameters, own, strict=True):
                    each.data = data
    found, state = _loaded(base)
    assert found == step
    assert _is_same(state, saved)


@pytest.mark.slow
def test_what_a_save_calls_does_not_grow_with_the_tensors(base: Path) -> None:
    """But for what runs in C, and the samples, of which there are 512 at most, or a few more."""
    counts = list[int]()
    for layers in (300, 1200):  # four tensors each, and four of the optimizer
        model = nn.Sequential(*[nn.Sequential(nn.Linear(1, 1), nn.LayerNorm(1)) for _ in range(layers)])
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, lr=0.1)
        with Flashpoint(base / str(layers), strict=True) as fp:
            fp.track(model=model, optimizer=optimizer).resume()
            for _ in range(4):
                for each in model.parameters():
                    each.grad = torch.ones_like(each)
                optimizer.step()
                assert fp.wait(60)
                called = list[object]()
                sys.setprofile(lambda frame, event, _: called.append(frame.f_code) if event == "call" else None)  # noqa: B023
                try:
                    fp.step()
                finally:
                    sys.setprofile(None)
            counts.append(len(called))
    assert abs(counts[1] - counts[0]) < 1000, "7,200 tensors more"
