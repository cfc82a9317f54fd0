"""Reasons why nothing can be loaded, and the decision that a job may start from nothing.

Pure functions of what all ranks know, so that all of them decide alike.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ml_flashpoint.engine.inventory import NodeReport
from ml_flashpoint.format.errors import NothingLoadableError
from ml_flashpoint.format.save_id import SaveId
from ml_flashpoint.memory.lineage import newest_begun

_MOST_SHOWN = 8

HINT = (
    "nothing was removed: try again when the cause is mended; to go on from elsewhere, pass a fallback; "
    "to give these versions up, remove the base container on every node (or pass discard_existing=True)"
)
"""Advice where nothing can be loaded, in the words of all adapters."""


def why_nothing(
    reports: Sequence[NodeReport],
    given_up: Mapping[SaveId, str],
    discarded: Collection[SaveId],
    *,
    world_size: int,
    durable: Sequence[str] = (),
) -> NothingLoadableError | None:
    """Return an error that names the versions that were lost; None if no version but the discarded ones was ever
    complete.

    Args:
        reports: of every node.
        given_up: versions that could not be fetched or checked, and why.
        discarded: versions that the program could not load, which its own errors explain.
        world_size: number of ranks now.
        durable: problems of the durable store.
    """
    reasons = [f"{save.version} ({why})" for save, why in given_up.items()] + list(durable)
    reasons += [
        f"{unread.version or 'the versions'} on {report.inventory.node} ({unread.why})"
        for report in reports
        for unread in report.unread
    ]
    parts_lost = False
    if not reasons and not discarded:
        reasons = _lost_parts(reports)
        parts_lost = all(part.world_size == world_size for report in reports for part in report.inventory.parts)
    if not reasons:
        return None
    more = f", and {len(reasons) - _MOST_SHOWN} more" if len(reasons) > _MOST_SHOWN else ""
    text = f"there are versions and none can be loaded: {'; '.join(reasons[:_MOST_SHOWN])}{more}"
    error = NothingLoadableError(text, hint=HINT)
    error.parts_lost = parts_lost
    return error


def _lost_parts(reports: Sequence[NodeReport]) -> list[str]:
    """Return the saves that are not whole, or do not exist; none if it is certain that no version was ever complete.

    It is certain if no record of the run says that there was a version, and the save is the only one there (the run's
    first, cut short), or the ranks whose parts are missing have saved on nodes that are here: had they committed their
    parts, these would be here, too.
    """
    record = newest_begun(record for report in reports for record in report.records)
    saves: dict[tuple[SaveId, int], set[int]] = {}
    for report in reports:
        for part in report.inventory.parts:
            saves.setdefault((part.save, part.world_size), set()).add(part.rank)
    here = frozenset[int]().union(*(report.savers for report in reports))
    exist = {save for save, _ in saves if record is None or record.has(save)}
    reasons, doubtful = [], record is not None and record.had_versions
    for (save, size), ranks in sorted(saves.items(), reverse=True):
        missing = [rank for rank in range(size) if rank not in ranks]
        if save not in exist:
            reasons.append(f"{save.version} of run {save.run} (the job has gone back from it)")
        elif missing:
            shown = ", ".join(map(str, missing[:_MOST_SHOWN]))
            doubtful = doubtful or (len(exist) > 1 and any(rank not in here for rank in missing))
            reasons.append(f"{save.version} (the parts of ranks {shown} of {size} are on no node of this job)")
        else:
            reasons.append(f"{save.version} (its parts were not written by one table)")
    if doubtful and not reasons and record is not None:
        reasons.append(f"the versions of run {record.run} (no part of any is on a node of this job)")
    return reasons if doubtful else []
