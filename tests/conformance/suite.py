"""What every way into the engine must do, whatever it is called: a suite to inherit.

A door comes with a `Door` adapter and a class that inherits `Conformance`::

    class TestMyDoor(Conformance):
        door = MyDoor
"""

from __future__ import annotations

import io
import random
import shutil
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import pytest
import torch

from ml_flashpoint import Flashpoint
from tests.faults.common import last, part_files
from tests.support.forked import Child, call, preload
from tests.support.settings import SETTINGS

preload("tests.conformance.suite")

State = dict[str, Any]


def state_of(step: int, variant: int = 0) -> State:
    """The state of a step: tensors of several dtypes and shapes, and what is no tensor. The same in every process."""
    generator = torch.Generator("cpu").manual_seed(step * 1000 + variant)
    plain: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
    return {
        "weight": torch.randn(300, 77, generator=generator, **plain),
        "half": torch.randn(1000, generator=generator, **plain).to(torch.bfloat16),
        "mask": torch.rand(33, generator=generator, **plain) > 0.5,
        "scalar": torch.tensor(step, device="cpu", dtype=torch.int64),
        "empty": torch.empty(0, 3, **plain),
        "plain": {"step": step, "variant": variant, "names": ["a", "b"]},
    }


def same(one: State, other: State) -> bool:
    """Whether two states are equal bit for bit."""
    return one.keys() == other.keys() and all(
        torch.equal(value, other[key]) and value.dtype == other[key].dtype
        if isinstance(value, torch.Tensor)
        else value == other[key]
        for key, value in one.items()
    )


class Door(ABC):
    """A way in, on one base container, in one process."""

    def __init__(self, base: Path) -> None:
        self.base = base

    @abstractmethod
    def save(self, step: int, state: State) -> None:
        """Save; the version is committed on return."""

    @abstractmethod
    def load_latest(self) -> tuple[int, State] | None:
        """The newest version that can be loaded, with its step; None if there is none."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the base container. What was saved stays."""


class Holder:
    """Anything that has a state."""

    def __init__(self) -> None:
        self.state: State = {}

    def state_dict(self) -> State:
        return self.state

    def load_state_dict(self, state: State) -> None:
        self.state = state


class FlashpointDoor(Door):
    def __init__(self, base: Path) -> None:
        super().__init__(base)
        self._holder = Holder()
        self._fp = self.open()
        self._asked = False

    def open(self) -> Flashpoint:
        return Flashpoint(str(self.base), strict=True, handle_sigterm=False).track(holder=self._holder)

    def save(self, step: int, state: State) -> None:
        if not self._asked:
            self.load_latest()  # as one must, where there may be something
        self._holder.state = state
        self._fp.save(step)
        assert self._fp.wait(60)

    def load_latest(self) -> tuple[int, State] | None:
        self._holder.state = {}
        step = self._fp.resume()
        self._asked = True
        return (step, self._holder.state) if self._holder.state else None

    def close(self) -> None:
        self._fp.close()


def _load_once(report: Any, door: type[Door], base: Path) -> tuple[int, bytes] | None:
    opened = door(base)
    try:
        found = opened.load_latest()
    finally:
        opened.close()
    if found is None:
        return None
    # As bytes: tensors would travel as shared memory, which goes with the process.
    stream = io.BytesIO()
    torch.save(found[1], stream)
    return found[0], stream.getvalue()


def loaded_by_a_new_process(door: type[Door], base: Path) -> tuple[int, State] | None:
    """What a process that has just started loads."""
    found = call(_load_once, door, base)
    return None if found is None else (found[0], torch.load(io.BytesIO(found[1])))


def save_once(report: Any, door: type[Door], base: Path, steps: list[int], variant: int) -> None:
    """Save some steps, and end."""
    opened = door(base)
    for step in steps:
        opened.save(step, state_of(step, variant))
    opened.close()


