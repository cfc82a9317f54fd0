"""What DCP stages: a save in the process that trains (`Staged`), and the state that consists of its copies.

The copies lie in the slot of the save, a file that another process can map, so that only places travel there. Before a
base container is known they are copies like any others. `TensorLeaves` takes the tensors out of a state, and builds the
state anew around copies.

DCP leaves out replicated tensors only when it plans, which in asynchronous saves is after they were staged; but as long
as structure and planner stay, so does the plan. So one save teaches the next (`Omission`). A wrong guess costs a save
and never a byte: what was not staged has no data to write.
"""

from __future__ import annotations

import copy
import functools
import threading
import time
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed._shard.sharded_tensor import Shard  # type: ignore[attr-defined]
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.tensor import DTensor

from ml_flashpoint.copy import cuda
from ml_flashpoint.copy.cpu import cpu_clones, view_identity
from ml_flashpoint.copy.overlap import LateCopy
from ml_flashpoint.copy.tensors import is_plain_strided, materialized, storable_name, whole_copy
from ml_flashpoint.engine.checkpointer import Checkpointer
from ml_flashpoint.engine.committing import BytesItem, TensorItem
from ml_flashpoint.engine.save import Save
from ml_flashpoint.format.errors import NotStagedError, SaveError
from ml_flashpoint.format.knobs import seal_deadline_s
from ml_flashpoint.state.plan import Structure, Tree
from ml_flashpoint.state.private import ShardedTensor, tree_unflatten

if TYPE_CHECKING:
    from _collections_abc import dict_items

GIVEN_S = 1e-3
"""Seconds in which a thread that DCP has just started lets the training thread return to its loop."""
_IMMUTABLE = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_CONTAINERS = frozenset({dict, OrderedDict, defaultdict, list, tuple})


class LeftOut(torch.Tensor):
    """A stand-in for a tensor that is not staged. It has no data, and a planner cannot pickle it."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> LeftOut:
        """Return one of a tensor's shape and dtype."""
        return torch.empty_like(tensor, device="meta").as_subclass(cls)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotStagedError(f"a tensor of shape {tuple(self.shape)} has no data: another rank used to write it")


@dataclass(frozen=True, eq=False, slots=True)
class Places:
    """The places of plain tensors in states of one structure: number of the leaf that each is of, and its path, such as
    ``optim.state.0.exp_avg``: DCP's name, when it flattens."""

    structure: Structure
    numbers: list[int]
    paths: list[str]


class TensorLeaves:
    """The plain tensors of a state dict, local parts of `DTensor` and `ShardedTensor` among them. The rest is copied.

    Args:
        before: places of the save before, which are taken where the structure is the same.

    Attributes:
        tensors: the tensors, without history; each memory once.
        indices: for each place of a plain tensor, which of ``tensors`` is there.

    Raises:
        Exception: a value cannot be copied, for whatever reason that has.
    """

    def __init__(self, state_dict: Mapping[str, Any], before: Places | None = None) -> None:
        tree = self._tree = _flattened(state_dict)
        self._before = before
        self._values = list(tree.leaves)
        self._numbers: list[int] = []  # of the leaf that each plain tensor is of
        tensors: list[torch.Tensor] = []
        for number, leaf in enumerate(tree.leaves):
            if isinstance(leaf, torch.Tensor) and (parts := _parts(leaf)) is not None:
                tensors += parts
                self._numbers += [number] * len(parts)
            elif isinstance(leaf, torch.Tensor):  # a meta tensor, too: it is an error only if the plan wants it
                self._values[number] = whole_copy(leaf, _paths(tree)[number])
            elif not isinstance(leaf, _IMMUTABLE):
                self._values[number] = copy.deepcopy(leaf)
        if cuda.in_use() and any(one is not other for one, other in zip(self._values, tree.leaves, strict=True)):
            cuda.settle()
        self.indices = _each_memory_once(tensors)
        self._first: dict[int, int] = {}
        for place, index in enumerate(self.indices):
            self._first.setdefault(index, place)
        self.tensors = [tensors[place] for place in self._first.values()]

    @functools.cached_property
    def places(self) -> Places:
        """The places: the same object as before while nothing but content has changed."""
        tree, before = self._tree, self._before
        if before is not None and before.numbers == self._numbers and before.structure.is_of(tree):
            return before
        paths = _paths(tree)
        return Places(Structure(tree), self._numbers, [paths[number] for number in self._numbers])

    @property
    def names(self) -> list[str]:
        """A name for each tensor, as the format takes it; unique."""
        names = [storable_name(self.places.paths[place]) for place in self._first.values()]
        return names if len(set(names)) == len(names) else [f"{name}#{number}" for number, name in enumerate(names)]

    def rebuild(self, copies: Mapping[int, torch.Tensor]) -> dict[str, Any]:
        """Return the state dict with ``copies[i]`` in the place of ``tensors[i]``, or else a `LeftOut`."""
        parts: dict[int, list[torch.Tensor]] = {}
        for number, index in zip(self._numbers, self.indices, strict=True):
            copied = copies.get(index)
            parts.setdefault(number, []).append(LeftOut.of(self.tensors[index]) if copied is None else copied)
        for number, found in parts.items():
            self._values[number] = _rebuilt(self._tree.leaves[number], found)
        built: dict[str, Any] = tree_unflatten(self._values, self._tree.spec)
        return built


