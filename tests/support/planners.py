"""Save planners as users write them, for tests; in a module of their own, so that saving processes find them."""

from __future__ import annotations

import dataclasses
import inspect
import threading
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

CACHES_PLANS = "enable_plan_caching" in inspect.signature(DefaultSavePlanner).parameters
"""Torch 2.6 does not."""


def caching_planner(enabled: bool = True) -> DefaultSavePlanner:
    """Torch's own planner, which keeps plans between saves where it can."""
    return DefaultSavePlanner(enable_plan_caching=enabled) if CACHES_PLANS else DefaultSavePlanner()


class CastingPlanner(DefaultSavePlanner):
    """Saves floating-point tensors as bfloat16."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        made = super().transform_object(write_item, object)
        return made.bfloat16() if isinstance(made, torch.Tensor) and made.is_floating_point() else made


class ResolvingPlanner(DefaultSavePlanner):
    """Saves floating-point tensors as bfloat16, too, but where data is resolved."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        made = super().resolve_data(write_item)
        return made.bfloat16() if isinstance(made, torch.Tensor) and made.is_floating_point() else made


class InPlacePlanner(DefaultSavePlanner):
    """Negates what it is given, where it lies."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        made = super().resolve_data(write_item)
        return made.neg_() if isinstance(made, torch.Tensor) else made


class RenamingPlanner(DefaultSavePlanner):
    """Saves everything under a longer name."""

    PREFIX = "a prefix that is long enough to outgrow the room that a header has to spare. " * 8

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [dataclasses.replace(item, index=self._renamed(item.index)) for item in plan.items]
        renamed = {self.PREFIX + name: path for name, path in self.mappings.items()}
        self.plan = dataclasses.replace(plan, items=items, planner_data=renamed)
        return self.plan

    def _renamed(self, index: MetadataIndex) -> MetadataIndex:
        return dataclasses.replace(index, fqn=self.PREFIX + index.fqn)

    def lookup_object(self, index: MetadataIndex) -> Any:
        return super().lookup_object(dataclasses.replace(index, fqn=index.fqn.removeprefix(self.PREFIX)))


class SwappingPlanner(DefaultSavePlanner):
    """Saves `a` under the name of `b` and the other way round."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        swapped = {**state_dict, "a": state_dict["b"], "b": state_dict["a"]}
        super().set_up_planner(swapped, storage_meta, is_coordinator)


class FailingPlanner(DefaultSavePlanner):
    """Raises in the method that it is told, on the ranks that it is told."""

    def __init__(self, method: str, ranks: tuple[int, ...] = (0,), rank: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self._method = method if rank in ranks else ""

    def create_local_plan(self) -> SavePlan:
        self._fail_in("create_local_plan")
        return super().create_local_plan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        self._fail_in("create_global_plan")
        return super().create_global_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self._fail_in("finish_plan")
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> Any:
        self._fail_in("resolve_data")
        return super().resolve_data(write_item)

    def _fail_in(self, method: str) -> None:
        if method == self._method:
            raise RuntimeError(f"the planner fails in {method}")


class GatedPlanner(DefaultSavePlanner):
    """Waits for a gate to open before it plans. Not for saving processes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.entered, self.gate = threading.Event(), threading.Event()

    def create_local_plan(self) -> SavePlan:
        self.entered.set()
        assert self.gate.wait(60)
        return super().create_local_plan()


class AnyDtypePlanner(DefaultSavePlanner):
    """For one rank: does not ask for sizes of elements, which torch cannot tell for the smallest dtypes."""

    def _dedup_save_plans(self, all_plans: list[SavePlan]) -> list[SavePlan]:
        assert len(all_plans) == 1
        return all_plans
