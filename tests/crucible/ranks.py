"""What a rank does in the crucible: one life after the other, as it is told, in a process that stays warm.

Owns the doors as ranks see them. What is told and what is made of the answers is `tests.crucible.campaign`'s.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from ml_flashpoint import Flashpoint, events
from ml_flashpoint.adapter.pytorch.memory_stager import HAS_FUTURES, MemoryStager
from ml_flashpoint.format.errors import FlashpointError, LoadError
from ml_flashpoint.local import AsyncCallsQueue, BasicTensorAwareStateDict, LocalCheckpointManager
from ml_flashpoint.ranks.strategies import PairwiseReplicationStrategy
from tests.crucible.scenarios import Life, Save, Scenario
from tests.crucible.states import Holder
from tests.support import dcp
from tests.support.forked import Report
from tests.support.injector import Injector, Interrupted

DEADLINE_S = 30.0


@dataclass(frozen=True)
class Order:
    """One life of one rank: the one with the number ``life`` of a scenario."""

    scenario: Scenario
    life: int
    rank: int
    base: str
    meeting: tuple[int, str]  # port of a store, and the prefix of what is there for this life
    variants: tuple[int, ...]  # that the newest version may have, the likeliest first
    saved_by: Mapping[tuple[int, int], int]  # number of ranks that saved a step in a life
    on_this_node: tuple[int, ...]  # processes

    @property
    def plan(self) -> Life:
        """What happens in this life."""
        return self.scenario.lives[self.life]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.plan.placement)


class Door(ABC):
    """A way in, on one rank."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.holder: Holder = None  # type: ignore[assignment]
        self.failures: list[str] = []
        self._verified: int | None = None
        self._changed = threading.Condition()
        self._subscription = contextlib.ExitStack()
        self._subscription.enter_context(events.subscribe(self._hear))

    def _hear(self, event: events.Event) -> None:
        if isinstance(event, events.VersionVerified):
            with self._changed:
                self._verified = event.step
                self._changed.notify()

    @property
    def verified(self) -> int | None:
        """The newest step that this rank knows to be safe from what its placement survives."""
        events.flush()
        return self._verified

    def await_verified(self, step: int | None) -> bool:
        """Wait until this rank knows that a step is verified."""
        with self._changed:
            return self._changed.wait_for(lambda: step is None or step == self._verified, DEADLINE_S)

    def make(self, variant: int) -> None:
        self.holder = Holder(self.order.scenario.spec, variant, self.order.rank, self.order.world_size)
        self.holder.fill(0, 99)

    @abstractmethod
    def load(self) -> int | None:
        """Load the newest version into a holder; its step."""

    def kept(self) -> list[int]:
        """Steps of the versions that can be gone back to."""
        return []

    def go_back(self, step: int) -> None:
        """Load a version other than the newest."""
        raise NotImplementedError

    def before_change(self) -> None:  # noqa: B027  (a door that copies at once need not be told)
        """The holder is about to change."""

    @abstractmethod
    def save(self, save: Save) -> None:
        """Save the holder."""

    @abstractmethod
    def settle(self) -> bool:
        """Wait until all is committed and copied, or lost."""

    def end(self) -> None:
        """Close, and hear of no more events."""
        self.close()
        self._subscription.close()

    @abstractmethod
    def close(self) -> None:
        """End; versions stay."""


class FacadeDoor(Door):
    """`Flashpoint`."""

    fp: Flashpoint | None = None

    def _open(self, variant: int) -> Flashpoint:
        if self.fp is not None:
            self.fp.close()
        self.make(variant)
        self.fp = Flashpoint(
            self.order.base,
            deadline_s=DEADLINE_S,
            handle_sigterm=False,
            on_world_size_change="keep",
            keep=self.order.scenario.keep,
        )
        tracked: dict[str, Any] = {"model": self.holder.model, "notes": self.holder.notes}
        if self.holder.optimizer is not None:
            tracked["optimizer"] = self.holder.optimizer
        return self.fp.track(**tracked)

    def load(self) -> int | None:
        return self._load(None)

    def kept(self) -> list[int]:
        assert self.fp is not None
        return [version.step for version in self.fp.versions()]

    def go_back(self, step: int) -> None:
        assert self._load(step) == step

    def _load(self, wanted: int | None) -> int | None:
        for variant in self.order.variants[:-1]:
            try:
                return self._resume(variant, wanted)
            except LoadError:  # of another structure: what a user would do is to go back to the code of then
                continue
        return self._resume(self.order.variants[-1], wanted)

    def _resume(self, variant: int, wanted: int | None) -> int | None:
        fp = self._open(variant)
        step = fp.resume(step=wanted)
        assert fp.last_recovery is not None
        if fp.last_recovery.source == "nothing":
            return None
        assert fp.last_recovery.version == f"step-{step}_ckpt"
        self.holder.adopt(self.holder.notes.state["variant"])
        return step

    def before_change(self) -> None:
        assert self.fp is not None
        self.fp.before_update()

    def save(self, save: Save) -> None:
        assert self.fp is not None
        # A loop's save may be skipped, or passed over for a newer one; this one may not.
        if save.awaited or save.nth == len(self.order.plan.saves):
            self.fp.save(save.step)
        assert self.fp.step() == save.step
        if save.awaited:
            self.fp.wait()
        self._note_failure()

    def settle(self) -> bool:
        assert self.fp is not None
        settled = self.fp.wait()
        self._note_failure()
        return settled

    def _note_failure(self) -> None:
        assert self.fp is not None
        error = self.fp.health.last_error
        if error is not None and error not in self.failures:
            assert "was changed while it was copied" not in error, error
            self.failures.append(error)

    def close(self) -> None:
        if self.fp is not None:
            self.fp.close()


