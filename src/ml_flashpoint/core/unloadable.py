"""Why nothing can be loaded, and whether it is safe to start from nothing.

Owns setting a job that never had a complete version, whose orphans may be forgotten, apart from one whose versions are
out of reach. Pure functions of what the ranks know, so that all of them decide alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

from ml_flashpoint.core.inventory import NodeReport
from ml_flashpoint.core.recovery_plan import complete_versions
from ml_flashpoint.format.errors import NothingLoadableError
from ml_flashpoint.format.lineage import Lineage

_MOST_SHOWN = 8

HINT = (
    "nothing was removed: try again when the cause is mended; to go on from elsewhere, pass a fallback; "
    "to give these versions up, remove the base container on every node (or pass discard_existing=True)"
)
"""What to do when nothing can be loaded, in the words of all doors."""


def why_nothing(
    reports: Sequence[NodeReport],
    given_up: Mapping[tuple[str, str], str],
    discarded: Collection[tuple[str, str]],
    lineage: Lineage,
    *,
    world_size: int,
) -> NothingLoadableError | None:
    """Why no version can be loaded, where none was found; None where there was none to lose.

    Args:
        reports: of every node that has ranks. All of them answered.
        given_up: versions (name, save id) that could not be fetched or verified, and why.
        discarded: versions that the caller did not want any more.
        lineage: which saves count: those that were gone back from are none that can be loaded.
        world_size: number of ranks now.

    Returns:
        An error that names every version concerned and what is wrong with it, or None: nothing but what the caller has
        discarded was ever complete.
    """
    reasons = [f"{version} ({why})" for (version, _), why in given_up.items()]
    complete = complete_versions(report.inventory for report in reports)
    reasons += [f"{each.version} (was gone back from)" for each in complete if not lineage.counts(each.save_id)]
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
    """Saves of which parts are missing everywhere, unless it is certain that none was ever complete.

    It is certain if no node remembers one, and the save is the only one there (the job's first, cut short), or the
    ranks whose parts are missing have saved on nodes that are here still: had they committed theirs, it would be here.
    Otherwise they ran on a node that is gone, and nobody can know.
    """
    saves: dict[tuple[str, str, int], set[int]] = {}
    for report in reports:
        for part in report.inventory.parts:
            saves.setdefault((part.save_id, part.version, part.world_size), set()).add(part.rank)
    complete = {version.save_id for version in complete_versions(report.inventory for report in reports)}
    here = frozenset[int]().union(*(report.savers for report in reports))
    remembered = any(report.was_complete for report in reports)
    reasons, doubtful = [], remembered
    for (save_id, version, world_size), ranks in sorted(saves.items(), reverse=True):
        if save_id in complete:
            continue
        missing = (rank for rank in range(world_size) if rank not in ranks)
        shown = ", ".join(map(str, itertools.islice(missing, _MOST_SHOWN)))
        elsewhere = any(rank not in ranks and rank not in here for rank in range(world_size))
        doubtful = doubtful or (len(saves) > 1 and elsewhere)
        reasons.append(f"{version} (the parts of ranks {shown} of {world_size} are on no node of this job)")
    return reasons if doubtful else []
