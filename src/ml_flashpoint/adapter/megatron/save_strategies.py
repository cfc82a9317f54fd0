"""`MLFlashpointMegatronAsyncSaveStrategy`: megatron-core's way into the engine.

Owns the order of a save: plan and stage on the caller's thread, everything else on a thread of its own. There is
nothing left for the process that megatron-core starts for an asynchronous save: no process could commit sooner than
this one, which has the arenas. What a version consists of, and its commit, are the writer's and the engine's.
"""

from __future__ import annotations

import io
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from ml_flashpoint import events
from ml_flashpoint.adapter.megatron.common_state import saved_common_state, written_common_state
from ml_flashpoint.adapter.megatron.optimizers import watch_optimizers
from ml_flashpoint.adapter.megatron.releases import (
    AsyncRequest,
    SaveStrategyBase,
    object_types,
    split_common_state,
)
from ml_flashpoint.adapter.megatron.save_plan import PlanExchange, PlannedSave
from ml_flashpoint.adapter.pytorch.memory_storage_writer import MemoryStorageWriter
from ml_flashpoint.adapter.pytorch.storage_data import METADATA_KEY, METADATA_SCOPE
from ml_flashpoint.checkpoint_object_manager.version_files import remove_version_folder, write_sidecars
from ml_flashpoint.copy.collection import collection_paused
from ml_flashpoint.copy.tensors import is_plain_strided, materialized
from ml_flashpoint.core.background import give_way
from ml_flashpoint.core.object_stages import BytesItem
from ml_flashpoint.core.save import Save
from ml_flashpoint.core.sidecars import sidecar_items, sidecar_labels
from ml_flashpoint.format.arguments import ignored
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import (
    DeadlineError,
    DivergedError,
    FlashpointError,
    InvalidArgumentError,
    SaveError,
    UnaskedVersionsError,
)
from ml_flashpoint.format.knobs import seal_deadline_s
from ml_flashpoint.format.private_folders import make_tree
from ml_flashpoint.ranks.rank_group import rank_group

_log = logging.getLogger(__name__)


def version_of(checkpoint_dir: str | os.PathLike[str]) -> CheckpointContainerId:
    """The version that a checkpoint folder is.

    Raises:
        InvalidArgumentError: it is none. InvalidNameError: it is no absolute path.
    """
    version = CheckpointContainerId(checkpoint_dir)
    if version.step is None:
        raise InvalidArgumentError(
            "must be a version of a base container: .../step-<n>_ckpt",
            argument="checkpoint_dir",
            value=str(checkpoint_dir),
            hint="CheckpointContainerId.create_child(base, CheckpointContainerId.format_version_container(step))",
        )
    return version


@dataclass(frozen=True, slots=True)
class _Carried:
    """The files that belong beside the parts of a version on this node.

    Attributes:
        carrier: the rank whose object keeps them.
        common: makes this rank's common.pt; None where another rank keeps the files.
        others: makes further files, by name.
    """

    carrier: int
    common: Callable[[], bytes | None] | None
    others: Callable[[], Mapping[str, bytes]] = dict


