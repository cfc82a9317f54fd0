"""`Checkpointer`: the public face. The state of a program goes into a base container, and comes back from it.

The engine's `Checkpointer` moves named tensors and bytes. This one moves modules, optimizers and whatever else has a
state, and gives DCP its storage writer and reader.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from functools import partial
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from ml_flashpoint import events
from ml_flashpoint.adapter.pytorch.memory_stager import MemoryStager
from ml_flashpoint.adapter.pytorch.memory_storage_reader import MemoryStorageReader
from ml_flashpoint.adapter.pytorch.memory_storage_writer import MemoryStorageWriter
from ml_flashpoint.adapter.pytorch.metadata_format import METADATA_KEY, merged_metadata, metadata_of_share
from ml_flashpoint.config import Config
from ml_flashpoint.copy import cuda
from ml_flashpoint.copy.collection import collection_paused
from ml_flashpoint.copy.overlap import Overlap
from ml_flashpoint.engine import checkpointer as engine
from ml_flashpoint.engine.committing import BytesItem, TensorItem
from ml_flashpoint.engine.joint_load import JointLoad
from ml_flashpoint.engine.replicas import Table
from ml_flashpoint.engine.save import Save
from ml_flashpoint.engine.signals import answer_sigterm, interrupts_held
from ml_flashpoint.format.arguments import checked_callable, checked_integer
from ml_flashpoint.format.errors import (
    Blame,
    DeadlineError,
    InvalidArgumentError,
    LoadError,
    NothingLoadableError,
    ReshardError,
    SaveError,
    without_frames,
)
from ml_flashpoint.format.knobs import seal_deadline_s
from ml_flashpoint.format.names import MAX_STEP, CheckpointContainerId, SaveId
from ml_flashpoint.state.archive import save_archive
from ml_flashpoint.state.plan import Captured, Offer, Share, Tree
from ml_flashpoint.state.random_numbers import capture_rng_state, restore_rng_state
from ml_flashpoint.state.resharding import Resharding
from ml_flashpoint.state.tracked import Reshard, Stateful, TrackedLoad, TrackedState, checked_reshard, rank_key

_log = logging.getLogger(__name__)

State = Mapping[str, torch.nn.Module | Optimizer | Stateful]
"""Objects to save and load, by name: modules, optimizers, and others with ``state_dict`` and ``load_state_dict``."""

Fallback = Callable[[], "int | None"]

STORE_VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


class _Written(NamedTuple):
    """For states of one structure: all that this rank has, the agreement on who writes it, and this rank's share."""

    offer: Offer
    table: Table
    share: Share


