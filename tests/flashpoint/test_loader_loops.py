"""Loops that people write over a tracked loader: a crash anywhere changes nothing, or a warning says what it does."""

from __future__ import annotations

import logging
import pickle
import queue
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ml_flashpoint import Flashpoint
from ml_flashpoint.format.errors import InvalidArgumentError, LoadError

BATCHES, EPOCHS = 6, 3  # of 4 samples each
FORKED = {"num_workers": 2, "multiprocessing_context": "fork"}


class Numbers(Dataset[torch.Tensor]):
    """Samples; with noise from the generator of whoever fetches them if they are augmented."""

    def __init__(self, augmented: bool = False) -> None:
        self._augmented = augmented

    def __len__(self) -> int:
        return 4 * BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index) + (torch.rand(()) / 2 if self._augmented else 0)


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


def plain(augmented: bool = False, **options: Any) -> DataLoader[torch.Tensor]:
    return DataLoader(Numbers(augmented), batch_size=4, shuffle=True, **options)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(9)


def stateful(augmented: bool = False, **options: Any) -> DataLoader[torch.Tensor]:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    loader: DataLoader[torch.Tensor] = module.StatefulDataLoader(
        Numbers(augmented), batch_size=4, shuffle=True, **options
    )
    return loader


def with_own_loop(loop: Callable[[Iterator[Any]], Iterator[Any]], augmented: bool = False) -> DataLoader[torch.Tensor]:
    module = pytest.importorskip("torchdata.stateful_dataloader")

    class Loader(module.StatefulDataLoader):  # type: ignore[misc, name-defined]
        def __iter__(self) -> Iterator[Any]:
            yield from loop(super().__iter__())

    return Loader(Numbers(augmented), batch_size=4, shuffle=True)  # type: ignore[no-any-return]


Loader = DataLoader[torch.Tensor]
Peek = Callable[[Flashpoint, Loader], object]


def at_the_loader(fp: Flashpoint, loader: Loader) -> None:
    next(iter(loader), None)


def at_the_batches(fp: Flashpoint, loader: Loader) -> None:
    next(iter(fp.batches(loader)), None)  # there is none after the last one of an epoch


def nothing(fp: Flashpoint, loader: Loader) -> None: ...


def draws(fp: Flashpoint, loader: Loader) -> None:
    torch.manual_seed(77)


PROGRAMS: dict[str, tuple[Callable[[], Loader], Any, Peek, Peek]] = {
    # name: loader, through, what is done before the loop, what is done in the midst of each epoch
    "peek before the loop": (plain, None, at_the_loader, nothing),
    "peek before the loop, own generator": (lambda: plain(generator=seeded()), None, at_the_loader, nothing),
    "peek at the batches": (lambda: plain(True), None, at_the_batches, nothing),
    "peek in mid-epoch": (plain, None, nothing, at_the_loader),
    "generators seeded before the loop": (plain, None, draws, nothing),
    "one ahead": (plain, one_ahead, nothing, nothing),
    "thread ahead": (lambda: plain(generator=seeded()), thread_ahead, nothing, nothing),
    "workers, thread ahead, peek": (lambda: plain(True, **FORKED), thread_ahead, at_the_loader, nothing),
    "torchdata": (lambda: stateful(True), None, at_the_loader, nothing),
    "torchdata, own generator": (lambda: stateful(generator=seeded()), None, nothing, nothing),
    "torchdata, workers, own generator": (lambda: stateful(generator=seeded(), **FORKED), None, nothing, nothing),
    "torchdata, one ahead": (stateful, one_ahead, nothing, nothing),
    "torchdata, workers, thread ahead": (lambda: stateful(**FORKED), thread_ahead, nothing, nothing),
    "torchdata, peek at the batches": (stateful, None, at_the_batches, nothing),
    "torchdata, peek in mid-epoch": (stateful, None, nothing, at_the_loader),
    "torchdata, workers, peek in mid-epoch": (lambda: stateful(**FORKED), None, nothing, at_the_loader),
    "torchdata, own loop": (lambda: with_own_loop(lambda each: (2 * it for it in each), True), None, nothing, nothing),
}

Seen = list[tuple[list[float], float]]


def crashes_of(program: str) -> list[float | None]:
    """After how many steps its lives end. What a program does before the loop begins, a run that is resumed between two
    epochs does, too, so that those which draw there are resumed within one."""
    between = 2 * BATCHES + 0.5
    return [2, 5, BATCHES, BATCHES + 2, *([between] if PROGRAMS[program][2] is nothing else []), None]


