"""`Flashpoint`: memory-first checkpoints for anyone with a training loop.

Owns the schedule, what a failed save means to the loop, what happens when memory has nothing to load, and the life of
the engine's parts. Saving and loading are `facade.save_runner`'s and `facade.state_loader`'s, which go through the
DCP door (`adapter.pytorch`) like anyone else's; what is tracked is `state.tracked`'s.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ml_flashpoint import events
from ml_flashpoint.copy.overlap import Overlap
from ml_flashpoint.core.engine import CheckpointEngine
from ml_flashpoint.core.persist_options import persist_options
from ml_flashpoint.core.room import check_capacity
from ml_flashpoint.data import LoaderBatches, Loaders, Through
from ml_flashpoint.engine.schedule import checked_every, passes_multiple
from ml_flashpoint.engine.signals import answer_sigterm
from ml_flashpoint.facade.agreement import fall_back
from ml_flashpoint.facade.claims import claim, release
from ml_flashpoint.facade.health import Recovery
from ml_flashpoint.facade.kept_versions import KeptVersions, checked_wanted
from ml_flashpoint.facade.launcher import warn_of_shared_store
from ml_flashpoint.facade.notices import size, tell
from ml_flashpoint.facade.readings import Readings
from ml_flashpoint.facade.save_runner import SaveRunner
from ml_flashpoint.facade.state_loader import StateLoader
from ml_flashpoint.format.arguments import (
    checked_base,
    checked_bool,
    checked_callable,
    checked_choice,
    checked_globals,
    checked_integer,
    checked_seconds,
)
from ml_flashpoint.format.checkpoint_id_types import MAX_STEP
from ml_flashpoint.format.errors import (
    DeadlineError,
    FlashpointError,
)
from ml_flashpoint.format.knobs import exit_deadline_s, seal_deadline_s
from ml_flashpoint.ranks.lasting_group import LastingGroup
from ml_flashpoint.ranks.rank_group import default_group, rank_group
from ml_flashpoint.ranks.retention import Keep, checked_keep
from ml_flashpoint.ranks.strategies import ReplicationStrategy, checked_strategy
from ml_flashpoint.state.archive import SafeGlobal
from ml_flashpoint.state.tracked import Reshard, TrackedState, checked_reshard

_log = logging.getLogger(__name__)

_IF_UNASKED = "call resume() before the first step, or construct with discard_existing=True"


class Flashpoint(KeptVersions, Readings):
    """Saves a training loop's state into memory every few steps, and restores it after a crash.

    ::

        with Flashpoint("/dev/shm/mlf-jobs/job-145", every_n_steps=1) as fp:   # after init_process_group, if any
            fp.track(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
            step = fp.resume()                                                # 0 when fresh
            for batch in fp.batches(loader):
                ...
                optimizer.step()
                fp.step()

    Construct it on all ranks, and call its methods in the same order on all of them: construction, `resume`, `step`
    and `save` are collective. They belong to the training thread; `wait` and everything that only tells may be used
    from any.

    The state saved is that of all tracked objects, and of the random number generators of Python, NumPy, torch and
    CUDA. The version of step n holds the state after n steps. It is copied before a save returns, and may change in any
    way then. The rest is done in the background; one save at most is under way.

    Args:
        base: base container of the job on this node: an absolute path, best on a tmpfs. Restarts use the same.
        every_n_steps: `step` saves at every so many. `flashpoint plan` computes a number for a job.
        replication: who holds copies of whose parts: a strategy, ``"pairwise"``, ``"ring"`` or ``"none"``. By default
            pairs of nodes, or nobody on a single node.
        strict: raise when a save has failed, from the next `step`, `save`, `wait` or `close`. By default failed saves
            are logged, counted in `health`, and survived.
        handle_sigterm: with ``persist``, have the next `step`, `save` or `close` after SIGTERM wait until the newest
            version is persisted, before the handler that was there before, or the default action, has its turn. Opened
            in the main thread only; undone by `close`. Without ``persist``, SIGTERM is left alone.
        grace_s: seconds at most that SIGTERM is held up.
        safe_globals: further types that tracked objects may have in their state, as for
            ``torch.serialization.safe_globals``. Tensors, plain values, containers and NumPy arrays need none.
        deadline_s: seconds at most that a rank waits for the others, or for an earlier save, while saving or loading.
            By default ``FLASHPOINT_SEAL_DEADLINE_S``, or 600.
        discard_existing: remove every version that is in the base container, on all nodes, before anything else. Not
            for a script that is started again after a crash: it would remove what it should resume from.
        on_world_size_change: what becomes, on another number of ranks, of what each rank has of its own and no
            ``reshard`` function of `track` is for. ``"raise"``: random number generators of new ranks are seeded anew,
            what all ranks had alike is everybody's, and anything else is a `ReshardError`. ``"keep"``: rank r takes
            that of rank r modulo the old number, random numbers and place in the data included.
        overlap: copy what tracked optimizers update on CUDA devices while the next forward and backward run; see
            `before_update`. What is on the CPU, and everything without it, is copied before a save returns.
        keep: how many of the newest verified versions stay in memory, or a `Keep`.
        on_event: called with each `events.Event` of this base container, on a thread of its own.
        persist: URL of a folder of this job alone that all nodes see. Verified versions are written there, too, in the
            background, and `resume` takes the newest one where memory has none as new: see docs/persist.md.
        persist_every, persist_keep: the first version at or after each multiple of so many steps; so many stay.
        persist_bytes_per_s: most bytes that a rank writes there in a second.

    Raises:
        InvalidArgumentError: an argument is unusable, or differs between ranks.
        JobInUseError: a live process, or another `Flashpoint` of this one, uses the base container as this rank.
        FlashpointError: the base container cannot be used, or ranks cannot agree.
    """

    _tracked_type: type[TrackedState] = TrackedState  # a door whose state has another form has another one
    _watches_optimizers = True

    def __init__(
        self,
        base: str | os.PathLike[str],
        *,
        every_n_steps: int = 1,
        replication: ReplicationStrategy | str | None = None,
        strict: bool = False,
        handle_sigterm: bool = True,
        grace_s: float = 20.0,
        safe_globals: Sequence[SafeGlobal] = (),
        deadline_s: float | None = None,
        discard_existing: bool = False,
        on_world_size_change: str = "raise",
        overlap: bool = False,
        on_event: Callable[[events.Event], object] | None = None,
        keep: int | Keep = 1,
        persist: str | None = None,
        persist_every: int = 50,
        persist_keep: int = 3,
        persist_bytes_per_s: float | None = None,
    ) -> None:
        self._base = checked_base(base)
        self._every = checked_every(every_n_steps)
        strategy = checked_strategy(replication)
        self._strict = checked_bool("strict", strict)
        handle_sigterm = checked_bool("handle_sigterm", handle_sigterm)
        self._grace_s = checked_seconds("grace_s", grace_s)
        allowed = checked_globals(safe_globals)
        self._deadline_s = seal_deadline_s() if deadline_s is None else checked_seconds("deadline_s", deadline_s)
        discard_existing = checked_bool("discard_existing", discard_existing)
        overlap = checked_bool("overlap", overlap)
        persisted = persist_options(persist, persist_every, persist_keep, persist_bytes_per_s)
        change = checked_choice("on_world_size_change", on_world_size_change, "raise", "keep")
        on_event = checked_callable("on_event", on_event, "of one event")
        self._keep = checked_keep(keep)
        self._world = default_group()
        self._open(
            {"every_n_steps": self._every, "on_world_size_change": change},
            replication=strategy,
            discard_existing=discard_existing,
            keep=self._keep,
            persist=persisted,
            sigterm_grace_s=self._grace_s if handle_sigterm else None,
        )
        self._saves, self._states = self._make_runners(allowed, change, Overlap(wanted=overlap))
        self._steps = 0
        self._tracking_ended = False
        self._told = False  # that saving works
        self._closed = False
        self._part_bytes = 0
        self._resumed_from: int | None = None
        self._last_recovery: Recovery | None = None
        self._unsubscribe = on_event and events.add_subscriber(on_event, self._base, argument="on_event")
        warn_of_shared_store(self._ranks.rank)

    def _make_runners(
        self, allowed: tuple[SafeGlobal, ...], change: str, overlap: Overlap
    ) -> tuple[SaveRunner, StateLoader]:
        """What saves and what loads the tracked state, through the engine."""
        self._ranks = self._engine.ranks
        self._loaders = Loaders()
        self._tracked = self._tracked_type(self._ranks.rank, self._ranks.world_size)
        saves = SaveRunner(
            self._tracked,
            self._engine.saver,
            self._group,
            safe_globals=allowed,
            deadline_s=self._deadline_s,
            overlap=overlap,
        )
        states = StateLoader(
            self._tracked,
            self._engine.loader,
            self._ranks,
            self._group,
            safe_globals=allowed,
            on_world_size_change=change,
        )
        return saves, states

    def _open(self, alike: dict[str, object], **options: Any) -> None:
        """Take the base container and open the engine, on all ranks or on none; what is ``alike`` is so on all."""
        with contextlib.ExitStack() as undo:
            self._key = claim(self, os.path.realpath(self._base), rank_group().rank)
            undo.callback(release, self, self._key)
            rank_group().agree_on(**alike)
            self._engine = undo.enter_context(CheckpointEngine(self._base, **options))
            # One of its own, so that saves never interleave with the program's collectives, on any device.
            self._group: LastingGroup | None = None
            if self._world is not None:
                calls = "to call step() or save() for the same steps"
                self._group = rank_group().new_lasting_group("facade", deadline_s=self._deadline_s, calls=calls)
            else:
                # A single process is what was asked for: torch need not warn about it.
                warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit")
            undo.pop_all()

    # ---- what is saved ------------------------------------------------------------------------------------

    def track(self, /, *, reshard: Reshard | Mapping[str, Reshard] | None = None, **named: object) -> Flashpoint:
        """Say what to save and restore, before `resume` and the first save.

        Modules and optimizers are saved as they are sharded, and can be loaded by another number of ranks. The state
        of anything else (schedulers, data loaders, counters) belongs to one rank, which gets its own back. On another
        number of ranks, a state that was the same on all of them is everybody's. One that was not, and the place of a
        loader in the data, which means something else then, need a ``reshard`` function.

        Args:
            reshard: by name, or one for all of this call that are neither modules nor optimizers:
                ``reshard(states, rank, world_size)``, called on each rank when the number of ranks is another one,
                whether or not the states differ. ``states`` is what ``state_dict()`` gave on each rank that saved, by
                rank, in new copies; None where this name was not tracked. What it returns goes to
                ``load_state_dict()`` on this rank, which is ``rank`` of ``world_size`` now. `rest_of_epoch` is one for
                data loaders.
            named: anything with ``state_dict()`` and ``load_state_dict()``, by the name to save it under.

        Returns:
            This object.

        Raises:
            InvalidArgumentError: a name is taken or no identifier, an object has no state, or ``reshard`` is unusable.
            FlashpointError: it is too late.
        """
        self._check_open()
        if self._tracking_ended:
            raise FlashpointError(
                "tracking ends with resume() or the first save: what is tracked later could not be restored",
                rank=self._ranks.rank,
                hint="call track() before resume()",
            )
        functions = checked_reshard(reshard, named)
        for name, value in named.items():
            self._tracked.add(name, self._loaders.tracked(name, value), functions.get(name))
            if isinstance(value, Optimizer) and self._watches_optimizers:
                self._saves.overlap.watch(value)
        return self

    def batches(self, loader: DataLoader[Any], through: Through | None = None) -> LoaderBatches:
        """The batches of a tracked loader, from where training goes on: each ``for`` loop over the result is one pass.

        Args:
            loader: tracked. Whoever iterates over it directly changes nothing of where training goes on.
            through: fetches batches ahead of the loop: takes an iterable, and gives its batches one for one, in order.

        Returns:
            An iterable, whose ``len()`` is the loader's. The first pass after `resume` begins with the batch that comes
            next, and with the random number generators as they were saved.

        Raises:
            InvalidArgumentError: the loader is not tracked, or ``through`` cannot be called.
        """
        return self._loaders.batches(loader, through)

    # ---- recovery -----------------------------------------------------------------------------------------

    def resume(self, fallback: Callable[[], int | None] | None = None, *, step: int | None = None) -> int:
        """Restore the newest state that all ranks can load, or that of a step. Collective.

        Versions that turn out to be damaged are left for older ones; what cannot be read just now is tried again for
        ``FLASHPOINT_RECOVERY_DEADLINE_S`` first. Afterwards the filesystem is checked to have room for the checkpoints
        to come. May be called again during training, to go back to the newest version.

        Args:
            fallback: called on all ranks when memory has no version, or none that is sound; loads the state from
                elsewhere and returns the number of steps done, or None for 0. Not together with ``step``.
            step: load the version of this step, or raise. Newer versions do not count any more: no `resume` finds
                them again, and their memory is the next saves'.

        Returns:
            The number of steps done, which is where to go on; 0 if there is nothing to go on from. `step` counts on
            from there.

        Raises:
            ReshardError: the newest version is of another number of ranks, and nothing says what becomes of what
                each of them had of its own. Names it, on all ranks; nothing older is loaded, nor the fallback called.
            LoadError: there is a version that does not fit the tracked objects, whatever the fallback: lists all
                differences. Or there are versions, none could be loaded (`NothingLoadableError`), and no fallback.
                Going on would in the end overwrite them. May be called again: nothing is remembered of what failed. Or
                there is no version of ``step``: names those there are.
            CapacityError: the filesystem is too small.
            InvalidArgumentError: ``fallback`` cannot be called.
            FlashpointError: ranks lost each other, or their fallbacks returned different steps.
            Exception: what the fallback raised; a `LoadError` on ranks where it did not.
        """
        fallback = checked_callable("fallback", fallback, "without arguments that loads a state and returns its step")
        wanted = checked_wanted(step, fallback)
        self._check_usable()
        began = time.perf_counter()
        if not self._saves.help_and_await(self._deadline_s):
            raise DeadlineError("a save is still under way", rank=self._ranks.rank)
        outcome = self._load(wanted)
        source = outcome.source
        if outcome.version is not None:
            step = self._resumed_from = outcome.version.step or 0
        elif fallback is not None:
            if (why := outcome.why()) is not None:
                _log.error("falling back, and what is in memory will be overwritten: %s", why)
            step, source = fall_back(self._ranks, fallback), "fallback"
        else:
            outcome.refuse_to_start_anew()
            step, source = 0, "nothing"
        self._steps = step
        self._engine.go_on_from(step)
        self._saves.align()
        self._check_capacity()
        self._last_recovery = outcome.recovery(step, source, time.perf_counter() - began)
        seconds = self._last_recovery.total_s
        events.emit(events.Resumed, self._ranks, self._base, step, source=source, seconds=seconds)
        tell(_log, self._ranks.rank, "%s", self._last_recovery.in_words(str(self._base)))
        return step

    def _check_capacity(self) -> None:
        check_capacity(self._ranks, self._tracked.expected_bytes(), self._engine.store, self._engine.replication)

    # ---- saving -------------------------------------------------------------------------------------------

    def step(self) -> int:
        """Count a step as done, and save if one is due. Call it after the optimizer's step.

        Returns:
            The number of steps done.

        Raises:
            UnaskedVersionsError: see `save`.
            FlashpointError: a save has failed, and failures are to be raised (``strict``).
        """
        answer_sigterm()
        self._check_usable()
        self._engine.check_asked("resume()", hint=_IF_UNASKED)
        self._steps += 1
        self._loaders.stepped()
        if passes_multiple(self._every, self._steps - 1, self._steps):
            self._saves.save(self._engine.version(self._steps))
        self._raise_failure()
        return self._steps

    def save(self, step: int | None = None) -> None:
        """Save now, whatever the schedule says.

        Args:
            step: number of steps to save under; by default those done.

        Raises:
            InvalidArgumentError: ``step`` is no step.
            UnaskedVersionsError: the base container has versions from before, and `resume` was not called.
            FlashpointError: a save has failed, and failures are to be raised (``strict``).
        """
        answer_sigterm()
        self._check_usable()
        self._engine.check_asked("resume()", hint=_IF_UNASKED)
        step = self._steps if step is None else checked_integer("step", step, 0, MAX_STEP)
        self._loaders.stepped()
        self._saves.save(self._engine.version(step))
        self._raise_failure()

    def before_update(self) -> None:
        """Have what this thread gives to its devices from now on wait for the copy of the latest save.

        With ``overlap``, to be called before anything but its ``step()`` changes parameters of a tracked optimizer, or
        its state, on a CUDA device. Otherwise the save fails, and later saves return when all is copied.
        """
        self._saves.overlap.before_update()

    def _raise_failure(self) -> None:
        """Called at the end of everything that saves or waits."""
        if not self._told and self._saves.saves:
            self._told = True
            health = self.health
            what = "first save works: step %s, %s of this rank in memory; it held training up for %.3f s"
            tell(_log, self._ranks.rank, what, self._saves.last_saved, size(health.bytes), health.blocked_s)
        failure = self._saves.take_failure()
        if self._strict and failure is not None:
            raise failure

    def wait(self, deadline_s: float | None = None) -> bool:
        """Wait until every save begun is committed and has its copies, or has failed.

        Args:
            deadline_s: seconds at most; by default that of the constructor.

        Returns:
            Whether that was so in time.

        Raises:
            FlashpointError: a save has failed, and failures are to be raised (``strict``).
        """
        deadline_s = self._deadline_s if deadline_s is None else checked_seconds("deadline_s", deadline_s)
        self._engine.saver.owner.check(self._ranks.rank)
        settled = self._saves.settle(deadline_s)
        self._raise_failure()
        return settled

    # ---- life ---------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise FlashpointError("this Flashpoint is closed", rank=self._ranks.rank)
        self._engine.saver.owner.check(self._ranks.rank)
        if default_group() is not self._world:
            raise FlashpointError(
                "torch.distributed was initialized or destroyed since this Flashpoint was constructed",
                rank=self._ranks.rank,
                hint="construct it after init_process_group, and close it before destroy_process_group",
            )

    def _check_usable(self) -> None:
        self._check_open()
        if not self._tracked.names:
            raise FlashpointError("nothing is tracked", hint="call track(model=..., optimizer=...) first")
        self._tracking_ended = True

    def close(self) -> None:
        """Let saves under way finish, within a deadline, and end. Versions stay for the next run. Idempotent.

        Raises:
            FlashpointError: a save has failed, and failures are to be raised (``strict``).
        """
        self._close(self._deadline_s)
        self._raise_failure()

    def _close(self, deadline_s: float) -> None:
        if self._closed or self._engine.saver.owner.forked:
            return
        self._closed = True
        committed = self._saves.help_and_await(deadline_s)
        if not committed:
            _log.warning("closed while a save was under way: it may not be committed")
        self._engine.stop(deadline_s)
        self._part_bytes = self.health.bytes
        if committed:
            # Else arenas may still be written to: they stay mapped until the process ends.
            self._engine.close()
            if self._group is not None:
                self._group.close()
        self._saves.close()
        if self._unsubscribe is not None:
            self._unsubscribe()
        release(self, self._key)

    def __enter__(self) -> Flashpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            # The peers may be dead or about to be: they are not waited for as long.
            self._close(min(exit_deadline_s(), self._deadline_s))
