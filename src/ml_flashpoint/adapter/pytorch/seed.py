"""The classes of the user guide: thin, and constructed before any base container is known.

All of a process share one `Checkpointer` a base container, which the first call that names it opens. That call is
collective: a save's, or `DefaultMLFlashpointCheckpointLoader.get_latest_complete_checkpoint`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from ml_flashpoint.adapter.pytorch.saves import LocalSaves
from ml_flashpoint.config import Config
from ml_flashpoint.engine.checkpointer import Checkpointer
from ml_flashpoint.engine.reader import VersionReader
from ml_flashpoint.format.arguments import checked_integer, ignored
from ml_flashpoint.format.errors import InvalidArgumentError, ReplicationError
from ml_flashpoint.format.names import CheckpointContainerId
from ml_flashpoint.ranks.rank_group import rank_group
from ml_flashpoint.ranks.strategies import ReplicationStrategy, checked_strategy
from ml_flashpoint.status import Status

_opened: dict[CheckpointContainerId, tuple[Checkpointer, str]] = {}
"""The checkpointers of this process, with the strategies that were asked for."""
_lock = threading.Lock()


class CheckpointObjectManager:
    """Says which base container this process uses. One serves one base container, the first that it is asked for."""

    def __init__(self) -> None:
        self._base: CheckpointContainerId | None = None

    def checkpointer(
        self, base: str | os.PathLike[str], replication_manager: ReplicationManager | None = None
    ) -> Checkpointer:
        """Return the checkpointer of a base container. Collective the first time. Raises `InvalidArgumentError` if this
        manager serves another base container, or it is open with another strategy."""
        path = CheckpointContainerId(base)
        asked = None if replication_manager is None else replication_manager.checked
        with _lock:
            if self._base is not None and self._base != path:
                text = f"one CheckpointObjectManager serves one base container, {self._base} here"
                hint = "use one base container a job, or a second manager"
                raise InvalidArgumentError(text, argument="base", value=str(path), hint=hint)
            if path not in _opened:
                strategy = "none" if replication_manager is None else asked
                _opened[path] = Checkpointer(path, Config(replication=strategy)), repr(asked)
            checkpointer, strategy_asked = _opened[path]
            if replication_manager is not None and repr(asked) != strategy_asked:
                text = "the base container is open with another replication strategy, or with none"
                hint = "give saver and loader the same ReplicationManager"
                raise InvalidArgumentError(text, argument="replication_manager", value=asked, hint=hint)
            self._base = path
            return checkpointer

    @property
    def opened(self) -> Checkpointer | None:
        """Return the checkpointer; None before it is opened, and once it is closed."""
        found = None if self._base is None else _opened.get(self._base)
        return None if found is None else found[0]

    def close(self) -> None:
        """Close the base container, for all of this process. Versions stay. Safe to call twice."""
        base, self._base = self._base, None
        with _lock:
            if base is not None and (found := _opened.pop(base, None)) is not None:
                found[0].close()


class ReplicationManager:
    """Says who holds copies of whose parts.

    Args:
        strategy: a strategy, or its name; by default pairs of nodes, or nothing on a single node.
    """

    def __init__(self, strategy: ReplicationStrategy | str | None = None) -> None:
        self._strategy = checked_strategy(strategy, "strategy")
        self._initialized = False

    def initialize(self, checkpoint_object_manager: CheckpointObjectManager) -> None:
        """Learn who the ranks are. Collective. Copies begin as a base container is opened."""
        if not isinstance(checkpoint_object_manager, CheckpointObjectManager):
            raise InvalidArgumentError(
                "must be a CheckpointObjectManager",
                argument="checkpoint_object_manager",
                value=checkpoint_object_manager,
            )
        rank_group()
        self._initialized = True

    def close(self) -> None:
        """Refuse to be used for another base container. Copies end with the one that is open. Safe to call twice."""
        self._initialized = False

    shutdown = close

    @property
    def checked(self) -> ReplicationStrategy | None:
        """Return the strategy; None for the default. Raises `ReplicationError` before `initialize`."""
        if not self._initialized:
            raise ReplicationError("the replication manager is not initialized", hint="call initialize() first")
        return self._strategy


class DefaultMLFlashpointCheckpointSaver:
    """Saves into memory. Collective to construct.

    Args:
        ckpt_obj_manager: says which base container; one of its own by default.
        replication_manager: who holds copies; nobody by default.
        global_rank_getter, local_rank_getter, global_barrier_func, initial_buffer_size_bytes, use_optimized_save:
            accepted for callers that pass them, and ignored: the ranks are those of ``torch.distributed``, and slots
            are as large as what is saved.

    Attributes:
        saves: for a `MemoryStorageWriter`.
    """

    def __init__(
        self,
        global_rank_getter: Callable[[], int] | None = None,
        local_rank_getter: Callable[[], int] | None = None,
        global_barrier_func: Callable[[], object] | None = None,
        ckpt_obj_manager: CheckpointObjectManager | None = None,
        replication_manager: ReplicationManager | None = None,
        initial_buffer_size_bytes: int = 16 << 30,
        *,
        use_optimized_save: bool | None = None,
    ) -> None:
        unused = {"local_rank_getter": local_rank_getter, "global_barrier_func": global_barrier_func}
        ignored("DefaultMLFlashpointCheckpointSaver", **unused, use_optimized_save=use_optimized_save)
        checked_integer("initial_buffer_size_bytes", initial_buffer_size_bytes, 1)
        self._objects = objects = ckpt_obj_manager or CheckpointObjectManager()
        self.saves = LocalSaves(
            rank_group(), lambda base: objects.checkpointer(base, replication_manager), lambda: objects.opened
        )

    @property
    def status(self) -> Status | None:
        """Status of saving on this rank; None before a base container is open."""
        return None if self._objects.opened is None else self._objects.opened.status

    def wait(self, deadline_s: float | None = None) -> bool:
        """Wait until all saves that were begun are verified, or have failed. Return True if that was so in time."""
        self.saves.give_up()
        return self._objects.opened is None or self._objects.opened.wait(deadline_s)


class DefaultMLFlashpointCheckpointLoader:
    """Finds versions in this node's memory and its peers', and reads them.

    Args:
        checkpoint_object_manager: says which base container; one of its own by default.
        replication_manager: the saver's.
        global_rank_getter, local_rank_getter, broadcast_object_list_func, all_gather_object_func, world_size_getter:
            accepted for callers that pass them, and ignored: the ranks are those of ``torch.distributed``.
    """

    def __init__(
        self,
        checkpoint_object_manager: CheckpointObjectManager | None = None,
        replication_manager: ReplicationManager | None = None,
        global_rank_getter: Callable[[], int] | None = None,
        *,
        local_rank_getter: Callable[[], int] | None = None,
        broadcast_object_list_func: Callable[..., object] | None = None,
        all_gather_object_func: Callable[..., object] | None = None,
        world_size_getter: Callable[[], int] | None = None,
    ) -> None:
        ignored(
            "DefaultMLFlashpointCheckpointLoader",
            local_rank_getter=local_rank_getter,
            broadcast_object_list_func=broadcast_object_list_func,
            all_gather_object_func=all_gather_object_func,
            world_size_getter=world_size_getter,
        )
        self._objects = checkpoint_object_manager or CheckpointObjectManager()
        self._replication = replication_manager

    def get_latest_complete_checkpoint(
        self, checkpoint_base_container: str | os.PathLike[str]
    ) -> CheckpointContainerId | None:
        """Find the newest version that every rank can load, bring here what this node lacks, and go on from it.
        Collective.

        Returns:
            The version, under this node's base container; None if there never was one.

        Raises:
            NothingLoadableError: there are versions, and none can be loaded. On all ranks.
            FlashpointError: this rank cannot take part.
        """
        return self._objects.checkpointer(checkpoint_base_container, self._replication).latest()

    def open_version(self, version: CheckpointContainerId) -> VersionReader:
        """Return a reader of a version. Collective the first time."""
        return self._objects.checkpointer(version.parent, self._replication).open_version(version)
