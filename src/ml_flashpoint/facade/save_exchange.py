"""What ranks say to each other about a save: two exchanges, before it is written and after.

Owns the messages between the ranks and the coordinator, which is rank 0, and what a rank remembers of its plan between
saves. A rank whose state has the structure from before says so, copies its share at once, and leaves the first exchange
to the background; another one sends its plan, and waits for its share. Who writes what is `plan_agreement`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from ml_flashpoint.core.save_identity import SaveIdentity
from ml_flashpoint.facade.failures import as_flashpoint_error, causes_of
from ml_flashpoint.facade.plan_agreement import Answer, PlanAgreement, Report
from ml_flashpoint.format.errors import FlashpointError
from ml_flashpoint.ranks.lasting_group import LastingGroup
from ml_flashpoint.ranks.roll_call import Late
from ml_flashpoint.state.archive import SafeGlobal
from ml_flashpoint.state.plan import Offer, Share
from ml_flashpoint.state.tree import Tree


class SaveExchange:
    """The exchanges of one rank. One save at a time, from whatever thread.

    Args:
        group: processes that save together; None without torch.distributed.
        safe_globals: see `Flashpoint`.

    Attributes:
        share: what this rank writes of the state seen last; None until ranks have agreed on that.
    """

    def __init__(self, group: LastingGroup | None, safe_globals: Sequence[SafeGlobal] = ()) -> None:
        self._group = group
        self._rank = dist.get_rank() if group is not None else 0
        world_size = dist.get_world_size() if group is not None else 1
        self._agreement = PlanAgreement(world_size, safe_globals) if self._rank == 0 else None
        self._offer: Offer | None = None
        self._generation: int | None = None
        self.share: Share | None = None

    def look_at(self, state: Mapping[str, Any]) -> Tree:
        """Flatten the state that is saved next. If it is of another structure than the one before, there is no
        :attr:`share` of it yet.

        Raises:
            ValueError: two of its values have one name.
        """
        tree = Tree(state)
        if self._offer is None or not self._offer.is_of(tree):
            self._offer = self.share = self._generation = None
            self._offer = Offer(tree, coordinator=self._rank == 0)
        return tree

    def agree(self, identity: SaveIdentity, late: Late) -> SaveIdentity:
        """Collective: all ranks are about to save. Afterwards there is a :attr:`share`.

        Args:
            identity: what this rank proposes to call the save.
            late: is told of ranks that do not come; see `LastingGroup.run`.

        Returns:
            What all ranks call it.

        Raises:
            DivergedError: they save different steps.
            FlashpointError: a rank cannot save, or is gone.
        """
        assert self._offer is not None
        known = self.share is not None
        generation, plan = (self._generation, None) if known else (None, self._offer.plan)
        answer = self._ask(Report(identity, generation, plan), late)
        if answer.share is not None:
            self.share = Share(self._offer, answer.share)
        self._generation = answer.generation
        assert answer.identity is not None
        return answer.identity

    def refuse(self, error: BaseException, step: int) -> None:
        """Collective: this rank cannot save, and the others learn of it instead of waiting.

        Raises:
            FlashpointError: always: why there is no such save, which may be what another rank says.
        """
        failure = as_flashpoint_error(causes_of(error), step=step, rank=self._rank)
        self._ask(Report(failure=failure))
        raise failure

    def _ask(self, report: Report, late: Late | None = None) -> Answer:
        answer: Answer = self._exchange(report, self._answers, late)
        if answer.failure is not None:
            if answer.generation != self._generation:
                self.share = self._generation = None
            raise answer.failure
        return answer

    def _answers(self, reports: list[Report]) -> list[Answer]:
        """On the coordinator."""
        assert self._agreement is not None
        return self._agreement.agree(reports)

    def conclude(self, failure: BaseException | None, commit: Callable[[bytes], object], step: int) -> None:
        """Collective: this rank has committed its part, or failed to. The version is complete if none raises.

        Args:
            commit: called on the coordinator, with DCP's metadata, once all others have committed theirs.

        Raises:
            FlashpointError: it failed, on whatever rank, or one is gone.
        """
        mine = None if failure is None else as_flashpoint_error(causes_of(failure), step=step, rank=self._rank)

        def end(outcomes: Sequence[FlashpointError | None]) -> list[FlashpointError | None]:
            first = next((each for each in outcomes if each is not None), None)
            if first is None:
                try:
                    assert self._agreement is not None
                    commit(self._agreement.metadata())
                except Exception as error:  # of whatever kind: the others wait for what comes of it
                    first = as_flashpoint_error(causes_of(error), step=step, rank=self._rank)
            return [first] * len(outcomes)

        outcome = self._exchange(mine, end)
        if outcome is not None:
            raise outcome

    def _exchange(self, message: Any, answer: Callable[[list[Any]], Sequence[Any]], late: Late | None = None) -> Any:
        """Collective: what the coordinator's ``answer`` to the messages of all ranks, in rank order, has for this
        one."""
        if self._group is None:
            return answer([message])[0]
        received: list[Any] = [None]

        def collective(group: dist.ProcessGroup) -> None:
            messages = [None] * dist.get_world_size(group) if self._rank == 0 else None
            dist.gather_object(message, messages, dst=0, group=group)
            answers = None if messages is None else list(answer(messages))
            dist.scatter_object_list(received, answers, src=0, group=group)

        self._group.run("the save", collective, late=late)
        return received[0]
