"""Copying the state while training goes on: what is copied late, and who has to wait for it.

Parameters of an optimizer, and its state, change in its ``step()``. Until then they can be copied while the next
forward and backward run; a hook has each ``step()`` wait for what is left of the copy, and help. Everything else is
copied before a save returns. Owns the hooks, the thread that copies, and the proof that nothing has changed meanwhile:
version counters of all that is copied late, samples of its content throughout, and all of one tensor's, another one
each time. Where it fails, the save fails, and from then on all is copied before a save returns. On the CPU, it is done
where it pays: see `staging_trial`.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from operator import attrgetter
from typing import Any, cast

import torch
import xxhash
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

from ml_flashpoint.core.aliases import Aliases
from ml_flashpoint.core.background import BackgroundThread
from ml_flashpoint.core.checkpoint_saver import DefaultMLFlashpointCheckpointSaver
from ml_flashpoint.core.object_stages import TensorItem
from ml_flashpoint.core.owned_memory import OwnedMemory
from ml_flashpoint.core.owning_process import OwningProcess
from ml_flashpoint.core.picking import tensors_of
from ml_flashpoint.core.save import Save
from ml_flashpoint.core.staging_trial import StagingTrial
from ml_flashpoint.format.errors import InvalidArgumentError, SaveError
from ml_flashpoint.staging import cuda
from ml_flashpoint.staging.late_copy import SLICE, LateCopy
from ml_flashpoint.staging.late_device_copy import LateDeviceCopy
from ml_flashpoint.staging.torch_dtypes import bytes_of

_log = logging.getLogger(__name__)

Owned = tuple[int, torch.Tensor]
"""Bytes of a tensor on this rank, and the tensor, or the `DTensor` that it is the local part of."""

_version = attrgetter("_version")

_PROBE = 1 << 20
"""Bytes whose content is compared of one tensor of each save."""

_SAMPLE, _MOST_SAMPLES, _SHIFT = 64, 512, 8191
"""Bytes that are compared of each slice of what is copied late; of how many tensors, and slices of each, at most; and
how much farther on in their slices they are the next time."""


class Overlap:
    """See the module. To be used by the training thread.

    Args:
        wanted: whether anything may be copied late.
        verify: compare the content of everything that is copied late, before and after: for tests, and for loops under
            suspicion. It takes as long as it takes to read the state twice.

    Attributes:
        active: whether anything is copied late.
        trial: what copying late takes of the loop, and what copying at once does.
        on_waited: told for how many seconds training was held back until a copy was done.
        deferred: context that holds signals back whose handlers wait for a save: they may come anywhere, also while
            this thread has the lock of a copy.
    """

    def __init__(self, *, wanted: bool = True, verify: bool = False) -> None:
        self.active = wanted
        self.on_waited: Callable[[float], None] = lambda seconds: None
        self.deferred: Callable[[], AbstractContextManager[None]] = nullcontext
        self.trial = StagingTrial()
        self._tried: tuple[bool, float] | None = None
        self._verify = verify
        self._thread = BackgroundThread("flashpoint-copies")
        self._optimizers: list[Optimizer] = []
        self._updates: list[Callable[[], Iterable[torch.Tensor]]] = []
        self._hooks: list[Any] = []
        self._late: LateCopy | LateDeviceCopy | None = None
        self._aliases = Aliases()
        self._probe = self._proofs = 0
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
        not set."""
        if not self.active:
            return {}
        owned: dict[int, Owned] = {}
        for each in self._updated():
            local = each._local_tensor if isinstance(each, DTensor) else each
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
        began: float,
        versions: Callable[[], Sequence[int]] | None = None,
        **how: Any,
    ) -> Sequence[Any] | None:
        """Stage tensors; see the saver's ``stage``, which takes the other arguments. After the copy before is over.

        Args:
            late_from: number of the first tensor that an optimizer updates: these may be copied while training goes on.
            owners: for each of the latter, what counts its in-place operations: the tensor itself, or the `DTensor`
                that it is the local part of, whose own counter stays as it is.
            began: when the save began, by the performance counter.
            versions: gives what the owners counted when this was called, if they were asked already.
        """
        copies_of_late = _From(late_from)
        if self._allows(tensors, late_from, began):
            tensors, late = self._aliases.of(tensors, late_from)
            how |= {"late_from": late_from, "check": self.proof(late, owners, copies_of_late, versions)}
        else:
            self._aliases.forget()
        copies = saver.stage(save, tensors, **how)
        if copies is not None:
            copies_of_late.all = copies
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
        began = time.perf_counter()
        self.before_update()
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
        copies = self.stage(saver, save, ordered, len(now), owners, began, **how)
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
            return lambda number, tensor: wholes.get(number, tensor) if self.active and _can_wait(tensor) else None
        owned = OwnedMemory(owner for _, owner in self.owned().values())
        return lambda _, tensor: owned.owner_of(tensor)

    def _allows(self, tensors: Sequence[TensorItem], late_from: int, began: float) -> bool:
        """Whether tensors that optimizers update are to be copied late this time. Those on a CUDA device may not if an
        optimizer's step is part of a graph: replaying it calls no hooks, and leaves version counters as they are."""
        stepped, self._stepped = self._stepped, set()
        if not self.active or len(tensors) <= late_from:
            return False
        if self._hooks and _global_optimizer_pre_hooks:  # they come before ours, and may change anything
            return False
        if cuda.are_on_devices(tensor for _, tensor in islice(tensors, late_from, None)):
            by_hand = not self._captured and all(id(optimizer) in stepped for optimizer in self._optimizers)
            return self._announced or self._promised or by_hand
        if self._promised:  # no step tells how long the loop was held, and it has asked for this
            return True
        overlaps = self._verify or self.trial.begin()
        self._tried = (overlaps, began)
        return overlaps

    def _begin(self, late: LateCopy | LateDeviceCopy | None) -> None:
        """Copy in the background from now on what a save has left to be copied."""
        self._late = late
        if isinstance(late, LateDeviceCopy):
            late.when_over(lambda: self.on_waited(late.held_s))
        if late is not None:
            self._start(late)

    def _start(self, late: LateCopy | LateDeviceCopy) -> None:
        self._thread.run(late.copy)

    @property
    def waits(self) -> bool:
        """Whether the calling thread is waiting, and so in a signal's handler: it cannot wait for itself."""
        return threading.get_ident() in self._waiting

    def before_update(self) -> None:
        """Wait until nothing is copied any more, and help."""
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
                with self.deferred():
                    late.finish()
            finally:
                self._waiting.discard(thread)
            if self._late is late:  # and no earlier: optimizers may step in several threads
                self._late = None
            self.on_waited(time.perf_counter() - began)
        tried, self._tried = self._tried, None
        if tried is not None:
            self.trial.took(tried[0], time.perf_counter() - tried[1])

    def proof(
        self,
        tensors: Sequence[TensorItem],
        owners: Sequence[torch.Tensor],
        copies: Sequence[torch.Tensor],
        versions: Callable[[], Sequence[int]] | None = None,
    ) -> Callable[[], None]:
        """What raises a `SaveError` if one of these tensors has changed since now, or its copy is not what it was.
        Copies need not be there yet, and those from devices may come after it was asked."""
        counting, number_of = (owners, int) if versions is not None else self._counting(tensors, owners)
        before = list(map(_version, counting)) if versions is None else None
        self._probe = (self._probe + 1) % max(1, len(tensors))
        probed = range(len(tensors)) if self._verify else range(len(tensors))[self._probe : self._probe + 1]
        most = None if self._verify else _PROBE
        on_devices = cuda.are_on_devices(tensors_of(tensors))
        contents = {number: _content(tensors[number][1], most) for number in probed}
        self._proofs += 1
        sampled = not on_devices and not self._verify
        samples = _samples(tensors_of(tensors), self._proofs, self._aliases.places) if sampled else []

        def is_as_before(number: int, content: int | None) -> bool:
            tensor = tensors[number][1]
            there = [tensor] if on_devices else [tensor, copies[number]]
            return content is None or all(_content(each, most) == content for each in there)

        def check() -> None:
            counted = before if versions is None else list(versions())
            assert counted is not None
            now = list(map(_version, counting))
            changed = None
            if now != counted:
                others = (number_of(i) for i, version in enumerate(counted) if now[i] != version)
                changed = next((number for number in others if number is not None), None)
            if changed is None:
                changed = self._aliases.moved()
            if changed is None:
                changed = next((i for i, content in contents.items() if not is_as_before(i, content)), None)
            if changed is None:
                changed = next((i for i, at, was in samples if _bytes_at(copies[i], at, len(was)) != was), None)
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
        self._aliases = Aliases()
        self._thread.close()