class MLFlashpointMegatronAsyncSaveStrategy(SaveStrategyBase):  # type: ignore[misc]
    """Saves megatron-core's sharded state dicts into memory. Use one for all saves of a job, from one thread.

    A save that fails does not stop the training, be it synchronous or not: it is logged, counted in
    ``storage_writer.saver.stats`` and told by :attr:`last_error`, on every rank, and the next one is made as usual.

    Args:
        storage_writer: the job's writer.
        backend, version: what ``metadata.json`` says of the format. As for megatron-core's `torch_dist`, which reads
            the rest of such a checkpoint, common state and content metadata, by itself.
        child: give `AsyncCallsQueue` a function that does nothing, which it runs in a process. Without one it starts
            none, which saves a fork in each save; but a persistent caller that other strategies use, too, waits for
            the answer of that process to each request, and so for ever.
        use_cached_ckpt_structure: accepted for callers that pass it, and ignored: a plan is kept while the structure is
            the same.

    Raises:
        InvalidArgumentError: ``storage_writer`` is no `MemoryStorageWriter`.
    """

    def __init__(
        self,
        storage_writer: MemoryStorageWriter,
        backend: str = "torch_dist",
        version: int = 1,
        *,
        child: bool = True,
        use_cached_ckpt_structure: bool | None = None,
    ) -> None:
        super().__init__(backend, version)
        ignored("MLFlashpointMegatronAsyncSaveStrategy", use_cached_ckpt_structure=use_cached_ckpt_structure)
        if not isinstance(storage_writer, MemoryStorageWriter):
            raise InvalidArgumentError("must be a MemoryStorageWriter", argument="storage_writer", value=storage_writer)
        self._writer = storage_writer
        self._child = child
        self._group = rank_group()
        self._plans = PlanExchange(self._group)
        self._carried: _Carried | None = None
        self._failed: list[CheckpointContainerId] = []
        self._passed = range(0)  # steps that other ranks were at or past when this one was behind them
        self.last_error: FlashpointError | None = None
        self._latest: _Writing | None = None

    def watch(self, *optimizers: Any) -> None:
        """From now on, asynchronous saves return before what these optimizers update is copied, which goes on while the
        next forward and backward run; the next step waits for what is left of it, and helps.

        Args:
            optimizers: megatron-core's, chained or not, or torch's.

        Raises:
            InvalidArgumentError: one is neither.
        """
        watch_optimizers(self._writer, *optimizers)

    def before_update(self) -> None:
        """Wait until nothing is copied any more. To be called before anything but the step of an optimizer that is
        watched changes what that updates: else the save fails, and from then on saves return when all is copied."""
        self._writer.before_update()

    def stop_watching(self) -> None:
        """Wait until nothing is copied any more, and watch nothing from then on. Idempotent."""
        self._writer.stop_watching()

    def can_handle_sharded_objects(self) -> bool:
        """Sharded objects are saved like tensors. (megatron-core asks for the attribute, and calls it nowhere.)"""
        return True

    def async_save(
        self,
        sharded_state_dict: dict[str, Any],
        checkpoint_dir: str | os.PathLike[str],
        async_strategy: str | None = None,
    ) -> AsyncRequest:
        """Collective: plan and stage; return when the tensors may change again, but for those watched (:meth:`watch`).

        Args:
            sharded_state_dict: of sharded tensors and objects only.
            checkpoint_dir: a version's folder. It need not exist.
            async_strategy: accepted, and not needed: the request goes into any of the queues that this can name.

        Returns:
            What `AsyncCallsQueue` takes. Its finalization waits until every rank has committed its part. Of a save that
            failed, it is as good as any other.

        Raises:
            InvalidArgumentError, InvalidNameError: ``checkpoint_dir`` is no version.
            UnaskedVersionsError: the base container has versions of an earlier run that nobody has asked about. On all
                ranks.
        """
        began, version = time.perf_counter(), version_of(checkpoint_dir)
        writing = self._begin(sharded_state_dict, version)
        writing.go_on_in_background()
        self._tell_held(version, began)
        return AsyncRequest(_nothing if self._child else None, (), [lambda: self._end(writing)])

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | os.PathLike[str]) -> None:
        """Collective: save; every rank has committed its part on return, unless the save failed (:attr:`last_error`).

        Args and errors are those of :meth:`async_save`.
        """
        began, version = time.perf_counter(), version_of(checkpoint_dir)
        writing = self._begin(sharded_state_dict, version)
        self.before_update()
        writing.complete()
        self._end(writing)
        self._tell_held(version, began)

    def _tell_held(self, version: CheckpointContainerId, began: float) -> None:
        seconds = time.perf_counter() - began
        events.emit(events.LoopHeld, self._group, version.parent, version.step, seconds=seconds)

    @contextmanager
    def carrying(
        self, common_state: Mapping[str, Any], files: Callable[[], Mapping[str, bytes]] = dict
    ) -> Iterator[None]:
        """The save made in here keeps ``common_state`` of every node, as its lowest rank has it, and further files
        for the version's folder, which are made on that rank only. Their names have no directories."""
        leader = self._group.topology.ranks_of(self._group.node)[0]
        common = (lambda: saved_common_state(common_state)) if self._group.is_node_leader else None
        self._carried = _Carried(leader, common, files)
        try:
            yield
        finally:
            self._carried = None

    def _begin(self, sharded_state_dict: dict[str, Any], version: CheckpointContainerId) -> _Writing:
        """Everything that the caller has to wait for. Errors are kept, since they must not leave other ranks waiting,
        unless all ranks raise them."""
        for failed in self._failed:
            if failed != version:
                remove_version_folder(Path(str(failed)), (CONFIG_FNAME, COMMON_STATE_FNAME))
        self._failed.clear()
        saver: Any = self._writer.saver
        save = saver.begin(exchanged=True)
        save.complete = False  # until all ranks have told
        self._latest = writing = _Writing(self._writer, save, version)
        failure, step = None, version.step or 0
        sharded_state_dict, common_state = split_common_state(sharded_state_dict)
        try:
            if step in self._passed:  # the others wait for nothing here; after them, all are in step again
                writing.alone, behind, self._passed = True, self._passed[-1], range(step + 1, self._passed.stop)
                raise DivergedError(f"other ranks have gone on to step {behind} without this save")
            with collection_paused():
                saver.agree(save, version)
                try:
                    self._add_files(writing, common_state)
                except Exception as error:
                    failure = error
                writing.stage(self._plans.plan(sharded_state_dict, failure))
        except UnaskedVersionsError as error:  # on all ranks, and no fault that will pass
            writing.fail(error)
            remove_version_folder(Path(str(version)), (CONFIG_FNAME, COMMON_STATE_FNAME))
            raise
        except Exception as error:
            if isinstance(error, DivergedError) and error.highest_step is not None:
                self._passed = range(step + 1, error.highest_step + 1)
            writing.fail(error)
        except BaseException as error:
            writing.fail(error)
            raise
        return writing

    def _add_files(self, writing: _Writing, common_state: ShardedObject | None) -> None:
        """Have the files that `dist_checkpointing.load` looks for kept in an object.

        Args:
            common_state: what `dist_checkpointing.save` has given along; None where it has written a file instead.
        """
        carried = self._carried
        if carried is None:  # the common state is rank 0's
            common: Callable[[], bytes | None]
            if common_state is None:
                common = partial(written_common_state, writing.version)
            else:
                common = partial(saved_common_state, common_state.data)
            carried = _Carried(0, common if self._group.rank == 0 else None)
        writing.labels.update(sidecar_labels(carried.carrier))
        if carried.common is not None:
            config = json.dumps(asdict(CheckpointingConfig(self.backend, self.version)))
            content = carried.common()
            writing.files = {CONFIG_FNAME: config.encode()} | ({} if content is None else {COMMON_STATE_FNAME: content})
            writing.files |= carried.others()

    def _end(self, writing: _Writing) -> None:
        """Collective: wait for this rank's part, and learn whether all ranks have theirs."""
        error = self.last_error = self._outcome(writing)
        if error is None:
            writing.is_complete()
            return
        _log.error("the save of step %s failed, training goes on: %s", writing.version.step, error)
        self._failed.append(writing.version)
        if self._group.rank == 0:
            # `dist_checkpointing.save` is about to write a file there.
            try:
                make_tree(Path(str(writing.version.parent)), Path(str(writing.version)))
            except (FlashpointError, OSError) as refused:
                _log.error("the folder of the failed save cannot be made: %s", refused)

    def _outcome(self, writing: _Writing) -> FlashpointError | None:
        error = writing.outcome()
        try:
            if not writing.alone and not self._vote(error is None) and error is None:
                error = SaveError(
                    "another rank could not save its part", step=writing.version.step, rank=self._group.rank
                )
        except FlashpointError as gone:
            error = error or gone
        return error

    def _vote(self, ok: bool) -> bool:
        """Return True if a save is good on every rank."""
        (good,) = self._group.minimum((int(ok),), "vote")
        return bool(good)


