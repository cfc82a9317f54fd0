"""Copying from CUDA devices while training goes on: what is copied late, and who has to wait for it.

On the CPU a save copies before it returns: a copy beside the program's own writes cannot be made safe there. From CUDA
devices a stream may copy meanwhile, where a program asks for that. Parameters of an optimizer, and its state, change in
its ``step()``. Until then they can be copied while the next forward and backward run; a hook has each ``step()`` wait
for what is left of the copy. Everything else is copied before a save returns. Owns the hooks, the thread that waits for
devices, and what tells that something has changed meanwhile: version counters of all that is copied late. Where these
differ, the save fails, and from then on all is copied before a save returns.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from operator import attrgetter
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

from ml_flashpoint.core.background import BackgroundThread
from ml_flashpoint.core.checkpoint_saver import DefaultMLFlashpointCheckpointSaver
from ml_flashpoint.core.object_stages import TensorItem
from ml_flashpoint.core.owned_memory import OwnedMemory
from ml_flashpoint.core.owning_process import OwningProcess
from ml_flashpoint.core.picking import NamedTensors, tensors_of
from ml_flashpoint.core.save import Save
from ml_flashpoint.core.signals import interrupts_held
from ml_flashpoint.format.errors import InvalidArgumentError, SaveError
from ml_flashpoint.staging import cuda
from ml_flashpoint.staging.late_device_copy import LateDeviceCopy

_log = logging.getLogger(__name__)

Owned = tuple[int, torch.Tensor]
"""Bytes of a tensor on this rank, and the tensor, or the `DTensor` that it is the local part of."""

_version = attrgetter("_version")


class Overlap:
    """See the module. To be used by the training thread.

    Args:
        wanted: whether anything may be copied late.

    Attributes:
        active: whether anything is copied late, once there is something on a CUDA device.
        on_waited: told for how many seconds training was held back until a copy was done.
    """

    def __init__(self, *, wanted: bool = True) -> None:
        self.active = wanted
        self.on_waited: Callable[[float], None] = lambda seconds: None
        self._thread = BackgroundThread("flashpoint-copies")
        self._optimizers: list[Optimizer] = []
        self._updates: list[Callable[[], Iterable[torch.Tensor]]] = []
        self._hooks: list[Any] = []
        self._late: LateDeviceCopy | None = None
        self._announced = self._captured = self._promised = False
        self._stepped: set[int] = set()
        self._waiting: set[int] = set()  # threads
        self._owner = OwningProcess()

    def watch(
        self,
        optimizer: Optimizer,
        *,
        announced: bool = False,
        updates: Callable[[], Iterable[torch.Tensor]] | None = None,
    ) -> bool:
        """Have an optimizer's steps wait from now on. What it updates may be copied late, if it calls such hooks.
        Idempotent.

        Args:
            announced: whoever has it step calls :meth:`before_update` before it updates anything, and later than a hook
                of its ``step()`` would: that may have forward and backward in it, as a closure.
            updates: gives further tensors that nothing changes before such a step has begun.

        Returns:
            Whether it calls such hooks, or its steps are announced.

        Raises:
            InvalidArgumentError: it is none.
        """
        if not isinstance(optimizer, Optimizer):
            raise InvalidArgumentError("must be a torch optimizer", argument="optimizer", value=optimizer)
        # What has not called the constructor of its base, as some wrappers do not, has no hooks, or calls none.
        hooked = getattr(type(optimizer).step, "hooked", False) and hasattr(optimizer, "_optimizer_step_pre_hooks")
        if not self.active or not (announced or hooked):
            return bool(announced or hooked)
        if updates is not None and updates not in self._updates:
            self._updates.append(updates)
        if any(each is optimizer for each in self._optimizers):
            return True
        self._optimizers.append(optimizer)
        if announced:
            self._announced = True
            return True

        def wait(*_: object) -> None:
            self._stepped.add(id(optimizer))
            self._captured = self._captured or cuda.is_capturing()
            self.before_update()

        hook, hooks = optimizer.register_step_pre_hook(wait), cast(Any, optimizer._optimizer_step_pre_hooks)
        hooks.move_to_end(hook.id, last=False)  # the program's own may change what is copied
        self._hooks.append(hook)
        return True

    def owned(self) -> dict[int, Owned]:
        """The tensors that the watched optimizers update, by their addresses on this rank; none while :attr:`active` is
        not set, or where all of them are on the CPU."""
        if not self.active:
            return {}
        updated = [(each._local_tensor if isinstance(each, DTensor) else each, each) for each in self._updated()]
        if not cuda.are_on_devices(local for local, _ in updated if isinstance(local, torch.Tensor)):
            return {}
        owned: dict[int, Owned] = {}
        for local, each in updated:
            if isinstance(local, torch.Tensor) and _can_wait(local):
                known = owned.get(local.data_ptr())
                if known is None or known[0] < local.nbytes:  # else it is a part of that one
                    owned[local.data_ptr()] = local.nbytes, each
        return owned

    def owners(self) -> list[object]:
        """Equal to what it was before only if the watched optimizers have the same parameters, and the same of them are
        trained."""
        given = [p for each in self._optimizers for group in each.param_groups for p in group["params"]]
        return [self.active, *map(id, given), *[parameter.requires_grad for parameter in given]]

    def _updated(self) -> list[Any]:
        """What the watched optimizers update; with values of their state that are no tensors."""
        given = [p for each in self._optimizers for group in each.param_groups for p in group["params"]]
        # Of those that have no gradients, optimizers change none; something else may, in forward: an average, say.
        tensors: list[Any] = [parameter for parameter in given if parameter.requires_grad]
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                tensors += state.values() if isinstance(state, dict) else ()
        for updates in self._updates:
            tensors += updates()
        return tensors

    def stage(
        self,
        saver: DefaultMLFlashpointCheckpointSaver,
        save: Save,
        tensors: Sequence[TensorItem],
        late_from: int,
        owners: Sequence[torch.Tensor],
        versions: Callable[[], Sequence[int]] | None = None,
        **how: Any,
    ) -> Sequence[Any] | None:
        """Stage tensors; see the saver's ``stage``, which takes the other arguments. After the copy before is over.

        Args:
            late_from: number of the first tensor that an optimizer updates: these may be copied while training goes on,
                if one of them is on a CUDA device.
            owners: for each of the latter, what counts its in-place operations: the tensor itself, or the `DTensor`
                that it is the local part of, whose own counter stays as it is.
            versions: gives what the owners counted when this was called, if they were asked already.
        """
        if self._allows(tensors, late_from):
            tensors = _with_aliases(tensors, late_from)
            how |= {"late_from": late_from, "check": self._proof(tensors[late_from:], owners, versions)}
        copies = saver.stage(save, tensors, **how)
        if copies is not None:
            self._begin(save.staged.late if save.staged is not None else None)
        return copies

    def stage_owned(
        self,
        saver: DefaultMLFlashpointCheckpointSaver,
        save: Save,
        tensors: Sequence[TensorItem],
        *,
        promised: Mapping[int, torch.Tensor] | None = None,
        **how: Any,
    ) -> Sequence[Any] | None:
        """The same for those who do not know which tensors an optimizer updates.

        Args:
            promised: where no optimizer is watched, nothing changes anything before the copy is over, so all may be
                copied late. Gives the `DTensor`, by its number, of each tensor that is the local part of one.
        """
        self.before_update()
        if not self.active or not cuda.are_on_devices(tensor for _, tensor in tensors):
            return saver.stage(save, tensors, **how)
        owner_of = self._owner_of(promised)
        now, late, owners = list[int](), list[int](), list[torch.Tensor]()
        for number, (_, tensor) in enumerate(tensors):
            owner = owner_of(number, tensor)
            if owner is not None:
                late.append(number)
                owners.append(owner)
            else:
                now.append(number)
        order = now + late
        ordered = [tensors[number] for number in order] if late else tensors
        copies = self.stage(saver, save, ordered, len(now), owners, **how)
        if copies is None or not late:
            return copies
        place = {number: index for index, number in enumerate(order)}
        return [copies[place[number]] for number in range(len(order))]

    def _owner_of(
        self, promised: Mapping[int, torch.Tensor] | None
    ) -> Callable[[int, torch.Tensor], torch.Tensor | None]:
        """Gives what counts the operations on a tensor that may be copied late, by its number; None for others."""
        self._promised = promised is not None and not self._optimizers
        if promised is not None and self._promised:
            wholes = promised
            return lambda number, tensor: wholes.get(number, tensor) if _can_wait(tensor) else None
        owned = OwnedMemory(owner for _, owner in self.owned().values())
        return lambda _, tensor: owned.owner_of(tensor)

    def _allows(self, tensors: Sequence[TensorItem], late_from: int) -> bool:
        """Whether tensors that optimizers update are to be copied late this time: not where all are on the CPU, and not
        if an optimizer's step is part of a graph. Replaying it calls no hooks, and leaves version counters as they
        are."""
        stepped, self._stepped = self._stepped, set()
        if not self.active or not cuda.are_on_devices(tensor for _, tensor in islice(tensors, late_from, None)):
            return False
        if self._hooks and _global_optimizer_pre_hooks:  # they come before ours, and may change anything
            return False
        by_hand = not self._captured and all(id(optimizer) in stepped for optimizer in self._optimizers)
        return self._announced or self._promised or by_hand

    def _begin(self, late: LateDeviceCopy | None) -> None:
        """Wait in the background from now on for what a save has left to be copied."""
        self._late = late
        if late is not None:
            late.when_over(lambda: self.on_waited(late.held_s))
            self._start(late)

    def _start(self, late: LateDeviceCopy) -> None:
        self._thread.run(late.copy)

    @property
    def waits(self) -> bool:
        """Whether the calling thread is waiting, and so in a signal's handler: it cannot wait for itself."""
        return threading.get_ident() in self._waiting

    def before_update(self) -> None:
        """Have what changes the sources of a copy from now on wait until nothing is copied any more."""
        late = self._late
        if late is not None and not late.over and not self._owner.forked:
            if self.waits:
                late.cancel(
                    SaveError("the program was interrupted while it copied the state, and is about to change it")
                )
                return
            began, thread = time.perf_counter(), threading.get_ident()
            try:
                self._waiting.add(thread)
                with interrupts_held():
                    late.finish()
            finally:
                self._waiting.discard(thread)
            if self._late is late:  # and no earlier: optimizers may step in several threads
                self._late = None
            self.on_waited(time.perf_counter() - began)

    def _proof(
        self,
        tensors: Sequence[TensorItem],
        owners: Sequence[torch.Tensor],
        versions: Callable[[], Sequence[int]] | None = None,
    ) -> Callable[[], None]:
        """What raises a `SaveError` if one of these tensors has changed since now."""
        counting, number_of = (owners, int) if versions is not None else self._counting(tensors, owners)
        before = list(map(_version, counting)) if versions is None else None

        def check() -> None:
            counted = before if versions is None else list(versions())
            assert counted is not None
            now = list(map(_version, counting))
            changed = None
            if now != counted:
                others = (number_of(i) for i, version in enumerate(counted) if now[i] != version)
                changed = next((number for number in others if number is not None), None)
            if changed is not None:
                self.active = False
                raise SaveError(
                    f"{tensors[changed][0]!r} was changed while it was copied, and not by its optimizer's step(); from "
                    "now on everything is copied before a save returns",
                    hint="call before_update() before such changes, or construct with overlap=False",
                )

        return check

    def _counting(
        self, tensors: Sequence[TensorItem], owners: Sequence[torch.Tensor]
    ) -> tuple[Sequence[torch.Tensor], Callable[[int], int | None]]:
        """What counts the operations on these tensors, and which of them each is of, by number; None if it is of none.

        An operation on a `DTensor` is counted there, and one on its local part only with that: with the program's own,
        since a state dict has another `DTensor`, whose part counts nothing of it.
        """
        sharded = [number for number, owner in enumerate(owners) if isinstance(owner, DTensor)]
        if not sharded:
            return owners, int
        own = [each._local_tensor for each in self._updated() if isinstance(each, DTensor)]
        parts: list[torch.Tensor] = [part for part in own if type(part) is torch.Tensor and not part.is_inference()]
        known: list[int] = [*range(len(owners)), *sharded]

        def number_of(index: int) -> int | None:
            if index < len(known):
                return known[index]
            address = parts[index - len(known)].data_ptr()
            return next((number for number in sharded if tensors[number][1].data_ptr() == address), None)

        return [*owners, *(tensors[number][1] for number in sharded), *parts], number_of

    def close(self) -> None:
        """Wait until nothing is copied any more, and take the hooks away. Idempotent."""
        self.before_update()
        for hook in self._hooks:
            hook.remove()
        for kept in (self._hooks, self._optimizers, self._updates):
            kept.clear()
        self._thread.close()


