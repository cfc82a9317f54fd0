"""A loop of docs/migration.md, as its reader has it: alone, or on the ranks of a team, with DDP on their gloo group."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

from ml_flashpoint import Checkpointer, Flashpoint


class Killed(Exception):
    """Ends a life."""


class Loop:
    """What a reader has before the blocks: a model, an optimizer, and steps of training that draw no numbers."""

    def __init__(
        self, folder: Path, seed: int, last_step: int, die_at: int | None = None, *, of_a_team: bool = False
    ) -> None:
        torch.manual_seed(seed)
        self.model: nn.Module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
        if of_a_team:  # several buckets: backward calls several collectives
            self.model = DistributedDataParallel(self.model, bucket_cap_mb=1e-5)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.steps: list[int] = []
        self._die_at = die_at
        self.names: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "folder": str(folder),
            "last_step": last_step,
            "train": self._train,
            "AppState": AppState,
        }

    def _train(self, step: int) -> None:
        if step == self._die_at:
            raise Killed
        self.steps.append(step)
        self.optimizer.zero_grad()
        self.model(torch.full((2, 4), float(step))).square().mean().backward()
        self.optimizer.step()

    def run(self, block: str, root: Path) -> Loop:
        """Run a block with ``root`` in place of its folder, until its end or its death. Returns this."""
        try:
            exec(block.replace("/dev/shm/mlf-jobs", str(root)), self.names)
        except Killed:
            pass
        finally:
            for kept in (self.names.get("fp"), self.names.get("engine")):
                if isinstance(kept, (Flashpoint, Checkpointer)):
                    kept.close()
        return self


class AppState:
    """As in torch's tutorial."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optim": moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def weights_of(loop: Loop) -> list[bytes]:
    return [p.detach().numpy().tobytes() for p in loop.model.parameters()]


def loops_with_ddp(
    report: Any, rank: int, block: str, last_step: int, die_at: int
) -> tuple[list[int], list[int], bool]:
    """Run a block undisturbed, and in two lives. Returns the steps of these, and whether the weights are the same."""
    base = Path(os.environ["FLASHPOINT_TEST_BASE"])
    loops = [
        Loop(base, seed, last_step, die, of_a_team=True).run(block, base / name)
        for name, seed, die in (("undisturbed", 1, None), ("job", 1, die_at), ("job", 2, None))
    ]
    undisturbed, first, again = loops
    return first.steps, again.steps, weights_of(again) == weights_of(undisturbed)
