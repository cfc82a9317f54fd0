"""Which parts are of one save, and which save is newer: the names that saves get.

Owns the identity of a save and how ranks come to the same one. A rank proposes; what all ranks take is above every
proposal, so a rank that has begun more saves than others, or fewer, is in step again with the next one. The proposals
travel with what ranks exchange for a save anyway; that is the doors' business.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from ml_flashpoint import events
from ml_flashpoint.checkpoint_object_manager.base_marks import PRIVATE_DIR
from ml_flashpoint.checkpoint_object_manager.version_files import list_versions
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import DivergedError, FlashpointError
from ml_flashpoint.format.lineage import read_lineage
from ml_flashpoint.format.manifest import parse_manifest_name
from ml_flashpoint.ranks.rank_group import RankGroup
from ml_flashpoint.ranks.roll_call import Late

_MS_DIGITS = 13
_SAVES_OF_A_SAVER = 10**9
_UNKNOWN = 2**63 - 1
# Further than ranks can be apart that number their saves alone and have just learned that they are.
_JUMP = 1000


@dataclass(frozen=True, slots=True)
class SaveIdentity:
    """What is the same for all parts of one save.

    Attributes:
        run_id: of the run that saves; later ones compare greater.
        sequence: rises from save to save of a run.
        step: of the version, -1 if it is not known yet.
        newest_ms: in a proposal, the time in the newest save id of other runs that this rank has found in the base
            container, if it does not compare less than this run's; else -1.
    """

    run_id: str
    sequence: int
    step: int = -1
    newest_ms: int = -1

    @property
    def save_id(self) -> str:
        """The string by which the parts are named. Of one run, all have the same length, so they sort as numbers."""
        return f"{self.run_id}-{self.sequence:019d}"

    def is_of_saver(self, save_id: str) -> bool:
        """Return True if the saver of this save has made that one, too."""
        run_id, _, sequence = save_id.rpartition("-")
        return run_id == self.run_id and int(sequence) // _SAVES_OF_A_SAVER == self.sequence // _SAVES_OF_A_SAVER


def common_identity(proposals: Iterable[SaveIdentity]) -> SaveIdentity:
    """What all ranks take, from what each has proposed, in rank order.

    Raises:
        DivergedError: they save different steps.
    """
    gathered = list(proposals)
    steps = sorted({each.step for each in gathered})
    if len(steps) > 1:
        ahead = next(rank for rank, each in enumerate(gathered) if each.step == steps[-1])
        behind = next(rank for rank, each in enumerate(gathered) if each.step < steps[-1])
        raise _diverged(f"rank {ahead} step {steps[-1]}, rank {behind} step {gathered[behind].step}", steps[-1])
    run_id = max(each.run_id for each in gathered)
    agreed = SaveIdentity(run_id, max(each.sequence for each in gathered), steps[0])
    return later_than(agreed, max(each.newest_ms for each in gathered))


def later_than(identity: SaveIdentity, newest_ms: int) -> SaveIdentity:
    """The same save, under a run id that sorts after what was found, if it did not. The same on every rank."""
    if newest_ms < 0:
        return identity
    return replace(identity, run_id=f"{newest_ms + 1:0{_MS_DIGITS}d}{identity.run_id[_MS_DIGITS:]}")


def newest_of_other_runs(base: Path, run_id: str) -> int:
    """The time in the newest save id in a base container that does not sort before this run's, in milliseconds since
    the epoch; -1 if there is none. A clock that was set back leaves such save ids behind."""
    save_ids = [_newest_run(base)]
    for version in list_versions(base):
        try:
            names = os.listdir(base / version)
        except FileNotFoundError:  # pruned meanwhile
            continue
        save_ids += [found[1] for found in map(parse_manifest_name, names) if found is not None]
    newest = -1
    for save_id in save_ids:
        digits = save_id[:_MS_DIGITS]
        # Of another form it was not made here, and nothing could be made to sort after it.
        if save_id > run_id and not save_id.startswith(run_id) and digits.isascii() and digits.isdigit():
            newest = max(newest, int(digits) if len(digits) == _MS_DIGITS else -1)
    return newest


def _newest_run(base: Path) -> str:
    try:
        return read_lineage(base / PRIVATE_DIR).newest
    except FlashpointError:  # it is not believed by anybody
        return ""


def _diverged(who: str, highest_step: int) -> DivergedError:
    hint = "every rank must save at the same steps; the next save is not affected"
    return DivergedError(f"ranks save different steps: {who}", highest_step=highest_step, hint=hint)


def missing_ranks(by: events.Teller, version: CheckpointContainerId | None) -> Late:
    """Return a function that tells of ranks which do not come to a save of a version."""
    base, step = (None, None) if version is None else (version.parent, version.step)
    return lambda ranks, seconds: events.emit(events.RanksMissing, by, base, step, ranks=ranks, seconds=seconds)


class Numbering:
    """How one saver numbers its saves. Thread-safe.

    Args:
        group: the ranks that save together.
        saver: number of the saver; what a later one saves is newer.
    """

    def __init__(self, group: RankGroup, saver: int) -> None:
        self._group = group
        self._lock = threading.Lock()
        self._sequence = saver * _SAVES_OF_A_SAVER
        self._next_savers = self._sequence + _SAVES_OF_A_SAVER
        self._newest_ms: dict[str, int] = {}

    def begin(self) -> SaveIdentity:
        """The identity of a new save, as long as ranks have not come to another one."""
        with self._lock:
            self._sequence += 1
            return SaveIdentity(self._group.run_id, self._sequence)

    @property
    def highest(self) -> int:
        """The highest number so far."""
        return self._sequence

    def is_own(self, save_id: str) -> bool:
        """Return True if this saver has made a save, in this run."""
        return SaveIdentity(self._group.run_id, self._sequence).is_of_saver(save_id)

    def is_newer(self, save_id: str) -> bool:
        """Whether a save is of this run, and of a saver that was made after this one, which counts as newer."""
        run_id, _, sequence = save_id.rpartition("-")
        return run_id == self._group.run_id and int(sequence) >= self._next_savers

    def propose(self, version: CheckpointContainerId | None, sequence: int | None) -> SaveIdentity:
        """What this rank proposes for a save.

        Args:
            sequence: of the save, if it has begun here.
        """
        run_id = self._group.run_id
        sequence = self._sequence + 1 if sequence is None else sequence
        if version is None or version.step is None:
            return SaveIdentity(run_id, sequence)
        return SaveIdentity(run_id, sequence, version.step, self.newest_ms(version.parent.path))

    def newest_ms(self, base: str) -> int:
        """See `SaveIdentity`. The folder is read once: nothing that is newer comes later."""
        run_id = self._group.run_id
        if base not in self._newest_ms:
            self._newest_ms[base] = newest_of_other_runs(Path(base), run_id)
        newest = self._newest_ms[base]
        return newest if newest >= int(run_id[:_MS_DIGITS]) else -1

    def agree(self, proposal: SaveIdentity, *, asked: bool = True, late: Late | None = None) -> SaveIdentity | None:
        """What all ranks take. Collective, in the foreground; a rank without a step goes along with the others. None if
        one of them may not save where nobody has ``asked`` for what there is. ``late``: see `LastingGroup.run`.

        Raises:
            DivergedError: they save different steps; all ranks learn of it.
            FlashpointError: a rank is gone.
        """
        known = proposal.step >= 0
        low, negated = (proposal.step, -proposal.step) if known else (_UNKNOWN, _UNKNOWN)
        values = (-proposal.sequence, -proposal.newest_ms, low, negated, int(asked))
        sequence, newest, lowest, highest, all_asked = self._group.minimum(values, "agreement on a save", late=late)
        if not all_asked:
            return None
        if lowest != _UNKNOWN and lowest != -highest:
            mine = proposal.step if known else "none"
            raise _diverged(f"from {lowest} to {-highest}, rank {self._group.rank} {mine}", -highest)
        return later_than(SaveIdentity(proposal.run_id, -sequence, proposal.step), -newest)

    def adopt(self, identity: SaveIdentity) -> None:
        """Take note of what ranks have come to."""
        with self._lock:
            self._sequence = max(self._sequence, identity.sequence)
            self._group.run_id = max(self._group.run_id, identity.run_id)

    def jump(self, highest: int, newest_ms: int) -> None:
        """Number the saves to come above all that ranks have used, so that they are in step again.

        Args:
            highest: the highest number on any rank; with the rest, the same on all ranks.
            newest_ms: see `SaveIdentity`, of any rank.
        """
        self.adopt(later_than(SaveIdentity(self._group.run_id, (highest // _JUMP + 2) * _JUMP), newest_ms))
