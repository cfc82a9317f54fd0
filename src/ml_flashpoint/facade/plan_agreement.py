"""Who writes what of a save: the plans of all ranks, made to fit each other on one of them.

Owns what the coordinator knows of the ranks' plans, and when a plan from before is good for one more save. Nothing
here communicates: `save_exchange` brings the reports of all ranks here, and the answers back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from ml_flashpoint.adapter.pytorch.metadata_format import encode_metadata
from ml_flashpoint.adapter.pytorch.storage_data import ItemPlace
from ml_flashpoint.core.save_identity import SaveIdentity, common_identity
from ml_flashpoint.facade.failures import as_flashpoint_error
from ml_flashpoint.format.errors import FlashpointError, SaveError
from ml_flashpoint.state.archive import SafeGlobal
from ml_flashpoint.state.plain_modes import plain_modes
from ml_flashpoint.state.plan import item_keys

# What torch's own writer says; torch 2.6 has none.
_DCP_VERSION: str | None = getattr(filesystem, "CURRENT_DCP_VERSION", None)


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank says of a save that it has begun.

    Attributes:
        identity: what it proposes to call it; None if it failed.
        generation: of the agreement by which it writes its share, if its state has the structure that it had then.
        plan: else, its plan, with all that it has.
        failure: why it cannot save.
    """

    identity: SaveIdentity | None = None
    generation: int | None = None
    plan: SavePlan | None = None
    failure: FlashpointError | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What a rank learns of a save.

    Attributes:
        identity: what all ranks call it.
        generation: of the agreement that holds from now on. None: there is none, and all send their plans again.
        share: which items of the plan that it sent it writes, by number; None if it sent none.
        failure: why there is no such save, the same on all ranks.
    """

    identity: SaveIdentity | None = None
    generation: int | None = None
    share: tuple[int, ...] | None = None
    failure: FlashpointError | None = None


class PlanAgreement:
    """What the coordinator knows. A rank that goes on with its plan from before keeps its share, whatever others have
    changed, since it may have copied that already; they take what nobody else does.

    Args:
        world_size: number of ranks.
        safe_globals: types that may be in the metadata, see `Flashpoint`.
    """

    def __init__(self, world_size: int, safe_globals: Sequence[SafeGlobal] = ()) -> None:
        self._world_size = world_size
        self._safe_globals = safe_globals
        self._generation: int | None = None
        self._generations = 0
        self._plans: list[SavePlan] = []
        self._shares: list[SavePlan] = []
        self._metadata: bytes | None = None

    def agree(self, reports: Sequence[Report]) -> list[Answer]:
        """What to answer to the reports of all ranks, in rank order."""
        try:
            identity = self._identity(reports)
            shares = self._take_up(reports)
        except FlashpointError as failure:
            # Who sent no plan may go on with the one that it has, unless that is the trouble.
            return [Answer(failure=failure, generation=self._generation)] * self._world_size
        except Exception as error:  # of whatever kind: the others wait for what comes of it
            self._forget()
            return [Answer(failure=as_flashpoint_error({0: error}, step=0, rank=0))] * self._world_size
        return [Answer(identity, self._generation, share) for share in shares]

    def _identity(self, reports: Sequence[Report]) -> SaveIdentity:
        for report in reports:
            if report.failure is not None:
                raise report.failure
        return common_identity(report.identity for report in reports if report.identity is not None)

    def _take_up(self, reports: Sequence[Report]) -> list[tuple[int, ...] | None]:
        """Take note of new plans. Returns the shares of those that sent one."""
        changed = [rank for rank, report in enumerate(reports) if report.plan is not None]
        if any(report.plan is None and report.generation != (self._generation or -1) for report in reports):
            self._forget()
            raise SaveError("ranks disagree about the plan of the last save", hint="the next save plans anew")
        if not changed:
            return [None] * self._world_size
        plans = [known if (new := report.plan) is None else new for report, known in self._known(reports)]
        shares = self._shares_of(plans, changed)
        self._plans, self._shares, self._metadata = plans, shares, None
        self._generations += 1
        self._generation = self._generations
        return [_numbers(plans[rank], shares[rank]) if rank in changed else None for rank in range(self._world_size)]

    def _known(self, reports: Sequence[Report]) -> list[tuple[Report, SavePlan]]:
        return list(zip(reports, self._plans or [SavePlan([])] * self._world_size, strict=True))

    def _shares_of(self, plans: Sequence[SavePlan], changed: Sequence[int]) -> list[SavePlan]:
        """What each rank writes, so that everything is written once: the changed ones, of what the others do not."""
        kept = {item.index for rank in range(self._world_size) if rank not in changed for item in self._share(rank)}
        offered = [
            dataclasses.replace(plan, items=[item for item in plan.items if item.index not in kept])
            for plan in (plans[rank] for rank in changed)
        ]
        divided = iter(dedup_save_plans(offered))
        shares = [next(divided) if rank in changed else self._shares[rank] for rank in range(self._world_size)]
        self._check_whole(plans, shares)
        return shares

    def _share(self, rank: int) -> list[WriteItem]:
        return self._shares[rank].items

    def _check_whole(self, plans: Sequence[SavePlan], shares: Sequence[SavePlan]) -> None:
        written: set[MetadataIndex] = {item.index for share in shares for item in share.items}
        for rank, plan in enumerate(plans):
            for item in plan.items:
                if item.index not in written:
                    self._forget()
                    raise SaveError(
                        f"{item.index.fqn!r} is not written: the rank that used to has it no more, and rank {rank} has "
                        "gone on with its plan from before",
                        hint="the next save plans anew",
                    )

    def _forget(self) -> None:
        """Have all ranks send their plans with the next save."""
        self._generation = None  # and no number is used again: an answer to a rank may have been lost
        self._plans, self._shares, self._metadata = [], [], None

    def metadata(self) -> bytes:
        """DCP's metadata of what all ranks write; kept until a plan changes.

        Raises:
            UnsafeContentError: the reader would refuse it.
            ValueError: the parts of a tensor do not fit each other.
        """
        if self._metadata is None:
            # The shares overlap no more, so torch's planner only puts them together.
            with plain_modes():
                _, metadata = DefaultSavePlanner().create_global_plan(self._shares)
            metadata.storage_data = {
                item.index: ItemPlace(rank, key)
                for rank, share in enumerate(self._shares)
                for item, key in zip(share.items, item_keys(share.items), strict=True)
            }
            if _DCP_VERSION is not None and metadata.version is None:
                metadata.version = _DCP_VERSION
            self._metadata = encode_metadata(metadata, self._safe_globals)
        return self._metadata


def _numbers(plan: SavePlan, share: SavePlan) -> tuple[int, ...]:
    written = {item.index for item in share.items}
    return tuple(number for number, item in enumerate(plan.items) if item.index in written)
