"""Loops that people write over a tracked loader: a crash anywhere changes nothing, or a warning says what it does."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import pickle
import queue
import random
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ml_flashpoint import Flashpoint, rest_of_epoch
from ml_flashpoint.format.errors import InvalidArgumentError, LoadError
from tests.support.forked import Child, Report, call_team, wait_until

SAMPLES, BATCH, BATCHES, EPOCHS = 22, 4, 6, 3  # the last batch of an epoch is smaller
# Else children of a fork server would have their workers made by it.
FORKED: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork"}

Loader = DataLoader[Any]
Peek = Callable[[Flashpoint, Loader], object]


class Numbers(Dataset[torch.Tensor]):
    """Samples; with noise from the generators of whoever fetches them if they are augmented."""

    def __init__(self, augmented: bool = False) -> None:
        self._augmented = augmented
        self.fetched = 0  # in this process

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        self.fetched += 1
        noise = torch.rand(()) / 4 + random.random() / 4 + np.random.uniform() / 4 if self._augmented else 0
        return torch.tensor(float(index)) + noise


class Lazy(Sampler[int]):
    """A sampler of a user's own, which draws its order from Python's generator when it is asked for its first index."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(SAMPLES))
        random.shuffle(order)
        yield from order

    def __len__(self) -> int:
        return SAMPLES


