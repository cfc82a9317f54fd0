"""Data loaders of torch in the documented loop: a run that crashes is the undisturbed run, bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ml_flashpoint import Flashpoint
from ml_flashpoint.format.errors import InvalidArgumentError, LoadError
from tests.support.forked import call_team
from tests.workers import loaders
from tests.workers.loaders import BATCH, BATCHES, EPOCHS, LOADERS, SAMPLES, train


def test_tracking_changes_nothing(tmpfs: Path) -> None:
    for kind in ("shuffled, augmented", "own generator"):
        assert train(kind, tmpfs / kind.partition(" ")[0])[0] == train(kind, None)[0]


QUICK = ("shuffled, augmented", "distributed", "user's sampler", "no batches")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in QUICK else [pytest.mark.slow]) for kind in LOADERS]
)
def test_crashes_anywhere_change_nothing(tmpfs: Path, kind: str) -> None:
    undisturbed, _ = train(kind, None)
    epoch = len(undisturbed[0]) // EPOCHS
    assert epoch in (BATCHES, BATCHES - 1, SAMPLES)
    together: list[float] = []
    # In the first epoch, at its end, right after the next one began, and in the midst of the last one.
    crashes = [3, epoch, epoch + 1, 2 * epoch + 2, None]
    for life, crash_at in enumerate(crashes):
        (losses, parameters), _ = train(kind, tmpfs / "job", crash_at, seed=life)
        together += losses
    assert (together, parameters) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["distributed", "workers, distributed", "shuffled, augmented"])
def test_several_ranks(tmpfs: Path, kind: str) -> None:
    for undisturbed, together in call_team(loaders.lives, tmpfs, 2, kind, [2, 3]):
        assert together == undisturbed


def test_what_was_given_is_not_fetched_again(tmpfs: Path) -> None:
    train("shuffled", tmpfs / "job", 4)
    (losses, _), fetched = train("shuffled", tmpfs / "job", BATCHES)
    assert len(losses) == 2
    assert len(fetched) == SAMPLES - 4 * BATCH


def test_after_the_last_batch_the_first_loop_is_empty(tmpfs: Path) -> None:
    train("shuffled", tmpfs / "job", BATCHES)
    loader, _ = LOADERS["shuffled"]()
    with Flashpoint(tmpfs / "job") as fp:
        fp.track(loader=loader)
        assert fp.resume() == BATCHES
        assert [len(list(fp.batches(loader))) for _ in range(2)] == [0, BATCHES]


def test_set_epoch_says_that_the_next_epoch_begins(tmpfs: Path) -> None:
    train("distributed", tmpfs / "job", BATCHES)
    loader, _ = LOADERS["distributed"]()
    with Flashpoint(tmpfs / "job") as fp:
        fp.track(loader=loader).resume()
        loader.sampler.set_epoch(1)  # range(step // len(loader), epochs)
        assert len(list(fp.batches(loader))) == BATCHES


def test_set_epoch_to_another_epoch_is_refused(tmpfs: Path) -> None:
    train("distributed", tmpfs / "job", BATCHES + 2)
    loader, _ = LOADERS["distributed"]()
    with Flashpoint(tmpfs / "job") as fp:
        fp.track(loader=loader).resume()
        assert loader.sampler.epoch == 1
        loader.sampler.set_epoch(0)
        for _ in range(2):
            with pytest.raises(LoadError, match=r"'loader' does not give the 2 batches again .* set_epoch\(\)"):
                iter(fp.batches(loader))


def test_a_load_that_fails_leaves_the_place_of_a_loop_that_went_on(tmpfs: Path) -> None:
    train("shuffled", tmpfs / "job", 2)
    loader, _ = LOADERS["shuffled"]()
    with Flashpoint(tmpfs / "job", every_n_steps=99) as fp:
        fp.track(loader=loader).resume()
        for _ in fp.batches(loader):
            fp.step()
            with pytest.raises(LoadError):
                fp.resume(step=99)
            break
        fp.save()
    loader, _ = LOADERS["shuffled"]()
    with Flashpoint(tmpfs / "job") as fp:
        assert fp.track(loader=loader).resume() == 3
        assert len(list(fp.batches(loader))) == BATCHES - 3


def test_other_data_is_refused(tmpfs: Path) -> None:
    train("shuffled", tmpfs / "job", 3)
    for changed in (DataLoader(loaders.Numbers(), batch_size=5, shuffle=True), DataLoader(range(100), shuffle=True)):
        with Flashpoint(tmpfs / "job") as fp:
            fp.track(loader=changed).resume()
            with pytest.raises(LoadError, match="'loader' does not give the 3 batches again"):
                list(fp.batches(changed))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


class OwnLoop(DataLoader[int]):
    def __iter__(self) -> Any:
        yield from super().__iter__()


class OwnBatches(BatchSampler):
    pass


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: DataLoader(Stream()), "its dataset is iterable"),
        (lambda: DataLoader(range(4), batch_sampler=[[0, 1], [2]]), r"its batch sampler \(list\) has no state_dict"),
        (lambda: DataLoader(range(4), batch_sampler=OwnBatches(range(4), 2, False)), r"\(OwnBatches\) has no state"),
        (lambda: OwnLoop(range(4)), r"its class \(OwnLoop\) has an __iter__ of its own"),
        (lambda: DataLoader(range(4), num_workers=1, in_order=False), "its batches come in any order"),
    ],
)
def test_loaders_that_cannot_be_brought_back(tmpfs: Path, make: Callable[[], Any], reason: str) -> None:
    with Flashpoint(tmpfs / "job") as fp, pytest.raises(InvalidArgumentError, match=f"{reason}.*StatefulDataLoader"):
        fp.track(loader=make())


@pytest.mark.parametrize(
    "sampler",
    [RandomSampler(range(4)), SubsetRandomSampler(range(4)), WeightedRandomSampler([1.0] * 4, 4)],
    ids=lambda sampler: type(sampler).__name__,
)
def test_a_stateful_loader_whose_sampler_draws_and_has_no_state_is_refused(tmpfs: Path, sampler: Any) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    with Flashpoint(tmpfs / "job") as fp:
        with pytest.raises(InvalidArgumentError, match=f"its {type(sampler).__name__} has no state_dict"):
            fp.track(loader=torchdata.StatefulDataLoader(range(4), sampler=sampler))
        fp.track(loader=torchdata.StatefulDataLoader(range(4), shuffle=True))


class Stateful(DataLoader[int]):
    """As torchdata's loader: has a state, and draws when it is iterated over again."""

    given = 0
    skip = 0

    def __iter__(self) -> Any:
        iterator, self.given = super().__iter__(), 0
        for _ in range(self.skip):
            next(iterator)
        self.given, self.skip = self.skip, 0
        return self._counted(iterator)

    def _counted(self, iterator: Any) -> Iterator[Any]:
        for batch in iterator:
            self.given += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skip = state["given"]