class Checkpointer(engine.Checkpointer):
    """A base container that is open on all ranks, for loops that call `save` and `load` themselves. A context manager.

    ::

        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        with Checkpointer("/dev/shm/mlf-jobs/job-145", Config(replication="pairwise", keep=2)) as ckpt:
            step = ckpt.load(state)  # in place; 0 if there is none
            for step in range(step + 1, last_step + 1):
                train()
                save = ckpt.save(step, state)  # save.staged, save.committed, save.verified

    and for programs that call DCP::

        dcp.save(state_dict, checkpoint_id=ckpt.id(step), storage_writer=ckpt.writer())

    Construct it on all ranks, after ``init_process_group`` if there is one, and save the same steps on all of them.
    Construction, `load`, `latest`, `go_back` and `versions` are collective. For the arguments and errors see the
    engine's `Checkpointer`. ``last_load`` is the last `load`; None before.
    """

    def __init__(
        self, base: str | os.PathLike[str], config: Config | None = None, *, discard_existing: bool = False
    ) -> None:
        config = config or Config()
        self.overlap = Overlap(wanted=config.overlap)
        self.last_load: events.Resumed | None = None
        self.deadline_s = seal_deadline_s() if config.deadline_s is None else config.deadline_s
        self._writer_of_dcp: MemoryStorageWriter | None = None
        self._stager_of_dcp: MemoryStager | None = None
        self._state: dict[str, object] = {}
        self._tracked: TrackedState | None = None  # of that state
        self._written: _Written | None = None
        self._metadata: tuple[str, bytes] = ("", b"")  # of the table that was merged last; on the executor
        self._last: Save | None = None
        self._attempted = SaveId(0, -1)  # the highest, the same on all ranks
        self._is_saving = False
        super().__init__(base, config, discard_existing=discard_existing)
        warn_of_shared_store(self.ranks.rank)

    def _tracked_of(self, state: State, functions: Mapping[str, Reshard] | None = None) -> TrackedState:
        """Return what is tracked of a state: the same object as long as the state has the same objects."""
        if not isinstance(state, Mapping) or not state:
            text = "must be a dict of modules, optimizers and other objects with a state, by name"
            raise InvalidArgumentError(text, argument="state", value=state)
        known, tracked = self._state, self._tracked
        is_known = known.keys() == state.keys() and all(known[name] is each for name, each in state.items())
        if tracked is None or not is_known or functions is not None:
            tracked = TrackedState(self.ranks.rank, self.ranks.world_size)
            for name, value in state.items():
                tracked.add(name, value, (functions or {}).get(name))
                if isinstance(value, Optimizer):
                    self.overlap.watch(value)
            self._state, self._tracked = dict(state), tracked
        return tracked

    # ---- saving --------------------------------------------------------------------------------------------

    def save(self, step: int, state: State, *, explicit: bool = True) -> Save:
        """Save, and return once the state is copied: it may change then. The rest happens in the background. If the
        save fails, its futures have the error.

        Args:
            step: higher than the steps saved before in this run. For the step that was saved last, return that save;
                if it was skipped, failed or passed over, save it in a new run that continues from the newest version.
            state: the objects to save, by name.
            explicit: if no slot is free, wait for one, up to the deadline of the save. False: skip the save at once.

        Raises:
            UnaskedVersionsError: there are earlier versions, and `load` was not called.
            InvalidArgumentError: the step is not higher than those saved before, or ``state`` is invalid.
            SaveError: called during another call of `save` (in a signal handler), or the checkpointer is closed.
        """
        self.answer_sigterm()
        self.check_usable("load(state)")
        step = checked_integer("step", step, 0, MAX_STEP)
        return self.save_tracked(step, self._tracked_of(state), explicit=explicit)

    def answer_sigterm(self) -> None:
        """Act on a SIGTERM that has come, where a save would begin. Within a save, leave that to the next one: this
        call, of a signal handler, would wait for the save that it interrupts."""
        if not self._is_saving:
            answer_sigterm()

    def save_tracked(self, step: int, tracked: TrackedState, *, explicit: bool) -> Save:
        """Do as `save` with what a `Flashpoint` tracks, which has made sure that it may save."""
        if self._is_saving:
            text = "called while a save begins: in a signal handler, say"
            hint = "let the handler set a flag, and save in the loop"
            raise SaveError(text, step=step, rank=self.ranks.rank, hint=hint)
        cuda.settle()  # what the device still has to do of the step is not time that a save holds the loop
        began = time.perf_counter()
        try:
            self._is_saving = True
            with interrupts_held(), collection_paused():
                return self._save(SaveId(self.run, step), tracked, explicit=explicit)
        finally:
            self._is_saving = False
            events.emit(events.LoopHeld, self.ranks, self.base, step, seconds=time.perf_counter() - began)

    def _save(self, name: SaveId, tracked: TrackedState, *, explicit: bool) -> Save:
        step = name.step
        if name == self._attempted or not name.run:
            if (last := self._already(name, explicit=explicit)) is not None:
                return last
            name = SaveId(self.run, step)
        self._attempted = max(name, self._attempted)
        tree: Tree | Exception
        try:
            tree = self._flatten(name, tracked)
        except Exception as caught:  # of whatever kind: the other ranks learn that this rank has no part
            tree = caught
            self.replicas.pass_over(name)
        written = self._written
        self._last = save = self.begin(step, explicit=explicit, table="" if written is None else written.table.name)
        try:
            if isinstance(tree, Exception):
                raise tree
            assert written is not None
            captured = written.share.capture(tree)
            copies = save.stage(
                captured.tensors,
                [*written.share.byte_keys, METADATA_KEY],
                kind=captured.plan,
                late=self.overlap.begin(tensor for _, tensor in captured.tensors),
            )
            written.share.copy_values(captured, tree)
            captured.tensors = ()
            save.commit(items=partial(self._items, written, captured, copies))
        except Exception as caught:
            _log.debug("the save of step %d has failed", step, exc_info=caught)
            save.fail(without_frames(caught))
        except BaseException:  # the program is being interrupted
            save.fail(SaveError("interrupted", step=step, rank=self.ranks.rank))
            raise
        return save

    def _already(self, name: SaveId, *, explicit: bool) -> Save | None:
        """Return the save of this name, if it has not failed on any rank, nor was passed over where somebody waits for
        it now. Else a new run begins. Collective."""
        last, is_there = self._last, False
        if last is not None and last.id == name:
            futures.wait([last.committed], self.deadline_s)  # it may have no slot in the end
            is_there = not last.committed.done() or last.committed.exception() is None
            is_there = is_there and (not explicit or last.ask())
        if self.ranks.all_ok(is_there):
            return last
        self.latest()
        return None

    def _flatten(self, save: SaveId, tracked: TrackedState) -> Tree:
        """Flatten the state. Afterwards `_written` says what this rank writes of it."""
        tree, ranks, known = Tree(tracked.to_save()), self.ranks, self._written
        offer = None if known is None or known.offer.structure != tree.structure else known.offer
        if offer is None:
            self._written = known = None
            offer = Offer(tree, rank=ranks.rank, ranks=ranks.world_size, own=rank_key(ranks.rank))
        metadata = partial(_metadata_by, offer, ranks.rank)
        table = self.replicas.agree(
            save, *offer.digests, lambda: list(offer.replicas.values()), self.deadline_s, share=metadata
        )
        if known is None or table is not known.table:
            self._written = _Written(offer, table, Share(offer, offer.written(table.written)))
        return tree

    def _items(
        self, written: _Written, captured: Captured, copies: Sequence[torch.Tensor]
    ) -> tuple[list[TensorItem], list[BytesItem]]:
        """Return the items of a save under their names. On the committing executor."""
        allowed, table = tuple(self.config.safe_globals), written.table
        tensors, byte_items = written.share.named(captured, copies, partial(save_archive, allowed=allowed))
        self.replicas.publish(table.name, partial(_metadata_by, written.offer, self.ranks.rank, table))
        if self.ranks.rank == 0:
            if self._metadata[0] != table.name:
                shares = self.replicas.collect(table.name, self.deadline_s)
                self._metadata = table.name, merged_metadata(shares)
            byte_items.append((METADATA_KEY, self._metadata[1]))
        return tensors, byte_items

    # ---- loading -------------------------------------------------------------------------------------------

    def load(
        self,
        state: State,
        *,
        step: int | None = None,
        fallback: Fallback | None = None,
        reshard: Reshard | Mapping[str, Reshard] | None = None,
    ) -> int:
        """Load the newest version that all ranks can load, or the version of a step, in place. Collective.

        If a version is damaged, the next older one is loaded. Afterwards a new run begins, and the filesystem is
        checked for room for future versions.

        Args:
            state: the objects to load into, by name.
            step: load the version of this step, or raise. Newer versions are ignored from then on, and later saves
                reuse their memory.
            fallback: called on all ranks if memory has no version, or none that is intact. It loads the state from
                another place, and returns the number of steps done, or None for 0. Not together with ``step``.
            reshard: functions for state that belongs to one rank, for another number of ranks; see `Flashpoint.track`.

        Returns:
            The step of the version; the result of ``fallback``; 0 at a fresh start.

        Raises:
            ReshardError: another number of ranks saved the version, and there is no rule for state that belonged to
                one rank.
            LoadError: a version does not fit the objects, none can be loaded and there is no fallback
                (`NothingLoadableError`), or there is no version of ``step``.
            CapacityError: the filesystem is too small.
            SaveError: the checkpointer is closed. JobInUseError: this process is a forked child.
            FlashpointError: an argument is invalid, ranks lost each other, or their fallbacks failed or differ.
        """
        self.check_usable()
        tracked = self._tracked_of(state, None if reshard is None else checked_reshard(reshard, state))
        return self.load_tracked(tracked, step=step, fallback=fallback).step or 0

    def load_tracked(self, tracked: TrackedState, *, step: int | None, fallback: Fallback | None) -> events.Resumed:
        """Do as `load` with what a `Flashpoint` tracks."""
        fallback = checked_callable("fallback", fallback, "without arguments that loads a state and returns its step")
        wanted = checked_wanted(step, fallback)
        began, ranks = time.perf_counter(), self.ranks
        self.overlap.before_update()
        if not ranks.all_ok(self.await_commits(self.deadline_s)):
            raise DeadlineError("a save is still under way, on this rank or another one", rank=ranks.rank)
        load = _Load(self, tracked, wanted)
        version = load.run(may_fall_back=fallback is not None)
        report, loaded_s = self.last_recovery or events.VersionRecovered(), time.perf_counter() - began
        done, source = 0, "nothing"
        if version is not None:
            done, source = version.step or 0, report.tier
        elif fallback is not None:
            if why := load.why():
                _log.error("calling the fallback; later saves will overwrite the versions in memory: %s", why)
            done, source = self._fall_back(fallback), "fallback"
        self.go_on_from(version)
        self.check_room(tracked.expected_bytes())
        self.last_load = events.emit(
            events.Resumed,
            ranks,
            self.base,
            done,
            source=source,
            seconds=time.perf_counter() - began,
            version=None if version is None else version.name,
            detect_s=report.detect_s,
            plan_s=report.plan_s,
            fetch_s=report.fetch_s,
            fetched_bytes=report.fetched_bytes,
            load_s=loaded_s - report.detect_s - report.plan_s - report.fetch_s,
            discarded=tuple(failure.version for failure in load.failures),
        )
        return self.last_load

    def _fall_back(self, fallback: Fallback) -> int:
        """Call a program's fallback, and return the step that it has loaded."""
        ranks = self.ranks

        def call() -> int:
            returned = fallback()
            return checked_integer("fallback", 0 if returned is None else returned, 0, MAX_STEP)

        step = ranks.together(call, LoadError, "the fallback")
        steps = [int(blob) for blob in ranks.gather(str(step).encode())]
        if len(set(steps)) > 1:
            raise LoadError(f"the fallback returned different steps on different ranks: {steps}", rank=ranks.rank)
        return step

    # ---- DCP -----------------------------------------------------------------------------------------------

    def writer(self) -> MemoryStorageWriter:
        """Return the storage writer for all ``dcp.save`` and ``dcp.async_save`` of the job."""
        if self._writer_of_dcp is None:
            self._writer_of_dcp = MemoryStorageWriter(self, safe_globals=self.config.safe_globals)
        return self._writer_of_dcp

    def stager(self) -> MemoryStager:
        """Return the stager for ``dcp.async_save(..., async_stager=ckpt.stager())``."""
        if self._stager_of_dcp is None:
            self._stager_of_dcp = MemoryStager(self.writer())
        return self._stager_of_dcp

    def reader(self, version: CheckpointContainerId | str | os.PathLike[str] | None = None) -> MemoryStorageReader:
        """Return a storage reader for ``dcp.load``, of one version or of the one that ``checkpoint_id`` names."""
        return MemoryStorageReader(version, self, safe_globals=self.config.safe_globals)

    def wait(self, deadline_s: float | None = None) -> bool:
        """Wait until all futures of all saves have ended. Give up saves of DCP that another rank has not finished.
        Return False after ``deadline_s`` seconds."""
        if self._writer_of_dcp is not None:
            self._writer_of_dcp.give_up()
        return super().wait(self.deadline_s if deadline_s is None else deadline_s)

    def close(self, persist_deadline_s: float | None = None) -> None:
        """Do as the engine's `Checkpointer.close`, and watch no optimizers from then on."""
        if not self.is_closed:
            self.overlap.close()
            if self._writer_of_dcp is not None:
                self._writer_of_dcp.close()
        super().close(persist_deadline_s)