class Eager(Lazy):
    """The same, drawn when it is asked for an iterator."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SAMPLES).tolist())


def one_ahead(batches: Iterable[Any]) -> Iterator[Any]:
    """As those who want to know which batch is the last one."""
    iterator = iter(batches)
    for held in iterator:
        for following in iterator:
            yield held
            held = following
        yield held


def thread_ahead(batches: Iterable[Any]) -> Iterator[Any]:
    """As those who copy to a device beside training."""
    fetched: queue.Queue[Any] = queue.Queue()
    room, left, end = threading.Semaphore(2), threading.Event(), object()

    def fetch() -> None:
        for batch in batches:
            fetched.put(batch)
            room.acquire()
            if left.is_set():
                return
        fetched.put(end)

    thread = threading.Thread(target=fetch)
    thread.start()
    try:
        while (batch := fetched.get()) is not end:
            room.release()
            yield batch
    finally:
        left.set()
        room.release()
        thread.join()


def sampled(augmented: bool = False, **options: Any) -> Loader:
    return DataLoader(Numbers(augmented), **{"batch_size": BATCH, **options})


def plain(augmented: bool = False, **options: Any) -> Loader:
    return sampled(augmented, shuffle=True, **options)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(9)


def stateful(augmented: bool = False, **options: Any) -> Loader:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    made: Loader = module.StatefulDataLoader(
        Numbers(augmented), batch_size=BATCH, shuffle="sampler" not in options, **options
    )
    return made


def distributed() -> DistributedSampler[int]:
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    return DistributedSampler(range(SAMPLES), ranks, rank, seed=4)  # type: ignore[arg-type]


def with_own_loop() -> Loader:
    module = pytest.importorskip("torchdata.stateful_dataloader")

    class Doubled(module.StatefulDataLoader):  # type: ignore[misc, name-defined]
        def __iter__(self) -> Iterator[Any]:
            yield from (2 * each for each in super().__iter__())

    return Doubled(Numbers(augmented=True), batch_size=BATCH, shuffle=True)  # type: ignore[no-any-return]


class Wrapper:
    """As Accelerate's `DataLoaderShard`: says that its class is the loader's, and is one batch ahead of its loop."""

    def __init__(self, loader: Any) -> None:
        self.base_dataloader = loader
        if hasattr(loader, "state_dict"):
            self.saved = loader.state_dict()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base_dataloader, name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self.base_dataloader.__class__

    def state_dict(self) -> Any:
        return self.saved

    def load_state_dict(self, state: Any) -> None:
        self.base_dataloader.load_state_dict(state)

    def __len__(self) -> int:
        return len(self.base_dataloader)

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self.base_dataloader)
        held = next(iterator, None)
        while held is not None:
            before = self.base_dataloader.state_dict()
            following = next(iterator, None)
            self.saved = before | {"_iterator_finished": following is None}
            yield held
            held = following


# ---- loops that a crash does not change ------------------------------------------------------------------------


def at_the_loader(fp: Flashpoint, loader: Loader) -> None:
    next(iter(loader), None)


def at_the_batches(fp: Flashpoint, loader: Loader) -> None:
    next(iter(fp.batches(loader)), None)  # there is none after the last one of an epoch


def nothing(fp: Flashpoint, loader: Loader) -> None: ...


def draws(fp: Flashpoint, loader: Loader) -> None:
    torch.manual_seed(77)


@dataclass(frozen=True)
class Program:
    """A loader, and the loop over it: how it fetches, and what it does before the loop, and midway in each epoch."""

    make: Callable[[], Any]
    through: Any = None
    before: Peek = nothing
    midway: Peek = nothing
    shares_its_generator: bool = False

    def crashes(self) -> list[float | None]:
        """After how many steps its lives end. By half a step: after a save when a loop has ended. What a program does
        before the loop begins, a run that is resumed between two epochs does, too, so that those which draw there are
        resumed within one."""
        epoch = len(self.make())
        return [2, epoch, epoch + 1, 2 * epoch + (0.5 if self.before is nothing else 2), None]


PLAIN = Program(plain)
PROGRAMS: dict[str, Program] = {
    "augmented": Program(lambda: plain(augmented=True)),
    "drop last": Program(lambda: plain(drop_last=True)),
    "generator that the program draws from, too": Program(lambda: plain(generator=seeded()), shares_its_generator=True),
    "with replacement": Program(lambda: sampled(sampler=WeightedRandomSampler(list(range(1, SAMPLES + 1)), SAMPLES))),
    "lazy sampler": Program(lambda: sampled(sampler=Lazy())),
    "eager sampler": Program(lambda: sampled(sampler=Eager())),
    "no batches": Program(lambda: plain(batch_size=None)),
    "distributed": Program(lambda: sampled(sampler=distributed())),
    "peek before the loop": Program(plain, before=at_the_loader),
    "peek before the loop, own generator": Program(lambda: plain(generator=seeded()), before=at_the_loader),
    "peek at the batches": Program(lambda: plain(augmented=True), before=at_the_batches),
    "peek in mid-epoch": Program(plain, midway=at_the_loader),
    "generators seeded before the loop": Program(plain, before=draws),
    "one ahead": Program(plain, one_ahead),
    "thread ahead": Program(lambda: plain(generator=seeded()), thread_ahead),
    "workers, own generator": Program(lambda: plain(True, generator=seeded(), **FORKED)),
    "workers, distributed": Program(lambda: sampled(True, sampler=distributed(), prefetch_factor=1, **FORKED)),
    "workers, thread ahead, peek": Program(lambda: plain(True, **FORKED), thread_ahead, at_the_loader),
    "torchdata": Program(lambda: stateful(augmented=True), before=at_the_loader),
    "torchdata, distributed": Program(lambda: stateful(sampler=distributed())),
    "torchdata, own generator": Program(lambda: stateful(generator=seeded())),
    "torchdata, workers, own generator": Program(lambda: stateful(generator=seeded(), **FORKED)),
    "torchdata, one ahead": Program(stateful, one_ahead),
    "torchdata, workers, thread ahead": Program(lambda: stateful(**FORKED), thread_ahead),
    "torchdata, peek at the batches": Program(stateful, before=at_the_batches),
    "torchdata, peek in mid-epoch": Program(stateful, midway=at_the_loader),
    "torchdata, workers, peek in mid-epoch": Program(lambda: stateful(**FORKED), midway=at_the_loader),
    "torchdata, own loop": Program(with_own_loop),
    "torchdata, wrapped": Program(lambda: Wrapper(stateful())),
}

Seen = list[Any]


def drawn() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), np.random.uniform()


def live(program: Program, base: Path | None, seed: int = 0, crash_at: float | None = None) -> Seen:
    """One life of a job; the batches of its steps, and what they drew. Without a base, that of a plain loop."""
    for reseed in (torch.manual_seed, random.seed, np.random.seed):
        reseed(100 * seed + (dist.get_rank() if dist.is_initialized() else 0))
    loader, seen = program.make(), list[Any]()
    if base is None:
        for epoch in range(EPOCHS):
            begin_epoch(loader, epoch)
            seen += ((batch.tolist(), drawn()) for batch in loader)
        return seen
    batches: Iterator[Any] = iter(())
    with Flashpoint(base, handle_sigterm=False, strict=True) as fp:
        noise = {"noise": loader.generator} if program.shares_its_generator else {}
        step = fp.track(loader=loader, **noise).resume()
        program.before(fp, loader)
        while step < EPOCHS * len(loader):
            begin_epoch(loader, step // len(loader))
            batches = iter(fp.batches(loader, program.through))
            for batch in batches:
                if step % len(loader) == 3:
                    program.midway(fp, loader)
                noises = [torch.rand((), generator=each).item() for each in noise.values()]
                seen.append((batch.tolist(), drawn(), *noises))
                step = fp.step()
                fp.wait()
                if step == crash_at:
                    break
            else:
                if crash_at != step + 0.5:
                    continue
                fp.save()
                fp.wait()
            break
    if loader.num_workers:  # those of torchdata's loader would be waited for in vain when it is collected
        for _ in itertools.chain(batches, loader):
            pass
    return seen


def begin_epoch(loader: Any, epoch: int) -> None:
    if isinstance(loader.sampler, DistributedSampler):
        loader.sampler.set_epoch(epoch)


def check_crashes(report: Report, rank: int, root: Path, names: Iterable[str]) -> None:
    torch.set_num_threads(1)
    for name in names:
        program, together = PROGRAMS[name], list[Any]()
        is_plain = program == Program(program.make)  # nor is it disturbed by being tracked
        undisturbed = live(program, None if is_plain else root / name / "undisturbed", seed=1)
        for life, crash_at in enumerate(program.crashes()):
            together += live(program, root / name / "job", 1 + life, crash_at)
        assert together == undisturbed, name


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if "workers" in name else []) for name in PROGRAMS]
)
def test_a_crash_anywhere_changes_nothing(tmpfs: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    check_crashes(Report, 0, tmpfs, [name])  # type: ignore[arg-type]
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.slow
def test_a_crash_of_several_ranks_changes_nothing(tmpfs: Path) -> None:
    call_team(check_crashes, tmpfs, 2, tmpfs / "jobs", ["distributed", "workers, distributed"])


@pytest.mark.parametrize(
    ("makes", "strict"),
    [((plain, plain), False), ((plain, plain), True), ((plain, stateful), False), ((stateful, plain), True)],
)
def test_loaders_side_by_side_go_on(tmpfs: Path, makes: tuple[Callable[..., Loader], ...], strict: bool) -> None:
    """One draws from the generators between the begin of another's pass and its first batch. The other is not asked for
    more once the first has no more, unless the loop is strict."""

    def life(base: Path, seed: int, crash_at: int | None) -> Seen:
        torch.manual_seed(seed)
        one, other = (make() for make in makes)
        seen: Seen = []
        with Flashpoint(base, handle_sigterm=False, strict=True) as fp:
            step = fp.track(one=one, other=other).resume()
            while step < EPOCHS * BATCHES:
                for pair in zip(fp.batches(one), fp.batches(other), strict=strict):
                    seen.append((torch.cat(pair).tolist(), drawn()[0]))
                    step = fp.step()
                    fp.wait()
                    if step == crash_at:
                        return seen
        return seen

    together = [
        each
        for number, crash_at in enumerate([1, BATCHES, BATCHES + 2, None])
        for each in life(tmpfs / "job", 1 + number, crash_at)
    ]
    assert together == life(tmpfs / "undisturbed", 1, None)


def tracked(base: Path, loader: Any, **options: Any) -> Flashpoint:
    """A façade that has resumed with a loader."""
    fp = Flashpoint(base, handle_sigterm=False, **options).track(loader=loader)
    fp.resume()
    return fp


def test_what_was_given_is_not_fetched_again_and_after_the_last_batch_a_loop_is_empty(base: Path) -> None:
    live(PLAIN, base, crash_at=4)
    loader: Any = plain()
    with tracked(base, loader) as fp:
        assert len(list(fp.batches(loader))) == BATCHES - 4
        assert loader.dataset.fetched == SAMPLES - 4 * BATCH
    live(PLAIN, base, crash_at=BATCHES)
    with tracked(base, loader) as fp:
        assert [len(list(fp.batches(loader))) for _ in range(2)] == [0, BATCHES]


@pytest.mark.parametrize(
    "name", ["augmented", "generator that the program draws from, too", "distributed", "torchdata"]
)
def test_a_loop_over_a_range_of_epochs_skips_no_epoch_where_finished_ones_are_skipped(tmpfs: Path, name: str) -> None:
    def life(base: Path, seed: int, crash_at: int | None) -> Seen:
        for reseed in (torch.manual_seed, random.seed, np.random.seed):
            reseed(seed)
        loader, seen = PROGRAMS[name].make(), list[Any]()
        with Flashpoint(base, handle_sigterm=False, strict=True) as fp:
            step = fp.track(loader=loader).resume()
            for epoch in range(step // len(loader), EPOCHS):
                for batch in fp.batches(loader).skipping_finished():
                    seen.append((epoch, batch.tolist(), drawn()))
                    step = fp.step()
                    fp.wait()
                    if step == crash_at:
                        return seen
        return seen

    crashes = [2, BATCHES, BATCHES + 1, 2 * BATCHES, None]
    together = [each for seed, crash_at in enumerate(crashes) for each in life(tmpfs / "job", seed, crash_at)]
    assert together == life(tmpfs / "undisturbed", 0, None)
    assert len(together) == EPOCHS * BATCHES


@pytest.mark.parametrize("name", ["distributed", "torchdata, distributed"])
def test_set_epoch_says_that_the_next_epoch_begins_and_another_epoch_is_refused(base: Path, name: str) -> None:
    program = PROGRAMS[name]
    live(program, base, crash_at=BATCHES)
    loader = program.make()
    with tracked(base, loader) as fp:
        loader.sampler.set_epoch(1)
        assert len(list(fp.batches(loader))) == BATCHES
    live(program, base, crash_at=BATCHES + 2)
    loader = program.make()
    with tracked(base, loader) as fp:
        loader.sampler.set_epoch(0)
        for _ in range(2):
            with pytest.raises(LoadError, match=r"set_epoch|set to epoch 0"):
                next(iter(fp.batches(loader)))


def test_a_load_that_fails_leaves_the_place_of_a_loop_that_went_on(base: Path) -> None:
    live(PLAIN, base, crash_at=2)
    loader = plain()
    with tracked(base, loader, every_n_steps=99) as fp:
        for _ in fp.batches(loader):
            fp.step()
            with pytest.raises(LoadError):
                fp.resume(step=99)
            break
        fp.save()
    with tracked(base, loader) as fp:
        assert fp.steps_done == 3
        assert len(list(fp.batches(loader))) == BATCHES - 3


def test_other_data_is_refused(base: Path) -> None:
    live(PLAIN, base, crash_at=3)
    for changed in (plain(batch_size=5), DataLoader(range(100), shuffle=True)):  # type: ignore[arg-type]
        with tracked(base, changed) as fp, pytest.raises(LoadError, match="'loader' does not give the 3 batches again"):
            list(fp.batches(changed))


# ---- loops that a restart changes ------------------------------------------------------------------------------


def past_the_batches(fp: Flashpoint, loader: Loader) -> None:
    for _ in loader:
        fp.step()
        fp.wait()


def every_other(fp: Flashpoint, loader: Loader) -> None:
    for _ in fp.batches(loader, lambda batches: (batch for n, batch in enumerate(batches) if n % 2)):
        fp.step()
        fp.wait()


def two_at_a_time(fp: Flashpoint, loader: Loader) -> None:
    for _ in zip(fp.batches(loader), fp.batches(loader), strict=True):
        fp.step()
        fp.wait()


def one_within_the_other(fp: Flashpoint, loader: Loader) -> None:
    for _ in fp.batches(loader):
        next(iter(fp.batches(loader)))
        fp.step()
        fp.wait()


def over_a_resume(fp: Flashpoint, loader: Loader) -> None:
    for number, _ in enumerate(fp.batches(loader), 1):
        fp.step()
        fp.wait()
        if number == 2:
            fp.resume()


def accumulating_gradients_and_validating(fp: Flashpoint, loader: Loader) -> None:
    fp.save()
    fp.wait()
    for _ in range(2):
        for number, _ in enumerate(fp.batches(loader), 1):
            if number % 2 == 0:
                fp.step()
                fp.wait()
        fp.save()
        fp.wait()


@pytest.mark.parametrize(
    ("loop", "make", "message"),
    [
        (past_the_batches, plain, "nobody loops over fp.batches"),
        (every_other, plain, "through= has not given one batch for each"),
        (two_at_a_time, plain, "a loop over 'loader' goes on beside a newer one"),
        (two_at_a_time, stateful, "a loop over 'loader' goes on beside a newer one"),
        (one_within_the_other, plain, "a loop over 'loader' goes on beside a newer one"),
        (over_a_resume, plain, "a loop over 'loader' goes on .* from before a resume"),
        (accumulating_gradients_and_validating, plain, None),
    ],
)
def test_a_loop_that_a_restart_changes_is_told_so_once(
    base: Path, caplog: pytest.LogCaptureFixture, loop: Peek, make: Callable[[], Loader], message: str | None
) -> None:
    loader = make()
    with tracked(base, loader) as fp:
        loop(fp, loader)
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == (message is not None)
    assert message is None or re.search(message, warnings[0])


# ---- what a loader is, while it is tracked ---------------------------------------------------------------------


def test_a_tracked_loader_is_what_it_was_and_may_be_tracked_again(base: Path) -> None:
    loader = sampled()
    before, attributes = type(loader), dict(vars(loader))
    for _ in range(2):
        with Flashpoint(base, discard_existing=True) as fp:
            fp.track(loader=loader).save()
            batches = fp.batches(loader)
            first, *rest = batches
            assert len(rest) + 1 == len(list(batches)) == len(batches) == BATCHES
            assert type(loader) is before
            assert vars(loader) == attributes
            assert torch.equal(next(iter(pickle.loads(pickle.dumps(loader)))), first)


@pytest.mark.slow
def test_persistent_workers_of_a_peek_are_not_those_of_the_loop(base: Path) -> None:
    loader = sampled(persistent_workers=True, **FORKED)
    with tracked(base, loader) as fp:
        expected = list(fp.batches(loader))
        for _ in range(2):
            iterator = iter(fp.batches(loader))
            given = [next(iterator)]
            assert torch.equal(next(iter(loader)), expected[0])
            given += iterator
            assert all(map(torch.equal, given, expected))


def loop_and_wait(report: Report, base: Path) -> None:
    """Take a batch of a tracked loader, and have workers fetch all that they may ahead."""
    loader = sampled(prefetch_factor=4, **FORKED)
    with tracked(base, loader) as fp:
        for _ in fp.batches(loader):
            report("workers", [each.pid for each in multiprocessing.active_children()])
            report.listen()


@pytest.mark.slow
def test_workers_of_a_killed_rank_end(base: Path) -> None:
    def lives(pid: int) -> bool:
        try:
            return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False

    with Child(loop_and_wait, base) as child:
        (_, pids) = child.next_report("workers")
        assert len(pids) == FORKED["num_workers"]
        os.kill(child.pid, signal.SIGKILL)
        wait_until(lambda: not any(map(lives, pids)), "the workers have ended")


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


class OwnLoop(DataLoader[Any]):
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
        (lambda: Wrapper(plain()), "an __iter__ of its own"),
        (lambda: DataLoader(range(4), num_workers=1, in_order=False), "its batches come in any order"),
        (lambda: stateful(sampler=RandomSampler(range(4))), "its RandomSampler has no state_dict"),
        (lambda: stateful(sampler=SubsetRandomSampler(range(4))), "its SubsetRandomSampler has no state_dict"),
        (lambda: stateful(sampler=WeightedRandomSampler([1.0] * 4, 4)), "its WeightedRandomSampler has no state_dict"),
    ],
)
def test_loaders_that_cannot_be_brought_back_are_refused(base: Path, make: Callable[[], Any], reason: str) -> None:
    with Flashpoint(base) as fp, pytest.raises(InvalidArgumentError, match=reason):
        fp.track(loader=make())


@pytest.mark.parametrize(("name", "other"), [("position", 3), ("number", 2), ("set_epoch", 1), ("ended", True)])
def test_the_rest_of_an_epoch_is_of_ranks_at_one_place(name: str, other: object) -> None:
    dealing = {"replicas": 2, "batch_size": 2, "samples": 20}
    state = {
        "number": 1,
        "ended": False,
        "position": 2,
        "set_epoch": 0,
        "given": 0,
        "dealing": dealing,
        "generators": [],
    }
    assert rest_of_epoch([state, dict(state)], 0, 3)["given"] == 8
    with pytest.raises(LoadError, match=f"different places in the data: {name} differs"):
        rest_of_epoch([state, {**state, name: other}], 0, 3)


def test_what_is_not_tracked_has_no_batches(base: Path) -> None:
    with Flashpoint(base) as fp:
        loader = plain()
        fp.track(loader=loader)
        for other, through in ((plain(), None), ([1, 2], None), (loader, 3)):
            with pytest.raises(InvalidArgumentError):
                fp.batches(other, through)  # type: ignore[arg-type]


def test_a_generator_is_tracked_once(base: Path) -> None:
    generator = seeded()
    with Flashpoint(base) as fp:
        fp.track(generator=generator).save(1)
    expected = torch.rand(3, generator=generator)
    other = torch.Generator()
    with Flashpoint(base) as fp:
        assert fp.track(generator=other).resume() == 1
    assert torch.equal(torch.rand(3, generator=other), expected)
    with Flashpoint(base) as fp, pytest.raises(InvalidArgumentError, match="already"):
        fp.track(one=other, two=other)