def live(program: str, base: Path, seed: int, crash_at: float | None = None) -> Seen:
    """One life of a job; the batches of its steps, and what they drew. Half a step: a save and a crash after a loop."""
    make, through, before, midway = PROGRAMS[program]
    torch.manual_seed(seed)
    loader = make()
    seen: Seen = []
    with Flashpoint(base, handle_sigterm=False, strict=True) as fp:
        step = fp.track(loader=loader).resume()
        before(fp, loader)
        while step < EPOCHS * BATCHES:
            for batch in fp.batches(loader, through):
                if step % BATCHES == 3:
                    midway(fp, loader)
                seen.append((batch.tolist(), torch.rand(()).item()))
                step = fp.step()
                fp.wait()
                if step == crash_at:
                    return seen
            if crash_at == step + 0.5:
                fp.save()
                fp.wait()
                return seen
    return seen


@pytest.mark.parametrize(
    "program", [pytest.param(name, marks=[pytest.mark.slow] if "workers" in name else []) for name in PROGRAMS]
)
def test_a_crash_anywhere_changes_nothing(tmpfs: Path, program: str, caplog: pytest.LogCaptureFixture) -> None:
    undisturbed = live(program, tmpfs / "undisturbed", seed=1)
    together: Seen = []
    for life, crash_at in enumerate(crashes_of(program)):
        together += live(program, tmpfs / "job", 1 + life, crash_at)
    assert together == undisturbed
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


def lives(life: Callable[[Path, int, float | None], Seen], tmpfs: Path, crashes: list[int]) -> tuple[Seen, Seen]:
    """What an undisturbed job sees, and what one sees that crashes after so many steps, again and again."""
    undisturbed, together = life(tmpfs / "undisturbed", 1, None), list[Any]()
    for number, crash_at in enumerate([*crashes, None]):
        together += life(tmpfs / "job", 1 + number, crash_at)
    return undisturbed, together


@pytest.mark.parametrize("makes", [(plain, plain), (plain, stateful), (stateful, plain)])
@pytest.mark.parametrize("strict", [False, True])
def test_loaders_side_by_side_go_on(tmpfs: Path, makes: tuple[Callable[..., Loader], ...], strict: bool) -> None:
    """One draws from the generators between the begin of another's pass and its first batch. The other is not asked for
    more once the first has no more, unless the loop is strict."""

    def life(base: Path, seed: int, crash_at: float | None) -> Seen:
        torch.manual_seed(seed)
        one, other = (make() for make in makes)
        seen: Seen = []
        with Flashpoint(base, handle_sigterm=False, strict=True) as fp:
            step = fp.track(one=one, other=other).resume()
            while step < EPOCHS * BATCHES:
                for pair in zip(fp.batches(one), fp.batches(other), strict=strict):
                    seen.append((torch.cat(pair).tolist(), torch.rand(()).item()))
                    step = fp.step()
                    fp.wait()
                    if step == crash_at:
                        return seen
        return seen

    undisturbed, together = lives(life, tmpfs, [1, BATCHES, BATCHES + 2])
    assert together == undisturbed