def warn_of_shared_store(rank: int) -> None:
    """Warn, on rank 0, if torchrun will start ranks again, whose agents keep one store over all lives of the ranks:
    later ranks find addresses of earlier ones there, and wait for dead processes in `init_process_group`."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if rank == 0 and shared and restarts not in ("", "0"):
        static = f"pass --rdzv-backend=c10d (or --standalone): its default, static, ignores {STORE_VARIABLE}"
        _log.warning(
            "torchrun will start ranks again that fail (--max-restarts=%s), but they may then hang in"
            " init_process_group. Where torchrun is started, on every node: %s",
            restarts,
            f"{static}=1" if os.environ.get(STORE_VARIABLE) == "1" else f"export {STORE_VARIABLE}=1, and {static}",
        )


class _Load:
    """One load, into the objects of all ranks or of none. All vote on each step: one rank's trouble is all ranks'."""

    def __init__(self, checkpointer: Checkpointer, tracked: TrackedState, wanted: int | None) -> None:
        self._checkpointer, self._tracked, self._wanted = checkpointer, tracked, wanted
        self._joint = JointLoad(checkpointer)
        self._unloadable: NothingLoadableError | None = None
        self.failures = self._joint.failures  # newest first

    def run(self, *, may_fall_back: bool) -> CheckpointContainerId | None:
        """Return the version that was loaded, if one was. Raise where all ranks must stop."""
        fresh, generators, loaded = self._tracked.fresh(), capture_rng_state(), None
        try:
            loaded = self._joint.newest(self._next_version, self._load)
        finally:
            if loaded is None:  # a training that starts anew shows nothing of the tries
                for each in fresh:
                    each.forget()
                restore_rng_state(generators)
        if loaded is None:
            self._refuse(may_fall_back)
        return None if loaded is None else loaded[0]

    def _refuse(self, may_fall_back: bool) -> None:
        """Raise if going on from elsewhere would bury a version, or the user has to decide first."""
        in_part = " (one was loaded in part)" if any(failure.touched for failure in self.failures) else ""
        rank = self.failures[0].rank if self.failures else self._checkpointer.ranks.rank
        anew, or_discard = "to start anew, use another base container", "discard_existing=True to the constructor"
        for each in self.failures:
            if each.blame is Blame.CHOICE:
                raise ReshardError(f"version {each.version} cannot be loaded yet: {each.text}", rank=each.rank)
        if self._wanted is not None:
            raise LoadError(f"the version cannot be loaded{in_part}: {self.why()}", rank=rank)
        for each in self.failures:
            if each.is_misfit:
                text = f"version {each.version} does not fit what is tracked: {each.text}"
                raise LoadError(text, rank=each.rank, hint=f"{anew}, or pass {or_discard}")
        if may_fall_back:
            return
        if self.failures:
            text = f"there are versions and none can be loaded{in_part}: {self.why()}"
            hint = f"{anew}, pass fallback=, or {or_discard}"
            raise NothingLoadableError(text, rank=rank, hint=hint) from self._unloadable
        if self._unloadable is not None:
            raise self._unloadable

    def why(self) -> str:
        """Return why versions were passed over; nothing if there are none."""
        reasons = [f"{failure.version}: rank {failure.rank}: {failure.text}" for failure in self.failures]
        return "; ".join([*reasons, *([self._unloadable.message] if self._unloadable else ())])

    def _next_version(self) -> CheckpointContainerId | None:
        try:
            if self._wanted is None:
                return self._checkpointer.newest()
            return None if self.failures else self._checkpointer.bring(self._wanted)
        except NothingLoadableError as error:
            self._unloadable = error
            return None

    def _load(self, version: CheckpointContainerId) -> None:
        """Load one version, in steps that all ranks vote on."""
        # The planner loads items that are no tensors by itself, and trusts them no more than the reader would.
        allowed, ranks = tuple(self._checkpointer.config.safe_globals), self._checkpointer.ranks
        reader = MemoryStorageReader(version, self._checkpointer, safe_globals=allowed, trust_bytes=True)
        tracked, step = self._tracked, partial(self._joint.step, version)
        metadata = step(reader.read_metadata)
        reader.set_up_storage_reader(metadata, ranks.rank == 0)
        target = step(lambda: TrackedLoad(tracked, metadata, reader, path=str(version), allowed=allowed))
        change = None
        if target.saved_by != ranks.world_size:
            keep = self._checkpointer.config.on_world_size_change == "keep"
            change = Resharding(tracked, target, version, keep=keep)
            reports = ranks.gather(step(lambda: change.read(reader, metadata)))
            step(lambda: change.decide(reports))
        left = ranks.gather(json.dumps(target.left).encode())
        left_on_all = set.intersection(*(set(json.loads(blob)) for blob in left))
        step(lambda: target.check_left(left_on_all))

        def load_and_apply() -> None:
            target.load(reader)
            tracked.apply(target, {**target.states, **({} if change is None else change.states)})

        step(load_and_apply, touched=lambda: target.touched)


def checked_wanted(step: int | None, fallback: object) -> int | None:
    """Return the step that is to be loaded, or None for the newest version."""
    if step is not None and fallback is not None:
        raise InvalidArgumentError("cannot go with a step: that is loaded, or nothing", argument="fallback", value=step)
    return None if step is None else checked_integer("step", step, 0, MAX_STEP)


def _metadata_by(offer: Offer, rank: int, table: Table) -> bytes:
    share = Share(offer, offer.written(table.written))
    return metadata_of_share(share.items, share.keys, offer.plan.planner_data, rank)
