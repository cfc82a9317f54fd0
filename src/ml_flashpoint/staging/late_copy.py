"""A copy that goes on while training does, and that whoever is about to change the sources can wait for.

Owns the slices of such a copy and who copies which: a thread in the background, and the one that waits for it, which
helps. What may be copied late, and when its sources change, is for the doors to know.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import torch

from ml_flashpoint.format.errors import SaveError
from ml_flashpoint.staging.copy import Piece, copy_all

SLICE = 4 << 20
"""Bytes of a slice: a millisecond at most, and that is how long somebody who waits may wait for the last of them."""

_Pair = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]


class LateCopy:
    """Copies tensors on the CPU, by slices, in the order given. Thread-safe.

    Args:
        targets, sources: as for `copy.copy_all`. They are let go of once all is copied.
        pieces: what `copy.cut` made of the targets' sizes, by :data:`SLICE`.
        check: called once all is copied, before anybody is told; raises if the sources have changed meanwhile.
    """

    def __init__(
        self,
        targets: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        pieces: Sequence[Piece],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._slices = _slices(targets, sources, pieces)
        self._check = check
        self._changed = threading.Condition()
        self._copying = 0
        self._given_out = False
        self._error: BaseException | None = None
        self._over = False
        self._when_over: list[Callable[[], None]] = []

    @property
    def over(self) -> bool:
        """Whether nothing is copied any more."""
        return self._over

    @property
    def error(self) -> BaseException | None:
        """Why it failed."""
        return self._error

    def when_over(self, function: Callable[[], None]) -> None:
        """Have a function called once nothing is copied any more, before anybody is told: by the thread that copied
        last. Here and now, if it is over."""
        with self._changed:
            if not self._over:
                self._when_over.append(function)
                return
        function()

    def copy(self) -> None:
        """Copy until nothing is left. Never raises: see :meth:`wait`."""
        while (pair := self._next()) is not None:
            error: BaseException | None = None
            try:
                copy_all(*pair)
            except BaseException as caught:  # whatever it is, nobody else would be told
                error = caught
            del pair
            self._done(error)

    def finish(self) -> None:
        """Copy what is left, and wait until nothing is copied any more, whatever became of it."""
        self.copy()
        with self._changed:  # for one slice, at most, of each thread that copies
            self._changed.wait_for(lambda: self._over)

    def wait(self, deadline_s: float) -> None:
        """Wait until nothing is copied any more.

        Args:
            deadline_s: seconds at most.

        Raises:
            SaveError: it failed, or was given up, or not all was copied in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._over, deadline_s):
                raise SaveError(f"the state was not copied within {deadline_s:.0f} s")
        if self._error is not None:
            raise SaveError(f"the state could not be copied: {self._error}") from self._error

    def cancel(self, error: BaseException) -> None:
        """Copy nothing more. What is being copied may go on for a moment: see :meth:`when_over`."""
        with self._changed:
            if self._over:
                return
            self._error = self._error or error
            self._given_out = True
        self._end_if_last()

    def _next(self) -> _Pair | None:
        with self._changed:
            if self._given_out:
                return None
            pair = next(self._slices, None)
            if pair is None:
                self._given_out = True
            else:
                self._copying += 1
        if pair is None:
            self._end_if_last()
        return pair

    def _done(self, error: BaseException | None) -> None:
        with self._changed:
            self._copying -= 1
            if error is not None:
                self._error, self._given_out = self._error or error, True
        self._end_if_last()

    def _end_if_last(self) -> None:
        with self._changed:
            if self._over or self._copying or not self._given_out:
                return
            self._copying = -1  # nobody else ends it
            self._slices = iter(())
        if self._error is None:
            self._call(self._check)
        while True:
            with self._changed:
                if not self._when_over:
                    self._over, self._check = True, lambda: None
                    self._changed.notify_all()
                    return
                function = self._when_over.pop(0)
            self._call(function)

    def _call(self, function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:  # whatever it is, others wait for the end
            self._error = self._error or error


def _slices(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], pieces: Sequence[Piece]
) -> Iterator[_Pair]:
    for piece in pieces:
        of, to = sources[piece.start : piece.stop], targets[piece.start : piece.stop]
        if len(to) > 1 or to[0].nbytes <= SLICE or not (to[0].is_contiguous() and of[0].is_contiguous()):
            yield to, of
            continue
        flat_to, flat_of = to[0].view(-1), of[0].detach().view(-1)
        step = SLICE // to[0].element_size()
        for at in range(0, flat_to.numel(), step):
            yield [flat_to[at : at + step]], [flat_of[at : at + step]]
