"""A copy that CUDA streams make while training goes on, and the proof that it is of the state at the save."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch

from ml_flashpoint.copy import cuda, pinned
from ml_flashpoint.copy.dtypes import bytes_of
from ml_flashpoint.copy.transfers import transfers
from ml_flashpoint.format.errors import SaveError

_WORD = 8


class LateCopy:
    """A copy of CUDA tensors into page-locked memory that goes on after a save has returned.

    The save starts it. The program's stream is held until it is over before anything may change a source. The executor
    that commits waits for it, and compares the sum of each copy with that of its source at the save.

    Args:
        numbers: of the save's tensors that may be copied late.
        on_change: called before a wait fails because a source has changed.
    """

    def __init__(self, numbers: Collection[int], on_change: Callable[[], None]) -> None:
        self.numbers = numbers
        self._on_change = on_change
        self._events: list[Any] = []
        self._sums: list[tuple[str, torch.Tensor, torch.Tensor]] = []  # name, copy, sum of the source
        self._checking = threading.Lock()
        self._error: SaveError | None = None

    @staticmethod
    def takes(target: torch.Tensor, source: torch.Tensor) -> bool:
        """Return True if a tensor can be copied late: small ones, and those that pass through a buffer, cannot."""
        return source.nbytes % _WORD == 0 and source.data_ptr() % _WORD == 0 and transfers(target, source) is not None

    def start(self, names: Sequence[str], targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Take the sums of all sources on the program's stream, and begin the copy on another one.

        Args:
            names: of the tensors, for errors. targets, sources: pairs that :meth:`takes` takes.

        Raises:
            SaveError: a CUDA graph is being captured.
        """
        indices = cuda.indices(sources)
        try:
            for index in sorted(set(indices)):
                every = zip(names, targets, sources, indices, strict=True)
                self._start(index, [(name, to, of) for name, to, of, on in every if on == index])
        except BaseException:
            self.settle()
            raise

    def _start(self, index: int, tensors: Sequence[tuple[str, torch.Tensor, torch.Tensor]]) -> None:
        stream = cuda.stream(index, "late")
        with torch.no_grad():
            sums = torch.stack([_words(source).sum() for _, _, source in tensors])
        stream.start()
        pinned.note_device(index)
        found = stream.pinned(sums.nbytes).view(torch.int64)
        pairs = [pair for _, target, source in tensors for pair in transfers(target, source) or ()]
        try:
            for to, of in [(found, sums), *pairs]:
                stream.do(partial(to.copy_, of, non_blocking=True))
                stream.keep(of)
        finally:
            self._events.append(stream.event())
        self._sums += [(name, target, total) for (name, target, _), total in zip(tensors, found, strict=True)]

    @property
    def over(self) -> bool:
        """True if nothing is copied any more."""
        return all(event.wait(0) for event in self._events)

    def hold(self) -> None:
        """Have what this thread gives to the devices from now on wait for the copy. The thread itself does not."""
        for event in self._events:
            event.hold()

    def settle(self) -> None:
        """Wait until the copy is over, whatever became of it: its memory may then be another's."""
        for event in self._events:
            event.wait()

    def wait(self, deadline_s: float) -> None:
        """Wait until the copy is over, and check it.

        Args:
            deadline_s: seconds at most.

        Raises:
            SaveError: a source has changed, or the copy was not over in time.
        """
        if not all(event.wait(deadline_s) for event in self._events):
            raise SaveError(f"the devices have not copied the state within {deadline_s:.0f} s")
        with self._checking:
            sums, self._sums = self._sums, []
            for name, copy, expected in sums:
                if int(_words(copy).sum()) != int(expected):
                    self._on_change()
                    self._error = SaveError(
                        f"{name!r} was changed while it was copied, and not by its optimizer's step(); from now on"
                        " everything is copied before a save returns",
                        hint="call before_update() before such changes, or construct with overlap=False",
                    )
                    break
        if self._error is not None:
            raise self._error


def _words(tensor: torch.Tensor) -> torch.Tensor:
    return bytes_of(tensor).view(torch.int64)
