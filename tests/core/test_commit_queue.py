"""The queue behind a saver: what goes wrong in it must neither keep a rank from voting nor pass for success."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from ml_flashpoint.core.commit_queue import CommitQueue
from ml_flashpoint.core.save import Save, SaveState
from ml_flashpoint.core.save_identity import SaveIdentity
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from tests.support.injector import Fault, Injector

# What a store does with older versions.
RETAINING: dict[str, Any] = {
    "advance": lambda save_id, **known: None,
}


class TwoRanks:
    """A group of which the other rank always agrees, and its numbering; it records this rank's votes."""

    distributed = True
    highest = 9
    rank, node = 0, "node-0"
    is_node_leader = False

    def __init__(self) -> None:
        self.votes: list[tuple[int, ...]] = []

    was_asked = True

    def minimum(self, values: tuple[int, ...]) -> tuple[int, ...]:
        self.votes.append(values)
        return values

    def newest_ms(self, base: str) -> int:
        return -1

    def close(self) -> None:
        pass


def test_a_rank_votes_whatever_goes_wrong_before() -> None:
    group: Any = TwoRanks()

    def watch(save: Save) -> float | None:
        raise OSError("the notices are gone")

    queue = CommitQueue(group, group, group, None, seal_deadline_s=lambda: 10.0, watch=watch)
    broken = Save(SaveIdentity("a", 1))
    queue.submit(broken)
    assert broken.finished.wait(10)
    assert [vote[:2] for vote in group.votes] == [(0, 1)]
    assert isinstance(broken.error, OSError)

    part = SimpleNamespace(doomed=False, size=0)
    store = SimpleNamespace(base="/job", pinned=lambda part: nullcontext(True), **RETAINING)
    later = Save(SaveIdentity("a", 2))
    later.version = CheckpointContainerId("/job/step-2_ckpt")
    later.commit(part, store)  # type: ignore[arg-type]
    queue.submit(later)
    assert later.finished.wait(10)
    assert later.state is SaveState.VERIFIED
    queue.close(5)


def test_a_thread_that_cannot_be_started_is_started_later() -> None:
    group: Any = TwoRanks()
    queue = CommitQueue(group, group, group, None, seal_deadline_s=lambda: 10.0, watch=lambda save: 0.1)
    one, other = Save(SaveIdentity("a", 1)), Save(SaveIdentity("a", 2))
    for save in (one, other):
        save.fail(OSError("lost"))
    with Injector(0, [Fault(rank=0, step=0, point="thread", action="no-thread")]) as injector:
        queue.submit(one)
        assert len(injector.fired) == 1
        assert queue.wait_for_change(queue.is_idle, 10)
        queue.submit(other)
        assert queue.wait_for_change(queue.is_idle, 10)
    assert len(group.votes) == 2
    queue.close(5)


def test_a_save_that_turns_out_verified_is_not_evicted_at_that_instant() -> None:
    """Older versions go then, so there would be none left."""
    group: Any = TwoRanks()
    evicted: list[bool] = []
    queue = CommitQueue(group, group, group, None, seal_deadline_s=lambda: 10.0, watch=lambda save: 0.1)
    store = SimpleNamespace(base="/job", reject=lambda save_id: None, **RETAINING)
    uncertain = Save(SaveIdentity("a", 4))
    uncertain.commit(SimpleNamespace(), store)  # type: ignore[arg-type]
    uncertain.replicate()
    uncertain.uncertain = True
    queue._uncertain.append(uncertain)
    verify = queue._verify_save

    def verify_after_an_eviction(save: Save) -> None:
        evicted.append(queue.evict(save))
        verify(save)

    queue._verify_save = verify_after_an_eviction  # type: ignore[method-assign]
    queue._clear_up(4)
    assert evicted == [False]
    assert uncertain.state is SaveState.VERIFIED
    queue.close(5)
