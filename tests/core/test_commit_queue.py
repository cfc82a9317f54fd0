"""The queue behind a saver: what goes wrong in it must neither keep a rank from voting nor pass for success."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ml_flashpoint.core.commit_queue import CommitQueue, PendingSave


class TwoRanks:
    """A group of which the other rank always agrees; it records this rank's votes."""

    distributed = True
    rank = 0
    is_node_leader = False

    def __init__(self) -> None:
        self.votes: list[tuple[int, ...]] = []

    def agree_min(self, values: tuple[int, ...]) -> tuple[int, ...]:
        self.votes.append(values)
        return values


def test_a_rank_votes_whatever_goes_wrong_before() -> None:
    group: Any = TwoRanks()

    def watch(pending: PendingSave) -> float | None:
        raise OSError("the notices are gone")

    queue = CommitQueue(group, None, seal_deadline_s=lambda: 10.0, watch=watch)
    broken = PendingSave("a-1", 1)
    queue.submit(broken)
    assert broken.settled.wait(10)
    assert [vote[:2] for vote in group.votes] == [(0, 1)]
    assert isinstance(broken.error, OSError)

    part, store = SimpleNamespace(), SimpleNamespace(advance=lambda attempt: None)
    later = PendingSave("a-2", 2, step=2)
    later.resolve(part, store)  # type: ignore[arg-type]
    queue.submit(later)
    assert later.settled.wait(10)
    assert later.verified
    queue.close(5)


def test_only_the_first_outcome_of_a_save_counts() -> None:
    pending = PendingSave("a-1", 1)
    assert pending.resolve(None, None, OSError("first"))
    assert not pending.resolve(None, None, OSError("second"))
    assert str(pending.error) == "first"