class DcpDoor(Door):
    """`dcp.save`, `dcp.async_save` and `dcp.load`."""

    def __init__(self, order: Order) -> None:
        super().__init__(order)
        self.door = dcp.Door(order.base)  # type: ignore[arg-type]
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=DEADLINE_S))
        self._under_way: Future[Any] | None = None

    def make(self, variant: int) -> None:
        super().make(variant)
        if self.holder.optimizer is not None:
            self.door.writer.watch(self.holder.optimizer)

    def before_change(self) -> None:
        self.door.writer.before_update()

    def state(self) -> dict[str, Any]:
        tensors = {name: tensor.detach() if tensor.requires_grad else tensor for name, tensor in self.holder.tensors()}
        notes = {key: value for key, value in self.holder.notes.state.items() if key not in ("rank", "own")}
        return {"tensors": tensors, "notes": notes, "own": dict(self.holder.notes.state["own"])}

    def load(self) -> int | None:
        step = self.door.latest()
        if step is None:
            self.make(0)
            return None
        errors: list[BaseException] = []
        for variant in self.order.variants:
            self.make(variant)
            state = self.state()
            try:
                self.door.load(state, step, process_group=self.group)
            except (Exception, CheckpointException) as error:
                errors.append(error)
                if "Missing key" in str(error) or "size mismatch" in str(error).lower():
                    continue
                raise
            self.holder.notes.state = {**self.holder.notes.state, **state["notes"], "own": state["own"]}
            return step
        raise errors[0]

    def save(self, save: Save) -> None:
        self._end()
        try:
            if save.mode == "sync":
                self.door.save(self.state(), save.step, process_group=self.group)
                return
            options = dcp.checkpointer(save.mode)
            if save.nth % 2 and HAS_FUTURES:  # who says so before anything changes: see before_change
                options["async_stager"] = MemoryStager(self.door.writer)
            future = self.door.async_save(self.state(), save.step, process_group=self.group, **options)
        except (Exception, CheckpointException) as error:
            self._failed(error)
            return
        self._under_way = future
        if save.awaited:
            self._end()

    def _failed(self, error: BaseException) -> None:
        assert "was changed while it was copied" not in str(error), error
        self.failures.append(f"{type(error).__name__}: {error}")

    def _end(self) -> None:
        if self._under_way is None:
            return
        future, self._under_way = self._under_way, None
        try:
            future.result(DEADLINE_S * 5)
        except (Exception, CheckpointException) as error:
            self._failed(error)

    def settle(self) -> bool:
        self._end()
        return self.door.saver.wait(DEADLINE_S)

    def close(self) -> None:
        self.door.close()


class LocalDoor(Door):
    """`LocalCheckpointManager`."""

    def __init__(self, order: Order) -> None:
        super().__init__(order)
        strategy = PairwiseReplicationStrategy() if len(set(order.plan.placement)) > 1 else None
        self.manager = LocalCheckpointManager(order.base, repl_strategy=strategy)
        self.queue = AsyncCallsQueue()
        self._under_way: int | None = None
        self._committed: int | None = None  # on all ranks

    def load(self) -> int | None:
        step = self.manager.find_latest()
        if step == -1:
            self.make(0)
            return None
        loaded, (iteration, _, _) = self.manager.load()
        state = loaded.state_dict  # type: ignore[attr-defined]
        self.make(int(state["variant"]))
        found = dict(self.holder.tensors())
        assert list(found) == list(state["tensors"]), "other keys"
        for name, tensor in found.items():
            value = state["tensors"][name]
            assert (value.shape, value.dtype) == (tensor.shape, tensor.dtype), name
            with torch.no_grad():
                tensor.copy_(value)
        self.holder.notes.state = state["notes"]
        return int(iteration)

    def save(self, save: Save) -> None:
        self._end()
        tensors = {name: tensor.detach() for name, tensor in self.holder.tensors()}
        content = {"tensors": tensors, "notes": dict(self.holder.notes.state), "variant": self.holder.variant}
        try:
            request = self.manager.save(BasicTensorAwareStateDict(content), save.step, is_async=save.mode != "sync")
            if request is None:
                self._committed = save.step
                return
            self.queue.schedule_async_request(request)
            self._under_way = save.step
        except FlashpointError as error:
            self.failures.append(f"{type(error).__name__}: {error}")
        if save.awaited:
            self._end()

    def _end(self) -> None:
        step, self._under_way = self._under_way, None
        if step is not None:
            try:
                self.queue.maybe_finalize_async_calls(blocking=True)
                self._committed = step
            except FlashpointError as error:
                self.failures.append(f"{type(error).__name__}: {error}")

    def settle(self) -> bool:
        self._end()
        return self.await_verified(self._committed)

    def close(self) -> None:
        self.manager.close()