class OverlappingDoor:
    """What doors with asynchronous saves offer whose users make the steps."""

    _overlap: Overlap

    def watch(self, *optimizers: Optimizer, updates: Callable[[], Iterable[torch.Tensor]] | None = None) -> None:
        """Ask for overlap: have what these optimizers update on CUDA devices, parameters and their own state, copied
        while training goes on. An asynchronous save returns before, and each ``step()`` waits for what is left of the
        copy. Everything else is copied before the save returns: whatever is on the CPU, and what an optimizer updates
        whose ``step()`` calls no hooks of ``register_step_pre_hook``.

        Args:
            updates: gives, at each save, further tensors that nothing changes before one of these optimizers has begun
                its step: parameters in another precision, for example, which are made of those that it updates.

        Raises:
            InvalidArgumentError: one is none.
        """
        for optimizer in optimizers:
            if not self._overlap.watch(optimizer, updates=updates):
                _log.warning(
                    "the steps of %s call no hooks: what it updates is copied before a save returns", type(optimizer)
                )

    def before_update(self) -> None:
        """Wait until nothing is copied any more. To be called before anything but its ``step()`` changes what an
        optimizer that is watched updates: else the save fails, and from then on saves return when all is copied."""
        self._overlap.before_update()

    def stop_watching(self) -> None:
        """Wait until nothing is copied any more, and watch nothing from then on. Idempotent."""
        self._overlap.close()


def _with_aliases(items: Sequence[TensorItem], begin: int) -> NamedTensors:
    """The same, with aliases in the place of the tensors from number ``begin`` on. They keep the memory that these have
    now: a program may give a tensor other data while it is copied."""
    names = items.names if isinstance(items, NamedTensors) else [name for name, _ in items]
    tensors = tensors_of(items)
    return NamedTensors(names, [*tensors[:begin], *map(torch.Tensor.detach, tensors[begin:])])


def _can_wait(tensor: torch.Tensor) -> bool:
    """Whether it can be told that a tensor has not changed, and it has memory that can be copied by slices."""
    plain = tensor.layout is torch.strided and tensor.device.type in ("cpu", "cuda")
    lazy = tensor.is_conj() or tensor.is_neg()  # its bytes are not those of a copy
    return plain and not lazy and not tensor.is_inference() and tensor.numel() > 0
