"""`MLFlashpointMegatronAsyncSaveStrategy`: megatron-core's way into the engine.

The caller's thread plans and stages, the engine does the rest. Nothing is left for the process that megatron-core
starts for an asynchronous save: no process could commit sooner than this one, which has the slots.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME

from ml_flashpoint import events
from ml_flashpoint.adapter.megatron.optimizers import watch_optimizers
from ml_flashpoint.adapter.megatron.releases import AsyncRequest, SaveStrategyBase, object_types, split_common_state
from ml_flashpoint.adapter.megatron.save_plan import Plans
from ml_flashpoint.adapter.megatron.translation import saved_common_state, written_common_state
from ml_flashpoint.adapter.pytorch.memory_storage_writer import MemoryStorageWriter
from ml_flashpoint.adapter.pytorch.metadata_format import METADATA_KEY
from ml_flashpoint.adapter.pytorch.saves import checked_version
from ml_flashpoint.copy.collection import collection_paused
from ml_flashpoint.engine.checkpointer import Checkpointer
from ml_flashpoint.engine.committing import BytesItem, TensorItem
from ml_flashpoint.engine.save import Save
from ml_flashpoint.engine.sidecars import sidecar_items, sidecar_labels
from ml_flashpoint.format.arguments import ignored
from ml_flashpoint.format.errors import FlashpointError, InvalidArgumentError, SaveError, UnaskedVersionsError
from ml_flashpoint.format.files import make_tree
from ml_flashpoint.format.knobs import seal_deadline_s
from ml_flashpoint.format.names import CheckpointContainerId, SaveId
from ml_flashpoint.ranks.rank_group import rank_group

_log = logging.getLogger(__name__)
_MOST_SHOWN = 500


@dataclass(frozen=True, slots=True)
class _Carried:
    """Files that belong beside the parts of a version on this node."""

    carrier: int  # the rank whose object keeps them
    common: Callable[[], bytes | None] | None  # makes this rank's common.pt; None where another rank keeps the files
    others: Callable[[], Mapping[str, bytes]] = dict  # makes further files, by name
    explicit: bool = True  # somebody waits for the save


@dataclass(slots=True)
class _Writing:
    """One save on this rank."""

    version: CheckpointContainerId
    checkpointer: Checkpointer | None = None
    save: Save | None = None
    files: dict[str, bytes] = field(default_factory=dict)  # beside the part
    table: str = ""  # by which this rank writes the save; empty if it does not
    failure: BaseException | None = None  # why nothing is on its way to be committed


class MLFlashpointMegatronAsyncSaveStrategy(SaveStrategyBase):  # type: ignore[misc]
    """Saves megatron-core's sharded state dicts into memory. Use one for all saves of a job, from one thread.

    A save that fails does not stop the training, be it synchronous or not: it is logged, counted, and told by
    `last_error`, on every rank, and the next one is made as usual. To save the last step again, or an earlier one,
    begins a new run, which goes on from the newest version.

    Args:
        storage_writer: the job's writer.
        backend, version: what ``metadata.json`` says of the format. As for megatron-core's `torch_dist`, which reads
            common state and content metadata of such a checkpoint by itself.
        child: give `AsyncCallsQueue` a function that does nothing, which it runs in a process. Without one it starts
            none; but a persistent caller that other strategies use, too, would wait for an answer for ever.
        use_cached_ckpt_structure: accepted for callers that pass it, and ignored.

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
        self._plans = Plans(self._group.rank)
        self._carried: _Carried | None = None
        self.last_error: FlashpointError | None = None

    def watch(self, *optimizers: Any) -> None:
        """Have asynchronous saves copy what these optimizers update while the next forward and backward run: see
        `watch_optimizers`."""
        watch_optimizers(self._writer, *optimizers)

    def before_update(self) -> None:
        """Wait until nothing is copied any more: see `MemoryStorageWriter.before_update`."""
        self._writer.before_update()

    def stop_watching(self) -> None:
        """Wait until nothing is copied any more, and watch nothing from then on. Safe to call twice."""
        self._writer.stop_watching()

    def async_save(
        self,
        sharded_state_dict: dict[str, Any],
        checkpoint_dir: str | os.PathLike[str],
        async_strategy: str | None = None,
    ) -> AsyncRequest:
        """Plan and stage; return when the tensors may change again, except for those watched. Collective.

        Args:
            sharded_state_dict: of sharded tensors and objects only.
            checkpoint_dir: a version's folder. It need not exist.
            async_strategy: accepted, and not needed: the request goes into any of the queues that this can name.

        Returns:
            What `AsyncCallsQueue` takes, also where the save has failed. Its finalization waits until every rank has
            committed its part.

        Raises:
            InvalidArgumentError, InvalidNameError: ``checkpoint_dir`` is no version.
            UnaskedVersionsError: there are versions of an earlier run that nobody has asked about. On all ranks.
        """
        writing = self._begin(sharded_state_dict, checked_version(checkpoint_dir))
        return AsyncRequest(_nothing if self._child else None, (), [partial(self._end, writing)])

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | os.PathLike[str]) -> None:
        """Save; every rank has committed its part on return, or the save has failed (`last_error`). Collective."""
        self._end(self._begin(sharded_state_dict, checked_version(checkpoint_dir)))

    @contextmanager
    def carrying(
        self, common_state: Mapping[str, Any], files: Callable[[], Mapping[str, bytes]] = dict, *, explicit: bool = True
    ) -> Iterator[None]:
        """Have the save made in here keep ``common_state`` of every node, as its lowest rank has it, and further files,
        which are made on that rank only; see `save_local_aware_megatron_checkpoint`."""
        leader = self._group.topology.ranks_of(self._group.node)[0]
        common = (lambda: saved_common_state(common_state)) if self._group.is_node_leader else None
        self._carried = _Carried(leader, common, files, explicit)
        try:
            yield
        finally:
            self._carried = None

    def _begin(self, sharded_state_dict: dict[str, Any], version: CheckpointContainerId) -> _Writing:
        """Do all that the caller waits for. Keep errors that not all ranks raise: the other ranks would wait."""
        began, writing = time.perf_counter(), _Writing(version)
        try:
            writing.checkpointer = checkpointer = self._writer.enter(version)
            checkpointer.check_usable("get_latest_complete_checkpoint(base)")
            with collection_paused():
                self._stage(writing, checkpointer, *split_common_state(sharded_state_dict))
        except UnaskedVersionsError:  # on all ranks, and no fault that will pass
            if os.path.isdir(str(version)):  # it has files then of `dist_checkpointing.save`
                self._expect_files(writing)
            raise
        except BaseException as error:
            writing.failure = error
            if writing.save is not None and writing.checkpointer is not None:
                writing.save.fail(error)
            if not isinstance(error, Exception):
                raise
        seconds = time.perf_counter() - began
        events.emit(events.LoopHeld, self._group, version.parent, version.step, seconds=seconds)
        return writing

    def _stage(
        self,
        writing: _Writing,
        checkpointer: Checkpointer,
        sharded_state_dict: dict[str, Any],
        common_state: ShardedObject | None,
    ) -> None:
        """Plan what this rank writes, copy that, and leave the rest to the committing executor."""
        step = writing.version.step or 0
        planned, found, failure = self._plans.known, list[Any](), None
        try:
            planned, found = self._plans.plan(sharded_state_dict)
        except Exception as error:  # the other ranks may wait for this one's plan
            failure = error
        name, replicas = SaveId(checkpointer.run, step), checkpointer.replicas
        share = planned.share
        writing.table = replicas.agree(
            name, "megatron-core", planned.digest, list, seal_deadline_s(), share=lambda table: share
        ).name
        replicas.publish(writing.table, lambda: share)
        explicit = self._carried is None or self._carried.explicit
        writing.save = save = checkpointer.begin(step, explicit=explicit, table=writing.table)
        if failure is not None:
            raise failure
        carrier = self._add_files(writing, common_state)
        data = dict(zip((item.index for item in planned.plan.items), found, strict=True))
        planner: Any = SimpleNamespace(resolve_data=lambda item: data[item.index])
        tensors, byte_items = self._writer.items(planned.plan, planner, planned.keys, safe_globals=object_types())
        byte_items = [*byte_items, *sidecar_items(writing.files)]
        byte_keys, late = [METADATA_KEY, *(key for key, _ in byte_items)], self._writer.late(tensors)
        staged = save.stage(tensors, byte_keys, late=late)
        named = [(key, copy) for (key, _), copy in zip(tensors, staged, strict=True)]

        def items() -> tuple[list[TensorItem], list[BytesItem]]:
            if self._group.rank != 0:
                return named, byte_items
            metadata = self._plans.metadata(replicas, writing.table, save.terms.left_s)
            return named, [*byte_items, (METADATA_KEY, metadata)]

        save.commit(items=items, labels=sidecar_labels(carrier))

    def _add_files(self, writing: _Writing, common_state: ShardedObject | None) -> int:
        """Have the files that `dist_checkpointing.load` looks for kept in an object. Return the rank that has it."""
        carried = self._carried
        if carried is None:  # the common state is rank 0's
            common: Callable[[], bytes | None]
            if common_state is None:  # `dist_checkpointing.save` has written a file instead
                common = partial(written_common_state, writing.version)
            else:
                common = partial(saved_common_state, common_state.data)
            carried = _Carried(0, common if self._group.rank == 0 else None)
        if carried.common is not None:
            config = json.dumps(asdict(CheckpointingConfig(self.backend, self.version)))
            content = carried.common()
            writing.files = {CONFIG_FNAME: config.encode()} | ({} if content is None else {COMMON_STATE_FNAME: content})
            writing.files |= carried.others()
        return carried.carrier

    def _outcome(self, writing: _Writing) -> FlashpointError | None:
        """Wait until this rank's part is committed, and put the files beside it. Return why there is no part."""
        error = writing.failure
        if error is None and writing.save is not None:
            error = writing.save.committed.exception()
        if error is not None and not isinstance(error, FlashpointError):
            return SaveError(f"{type(error).__name__}: {error}", step=writing.version.step, rank=self._group.rank)
        try:
            if error is None and writing.files and writing.checkpointer and writing.save and writing.save.id:
                writing.checkpointer.container.write_sidecars(writing.save.id, writing.files)
        except Exception as refused:  # the part stays committed
            text = "the files beside step %s cannot be written; a recovery writes what its objects keep of them: %s"
            _log.warning(text, writing.version.step, refused)
        return error

    def _end(self, writing: _Writing) -> None:
        """Collective: wait for this rank's part, and learn whether all ranks have theirs."""
        error = self._outcome(writing)
        try:
            told = json.dumps([writing.table, "" if error is None else str(error)[:_MOST_SHOWN]])
            outcomes = [json.loads(blob) for blob in self._group.gather(told.encode())]
            text = next((f"rank {rank} failed: {why}" for rank, (_, why) in enumerate(outcomes) if why), "")
            if not text and len({table for table, _ in outcomes}) > 1:
                text = "the structure of the state has changed on some rank alone; the next save takes that up"
            if error is None and text:
                error = SaveError(text, step=writing.version.step, rank=self._group.rank)
        except FlashpointError as gone:
            error = error or gone
        self.last_error = error
        if error is None:
            return
        if writing.checkpointer is not None:
            writing.checkpointer.replicas.forget()
        _log.error("the save of step %s failed, training goes on: %s", writing.version.step, error)
        self._expect_files(writing)

    def _expect_files(self, writing: _Writing) -> None:
        """Have the next start remove the files that `dist_checkpointing.save` writes before and after a failed save."""
        version, checkpointer = writing.version, writing.checkpointer
        if self._group.rank != 0:
            return
        try:
            if checkpointer is None:
                make_tree(Path(str(version.parent)), Path(str(version)))
            else:
                name = SaveId(checkpointer.run, version.step or 0)
                checkpointer.container.expect_sidecars(name, [CONFIG_FNAME, COMMON_STATE_FNAME])
        except (FlashpointError, OSError) as refused:
            _log.error("the folder of the failed save cannot be made: %s", refused)


def _nothing() -> None:
    """Do what is left to do for a process of megatron-core's."""