class OverlappingDoor:
    """What doors with asynchronous saves offer whose users make the steps."""

    _overlap: Overlap

    def watch(self, *optimizers: Optimizer, updates: Callable[[], Iterable[torch.Tensor]] | None = None) -> None:
        """Have what these optimizers update, parameters and their own state, copied while training goes on: an
        asynchronous save returns before, and each ``step()`` waits for what is left of the copy, and helps. Everything
        else is copied before the save returns, and so is what an optimizer updates whose ``step()`` calls no hooks of
        ``register_step_pre_hook``.

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


class _From(Sequence[torch.Tensor]):
    """What follows from number ``begin`` on in a sequence that comes later."""

    def __init__(self, begin: int) -> None:
        self._begin = begin
        self.all: Sequence[torch.Tensor] = ()

    def __len__(self) -> int:
        return max(0, len(self.all) - self._begin)

    def __getitem__(self, index: Any) -> Any:
        return self.all[self._begin + index]


def _can_wait(tensor: torch.Tensor) -> bool:
    """Whether it can be told that a tensor has not changed, and it has memory that can be copied by slices."""
    plain = tensor.layout is torch.strided and tensor.device.type in ("cpu", "cuda")
    lazy = tensor.is_conj() or tensor.is_neg()  # its bytes are not those of a copy
    return plain and not lazy and not tensor.is_inference() and tensor.numel() > 0


def _samples(
    tensors: Sequence[torch.Tensor], number: int, places: dict[int, tuple[int, int]] | None = None
) -> list[tuple[int, int, bytes]]:
    """Of each slice of tensors on the CPU a few bytes, others for each ``number``: tensor, offset and content. Of each
    tensor, where there are not too many.

    Args:
        places: of the memory of some of these tensors; others are added.
    """
    samples: list[tuple[int, int, bytes]] = []
    places = {} if places is None else places
    shift, every = number * _SHIFT, 1 + len(tensors) // _MOST_SAMPLES
    for index in range(number % every, len(tensors), every):
        place = places.get(index)
        if place is None:
            place = places[index] = _place_of(tensors[index])
        address, nbytes = place
        for begin in range(0, nbytes, max(SLICE, nbytes // _MOST_SAMPLES)):
            at = begin + shift % max(1, min(nbytes - begin, SLICE) - _SAMPLE)
            samples.append((index, at, ctypes.string_at(address + at, min(nbytes - at, _SAMPLE))))
    return samples


def _place_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Address and number of bytes; none where its bytes are not there, or not those of a copy."""
    there = tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()
    address = tensor.data_ptr() if there else 0  # none: its memory was let go of, as the copy will say
    return address, tensor.nbytes if address else 0


def _bytes_at(tensor: torch.Tensor, offset: int, nbytes: int) -> bytes:
    return ctypes.string_at(tensor.data_ptr() + offset, nbytes)


def _content(tensor: torch.Tensor, most: int | None) -> int | None:
    """A digest of a tensor, of its first ``most`` bytes if that is given; None if it would take too long."""
    if most is not None and (tensor.is_cuda or not tensor.is_contiguous()):
        return None  # it would have to be waited for, or copied as a whole
    if not tensor.data_ptr():
        return None
    data: Any = bytes_of(tensor.detach().cpu().contiguous())[:most].numpy()
    return xxhash.xxh3_64_intdigest(data)