def test_loader_with_a_state_leaves_the_generators_alone_when_it_goes_on(tmpfs: Path) -> None:
    def run(until: int, resumed: bool) -> list[tuple[list[int], float]]:
        seen = []
        loader = Stateful(range(10), batch_size=2)
        torch.manual_seed(99 if resumed else 1)
        with Flashpoint(tmpfs / "job") as fp:
            step = fp.track(loader=loader).resume()
            for batch in fp.batches(loader):
                seen.append((batch.tolist(), torch.rand(()).item()))
                step = fp.step()
                fp.wait()
                if step == until:
                    break
        return seen

    first = run(5, False)
    shutil.rmtree(tmpfs / "job")
    assert run(2, False) + run(5, True) == first


def test_generator_is_tracked(tmpfs: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    with Flashpoint(tmpfs / "job") as fp:
        fp.track(generator=generator).save(1)
    expected = torch.rand(3, generator=generator)
    other = torch.Generator()
    with Flashpoint(tmpfs / "job") as fp:
        assert fp.track(generator=other).resume() == 1
        with Flashpoint(tmpfs / "other") as another, pytest.raises(InvalidArgumentError):
            another.track(one=other, two=other)
    assert torch.equal(torch.rand(3, generator=other), expected)


def test_loader_may_be_tracked_again(tmpfs: Path) -> None:
    loader = DataLoader(range(10), batch_size=2)
    for _ in range(2):
        with Flashpoint(tmpfs / "job", discard_existing=True) as fp:
            fp.track(loader=loader).save()
            batches = fp.batches(loader)
            assert [len(list(batches)) for _ in range(2)] == [len(batches)] * 2 == [5, 5]
