"""What ranks left on a node that they do not run on any more.

Owns who takes that over, and when it may go. It may be the only copy of a version, so nothing goes before a newer one
is verified, or the same one is in its place elsewhere; until then, a rank that runs here answers for it, and has the
use of what memory it leaves free.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence

from ml_flashpoint.checkpoint_object_manager.base_marks import PRIVATE_DIR, RANK_NAME
from ml_flashpoint.checkpoint_object_manager.rank_store import RankStore
from ml_flashpoint.format.errors import JobInUseError

_log = logging.getLogger(__name__)


def take_over_departed(store: RankStore, ranks_here: Sequence[int], gather: Callable[[bytes], list[bytes]]) -> None:
    """Make this rank's share of what departed ranks left its own. Collective, once every rank has opened its store:
    what is in use by then is not taken.

    Args:
        ranks_here: ranks that run on this node, this one among them. Those that have nothing here yet take it all, in
            turn; if there are none, all do.
        gather: what each rank says, by rank. Nobody takes anything before all have looked.
    """
    left: list[int] = []
    try:
        left = list(_departed(store, ranks_here))
    except Exception as error:  # not raised: the others wait for what is gathered
        _log.warning("cannot look for what departed ranks left: %s", error)
    held = gather(b"%d" % store.arenas.count)
    newcomers = [rank for rank in ranks_here if int(held[rank]) == 0] or list(ranks_here)
    for index, rank in enumerate(left):
        if newcomers[index % len(newcomers)] == store.rank:
            try:
                store.take_over(RankStore(store.base, rank, lock_deadline_s=0))
            except JobInUseError as error:
                _log.info("what rank %d left is still in use: %s", rank, error)
            except Exception as error:  # it stays where it is, and counts as used
                _log.warning("cannot take over what rank %d left: %s", rank, error)


def sweep_departed(store: RankStore, ranks_here: Collection[int], save_id: str) -> bool:
    """Prune what departed ranks left and nobody took over, and give its memory back.

    Args:
        ranks_here: ranks that run on this node; theirs is never touched.
        save_id: older parts may go, but for what the store retains.

    Returns:
        Whether nothing is left to be swept. False: a process still uses some of it, or some is retained.
    """
    done = True
    for rank in _departed(store, ranks_here):
        try:
            left = RankStore(store.base, rank, lock_deadline_s=0)
        except JobInUseError:
            done = False
            continue
        left.retained = store.retained
        left.prune(save_id)
        done = done and not left.held()
        left.delete_and_close()
    return done


def _departed(store: RankStore, ranks_here: Collection[int]) -> Iterator[int]:
    for path in sorted((store.base / PRIVATE_DIR).iterdir()):
        match = RANK_NAME.fullmatch(path.name)
        if match is not None and int(match[1]) not in (store.rank, *ranks_here):
            yield int(match[1])
