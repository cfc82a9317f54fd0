"""`CheckpointEngine`: a base container that is open on all ranks of a job, with everything that serves it.

Owns putting the parts together, on all ranks or on none, and the one order in which they end. What a door has beside
it (a writer of DCP's, tracked objects, a queue) is the door's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

from ml_flashpoint.checkpoint_object_manager.checkpoint_object_manager import CheckpointObjectManager
from ml_flashpoint.core.checkpoint_loader import DefaultMLFlashpointCheckpointLoader
from ml_flashpoint.core.checkpoint_saver import DefaultMLFlashpointCheckpointSaver
from ml_flashpoint.core.discarding import discard_versions
from ml_flashpoint.core.loader import MLFlashpointCheckpointLoader
from ml_flashpoint.core.opening import open_together
from ml_flashpoint.core.persist_options import PersistHealth, PersistOptions
from ml_flashpoint.core.persisted_loader import PersistedLoader
from ml_flashpoint.core.persisting import Persisting
from ml_flashpoint.core.retention import KeptVersion, Retention
from ml_flashpoint.core.saver import unasked_versions
from ml_flashpoint.core.status_board import StatusBoard
from ml_flashpoint.engine.signals import InFlight, answer_sigterm, hold_up_sigterm, let_go_of_sigterm
from ml_flashpoint.format.arguments import checked_base, checked_bool
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import FlashpointError
from ml_flashpoint.format.knobs import copy_threads, exit_deadline_s, seal_deadline_s
from ml_flashpoint.format.status import RankStatus
from ml_flashpoint.ranks.rank_group import rank_group
from ml_flashpoint.ranks.retention import Keep, checked_keep
from ml_flashpoint.ranks.strategies import ReplicationStrategy, checked_strategy
from ml_flashpoint.replication.replication_manager import ReplicationManager

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger(__name__)


class CheckpointEngine:
    """Opens a base container. Collective to construct; a context manager.

    Args:
        base: absolute path of a folder on a tmpfs of this node that belongs to this job alone.
        replication: who holds copies of whose parts: a strategy, ``"pairwise"``, ``"ring"`` or ``"none"``. By default
            pairs of nodes, or nothing on a single node.
        discard_existing: remove every version that is there, on all nodes, before anything else. Those that are
            persisted stay.
        keep: how many of the newest verified versions stay in memory, or a `Keep`.
        persist: where to persist versions, and which; by default none are. The same on all ranks.
        sigterm_grace_s: with ``persist``, seconds at most for which SIGTERM is held up, so that saves under way are
            committed and copied and the newest version is persisted; see `engine.signals`. None: it is left alone.

    Attributes:
        base: the base container.
        ranks: the ranks that use it together: what they gather, agree on and vote about.
        saver: makes this rank's part of a version; see `core.saver` for the calls of a save.
        loader: finds, fetches and verifies versions, in memory and among those that are persisted, and reads parts; see
            `core.loader`.
        persisting: writes versions to a durable store; None if nobody does.
        store: what this rank keeps of the base container, its own parts and copies of others.
        objects: gives a process its one store in each base container.
        replication: makes copies, and reaches the peers that hold some.
        retention: which versions there are, and going back to one.
        unasked: whether some node had versions of an earlier run when it was opened that nobody has asked about since.
            Set it to False when the program goes on from elsewhere, and knows of them.

    Raises:
        InvalidArgumentError: an argument is unusable.
        JobInUseError: a live process uses the base container as this rank.
        FlashpointError: this rank, or another one, cannot use it. Raised on all ranks.
    """

    def __init__(
        self,
        base: str | os.PathLike[str],
        *,
        replication: ReplicationStrategy | str | None = None,
        discard_existing: bool = False,
        keep: int | Keep = 1,
        persist: PersistOptions | None = None,
        sigterm_grace_s: float | None = None,
    ) -> None:
        self.base = checked_base(base)
        rule = checked_keep(keep)
        copy_threads()  # a value that is none is refused now, and not by each save
        strategy = checked_strategy(replication)
        discard_existing = checked_bool("discard_existing", discard_existing)
        self.ranks = rank_group()
        self._stopped = self._closed = False
        with contextlib.ExitStack() as undo:
            self.objects = CheckpointObjectManager()
            undo.callback(self.objects.close)
            self.store = open_together(self.objects, self.base, self.ranks.rank, self.ranks)
            self.ranks.agree_on(
                discard_existing=discard_existing,
                keep=repr(rule),
                persist="" if persist is None else repr(persist),
            )
            self.store.retained.keep = rule
            if discard_existing:
                discard_versions(self.store, self.ranks)
                self.store.asked = True
            self.replication = ReplicationManager(strategy)
            undo.callback(self.replication.close)
            self.replication.initialize(self.objects)
            self.persisting = None if persist is None else Persisting(persist, self.ranks, base=self.base)
            if self.persisting is not None:
                undo.callback(self.persisting.close)
            self.saver = DefaultMLFlashpointCheckpointSaver(
                ckpt_obj_manager=self.objects,
                replication_manager=self.replication,
                persisting=self.persisting,
            )
            undo.callback(self.saver.close)
            self._memory = memory = DefaultMLFlashpointCheckpointLoader(self.objects, self.replication)
            self.loader: MLFlashpointCheckpointLoader = memory
            if persist is not None:
                self.loader = PersistedLoader(memory, persist.persist, self.ranks)
            self.retention = Retention(self.store, self.ranks, self.replication, memory.source, self.saver.wait)
            self._status = StatusBoard(self.store, self.ranks, self.replication.strategy)
            undo.callback(self._status.close)
            # Found out here, so that all ranks raise alike without having to agree at each save.
            self.store.asked = self.saver.is_asked(self.base)
            self.unasked = not self.ranks.all_ok(self.store.asked)
            self._in_flight: InFlight | None = None
            if self.persisting is not None and sigterm_grace_s is not None:
                self._in_flight = self._hold_up_sigterm(self.persisting, sigterm_grace_s)
            undo.pop_all()

    def _hold_up_sigterm(self, persisting: Persisting, grace_s: float) -> InFlight:
        main = threading.main_thread()
        finish = partial(self.finish, settle=partial(self.saver.wait, held_up=main))
        in_flight = InFlight(persisting.hurry, finish, grace_s)
        hold_up_sigterm(in_flight)
        return in_flight

    def version(self, step: int) -> CheckpointContainerId:
        """The name of the version of a step, whether there is one or not."""
        return CheckpointContainerId.create_child(self.base, CheckpointContainerId.format_version_container(step))

    def holds(self, path: object) -> bool:
        """Whether a path is that of a version in the base container. Paths are compared, not their beginnings."""
        version = CheckpointContainerId.of_version(path)
        return version is not None and version.parent == self.base

    def latest(self) -> CheckpointContainerId | None:
        """The newest version that all ranks can load, in memory or persisted, fetched and verified; None if there never
        was one. Collective.

        Let saves under way end before (``saver.wait()``): what they replace may go while it is looked at.

        Raises:
            NothingLoadableError: there are versions, and none can be loaded.
            FlashpointError: ranks lost each other.
        """
        self.saver.owner.check(self.ranks.rank)
        self.loader.reconsider()
        version = self.loader.get_latest_complete_checkpoint(self.base)
        self.unasked = False
        if version is not None and version.step is not None:
            self.go_on_from(version.step)
        return version

    def versions(self) -> list[KeptVersion]:
        """What this job holds and can go back to, newest save first. Collective."""
        return self.retention.versions()

    def go_back(self, to: int) -> CheckpointContainerId:
        """Bring one version here, verified, to be loaded, and leave all newer ones: :meth:`latest` gives it, too, until
        the next save. Collective.

        Args:
            to: its step.

        Raises:
            LoadError: there is no such version, or it cannot be loaded. Nothing has changed then.
            DeadlineError: a save is still under way. Nothing has changed then.
            SaveError: it cannot be recorded on some node.
        """
        version = self.bring(to)
        self.leave_newer()
        self.go_on_from(version.step or 0)
        return version

    def bring(self, wanted: int) -> CheckpointContainerId:
        """The first half of :meth:`go_back`: what is newer stays the newest."""
        self.retention.settle()
        self.loader.reconsider()
        self.store.drop_before_next_save([])  # it may be one of those
        return self.loader.get_checkpoint(self.base, wanted)

    def leave_newer(self) -> None:
        """The second half of :meth:`go_back`."""
        version = self._memory.recovered
        assert version is not None
        self.retention.leave_newer(version)
        self.saver.stats.last_verified = None
        self.unasked = False

    def go_on_from(self, step: int) -> None:
        """Take note that the program goes on from this step, on all ranks, and knows of what there is."""
        self.unasked = False
        if self.persisting is not None:
            self.persisting.align(step)

    @property
    def persist_health(self) -> PersistHealth:
        """How persisting goes, on this rank, now; all None where nothing is to be persisted."""
        return PersistHealth(None, None, None, 0) if self.persisting is None else self.persisting.health

    def finish(self, deadline_s: float, settle: Callable[[float], bool] | None = None) -> bool:
        """Have saves under way committed and copied, and the newest version persisted, as a process does that is about
        to be ended by somebody else. Not collective. Saving may go on afterwards; from then on, each version that is
        verified is persisted as fast as that goes.

        Args:
            deadline_s: seconds at most for all of it.
            settle: waits for saves, at most for the seconds that it is given; by default ``saver.wait``.

        Returns:
            Whether all of that was done in time.
        """
        give_up = time.monotonic() + deadline_s
        if self.persisting is not None:
            self.persisting.hurry()  # at once: a save that other ranks have not begun may take all the time there is
        settled = (settle or self.saver.wait)(deadline_s)
        if not settled:
            _log.warning("the save under way was not committed and copied within %.0f s", deadline_s)
        persisted = self.persisting is None or self.persisting.finish(max(give_up - time.monotonic(), 0.0))
        if not persisted:
            _log.warning("the newest version was not persisted within %.0f s", deadline_s)
        return settled and persisted

    def remove_versions(self) -> None:
        """Remove every version from memory, on all nodes, at a planned end; a failure is logged. Collective. Saving may
        go on afterwards. Saves under way end first. Where the newest version was to be persisted and is not, or a save
        does not end, all versions stay."""
        try:
            if not self.ranks.all_ok(self.finish(seal_deadline_s())):
                _log.error(
                    "versions stay in memory: a rank has not ended its saves, or not persisted the newest version"
                )
                return
            discard_versions(self.store, self.ranks)
        except FlashpointError as error:
            _log.error("versions stay in memory: %s", error)
            return
        self.saver.stats.last_verified = None
        self.store.arenas.delete_free(0)

    def check_asked(self, call: str, *, hint: str | None = None) -> None:
        """Raise, on all ranks, if saving would overwrite versions that nobody has asked about.

        Args:
            call: what the user calls to ask.
            hint: what else the user can do.

        Raises:
            UnaskedVersionsError: so it is.
        """
        if self.unasked:
            raise unasked_versions(self.ranks.rank, self.ranks.node, str(self.base), call=call, hint=hint)

    @property
    def status(self) -> RankStatus:
        """How saving goes on this rank, as far as events have told."""
        return self._status.status

    def stop(self, persist_deadline_s: float | None = None) -> None:
        """End the background work, with ``FLASHPOINT_EXIT_DEADLINE_S`` for saves under way, and as long, or the time
        given, for persisting the newest version. Arenas stay mapped, for whoever may still write to them. Idempotent.
        """
        if not self._stopped and not self.saver.owner.forked:
            answer_sigterm()
            self._stopped = True
            if self._in_flight is not None:
                let_go_of_sigterm(self._in_flight)
            self.saver.close(exit_deadline_s())
            if self.persisting is not None:
                self.persisting.end(exit_deadline_s() if persist_deadline_s is None else persist_deadline_s)
            self._status.close()
            self.replication.close()
            self.loader.release()

    def close(self, persist_deadline_s: float | None = None) -> None:
        """End everything, and let go of the base container. Versions stay. Idempotent.

        Args:
            persist_deadline_s: seconds at most for persisting the newest version. By default
                ``FLASHPOINT_SEAL_DEADLINE_S``, since this is a planned end.
        """
        self.stop(seal_deadline_s() if persist_deadline_s is None else persist_deadline_s)
        if not self._closed and not self.saver.owner.forked:
            self._closed = True
            self.objects.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The peers may be dead or about to be: they are not waited for as long.
        self.close(None if error is None else exit_deadline_s())