class _Writing:
    """One save on this rank, from its plan to its commit."""

    def __init__(self, writer: MemoryStorageWriter, save: Save, version: CheckpointContainerId) -> None:
        self.version = version
        self.files: dict[str, bytes] = {}
        self.labels: dict[str, str] = {}
        self._writer = writer
        self._save = save
        self._plan: SavePlan | None = None
        self._extra: list[BytesItem] = []
        self._data = _StagedData()
        self._error: FlashpointError | None = None
        self._over = threading.Event()
        self.alone = False  # whether no other rank makes it

    def stage(self, planned: PlannedSave) -> None:
        """Copy what the plan says, once. The copies are the object."""
        self._extra = sidecar_items(self.files)
        if planned.metadata is not None:
            self._extra.append((METADATA_KEY, planned.metadata))
            self.labels[METADATA_SCOPE] = "global"
        staged: list[MetadataIndex] = []
        tensors: list[tuple[str, torch.Tensor]] = []
        byte_keys = [key for key, _ in self._extra]
        for item, key, data in zip(planned.plan.items, planned.keys, planned.data, strict=True):
            if item.type is WriteItemType.BYTE_IO:
                byte_keys.append(key)
                self._data[item.index] = data
                continue
            assert isinstance(data, torch.Tensor)
            data = materialized(data)
            if is_plain_strided(data) and not data.is_meta:
                staged.append(item.index)
                tensors.append((key, data))
            else:  # of a class of its own: written as bytes
                self._data[item.index] = data.clone()
        copies = self._writer.stage_tensors(self._save, tensors, base=self.version.parent, byte_keys=byte_keys)
        self._data.update(zip(staged, copies, strict=True))
        self._plan = planned.plan
        saver: Any = self._writer.saver
        saver.offer(self._save)

    def go_on_in_background(self) -> None:
        """Write and commit on another thread, unless the save has failed."""
        if self._over.is_set():
            return
        try:
            threading.Thread(target=self._complete_later, name="flashpoint-megatron", daemon=True).start()
        except RuntimeError as error:  # no more threads
            self.fail(error)

    def _complete_later(self) -> None:
        give_way()
        self.complete()

    def complete(self) -> None:
        """Write and commit, unless the save has failed."""
        if self._over.is_set():
            return
        assert self._plan is not None
        writer, self._save.worker = self._writer, threading.current_thread()
        try:
            writer.reset(str(self.version))
            # Nobody waits for what the other ranks have written: rank 0 knows their plans, and so the metadata.
            writer.set_up_storage_writer(False)
            writer.take_on(self._save, extra=self._extra, labels=self.labels, safe_globals=object_types())
            writer.write_data(self._plan, self._data.planner())
            self._write_files()
        except BaseException as error:
            self.fail(error)
            if not isinstance(error, Exception):
                raise
        self._let_go()

    def _write_files(self) -> None:
        """Put the files beside the part, which is committed by now: it stays so whatever happens here."""
        try:
            if self.files:
                write_sidecars(Path(str(self.version.parent)), self.version.name, self.files)
        except (FlashpointError, OSError) as error:
            text = "the files beside step %s cannot be written; a recovery writes what its objects keep of them: %s"
            _log.warning(text, self.version.step, error)

    def fail(self, error: BaseException) -> None:
        """Give the save up. Nothing of it is left, unless it was committed."""
        self._writer.saver.fail(self._save, error)
        kept = error if isinstance(error, FlashpointError) else SaveError(f"{type(error).__name__}: {error}")
        kept.step = self.version.step if kept.step is None else kept.step
        kept.rank = self._writer.saver.rank if kept.rank is None else kept.rank
        self._error = kept
        self._let_go()

    @property
    def is_over(self) -> bool:
        """Whether this rank's part is committed, or the save has failed."""
        return self._over.is_set()

    def is_complete(self) -> None:
        """All ranks have committed their parts."""
        self._save.complete = True

    def outcome(self) -> FlashpointError | None:
        """Wait until this rank's part is committed, or the save has failed; why it has."""
        if not self._over.wait(seal_deadline_s()):
            self.fail(DeadlineError(f"not committed within {seal_deadline_s():.0f} s"))
        return self._error

    def _let_go(self) -> None:
        self._data = _StagedData()
        self._extra = []
        self._over.set()


class _StagedData(dict[MetadataIndex, Any]):
    """What was staged, by the places in the plan."""

    def planner(self) -> SavePlanner:
        """Gives the writer the staged copies."""
        return _StagedPlanner(self)


class _StagedPlanner(SavePlanner):
    def __init__(self, data: Mapping[MetadataIndex, Any]) -> None:
        self._data = data

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        found: torch.Tensor | io.BytesIO = self._data[write_item.index]
        return found

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("the plan was made before")

    create_local_plan = create_global_plan = finish_plan = set_up_planner  # type: ignore[assignment]


def _nothing() -> None:
    """What is left to do for a process of megatron-core's."""