def round_trips(report: Any, door: type[Door], root: Path) -> None:
    """Save and load under each setting, once as the program goes on and once as it is started again."""
    for number, (name, setting) in enumerate(SETTINGS.items()):
        base = root / f"job-{number}"
        states = {step: state_of(step) for step in (1, 2)}
        for last_run in (False, True):
            with setting():
                opened = door(base)
                try:
                    if not last_run:
                        opened.save(1, states[1])
                        opened.save(2, states[2])
                    found = opened.load_latest()
                finally:
                    opened.close()
            assert found is not None, f"{name}: nothing was found"
            assert found[0] == 2, f"{name}: step {found[0]}"
            assert same(found[1], states[2]), f"{name}: another state"


def save_for_ever(report: Any, door: type[Door], base: Path, first: int) -> None:
    """Save step after step until killed."""
    opened = door(base)
    for step in range(first, 1 << 30):
        report("begins", step)
        opened.save(step, state_of(step))
        report("committed", step)


class Conformance:
    """The suite. Subclasses name their door."""

    door: type[Door]

    @pytest.fixture
    def base(self, tmpfs: Path) -> Path:
        return tmpfs / "job"

    def expect(self, base: Path, step: int, variant: int = 0) -> None:
        """A new process loads this step, bit for bit."""
        found = loaded_by_a_new_process(self.door, base)
        assert found is not None, "nothing was found"
        assert found[0] == step
        assert same(found[1], state_of(step, variant))

    def test_nothing_saved_nothing_loaded(self, base: Path) -> None:
        assert loaded_by_a_new_process(self.door, base) is None

    def test_what_is_loaded_is_what_was_saved(self, base: Path) -> None:
        door = self.door(base)
        try:
            for step in (3, 4, 9):
                door.save(step, state_of(step))
                found = door.load_latest()
                assert found is not None
                assert found[0] == step
                assert same(found[1], state_of(step))
        finally:
            door.close()
        self.expect(base, 9)

    def test_a_step_saved_again_replaces_the_earlier_save(self, base: Path) -> None:
        call(save_once, self.door, base, [5], 0)
        self.expect(base, 5, 0)
        call(save_once, self.door, base, [5, 6, 6], 1)  # in this run, too
        self.expect(base, 6, 1)
        call(save_once, self.door, base, [5, 5], 2)
        self.expect(base, 5, 2)

    def test_what_is_saved_after_going_back_is_the_newest(self, base: Path) -> None:
        call(save_once, self.door, base, [7, 8], 0)
        call(save_once, self.door, base, [6], 1)
        self.expect(base, 6, 1)

    def test_a_round_trip_under_every_default_and_mode_of_torch(self, tmpfs: Path) -> None:
        call(round_trips, self.door, tmpfs)

    @pytest.mark.slow
    def test_a_kill_loses_nothing_that_was_committed(self, base: Path) -> None:
        rng = random.Random(20)
        committed = begun = 0
        for _ in range(5):
            with Child(save_for_ever, self.door, base, begun + 1) as child:
                (_, first) = child.next_report("committed")
                time.sleep(rng.random() * 0.2)
                child.kill()
                committed, begun = max(first, last(child, "committed")), max(first, last(child, "begins"))
            found = loaded_by_a_new_process(self.door, base)
            assert found is not None
            assert committed <= found[0] <= begun
            assert same(found[1], state_of(found[0]))

    @pytest.mark.damages_on_purpose
    @pytest.mark.parametrize("which", [0, 1], ids=["object", "manifest"])
    @pytest.mark.parametrize("how", ["flip", "truncate"])
    def test_damage_is_noticed_and_an_older_version_taken(self, base: Path, which: int, how: str) -> None:
        call(save_once, self.door, base, [1], 0)
        kept = base.parent / "kept"
        shutil.copytree(base / "step-1_ckpt", kept)
        call(save_once, self.door, base, [2], 0)
        # Verified, the second save has replaced the first: put it back, as if both had been left by a crash.
        shutil.copytree(kept, base / "step-1_ckpt", dirs_exist_ok=True)
        self.expect(base, 2)
        path = base / part_files(base, 2)[which]
        if how == "flip":
            data = bytearray(path.read_bytes())
            data[len(data) // 3] ^= 0x10
            with open(path, "r+b") as file:
                file.write(data)
        else:
            with open(path, "r+b") as file:
                file.truncate(path.stat().st_size // 2)
        self.expect(base, 1)
