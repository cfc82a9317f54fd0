"""A copy that goes on while training does, and that whoever is about to change the sources can wait for.

Owns the slices of such a copy and who copies which: a thread in the background, and the one that waits for it, which
helps. What may be copied late, and when its sources change, is for the doors to know.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from ml_flashpoint.format.errors import SaveError
from ml_flashpoint.staging.copy import Piece, Slice, copy_all, slices

SLICE = 4 << 20
"""Bytes of a slice: a millisecond at most, and that is how long somebody who waits may wait for the last of them."""


class CopyUnderWay:
    """A copy that is not over yet: what those who wait for it, and those who depend on it, need. Thread-safe.

    Args:
        check: called once all is copied, before anybody is told; raises if the sources have changed meanwhile.

    Attributes:
        error: why it failed, as far as that is known.
        over: whether nothing is copied any more.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self.error: BaseException | None = None
        self.over = False
        self._check: Callable[[], None] | None = check
        self._changed = threading.Condition()
        self._when_over: list[Callable[[], None]] = []
        self._interrupt: BaseException | None = None

    def when_over(self, function: Callable[[], None]) -> None:
        """Have a function called once nothing is copied any more, before anybody is told. Here and now, if it is
        over."""
        with self._changed:
            if not self.over:
                self._when_over.append(function)
                return
        function()

    def wait(self, deadline_s: float) -> None:
        """Wait until nothing is copied any more.

        Args:
            deadline_s: seconds at most.

        Raises:
            SaveError: it failed, or was given up, or not all was copied in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.over, deadline_s):
                raise SaveError(f"the state was not copied within {deadline_s:.0f} s")
        if self.error is not None:
            raise SaveError(f"the state could not be copied: {self.error}") from self.error

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self.error = self.error or error

    def _call(self, function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:  # whatever it is, others wait for the end
            self._fail(error)
            if not isinstance(error, Exception):
                self._interrupt = error

    def _raise_interrupt(self) -> None:
        """Let the program be interrupted, now that others can go on."""
        interrupt, self._interrupt = self._interrupt, None
        if interrupt is not None:
            raise interrupt

    def _end(self) -> None:
        """Tell everybody, those first who depend on it."""
        while True:
            with self._changed:
                if not self._when_over:
                    self.over = True
                    self._changed.notify_all()
                    return
                function = self._when_over.pop(0)
            self._call(function)


class LateCopy(CopyUnderWay):
    """Copies tensors on the CPU, by slices, in the order given.

    Args:
        targets, sources: as for `copy.copy_all`. They are let go of once all is copied.
        pieces: what `copy.cut` made of the targets' sizes, by :data:`SLICE`.
        check: see `CopyUnderWay`.
    """

    def __init__(
        self,
        targets: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        pieces: Sequence[Piece],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(check)
        self._slices = slices(targets, sources, pieces, SLICE)
        self._copying: set[int] = set()  # threads
        self._given_out = self._ending = False

    def copy(self) -> None:
        """Copy until nothing is left; what fails is told by :meth:`wait`. An interrupt of this thread is raised, and
        fails the copy: nobody knows how far the slice has come."""
        thread, through = threading.get_ident(), False
        try:
            while (part := self._next(thread)) is not None:
                copy_all(part.targets, part.sources)
            through = True
        except Exception as error:
            self._fail(error)
        finally:
            with self._changed:
                if not through:
                    self.error = self.error or SaveError("the program was interrupted while it copied the state")
                    self._given_out = True
                self._copying.discard(thread)
            self._end_if_last()
            self._raise_interrupt()

    def finish(self, deadline_s: float = 60.0) -> None:
        """Copy what is left, and wait until nothing is copied any more, whatever became of it: for one slice, at most,
        of each thread that copies. Afterwards the sources may change.

        Args:
            deadline_s: seconds at most; the copy has failed then.
        """
        self.copy()
        with self._changed:
            if self._changed.wait_for(lambda: self.over, deadline_s):
                return
        self.cancel(SaveError(f"the state was not copied within {deadline_s:.0f} s"))

    def cancel(self, error: BaseException) -> None:
        """Copy nothing more. What is being copied may go on for a moment: see :meth:`when_over`."""
        with self._changed:
            if self.over:
                return
            self.error = self.error or error
            self._given_out = True
        self._end_if_last()

    def _next(self, thread: int) -> Slice | None:
        with self._changed:
            self._copying.discard(thread)
            part = None if self._given_out else next(self._slices, None)
            if part is None:
                self._given_out = True
            else:
                self._copying.add(thread)
            return part

    def _end_if_last(self) -> None:
        with self._changed:
            if self._ending or self._copying or not self._given_out:
                return
            self._ending = True  # nobody else ends it
            self._slices = iter(())
            check, self._check = self._check, None
        if self.error is None and check is not None:
            self._call(check)
        self._end()