DOORS: dict[str, type[Door]] = {"facade": FacadeDoor, "dcp": DcpDoor, "local": LocalDoor}


def door_of(order: Order) -> Door:
    """Collective: the door of a life. That of megatron-core, which need not be there, is imported when it is due."""
    if order.scenario.door == "megatron":
        from tests.crucible.megatron_door import MegatronDoor

        return MegatronDoor(order)
    return DOORS[order.scenario.door](order)


def serve(report: Report) -> None:
    """Live as often as told."""
    torch.set_num_threads(1)
    while True:
        order = report.listen()[0]
        if order is None:
            return
        try:
            report("lived", live(report, order))
        except (Exception, CheckpointException) as error:
            traceback.print_exc()
            report("raised", _is_ours(error), type(error).__name__, str(error))
        gc.collect()


def live(report: Callable[..., None], order: Order) -> dict[str, Any]:
    """One life: recover, check, save, end."""
    os.environ["FLASHPOINT_NODE_ID"] = f"node-{order.plan.placement[order.rank]}"
    os.environ["MASTER_ADDR"] = "127.0.0.1"  # where saving processes meet
    port, prefix = order.meeting
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(prefix, dist.TCPStore("127.0.0.1", port)),
        rank=order.rank,
        world_size=order.world_size,
        timeout=timedelta(seconds=8 * DEADLINE_S),  # ranks settle one deadline after the other, and then meet
    )
    # torch's saving process takes long to start where others compute.
    takes_s = DEADLINE_S * (4 if any(save.mode == "process" for save in order.plan.saves) else 1)
    os.environ["FLASHPOINT_SEAL_DEADLINE_S"] = str(takes_s)
    plan, clock_s = order.plan, order.plan.clock_s if order.rank == 0 else 0.0
    injector = Injector(order.rank, plan.faults, base=order.base, on_this_node=order.on_this_node, clock_s=clock_s)
    with injector, Interrupted() if plan.interrupted else contextlib.nullcontext():
        door = door_of(order)
        found = door.load()
        if found is not None:
            step, life = door.holder.check(order.saved_by if order.scenario.door in ("facade", "local") else {})
            assert step == found, f"version {found} holds step {step}"
            report("loaded", (step, life, door.holder.variant))
            found = _back(report, door, found)
        else:
            report("loaded", None)
        for planned in order.plan.saves:
            save = replace(planned, step=planned.nth + (found or 0))
            injector.at(save.nth)
            door.before_change()
            if save.grows and door.holder.variant < len(order.scenario.spec.grown):
                door.holder.grow()
            door.holder.fill(save.step, order.life)
            if save.nth == len(order.plan.saves) and any(each.grows for each in order.plan.saves):
                dist.barrier()  # as a training step is one, or a rank that has not grown is done first
            report("begins", save.step, door.holder.variant)
            door.save(save)
            report("state", door.verified)
        settled = door.settle()
        report("state", door.verified)
        if order.scenario.keep > 1:
            report("kept", door.kept())
        dist.barrier()  # as training does: nobody leaves while others still copy from here
        door.end()
    dist.destroy_process_group()
    return {"settled": settled, "failures": door.failures, "fired": injector.fired}


def _back(report: Callable[..., None], door: Door, found: int) -> int:
    """Go back to the oldest version that is kept, if that is to be; the step gone on from."""
    order = door.order
    if order.scenario.keep == 1:
        return found
    kept = door.kept()
    report("kept", kept)
    if not order.plan.looks_back or min(kept, default=found) == found:
        return found
    report("goes back", min(kept))
    door.go_back(min(kept))
    step, life = door.holder.check(order.saved_by)
    report("back", (step, life, door.holder.variant))
    return step


def _is_ours(error: BaseException) -> bool:
    """Whether it is an error that the docs name; DCP wraps those of all ranks into one."""
    causes = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
    return all(isinstance(cause, FlashpointError) for cause in causes)
