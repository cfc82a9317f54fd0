"""The façade in one process: what a user of `Flashpoint` relies on."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from ml_flashpoint import Flashpoint
from ml_flashpoint.format.errors import (
    CapacityError,
    FlashpointError,
    InvalidArgumentError,
    JobInUseError,
    LoadError,
    NothingLoadableError,
    SaveError,
    UnsafeContentError,
)
from ml_flashpoint.ranks.strategies import RingReplicationStrategy
from tests.support import warm
from tests.support.forked import Child, call
from tests.support.processes import child_environment
from tests.workers import training
from tests.workers.training import Job


@pytest.fixture
def base(tmpfs: Path) -> Path:
    return tmpfs / "job"


class Stored:
    """The simplest thing that can be tracked."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Custom:
    """A type that no allow-list knows."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom) and other.number == self.number


def train(base: Path, job: Job, until: int, **options: Any) -> Flashpoint:
    """Trains as any user would; the façade is closed."""
    with Flashpoint(base, **options) as fp:
        step = fp.track(**job.tracked).resume()
        while step < until:
            job.step()
            step = fp.step()
    return fp


def save_and(then: Callable[[Flashpoint], Any], fp: Flashpoint) -> None:
    """A failure may show in either call."""
    fp.save()
    then(fp)


def save_and_wait(fp: Flashpoint) -> None:
    save_and(Flashpoint.wait, fp)


def versions(base: Path) -> list[int]:
    return sorted(int(path.name[5:-5]) for path in base.glob("step-*_ckpt"))


def saved_twice(base: Path, **tracked: Any) -> None:
    """A base container with versions 1 and 2 of the same objects, both complete."""
    with Flashpoint(base) as fp:
        fp.track(**tracked).save(1)
        fp.wait()
        shutil.copytree(base / "step-1_ckpt", base / "kept")
        for value in tracked.values():
            if isinstance(value, Stored):
                value.value += 1
        fp.save(2)
        fp.wait()
    (base / "kept").rename(base / "step-1_ckpt")


def damage(base: Path, step: int) -> None:
    """Flips a byte in the middle of every object of a version."""
    for path in (base / f"step-{step}_ckpt").glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[len(data) // 3] ^= 1
        path.unlink()  # not through the link, into an arena
        path.write_bytes(data)


# ---- the same run, whatever happens ---------------------------------------------------------------------------


def test_resumed_runs_are_the_undisturbed_run(base: Path) -> None:
    expected = training.undisturbed(17)
    for life, until in enumerate((3, 4, 11, 17)):
        job = Job(seed=life)
        fp = train(base, job, until)
        assert fp.last_saved == fp.steps_done == until
        assert fp.health.failures == 0
    assert job.digests() == expected


@pytest.mark.slow
def test_killed_at_random_points_is_the_undisturbed_run(base: Path) -> None:
    steps, chance = 60, random.Random(os.environ.get("FLASHPOINT_TEST_SEED"))
    reached, killed = 0, 0
    while reached < steps:
        # However late the kill comes, no life gets further than so many steps, and all of them not to the end.
        most = min(steps, reached + 18)
        with Child(training.train, str(base), most, 0.01) as child:
            (_, resumed) = child.next_report("resumed")
            assert resumed >= reached - 1, "a step that was saved is lost"
            # The last one may have saved more than it had reported when it was killed, and left nothing to do.
            target = min(most, resumed + chance.randrange(1, 14))
            if target > resumed:
                (_, reached) = child.next_report("step", target)
            if target == steps:
                reached = steps
                digests = child.result()
            else:
                threading.Event().wait(chance.uniform(0, 0.05))
                child.kill()
                killed += 1
                reached = target
    assert killed >= 3
    assert digests == training.undisturbed(steps)


@pytest.mark.slow
def test_killed_while_resuming(base: Path) -> None:
    job = Job()
    train(base, job, 6)
    for _ in range(2):
        with Child(training.resume_and_hang, str(base)) as child:
            child.next_report("loading")
            child.kill()
    assert call(training.train, str(base), 9) == training.undisturbed(9)


def test_resume_again_goes_back_to_the_newest_version(base: Path) -> None:
    job = Job()
    with Flashpoint(base, every_n_steps=3) as fp:
        fp.track(**job.tracked).resume()
        for _ in range(5):
            job.step()
            fp.step()
        assert fp.resume() == fp.steps_done == fp.last_saved == 3
        assert job.digests() == training.undisturbed(3)
        for _ in range(3):
            job.step()
            fp.step()
        assert fp.wait()
        assert fp.last_saved == 6
    again = Job(seed=3)
    train(base, again, 7)
    assert again.digests() == training.undisturbed(7)


# ---- what is tracked ------------------------------------------------------------------------------------------


def resumed(base: Path, **tracked: Any) -> int:
    with Flashpoint(base) as fp:
        return fp.track(**tracked).resume()


def save(base: Path, step: int = 1, **tracked: Any) -> None:
    with Flashpoint(base, strict=True) as fp:
        fp.track(**tracked).save(step)


def _trained(model: nn.Module, make: Callable[..., torch.optim.Optimizer], *inputs: torch.Tensor) -> Any:
    optimizer = make(model.parameters())
    for x in inputs or (torch.ones(3, 4), torch.arange(12.0).view(3, 4)):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def _state(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    return dict(optimizer.state_dict()["state"])


def assert_same_state(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    assert _state(one).keys() == _state(other).keys()
    for number, values in _state(one).items():
        assert values.keys() == _state(other)[number].keys()
        for key, value in values.items():
            torch.testing.assert_close(value, _state(other)[number][key], rtol=0, atol=0)
    assert one.state_dict()["param_groups"] == other.state_dict()["param_groups"]


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        lambda params: torch.optim.Adam(params, lr=0.1, amsgrad=True),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        lambda params: torch.optim.SGD(params, lr=0.1),
        lambda params: torch.optim.Adafactor(params),
        lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.01)),
    ],
    ids=["adamw", "amsgrad", "momentum", "sgd", "adafactor", "tensor-lr"],
)
def test_optimizers(base: Path, make: Callable[..., torch.optim.Optimizer]) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = _trained(model, make)
    save(base, model=model, optimizer=optimizer)
    fresh = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    restored = make(fresh.parameters())
    assert resumed(base, model=fresh, optimizer=restored) == 1
    assert_same_state(restored, optimizer)
    torch.testing.assert_close(fresh.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_optimizer_with_lists_for_state(base: Path) -> None:
    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(3, 4)).square().sum()
        loss.backward()
        return float(loss)

    model = nn.Linear(4, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    optimizer.step(closure)
    save(base, model=model, optimizer=optimizer)
    fresh = nn.Linear(4, 2)
    restored = torch.optim.LBFGS(fresh.parameters(), max_iter=3)
    resumed(base, model=fresh, optimizer=restored)
    assert len(_state(restored)[0]["old_dirs"]) == len(_state(optimizer)[0]["old_dirs"]) > 0
    torch.testing.assert_close(_state(restored)[0]["old_dirs"], _state(optimizer)[0]["old_dirs"], rtol=0, atol=0)


def test_optimizer_that_has_not_stepped_is_not_made_to(base: Path) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with Flashpoint(base, strict=True) as fp:
        assert fp.track(model=model, optimizer=optimizer).resume() == 0
        fp.save(0)
        fp.wait()
        assert not optimizer.state
    stepped = _trained(model, torch.optim.AdamW)
    assert resumed(base, model=nn.Linear(4, 2), optimizer=stepped) == 0
    assert not stepped.state


def test_parameters_without_optimizer_state_get_none(base: Path) -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    model = Partly()
    optimizer = _trained(model, torch.optim.AdamW)
    save(base, model=model, optimizer=optimizer)
    fresh = Partly()
    restored = torch.optim.AdamW(fresh.parameters())
    resumed(base, model=fresh, optimizer=restored)
    assert len(restored.state) == 2
    assert_same_state(restored, optimizer)


def test_state_of_another_dtype_than_its_parameter_keeps_its_bits(base: Path) -> None:
    class Precise(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    sums = self.state[parameter].setdefault("sum", torch.zeros_like(parameter, dtype=torch.float32))
                    sums.add_(parameter.grad.float() * 1.2345678)

    model = nn.Linear(4, 2).bfloat16()
    optimizer = _trained(model, Precise, torch.ones(3, 4).bfloat16())
    save(base, model=model, optimizer=optimizer)
    fresh = nn.Linear(4, 2).bfloat16()
    restored = Precise(fresh.parameters())
    resumed(base, model=fresh, optimizer=restored)
    assert_same_state(restored, optimizer)
    assert _state(restored)[0]["sum"].dtype is torch.float32


def test_one_optimizer_of_two_modules_and_of_none(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make() -> dict[str, Any]:
        one, two, loose = nn.Linear(4, 4), nn.Linear(4, 2), nn.Parameter(torch.ones(3))
        both = torch.optim.AdamW([*one.parameters(), *two.parameters()])
        alone = torch.optim.AdamW([loose])
        return {"one": one, "two": two, "both": both, "alone": alone}

    saved = make()
    saved["two"](saved["one"](torch.ones(3, 4))).sum().backward()
    saved["alone"].param_groups[0]["params"][0].grad = torch.ones(3)
    saved["both"].step()
    saved["alone"].step()
    save(base, **saved)
    assert "'alone' is saved whole" in caplog.text
    assert "'both'" not in caplog.text
    fresh = make()
    resumed(base, **fresh)
    for name in ("both", "alone"):
        assert_same_state(fresh[name], saved[name])


def test_modules_of_all_sorts(base: Path) -> None:
    class WithExtra(nn.Linear):
        extra: Any = 0

        def get_extra_state(self) -> Any:
            return {"extra": self.extra}

        def set_extra_state(self, state: Any) -> None:
            self.extra = state["extra"]

    def make(seed: int) -> dict[str, nn.Module]:
        torch.manual_seed(seed)
        tied = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
        tied[1].weight = tied[0].weight
        compiled: Any = torch.compile(nn.Linear(3, 3))
        nested = nn.Sequential(compiled, nn.Linear(3, 3))
        return {"extra": WithExtra(3, 2), "tied": tied, "stateless": nn.GELU(), "compiled": compiled, "nested": nested}

    saved = make(1)
    saved["extra"].extra = [1, "two"]
    save(base, **saved)
    fresh = make(2)
    assert resumed(base, **fresh) == 1
    assert fresh["extra"].extra == [1, "two"]
    for name, module in saved.items():
        torch.testing.assert_close(list(fresh[name].parameters()), list(module.parameters()), rtol=0, atol=0)


def test_values_of_all_sorts(base: Path) -> None:
    value = {
        "a": [1, (2.5, None)],
        "b": {3, 4},
        "c": b"\0\xff",
        "d": np.arange(3),
        "e": torch.ones(2, dtype=torch.bool),
    }
    save(base, stored=Stored(value))
    stored = Stored()
    resumed(base, stored=stored)
    assert stored.value["a"] == value["a"]
    assert stored.value["b"] == value["b"]
    assert stored.value["c"] == value["c"]
    assert stored.value["d"].tolist() == [0, 1, 2]
    assert stored.value["e"].tolist() == [True, True]


class Buffered(nn.Module):
    """A layer, and a buffer of whatever kind."""

    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("buffer", buffer)


_COMPLEX = torch.complex(torch.arange(6.0), torch.arange(6.0) + 1).reshape(2, 3)
_BUFFERS = {
    "sparse": torch.eye(3).to_sparse(),
    "csr": torch.eye(3).to_sparse_csr(),
    "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    "conjugate": _COMPLEX.conj(),
    "negative": _COMPLEX.conj().imag,
    "expanded": torch.arange(3.0).expand(2, 3),
    "overlapping": torch.arange(6.0).as_strided((3, 3), (1, 1)),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 3),
}


@pytest.mark.parametrize("kind", _BUFFERS)
def test_buffers_of_all_kinds(base: Path, kind: str) -> None:
    buffer = _BUFFERS[kind]
    with Flashpoint(base, strict=True) as fp:
        assert fp.track(model=Buffered(buffer)).resume() == 0
        fp.step()
    again = Buffered(buffer.clone())
    with torch.no_grad():
        again.buffer.zero_() if kind != "quantized" else None
    with Flashpoint(base, strict=True) as fp:
        assert fp.track(model=again).resume() == 1
    dense = [each.dequantize() if each.is_quantized else each.to_dense() for each in (buffer, again.buffer)]
    assert torch.equal(*dense)


def _save_and_wait(fp: Flashpoint) -> None:
    fp.step()
    fp.wait()


_RAGGED = [torch.ones(2, 3), torch.ones(4, 3)]


@pytest.mark.parametrize(
    "buffer",
    [
        torch.nested.nested_tensor(_RAGGED),
        torch.nested.nested_tensor(_RAGGED, layout=torch.jagged),
        torch.ones(3, 4).to_mkldnn(),
        torch.empty(3, device="meta"),
    ],
    ids=["nested", "jagged", "mkldnn", "meta"],
)
def test_a_buffer_that_cannot_be_saved_is_told_by_name(base: Path, buffer: torch.Tensor) -> None:
    with Flashpoint(base, strict=True) as fp:
        assert fp.track(model=Buffered(buffer)).resume() == 0
        with pytest.raises(FlashpointError, match=r"'model\.buffer'"):
            _save_and_wait(fp)


def test_state_is_that_of_the_moment_of_saving(base: Path) -> None:
    model, stored = nn.Linear(64, 64), Stored([1])
    with Flashpoint(base) as fp:
        fp.track(model=model, stored=stored).save(1)
        expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with torch.no_grad():
            model.weight.zero_()
        stored.value.append(2)
    fresh = nn.Linear(64, 64)
    resumed(base, model=fresh, stored=stored)
    torch.testing.assert_close(dict(fresh.state_dict()), expected, rtol=0, atol=0)
    assert stored.value == [1]


def test_generators_are_restored_and_left_alone_otherwise(base: Path) -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), float(torch.rand(()))

    def seed(value: int) -> None:
        random.seed(value)
        np.random.seed(value)
        torch.manual_seed(value)

    model = _trained_model()
    seed(7)
    fresh_draw = draw()
    seed(7)
    with Flashpoint(base) as fp:
        assert fp.track(**model).resume() == 0
        assert draw() == fresh_draw
        fp.save(1)
        expected = draw()
        fp.wait()
    seed(8)
    resumed(base, **model)
    assert draw() == expected


def _trained_model() -> dict[str, Any]:
    model = nn.Linear(4, 2)
    return {"model": model, "optimizer": _trained(model, torch.optim.AdamW)}


@pytest.mark.cuda
def test_on_cuda(base: Path) -> None:
    def make(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Linear(64, 64, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        return {"model": model, "optimizer": optimizer, "stored": Stored(torch.rand(3, device="cuda"))}

    saved = make(1)
    with Flashpoint(base, strict=True) as fp:
        fp.track(**saved).resume()
        for _ in range(3):
            saved["model"](torch.rand(8, 64, device="cuda")).square().sum().backward()
            saved["optimizer"].step()
            saved["optimizer"].zero_grad()
            fp.step()
        drawn = torch.rand(5, device="cuda")
    fresh = make(2)
    assert resumed(base, **fresh) == 3
    assert torch.equal(torch.rand(5, device="cuda"), drawn)
    assert_same_state(fresh["optimizer"], saved["optimizer"])
    assert fresh["stored"].value.is_cuda
    assert torch.equal(fresh["stored"].value, saved["stored"].value)
    torch.testing.assert_close(fresh["model"].state_dict(), saved["model"].state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["1st", "with space", "_hidden", "a.b", ""])
def test_names_must_be_identifiers(base: Path, name: str) -> None:
    with Flashpoint(base) as fp, pytest.raises(InvalidArgumentError, match=r"name='") as caught:
        fp.track(**{name: Stored()})
    assert caught.value.value == repr(name)


def test_tracking_is_checked(base: Path) -> None:
    with Flashpoint(base) as fp:
        stored = Stored()
        assert fp.track(stored=stored) is fp
        with pytest.raises(InvalidArgumentError, match="name='stored'"):
            fp.track(stored=Stored())
        with pytest.raises(InvalidArgumentError, match="already, under another name"):
            fp.track(again=stored)
        for value in (3, object(), Stored):
            with pytest.raises(InvalidArgumentError, match="loader="):
                fp.track(loader=value)
        fp.resume()
        with pytest.raises(FlashpointError, match="before resume"):
            fp.track(late=Stored())


def test_tracking_ends_with_the_first_save(base: Path) -> None:
    with Flashpoint(base) as fp:
        fp.track(stored=Stored(1)).step()
        with pytest.raises(FlashpointError, match="tracking ends"):
            fp.track(late=Stored())


@pytest.mark.parametrize("call_it", [Flashpoint.resume, Flashpoint.step, Flashpoint.save])
def test_nothing_tracked(base: Path, call_it: Callable[[Flashpoint], Any]) -> None:
    with Flashpoint(base) as fp, pytest.raises(FlashpointError, match="nothing is tracked"):
        call_it(fp)


# ---- the schedule, and what can be read ------------------------------------------------------------------------


def test_every_few_steps(base: Path) -> None:
    stored = Stored(0)
    with Flashpoint(base, every_n_steps=3) as fp:
        fp.track(stored=stored)
        assert fp.last_saved is None
        for step in range(1, 9):
            stored.value = step
            assert fp.step() == step
        assert fp.wait()
        assert (fp.last_saved, fp.steps_done, fp.health.saves) == (6, 8, 2)
        fp.save()
        fp.wait()
        assert fp.last_saved == 8
    assert versions(base) == [8]
    assert resumed(base, stored=stored) == 8


def test_every_save_is_made_although_the_loop_does_not_wait(base: Path) -> None:
    stored = Stored(torch.zeros(1000))
    with Flashpoint(base) as fp:
        fp.track(stored=stored)
        for _ in range(30):
            stored.value += 1
            fp.step()
    assert (fp.health.saves, fp.health.failures) == (30, 0)
    assert resumed(base, stored=stored) == 30
    assert stored.value.unique().tolist() == [30]


def test_health_and_recovery_tell_what_happened(base: Path) -> None:
    job = Job()
    with Flashpoint(base) as fp:
        fp.track(**job.tracked)
        assert fp.last_recovery is None
        fp.resume()
        assert fp.last_recovery is not None
        assert (fp.last_recovery.source, fp.last_recovery.step, fp.last_recovery.version) == ("nothing", 0, None)
        for _ in range(3):
            job.step()
            fp.step()
        fp.wait()
        health = fp.health
        assert (health.saves, health.failures, health.last_error, health.degraded) == (3, 0, None, False)
        assert 0 < health.blocked_s <= health.blocked_total_s < 60
        assert 0 < health.committed_s < 60
        assert health.bytes > sum(p.nbytes * 3 for p in job.model.parameters())
        assert fp.last_replicated is None, "there is no other node"
    assert fp.health.bytes == health.bytes, "after closing, too"
    with Flashpoint(base) as fp:
        fp.track(**job.tracked).resume()
        found = fp.last_recovery
        assert found is not None
        assert (found.source, found.step, found.version, found.discarded) == ("memory", 3, "step-3_ckpt", ())
        assert 0 < found.load_s < found.total_s
        assert found.fetched_bytes == 0
        assert fp.last_saved == 3


# ---- recovery that does not find what it looks for ------------------------------------------------------------


@pytest.mark.damages_on_purpose
def test_damaged_version_is_left_for_an_older_one(base: Path) -> None:
    saved_twice(base, stored=Stored(10))
    assert versions(base) == [1, 2]
    damage(base, 2)
    stored = Stored()
    assert resumed(base, stored=stored) == 1
    assert stored.value == 10


def test_fallback_is_called_when_nothing_is_left(base: Path) -> None:
    saved_twice(base, stored=Stored(10))
    damage(base, 1)
    damage(base, 2)
    stored = Stored("long-term")
    with Flashpoint(base) as fp:
        assert fp.track(stored=stored).resume(fallback=lambda: 40) == fp.steps_done == 40
        assert fp.last_recovery is not None
        assert fp.last_recovery.source == "fallback"
        assert fp.step() == 41
    assert resumed(base, stored=stored) == 41


@pytest.mark.damages_on_purpose
def test_without_fallback_damage_is_an_error_and_no_fresh_start(base: Path) -> None:
    save(base, stored=Stored(1))
    damage(base, 1)
    with pytest.raises(NothingLoadableError, match=r"step-1_ckpt .*digest.*discard_existing=True"):
        resumed(base, stored=Stored(5))
    assert versions(base) == [1]
    with Flashpoint(base, discard_existing=True) as fp:
        assert fp.track(stored=Stored(5)).resume() == 0
    assert versions(base) == []


@pytest.mark.parametrize(("returned", "step"), [(None, 0), (0, 0), (12, 12)])
def test_what_a_fallback_returns(base: Path, returned: int | None, step: int) -> None:
    with Flashpoint(base) as fp:
        assert fp.track(stored=Stored()).resume(lambda: returned) == step


@pytest.mark.parametrize("returned", [-1, True, "7", 1.0])
def test_what_a_fallback_must_not_return(base: Path, returned: Any) -> None:
    with Flashpoint(base) as fp, pytest.raises(InvalidArgumentError, match="fallback="):
        fp.track(stored=Stored()).resume(lambda: returned)


def test_fallback_is_not_called_when_memory_has_a_version(base: Path) -> None:
    save(base, stored=Stored(1))
    with Flashpoint(base) as fp:
        assert fp.track(stored=Stored()).resume(lambda: pytest.fail("called")) == 1


def test_another_program_does_not_bury_what_is_saved(base: Path) -> None:
    saved = _trained_model()
    save(base, **saved, stored=Stored(1))
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    generators = torch.get_rng_state()
    with pytest.raises(LoadError, match=r"step-1_ckpt does not fit.*weight.*to start anew"):
        resumed(base, model=model, optimizer=optimizer, stored=Stored())
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), generators)
    with pytest.raises(LoadError, match="no state of 'other'"):
        resumed(base, **saved, stored=Stored(), other=Stored())
    with pytest.raises(LoadError, match=r"no place for, such as 'model\.bias'"):
        resumed(base, model=nn.Linear(4, 2, bias=False), stored=Stored())
    with Flashpoint(base) as fp:
        fp.track(model=model, stored=Stored())
        assert fp.resume(fallback=lambda: 3) == 3
    assert resumed(base, **saved, stored=Stored()) == 1


def test_an_older_version_that_happens_to_fit_does_not_bury_a_newer_one(base: Path) -> None:
    """Nobody would see that a step back was taken, and the next saves overwrite what could have been gone on from."""
    save(base, stored=Stored(1), other=Stored(1))
    shutil.copytree(base / "step-1_ckpt", base / "kept")
    with Flashpoint(base) as fp:
        fp.track(stored=Stored(1)).resume()
        fp.save(2)
        fp.wait()
    (base / "kept").rename(base / "step-1_ckpt")
    with pytest.raises(LoadError, match=r"step-2_ckpt does not fit.*no state of 'other'"):
        resumed(base, stored=Stored(), other=Stored())
    assert resumed(base, stored=Stored()) == 2


def test_what_is_not_tracked_any_more_is_told(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(base, stored=Stored(1), other=Stored(2), model=nn.Linear(2, 2))
    assert resumed(base, stored=Stored()) == 1
    assert "also has state of 'model', 'other', which is not tracked now" in caplog.text


def test_object_that_refuses_its_state(base: Path) -> None:
    class Refusing(Stored):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            if state["value"] > 10:
                torch.rand(3)
                raise ValueError("too much")
            super().load_state_dict(state)

    saved_twice(base, stored=Stored(10))
    refusing = Refusing()
    assert resumed(base, stored=refusing) == 1
    assert refusing.value == 10
    shutil.rmtree(base / "step-1_ckpt")
    generators = torch.get_rng_state()
    with pytest.raises(LoadError, match="ValueError: too much"):
        resumed(base, stored=refusing)
    assert torch.equal(torch.get_rng_state(), generators)


def test_checkpoint_of_another_door(base: Path) -> None:
    from tests.support.dcp import Door

    door = Door(base)
    door.save({"stored": torch.ones(3)}, 3)
    door.close()
    with pytest.raises(LoadError, match="not saved by a Flashpoint"):
        resumed(base, stored=Stored())


def test_no_room_is_told_before_training(base: Path) -> None:
    huge = nn.Linear(10**6, 10**6, device="meta")
    with Flashpoint(base) as fp:
        fp.track(huge=huge, optimizer=torch.optim.AdamW(huge.parameters()))
        with pytest.raises(CapacityError, match="enlarge the tmpfs") as caught:
            fp.resume()
    assert caught.value.needed_bytes == 2 * 3 * sum(p.nbytes for p in huge.parameters())
    assert caught.value.available_bytes is not None


# ---- saves that fail ------------------------------------------------------------------------------------------


def _make_unusable(base: Path) -> None:
    shutil.rmtree(base)
    base.write_text("no directory any more")


def test_failed_saves_do_not_stop_training(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    with Flashpoint(base) as fp:
        fp.track(**job.tracked).resume()
        job.step()
        fp.step()
        fp.wait()
        _make_unusable(base)
        for _ in range(5):
            job.step()
            fp.step()
            assert fp.wait()
        health = fp.health
        assert (health.saves, health.failures, fp.last_saved, fp.steps_done) == (1, 5, 1, 6)
        assert health.degraded
        assert health.last_error is not None
        assert str(base) in health.last_error
    assert job.digests() == training.undisturbed(6)
    told = [r for r in caplog.records if r.name.startswith("ml_flashpoint.facade") and r.levelno >= logging.ERROR]
    assert 1 <= len(told) < 5


def test_strict_raises_failures(base: Path) -> None:
    stored = Stored(1)
    with Flashpoint(base, strict=True) as fp:
        save_and_wait(fp.track(stored=stored))
        _make_unusable(base)
        with pytest.raises(SaveError, match=str(base)):
            save_and_wait(fp)
        fp.wait()  # each failure once
        with pytest.raises(SaveError, match=str(base)):
            save_and(Flashpoint.step, fp)
        with contextlib.suppress(SaveError):
            fp.wait()
        with pytest.raises(SaveError, match=str(base)):
            save_and(Flashpoint.close, fp)
        fp.close()


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small tmpfs")
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m,mode=700", "mlf-test", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_full_tmpfs(small_tmpfs: Path) -> None:
    base, stored = small_tmpfs / "job", Stored(torch.ones(100_000))
    with Flashpoint(base) as fp:
        fp.track(stored=stored).resume()
        for _ in range(3):
            fp.step()
        assert fp.wait()
        stored.value = torch.full((2_500_000,), 2.0)
        fp.step()
        assert fp.wait()
        assert (fp.last_saved, fp.health.failures, fp.health.degraded) == (3, 1, True)
        assert "bytes" in str(fp.health.last_error)
        stored.value = torch.full((100_000,), 3.0)
        fp.step()
        assert fp.wait()
        assert (fp.last_saved, fp.health.degraded) == (5, False)
    assert resumed(base, stored=stored) == 5
    assert stored.value.unique().tolist() == [3.0]


def test_unsafe_state_is_told_at_the_first_save(base: Path) -> None:
    stored = Stored({"deep": [Custom(4)]})
    name = f"{Custom.__module__}.Custom"
    with Flashpoint(base) as fp:
        fp.track(model=nn.Linear(2, 2), stored=stored).step()
        assert fp.wait()
        assert fp.last_saved is None
        assert f"'stored.value.deep.0' holds {name}" in str(fp.health.last_error)
        assert f"safe_globals=[{name}]" in str(fp.health.last_error)
    with (
        Flashpoint(base, strict=True) as fp,
        pytest.raises(UnsafeContentError, match=r"'stored\.value\.deep\.0' holds"),
    ):
        save_and_wait(fp.track(stored=stored))
    with Flashpoint(base, strict=True, safe_globals=[Custom]) as fp:
        fp.track(stored=stored).step()
    restored = Stored()
    with Flashpoint(base, safe_globals=[Custom]) as fp:
        assert fp.track(stored=restored).resume() == 1
        assert restored.value == stored.value
    with pytest.raises(LoadError, match=r"Custom.*may run code"):
        resumed(base, stored=restored)


def test_unsafe_extra_state_of_a_module_is_told(base: Path) -> None:
    class WithExtra(nn.Linear):
        def get_extra_state(self) -> Any:
            return Custom(1)

    with Flashpoint(base, strict=True) as fp, pytest.raises(UnsafeContentError, match=r"'model\._extra_state' holds"):
        save_and_wait(fp.track(model=WithExtra(2, 2)))


@pytest.mark.parametrize("value", [lambda: 0, threading.Lock()], ids=["lambda", "lock"])
def test_state_that_cannot_be_saved_is_told_by_name(base: Path, value: Any) -> None:
    stored = Stored(value)
    with Flashpoint(base) as fp:
        fp.track(stored=stored).step()
        assert fp.wait()
        assert "the state of 'stored.value' cannot be saved" in str(fp.health.last_error)
        stored.value = 1
        fp.step()
        assert fp.wait()
        assert (fp.last_saved, fp.health.failures) == (2, 1)


def test_object_that_raises_when_asked_for_its_state(base: Path) -> None:
    class Failing(nn.Linear):
        fails = True

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            if self.fails:
                raise RuntimeError("not now")
            return super().state_dict(*args, **kwargs)

    model = Failing(2, 2)
    with Flashpoint(base) as fp:
        fp.track(model=model)
        fp.step()
        assert fp.wait()
        assert "RuntimeError: not now" in str(fp.health.last_error)
        model.fails = False
        fp.step()
        assert fp.wait()
        assert fp.last_saved == 2


# ---- SIGTERM --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["after", "within"])
def test_sigterm_commits_the_save_in_flight_and_ends(base: Path, how: str) -> None:
    with Child(training.terminate_while_saving, str(base), how) as child:
        assert child.wait() == -signal.SIGTERM
    tracked: dict[str, Any] = {"big": nn.Linear(4096, 4096)}
    if how == "within":
        tracked["self"] = training.SignalsItself()
    assert resumed(base, **tracked) == 3


@pytest.mark.parametrize("function", ["wait", "notify_all"])
def test_sigterm_where_the_main_thread_holds_a_lock(base: Path, function: str) -> None:
    with Child(training.terminate_inside, str(base), function) as child:
        assert child.wait() == -signal.SIGTERM
        assert "not committed" not in child.log
    assert versions(base) == [1]


@pytest.mark.slow
def test_sigterm_ends_a_process_whose_main_thread_hangs(base: Path) -> None:
    with Child(training.hang_in_native_code, str(base)) as child:
        child.next_report("hangs")
        os.kill(child.pid, signal.SIGTERM)
        assert child.wait(20) == -signal.SIGTERM
    assert resumed(base, big=nn.Linear(4096, 4096)) == 1


def test_sigterm_for_a_forked_child_is_its_own(base: Path) -> None:
    with Child(training.fork_while_saving, str(base)) as child:
        (_, took) = child.next_report("took")
        assert took < 20, "held up for the grace"
        assert child.result() == (-signal.SIGTERM, True)


def test_an_event_loop_keeps_its_signals(base: Path) -> None:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    with ours, theirs:
        before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        try:
            with Flashpoint(base):
                pass
            assert signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False) == theirs.fileno()
        finally:
            signal.set_wakeup_fd(before)
    with Flashpoint(base):
        assert signal.set_wakeup_fd(-1) != -1
    assert signal.set_wakeup_fd(-1) == -1


def test_sigterm_is_chained_to_the_handler_before(base: Path) -> None:
    said = call(training.terminate_with_handler, str(base))
    assert said == ["handler, saved 1", "goes on", "handler, saved 2", "closed"]


def test_sigterm_handler_is_put_back(base: Path, tmpfs: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    first = Flashpoint(base)
    second = Flashpoint(tmpfs / "second")
    assert signal.getsignal(signal.SIGTERM) != before
    second.close()
    first.close()
    assert signal.getsignal(signal.SIGTERM) == before
    with Flashpoint(base, handle_sigterm=False):
        assert signal.getsignal(signal.SIGTERM) == before
    installed = Flashpoint(base)
    ours: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: ours.append(number))
    try:
        installed.close()
        os.kill(os.getpid(), signal.SIGTERM)
        assert ours == [signal.SIGTERM], "a handler installed later stays"
    finally:
        signal.signal(signal.SIGTERM, before)


def test_closing_in_another_order_leaves_the_chain_whole(base: Path, tmpfs: Path) -> None:
    said: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: said.append(number))
    earlier = signal.getsignal(signal.SIGTERM)
    try:
        first, second = Flashpoint(base), Flashpoint(tmpfs / "second")
        first.close()
        os.kill(os.getpid(), signal.SIGTERM)
        assert said == [signal.SIGTERM]
        second.close()
        assert signal.getsignal(signal.SIGTERM) == earlier, "nothing of ours is left that only passes on"
        os.kill(os.getpid(), signal.SIGTERM)
        assert said == [signal.SIGTERM] * 2
    finally:
        signal.signal(signal.SIGTERM, before)


def test_in_another_thread_there_is_no_handler(base: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    caught: list[BaseException] = []

    def run() -> None:
        try:
            job = Job()
            train(base, job, 3)
            assert signal.getsignal(signal.SIGTERM) == before
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not caught
    assert versions(base) == [3]


# ---- life and arguments ---------------------------------------------------------------------------------------


def test_context_manager_ends_it_whatever_happens(base: Path) -> None:
    stored = Stored(1)

    def fail(fp: Flashpoint) -> None:
        with fp:
            fp.track(stored=stored).step()
            raise ZeroDivisionError

    fp = Flashpoint(base)
    with pytest.raises(ZeroDivisionError):
        fail(fp)
    for use in (fp.step, fp.save, fp.resume, fp.track):
        with pytest.raises(FlashpointError, match="closed"):
            use()
    fp.close()
    assert fp.last_saved == 1
    assert resumed(base, stored=stored) == 1


def test_two_at_a_time_on_one_base_are_refused(base: Path, tmpfs: Path) -> None:
    (tmpfs / "link").symlink_to(tmpfs)
    with Flashpoint(base) as fp:
        for other in (base, str(base) + "/", tmpfs / "link" / "job"):
            with pytest.raises(JobInUseError, match="another Flashpoint of this process"):
                Flashpoint(other)
        with Flashpoint(tmpfs / "other") as beside:
            for each in (fp, beside):
                each.track(stored=Stored(1)).step()
            assert fp.wait()
            assert beside.wait()
            assert fp.last_saved == beside.last_saved == 1
    with Flashpoint(base) as fp:
        assert fp.track(stored=Stored()).resume() == 1


def test_a_live_process_on_the_base_is_refused(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHPOINT_LOCK_DEADLINE_S", "0.2")
    with Child(training.train, str(base), 1000, 0.2) as child:
        child.next_report("step", 2)  # then the save of step 1 has ended
        with pytest.raises(JobInUseError, match=str(child.pid)):
            Flashpoint(base)
    assert resumed(base, **Job().tracked) >= 1


def test_base_that_is_a_file(tmpfs: Path) -> None:
    (tmpfs / "job").write_text("a file")
    for _ in range(2):
        with pytest.raises(FlashpointError, match="cannot be used"):
            Flashpoint(tmpfs / "job")


def test_process_group_that_comes_later(base: Path) -> None:
    with Flashpoint(base) as fp:
        fp.track(stored=Stored(1)).resume()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            with pytest.raises(FlashpointError, match="after init_process_group"):
                fp.step()
        finally:
            dist.destroy_process_group()


def test_process_group_of_one(base: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        job = Job()
        train(base, job, 4)
    finally:
        dist.destroy_process_group()
    again = Job(seed=2)
    train(base, again, 8)
    assert again.digests() == training.undisturbed(8)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *(("base", value) for value in ("relative/path", "", "/tmp/../etc", 3, None)),
        *(("every_n_steps", value) for value in (0, -1, 1.5, True, "1", None)),
        *(("replication", value) for value in ("pairs", RingReplicationStrategy)),
        *(("strict", value) for value in (1, None, "yes")),
        *(("handle_sigterm", value) for value in (0, None)),
        *(("grace_s", value) for value in (0, -1.0, math.inf, math.nan, "5", True, None)),
        *(("deadline_s", value) for value in (0, -1, math.inf, "5", False)),
        *(("on_world_size_change", value) for value in ("ignore", None, True, 3)),
        *(("safe_globals", value) for value in ("abc", [3], [("x", "y")], [(Custom, 3)], None, Custom)),
    ],
)
def test_bad_arguments_are_named_with_their_value(base: Path, argument: str, value: Any) -> None:
    arguments = {"base": base, argument: value}
    with pytest.raises(InvalidArgumentError) as caught:
        Flashpoint(**arguments)
    assert caught.value.argument == argument
    assert f"{argument}={caught.value.value}" in str(caught.value)
    assert not base.exists()


@pytest.mark.parametrize(
    ("reshard", "reason"),
    [
        (3, "must be a function"),
        ({}, "must be a function"),
        ({"stored": None}, "must be a function"),
        ({"other": print}, "nothing is tracked here as 'other'"),
        ({"model": print}, "modules are resharded by themselves"),
    ],
)
def test_bad_reshard_functions(base: Path, reshard: Any, reason: str) -> None:
    with Flashpoint(base) as fp, pytest.raises(InvalidArgumentError, match=f"{reason}.*reshard="):
        fp.track(stored=Stored(), model=nn.Linear(2, 2), reshard=reshard)


@pytest.mark.parametrize("step", [-1, 1.0, True, "1", 10**30])
def test_bad_steps(base: Path, step: Any) -> None:
    with Flashpoint(base) as fp, pytest.raises(InvalidArgumentError, match="step="):
        fp.track(stored=Stored()).save(step)


@pytest.mark.parametrize("deadline", [0, -1, math.nan, "1"])
def test_bad_deadlines(base: Path, deadline: Any) -> None:
    with Flashpoint(base) as fp, pytest.raises(InvalidArgumentError, match="deadline_s="):
        fp.wait(deadline)


def test_the_job_depends_on_every_generator() -> None:
    """Else the tests above would show little."""
    reference = training.undisturbed(20)
    for disturb in (random.random, np.random.random, lambda: torch.rand(())):
        job = Job()
        for step in range(20):
            job.step()
            if step == 10:
                disturb()
        assert job.digests()["model.0.weight"] != reference["model.0.weight"]


# ---- what a user sees -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/dev/shm", "/proc"])
def test_whole_filesystem_is_no_base(path: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"mount point of a filesystem.*job-145"):
        Flashpoint(path)


@pytest.mark.parametrize("fallback", [7, "long-term", True])
def test_fallback_that_cannot_be_called(base: Path, fallback: Any) -> None:
    with Flashpoint(base) as fp:
        fp.track(stored=Stored(1)).save(3)
        with pytest.raises(InvalidArgumentError, match="must be a function without arguments"):
            fp.resume(fallback=fallback)


_TWO_RUNS = """
import sys
import torch
from ml_flashpoint import Flashpoint
{setup}
for _ in range(2):
    with Flashpoint({base!r}) as fp:
        fp.track(model=torch.nn.Linear(10, 10)).resume(fallback=({fallback}))
        for _ in range(3):
            fp.step()