@pytest.mark.parametrize("is_stateful", [False, True])
def test_a_loop_over_epochs_goes_on(tmpfs: Path, is_stateful: bool) -> None:
    def make() -> Loader:
        sampler = DistributedSampler(Numbers(), 1, 0, seed=4)
        if not is_stateful:
            return DataLoader(Numbers(), batch_size=4, sampler=sampler)
        module = pytest.importorskip("torchdata.stateful_dataloader")
        made: Loader = module.StatefulDataLoader(Numbers(), batch_size=4, sampler=sampler)
        return made

    def life(base: Path, seed: int, crash_at: float | None) -> Seen:
        torch.manual_seed(seed)
        loader = make()
        seen: Seen = []
        with Flashpoint(base, handle_sigterm=False, strict=True) as fp:
            step = fp.track(loader=loader).resume()
            for epoch in range(step // len(loader), EPOCHS):
                loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
                for batch in fp.batches(loader):
                    seen.append((batch.tolist(), torch.rand(()).item()))
                    step = fp.step()
                    fp.wait()
                    if step == crash_at:
                        return seen
        return seen

    undisturbed, together = lives(life, tmpfs, [2, BATCHES, BATCHES + 2, 2 * BATCHES])
    assert together == undisturbed
    life(tmpfs / "other", 1, BATCHES + 2)
    loader = make()
    with Flashpoint(tmpfs / "other", handle_sigterm=False) as fp:
        fp.track(loader=loader).resume()
        loader.sampler.set_epoch(0)  # type: ignore[attr-defined]
        with pytest.raises(LoadError, match=r"set_epoch|set to epoch 0"):
            next(iter(fp.batches(loader)))


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


@pytest.mark.parametrize(
    ("loop", "make", "message"),
    [
        (past_the_batches, plain, "nobody loops over fp.batches"),
        (every_other, plain, "through= has not given one batch for each"),
        (two_at_a_time, plain, "a loop over 'loader' goes on beside a newer one"),
        (two_at_a_time, stateful, "a loop over 'loader' goes on beside a newer one"),
        (one_within_the_other, plain, "a loop over 'loader' goes on beside a newer one"),
        (over_a_resume, plain, "a loop over 'loader' goes on .* from before a resume"),
    ],
)
def test_a_loop_that_a_restart_changes_is_told_so_once(
    tmpfs: Path, caplog: pytest.LogCaptureFixture, loop: Peek, make: Callable[[], Loader], message: str
) -> None:
    with Flashpoint(tmpfs / "job", handle_sigterm=False) as fp:
        loader = make()
        fp.track(loader=loader).resume()
        loop(fp, loader)
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert re.search(message, warnings[0])


def test_accumulating_gradients_and_validating_need_no_warning(tmpfs: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Flashpoint(tmpfs / "job", handle_sigterm=False) as fp:
        loader, validation = plain(), plain()
        fp.track(loader=loader, validation=validation).resume()
        fp.save()
        fp.wait()
        for _ in range(2):
            for number, _ in enumerate(fp.batches(loader), 1):
                if number % 2 == 0:
                    fp.step()
                    fp.wait()
                    assert len(list(fp.batches(validation))) == len(fp.batches(validation)) == BATCHES
            fp.save()
            fp.wait()
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


# ---- what a loader is, while it is tracked ---------------------------------------------------------------------


def test_a_tracked_loader_is_what_it_was(tmpfs: Path) -> None:
    loader = DataLoader(Numbers(), batch_size=4)
    before, attributes = type(loader), dict(vars(loader))
    with Flashpoint(tmpfs / "job", handle_sigterm=False) as fp:
        fp.track(loader=loader).resume()
        iterator = iter(fp.batches(loader))
        first = next(iterator)
        assert type(loader) is before
        assert vars(loader) == attributes
        assert torch.equal(next(iter(pickle.loads(pickle.dumps(loader)))), first)
        assert len(list(iterator)) == BATCHES - 1


@pytest.mark.slow
def test_persistent_workers_of_a_peek_are_not_those_of_the_loop(tmpfs: Path) -> None:
    loader = DataLoader(Numbers(), batch_size=4, persistent_workers=True, **FORKED)  # type: ignore[arg-type]
    with Flashpoint(tmpfs / "job", handle_sigterm=False) as fp:
        fp.track(loader=loader).resume()
        expected = list(fp.batches(loader))
        for _ in range(2):
            iterator = iter(fp.batches(loader))
            given = [next(iterator)]
            assert torch.equal(next(iter(loader)), expected[0])
            given += iterator
            assert all(map(torch.equal, given, expected))


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


PROGRAMS["wrapped torchdata"] = (lambda: Wrapper(stateful()), None, nothing, nothing)  # type: ignore[dict-item, return-value]


def test_a_wrapped_loader_with_a_state_goes_on(tmpfs: Path, caplog: pytest.LogCaptureFixture) -> None:
    test_a_crash_anywhere_changes_nothing(tmpfs, "wrapped torchdata", caplog)


def test_a_wrapped_loader_without_a_state_is_refused(tmpfs: Path) -> None:
    with Flashpoint(tmpfs / "job") as fp, pytest.raises(InvalidArgumentError, match="an __iter__ of its own"):
        fp.track(loader=Wrapper(plain()))


def test_what_is_not_tracked_has_no_batches(tmpfs: Path) -> None:
    with Flashpoint(tmpfs / "job") as fp:
        loader = plain()
        fp.track(loader=loader)
        for other, through in ((plain(), None), ([1, 2], None), (loader, 3)):
            with pytest.raises(InvalidArgumentError):
                fp.batches(other, through)  # type: ignore[arg-type]