def _flattened(state_dict: Mapping[str, Any]) -> Tree:
    """Return a state as a tree. Mappings of other types become dictionaries, other containers are copied whole."""
    tree = Tree(state_dict, _is_leaf)
    while any(isinstance(leaf, Mapping) for leaf in tree.leaves):
        leaves = [dict(leaf) if isinstance(leaf, Mapping) else leaf for leaf in tree.leaves]
        tree = Tree(tree_unflatten(leaves, tree.spec), _is_leaf)
    return tree


def _is_leaf(value: Any) -> bool:
    return type(value) not in _CONTAINERS


def _parts(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """Return the plain tensors that are all there is to a tensor on this rank; None if there is more to it."""
    if isinstance(tensor, ShardedTensor):
        return [materialized(shard.tensor) for shard in tensor.local_shards()]
    local = materialized(tensor._local_tensor if isinstance(tensor, DTensor) else tensor)
    return [local] if is_plain_strided(local) and not local.is_meta else None


def _rebuilt(tensor: Any, parts: list[torch.Tensor]) -> Any:
    if isinstance(tensor, ShardedTensor):
        made = copy.copy(tensor)
        shards = zip(parts, tensor.local_shards(), strict=True)
        made._local_shards = [Shard(part, shard.metadata) for part, shard in shards]
        return made
    if isinstance(tensor, DTensor):
        return DTensor(parts[0], tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return parts[0]


def _each_memory_once(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return a number for each tensor: the same for those that are the same view of the same memory."""
    if len(set(map(torch.Tensor.data_ptr, tensors))) == len(tensors):
        return list(range(len(tensors)))
    seen: dict[object, int] = {}
    return [seen.setdefault(view_identity(t) if t.numel() else place, len(seen)) for place, t in enumerate(tensors)]


def _paths(tree: Tree) -> list[str]:
    """Return the place of each leaf. DCP refuses a mapping with two keys that are the same as text."""
    found = {number: ".".join(map(str, path)) for path, number in tree.places().items()}
    return [found.get(number, "") for number in range(len(tree.leaves))]


# ---- a save --------------------------------------------------------------------------------------------------------


_reading = threading.local()


class StagedStateDict(dict[str, Any]):
    """A state that consists of copies. DCP saves it on a thread of its own, or sends it to another process, and says
    neither; so the state notes which thread reads it. ``staged`` is a `Staged`, or an `ArrivedState` in another
    process."""

    def __init__(self, state: dict[str, Any], staged: Any) -> None:
        super().__init__(state)
        self.staged = staged

    def items(self) -> dict_items[str, Any]:
        """Return the items."""
        _reading.staged = self.staged
        return super().items()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        reduced: tuple[Any, ...] = self.staged.sent(dict(self))
        return reduced


def take_read() -> Any:
    """Return what was staged of the state that the calling thread has read since the last call; None if it was no
    staged one."""
    staged, _reading.staged = getattr(_reading, "staged", None), None
    return staged


class Staged:
    """A save of DCP's; one that was not staged has no copies.

    Args:
        checkpointer: None if no base container is known yet.
        send: returns what a state is pickled as that consists of the copies.

    Attributes:
        save: None before it is begun.
        error: why there is nothing to save; raised as DCP plans.
        others: names of this rank's tensors that other ranks write, once its final plan is known; see `staging`.
        held_s: time that staging held the training loop; 0 if nothing was staged.
        thread: saves it, or waits for the process that does. None before.
        state: refers to the state that consists of the copies, for as long as DCP keeps that.
        is_claimed: True once a save has read what was staged.
    """

    def __init__(
        self, checkpointer: Checkpointer | None, send: Callable[[Staged, dict[str, Any]], tuple[Any, ...]]
    ) -> None:
        self.save: Save | None = None
        self.error: BaseException | None = None
        self.others: frozenset[str] | None = None
        self.held_s = 0.0
        self.thread: threading.Thread | None = None
        self.state: Callable[[], object] = object
        self.is_claimed = False
        self._checkpointer, self._send = checkpointer, send
        self._late: LateCopy | None = None
        self._copies: list[tuple[torch.Tensor, int]] = []
        self._stager = threading.current_thread()
        self._threads = weakref.WeakSet(threading.enumerate())

    def copy(self, tensors: Sequence[TensorItem], late: LateCopy | None) -> Sequence[torch.Tensor]:
        """Begin the save, if a base container is known, and copy tensors away. Return the copies in order."""
        if self._checkpointer is None:
            return cpu_clones([tensor for _, tensor in tensors])
        self.save, self._late = self._checkpointer.begin(explicit=True), late
        copies = self._checkpointer.stage(self.save, tensors, late=late)
        if late is None:  # else nothing is digested before it is committed
            self._copies = [(copied, copied._version) for copied in copies]
        return copies

    @property
    def is_copied(self) -> bool:
        """True if nothing is copied any more: nothing was late, or it is over."""
        return self._late is None or self._late.over

    def await_copies(self) -> None:
        """Wait until all is copied: whoever reads the copies needs all of them."""
        if self._late is None or self.error is not None:
            return
        try:
            self._late.wait(seal_deadline_s())
        except SaveError as error:
            self.fail(error)

    def claim(self, checkpointer: Checkpointer, step: int) -> None:
        """Give the save its step, on the thread that saves it. Raises `FlashpointError`, also if staging failed."""
        self.thread = self.thread or threading.current_thread()
        self.await_copies()
        failure, self._checkpointer = self.error, checkpointer
        try:
            if self.save is None:
                self.save = checkpointer.begin(step, explicit=True)
            else:
                checkpointer.name(self.save, step)
            if failure is not None:
                raise failure
        except Exception as error:
            self.fail(error)
            if failure is not None:
                raise SaveError(f"staging failed: {failure}", step=step) from failure
            raise

    def fill(self, tensors: Sequence[TensorItem], byte_items: Sequence[BytesItem]) -> None:
        """Bring all items into one object. Raises `SaveError` if the planner has written to a copy: its digest may be
        made already."""
        checkpointer, save = self._begun
        copies, self._copies = self._copies, []
        if any(copied._version != version for copied, version in copies):
            hint = "have it return other tensors, or save in a process (AsyncCheckpointerType.PROCESS)"
            raise SaveError("the planner has written to a tensor that was staged", hint=hint)
        checkpointer.fill(save, tensors, byte_items)

    def commit(self, extra: Sequence[BytesItem] = ()) -> None:
        """Commit the object; return when this rank's part is committed."""
        checkpointer, save = self._begun
        checkpointer.commit(save, extra=extra)
        save.committed.result()

    def fail(self, error: BaseException) -> None:
        """Give it up. Safe to repeat, and after it was committed."""
        self.error, self._copies = self.error or error, []
        if self.save is not None and self._checkpointer is not None:
            self._checkpointer.fail(self.save, error)

    @property
    def has_ended(self) -> bool:
        """True once this rank's part is committed, or there will be none."""
        return self.error is not None or (self.save is not None and self.save.committed.done())

    @property
    def is_over(self) -> bool:
        """True if DCP does nothing with it any more: its thread has ended or begins another save, its state is dropped,
        or, on the thread that has staged it, no thread has been started for it."""
        current = threading.current_thread()
        if self.thread is not None:
            return self.thread is current or not self.thread.is_alive()
        if self.state() is None:
            return True
        # DCP starts a thread for each asynchronous save before that returns.
        started = set(threading.enumerate()).difference(self._threads)
        return current is self._stager and all(each.name.startswith("flashpoint-") for each in started)

    @property
    def _begun(self) -> tuple[Checkpointer, Save]:
        if self.save is None or self._checkpointer is None:
            raise SaveError("nothing was staged")
        return self._checkpointer, self.save

    # ---- for another process ----------------------------------------------------------------------------------

    def sent(self, state: dict[str, Any]) -> tuple[Any, ...]:
        """Return what the state is pickled as."""
        if (thread := threading.current_thread()) is not self._stager:
            time.sleep(GIVEN_S)  # for pickling, its thread would keep the interpreter's lock
            self.thread = thread
        self.await_copies()
        return self._send(self, state)

    def place_of(self, tensor: torch.Tensor) -> tuple[str, int] | None:
        """Return file and offset of one of the copies; None for any other tensor."""
        if self.save is None or self._checkpointer is None:
            return None
        return self._checkpointer.place_of(self.save, tensor)

    def tensor_at(self, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """Return the copy, or a part of it, that lies at an offset. Raises `SaveError` if there is none."""
        checkpointer, save = self._begun
        if self.error is not None:
            raise self.error
        return checkpointer.tensor_at(save, offset, dtype, shape)


# ---- what need not be staged --------------------------------------------------------------------------------------


class Omission:
    """Tensors that need not be staged, because other ranks write them. For the thread that stages."""

    def __init__(self) -> None:
        self.places: Places | None = None
        self._others: frozenset[str] = frozenset()
        self._last: Staged | None = None
        self._has_failed = False

    def needed(self, leaves: TensorLeaves, staged: Staged) -> list[int]:
        """Return the indices of the tensors to stage for a save. It teaches the next one of the same structure."""
        last, self._last = self._last, staged
        if leaves.places is not self.places:
            self.places, self._others, self._has_failed = leaves.places, frozenset(), False
        elif last is not None and isinstance(last.error, NotStagedError):
            # Another rank has another plan now, or plans of several kinds take turns.
            self._others, self._has_failed = frozenset(), True
        elif last is not None and last.others is not None and not self._has_failed:
            self._others = last.others
        others = self._others
        return sorted({i for path, i in zip(leaves.places.paths, leaves.indices, strict=True) if path not in others})


def tensor_names(plan: SavePlan) -> frozenset[str] | None:
    """Return the names of the tensors in a rank's own plan; None if the plan is empty, and stands for a cached one."""
    if not getattr(plan, "usable", True):
        return None
    return frozenset(item.index.fqn for item in plan.items if item.type is not WriteItemType.BYTE_IO)


def left_to_others(planner: SavePlanner, own: frozenset[str] | None, final: SavePlan) -> frozenset[str] | None:
    """Return the names of a rank's tensors that its final plan does not have, but its own; None if that is not known.
    Only torch's planner is known to write each tensor under the name of its place and from itself alone."""
    if type(planner) is not DefaultSavePlanner or not planner.flatten_state_dict or own is None:
        return None
    return own - {item.index.fqn for item in final.items}