"""


def _said(base: Path, setup: str = "", fallback: str = "None", *, cold: bool = False) -> list[str]:
    argv = [sys.executable, "-c", _TWO_RUNS.format(base=str(base), setup=setup, fallback=fallback)]
    if cold or warm.ALL_COLD:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=100, check=True)
    else:
        done = warm.run(argv, child_environment(PYTHONUNBUFFERED="1"), check=True)
    assert done.stdout == ""
    return done.stderr.splitlines()


@pytest.mark.slow
def test_says_where_it_goes_on_and_that_it_saves(base: Path) -> None:
    said = _said(base, cold=True)
    assert len(said) == 4, said
    assert said[0] == f"ml_flashpoint: no checkpoint to go on from in {base}: training starts at step 0"
    assert re.fullmatch(
        r"ml_flashpoint: first save works: step [123], [\d.]+ kB of this rank in memory; it held .* [\d.]+ s", said[1]
    )
    assert said[2].startswith(f"ml_flashpoint: resumed at step 3 from memory ({base}/step-3_ckpt) in ")
    assert said[3].startswith("ml_flashpoint: first save works: step ")


@pytest.mark.slow
def test_says_it_once_where_logging_is_set_up(base: Path) -> None:
    setup = "import logging; logging.basicConfig(level=logging.INFO, format='%(name)s | %(message)s')"
    said = [line for line in _said(base, setup, "lambda: 5") if "ml_flashpoint.flashpoint |" in line]
    assert said[0].endswith(": at step 5, from the fallback")
    assert len(said) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "setup",
    [
        "import logging; logging.getLogger('ml_flashpoint').setLevel(logging.WARNING)",
        "import logging; logging.basicConfig()",
        "import logging; logging.disable(logging.INFO)",
    ],
)
def test_what_it_says_can_be_silenced(base: Path, setup: str) -> None:
    assert _said(base, setup) == []
