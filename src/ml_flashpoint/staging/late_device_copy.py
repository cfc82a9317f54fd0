"""A copy from devices that goes on while training does, and that their streams wait for before the sources change.

Owns what becomes of such a copy: no thread of the training waits for it. How it is cut and moved is `device_copy`'s;
what may be copied late, and when its sources change, is for the doors to know.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ml_flashpoint.format.errors import SaveError
from ml_flashpoint.staging.device_copy import Transfer
from ml_flashpoint.staging.transfer_plan import Memo


class LateDeviceCopy:
    """Copies tensors, some of which are on devices, into memory that is page-locked. Thread-safe once it has begun.

    It begins with its construction, by the thread that trains; CPU tensors are copied by then. Another thread has to
    call :meth:`copy`, and does the waiting.

    Args:
        targets, sources, copy_on_host, memo: as for `copy_through_lanes`. They are let go of when all is copied.
        check: called before the sources may change, and at the latest when all is copied; raises if they have changed.

    Attributes:
        error: why it failed, as far as that is known.
        over: whether nothing is copied any more.
        held_s: once it is over, the seconds for which the devices were kept from what came after :meth:`finish`.

    Raises:
        NotDirectError: a part of the memory is not locked.
        SaveError: a CUDA graph is being captured.
    """

    def __init__(
        self,
        targets: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        copy_on_host: Callable[[list[torch.Tensor], list[torch.Tensor]], None],
        check: Callable[[], None] = lambda: None,
        memo: Memo | None = None,
        lanes: Any = None,
    ) -> None:
        transfer = Transfer(targets, sources, copy_on_host, memo, lanes)
        if not transfer.is_direct:
            raise NotDirectError
        self.error: BaseException | None = None
        self.over = False
        self.held_s = 0.0
        self._check: Callable[[], None] | None = check
        self._changed = threading.Condition()
        self._when_over: list[Callable[[], None]] = []
        self._interrupt: BaseException | None = None
        self._transfer: Transfer | None = transfer
        self._copying, self._checking = threading.Lock(), threading.Lock()
        transfer.keep_small()
        try:
            transfer.start()
        except BaseException:
            transfer.settle()
            raise

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

    def finish(self) -> None:
        """Have what this thread gives to the devices from now on wait for the copy. Whatever becomes of it, the sources
        may change after that."""
        transfer = self._transfer
        if transfer is not None:
            self._call(transfer.hold)
        self._check_once()
        interrupt, self._interrupt = self._interrupt, None
        if interrupt is not None:
            raise interrupt  # the program is interrupted, now that others can go on

    def copy(self) -> None:
        """Wait until nothing is copied any more, and say so. Never raises: see :meth:`wait`."""
        with self._copying:
            transfer = self._transfer
            if transfer is None:
                return
            self._call(transfer.settle)
            if self.error is None:
                self._call(transfer.finish)
            self._check_once()
            self._transfer = None
            self._call(partial(self._note_held, transfer))
        self._end()

    def cancel(self, error: BaseException) -> None:
        """Take note that the copy is of no use any more. What a device was given, it does: see :meth:`when_over`. This
        waits for it if no other thread does."""
        with self._changed:
            if self.over:
                return
            self.error = self.error or error
        if not self._copying.locked():
            self.copy()

    def _note_held(self, transfer: Transfer) -> None:
        self.held_s = transfer.held_s()

    def _check_once(self) -> None:
        with self._checking:  # also waits for the other thread that does
            check, self._check = self._check, None
            if check is not None:
                self._call(check)

    def _call(self, function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:  # whatever it is, others wait for the end
            with self._changed:
                self.error = self.error or error
            if not isinstance(error, Exception):
                self._interrupt = error

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


class NotDirectError(Exception):
    """Memory would have to be copied through slots, for which somebody has to wait."""
