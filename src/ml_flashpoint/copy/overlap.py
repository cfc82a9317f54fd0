"""Overlap: on CUDA, what optimizers update is copied while the next forward and backward run.

Parameters of an optimizer and its state change in its ``step()``. Until then a stream can copy them, and a hook has
each ``step()`` wait for the rest. Everything else is copied before a save returns.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ml_flashpoint.copy import cuda
from ml_flashpoint.copy.dtypes import bytes_of
from ml_flashpoint.copy.tensors import is_plain_strided
from ml_flashpoint.copy.transfers import transfers
from ml_flashpoint.format.errors import InvalidArgumentError, SaveError

_log = logging.getLogger(__name__)

Updates = Callable[[], Iterable[torch.Tensor]]

_WORD = 8


class LateCopy:
    """A copy of CUDA tensors into page-locked memory that goes on after a save has returned.

    The program's stream is held until it is over before anything may change a source. The executor that commits waits
    for it, and compares the sum of each copy with that of its source at the save.

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
        """Take the sums of all sources on the program's stream, and begin the copy on another one: of pairs that
        :meth:`takes` takes. Raise a `SaveError` while a CUDA graph is being captured."""
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
        cuda.note_device(index)
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
        """Wait until the copy is over, and check it. Raises a `SaveError` if a source has changed, or the copy was not
        over in time."""
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


class Overlap:
    """The optimizers whose tensors are copied late, and the copy under way. To be used by the training thread.

    Args:
        wanted: False: nothing is copied late.

    Attributes:
        active: True if CUDA tensors are copied late. False for good once a source has changed during a copy, or an
            optimizer's step was captured in a CUDA graph: its replays call no hooks.
    """

    def __init__(self, *, wanted: bool = True) -> None:
        self.active = wanted
        self._optimizers: list[Optimizer] = []
        self._updates: list[Updates] = []
        self._hooks: list[Any] = []
        self._late: LateCopy | None = None

    def watch(self, optimizer: Optimizer, *, announced: bool = False, updates: Updates | None = None) -> bool:
        """Have an optimizer's steps wait from now on, and copy late what it updates. Safe to call twice.

        Args:
            announced: the caller of its ``step()`` calls :meth:`before_update` before it updates anything. A hook would
                come too early, if forward and backward run in a closure.
            updates: returns further tensors that nothing changes before such a step has begun.

        Returns:
            True if its steps wait: its ``step()`` calls hooks, or is announced.

        Raises:
            InvalidArgumentError: ``optimizer`` is none.
        """
        if not isinstance(optimizer, Optimizer):
            raise InvalidArgumentError("must be a torch optimizer", argument="optimizer", value=optimizer)
        # Wrappers that have not called the constructor of their base have no hooks, or call none.
        hooked = getattr(type(optimizer).step, "hooked", False) and hasattr(optimizer, "_optimizer_step_pre_hooks")
        if not self.active or not (announced or hooked):
            return announced or hooked
        if updates is not None and updates not in self._updates:
            self._updates.append(updates)
        if not any(each is optimizer for each in self._optimizers):
            self._optimizers.append(optimizer)
            if not announced:
                hook, hooks = optimizer.register_step_pre_hook(self._step), cast(Any, optimizer)
                hooks._optimizer_step_pre_hooks.move_to_end(hook.id, last=False)  # the program's may change a source
                self._hooks.append(hook)
        return True

    def begin(self, tensors: Iterable[torch.Tensor], *, promised: bool = False) -> LateCopy | None:
        """Return a late copy for a save of these tensors, not started; None if none of them may be copied late.

        Args:
            promised: where no optimizer is watched, nothing changes any tensor before the copy is over.
        """
        self.before_update()
        self._late = None
        tensors = list(tensors) if self.active and cuda.in_use() else ()
        if not cuda.are_on_devices(tensors):
            return None
        may_wait = self._lies_in_updated() if self._optimizers or not promised else lambda tensor: True
        found = enumerate(zip(tensors, cuda.indices(tensors), strict=True))
        numbers = {number for number, (tensor, index) in found if index >= 0 and may_wait(tensor)}
        if numbers:
            self._late = LateCopy(numbers, self._turn_off)
        return self._late

    def _lies_in_updated(self) -> Callable[[torch.Tensor], bool]:
        """Return a test for tensors whose memory is that of a tensor that an optimizer updates, or a part of it."""
        spans = sorted((each.data_ptr(), each.data_ptr() + each.nbytes) for each in self._updated())
        begins, ends = [begin for begin, _ in spans], [*accumulate((end for _, end in spans), max)]

        def lies(tensor: torch.Tensor) -> bool:
            before = bisect_right(begins, tensor.data_ptr())
            return before > 0 and tensor.data_ptr() + tensor.nbytes <= ends[before - 1]

        return lies

    def _updated(self) -> Sequence[torch.Tensor]:
        """Return this rank's part of what the watched optimizers update."""
        given = [p for each in self._optimizers for group in each.param_groups for p in group["params"]]
        # Optimizers do not change parameters without gradients; something else may, in forward: an average, say.
        values: list[Any] = [parameter for parameter in given if parameter.requires_grad]
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                values += state.values() if isinstance(state, dict) else ()
        for updates in self._updates:
            values += updates()
        parts = [each._local_tensor if isinstance(each, DTensor) else each for each in values]
        return [each for each in parts if isinstance(each, torch.Tensor) and is_plain_strided(each)]

    def _turn_off(self) -> None:
        self.active = False

    def _step(self, *_: object) -> None:
        if cuda.is_capturing():
            self._turn_off()
        self.before_update()

    def before_update(self) -> None:
        """Have what this thread gives to the devices from now on wait for the copy under way. The thread does not."""
        late = None
        while late is not self._late:  # a signal's handler may save meanwhile
            late = self._late
            if late is not None and cuda.in_use() and not cuda.is_capturing():
                late.hold()

    def close(self) -> None:
        """Have the program's streams wait for the copy under way, and take the hooks away. Safe to call twice."""
        self.before_update()
        for hook in self._hooks:
            hook.remove()
        for kept in (self._hooks, self._optimizers, self._updates):
            kept.clear()


class OverlappingDoor:
    """The calls of an adapter with asynchronous saves by which users ask for overlap."""

    _overlap: Overlap

    def watch(self, *optimizers: Optimizer, updates: Updates | None = None) -> None:
        """Ask for overlap: copy what these optimizers update on CUDA devices, parameters and their own state, while
        training goes on. An asynchronous save returns before, and each ``step()`` waits for the rest of the copy.

        Everything else is copied before the save returns: small tensors, whatever is on the CPU, and what an optimizer
        updates whose ``step()`` calls no hooks of ``register_step_pre_hook``.

        Args:
            updates: returns, at each save, further tensors that nothing changes before one of these optimizers has
                begun its step: parameters in another precision, for example, which are made of those that it updates.

        Raises:
            InvalidArgumentError: ``optimizers`` has something else in it.
        """
        for optimizer in optimizers:
            if not self._overlap.watch(optimizer, updates=updates):
                _log.warning(
                    "the steps of %s call no hooks: what it updates is copied before a save returns", type(optimizer)
                )

    def before_update(self) -> None:
        """Have what this thread gives to the devices from now on wait for the copy of the latest save.

        To be called before anything but its ``step()`` changes what a watched optimizer updates. Otherwise the save
        fails, and later saves return when all is copied.
        """
        self._overlap.before_update()

    def stop_watching(self) -> None:
        """Have the program's streams wait for the copy of the latest save, and watch nothing from then on."""
        self._overlap.close()
