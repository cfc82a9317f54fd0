"""The blocks of docs/migration.md, one after the other: what the old program has left is gone on from."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import ml_flashpoint.local
from ml_flashpoint import Flashpoint
from ml_flashpoint.adapter.pytorch.engine import Engine
from ml_flashpoint.ddict import DDict
from tests.test_guides import blocks_of, here

LAST = 205


class Killed(Exception):
    """Ends a life."""


def block_with(text: str) -> str:
    (found,) = [block for block in blocks_of("migration.md", "python") if text in block]
    return found


class Loop:
    """What a reader has before the blocks: a model, an optimizer, and steps of training that draw no numbers."""

    def __init__(self, folder: Path, seed: int, last_step: int, die_at: int | None = None) -> None:
        torch.manual_seed(seed)
        self.model = nn.Linear(4, 4)
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

    def run(self, block: str, root: Path) -> None:
        try:
            exec(here(block, root), self.names)
        except Killed:
            pass
        finally:
            for kept in (self.names.get("fp"), self.names.get("engine")):
                if isinstance(kept, (Flashpoint, Engine)):
                    kept.close()


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


def test_a_loop_with_plain_dcp(tmp_path: Path, tmpfs: Path) -> None:
    before, after = block_with("def load_long_term"), block_with("fallback=load_long_term")
    functions = before[: before.index("\n\nfor step")]
    undisturbed = Loop(tmp_path / "undisturbed", seed=1, last_step=LAST)
    undisturbed.run(before, tmpfs)

    old = Loop(tmp_path / "steps", seed=1, last_step=LAST, die_at=150)
    old.run(before, tmpfs)
    new = Loop(tmp_path / "steps", seed=2, last_step=LAST, die_at=203)
    new.run(functions + after, tmpfs)
    assert new.steps == list(range(101, 203)), "it goes on from what DCP has saved"
    assert {path.name for path in (tmp_path / "steps").iterdir()} == {"100", "200"}
    again = Loop(tmp_path / "steps", seed=3, last_step=LAST)
    again.run(functions + after, tmpfs)
    assert again.steps == [203, 204, 205], "and then from memory"
    assert weights_of(again) == weights_of(undisturbed)


def test_a_loop_with_asynchronous_saves(tmp_path: Path, tmpfs: Path) -> None:
    block = block_with("checkpoint_future")
    undisturbed = Loop(tmp_path, seed=1, last_step=9)
    undisturbed.run(block, tmpfs / "undisturbed")
    first = Loop(tmp_path, seed=1, last_step=9, die_at=6)
    first.run(block, tmpfs)
    again = Loop(tmp_path, seed=2, last_step=9)
    again.run(block, tmpfs)
    assert (first.steps, again.steps) == ([1, 2, 3, 4, 5], [6, 7, 8, 9])
    assert weights_of(again) == weights_of(undisturbed)


@pytest.fixture
def own_modules() -> Iterator[None]:
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("nvidia_resiliency_ext"):
            del sys.modules[name]


def test_imports_lead_here(own_modules: None) -> None:
    names: dict[str, Any] = {}
    exec(block_with("    AsyncCallsQueue,\n"), names)
    exec(block_with("compat.install()"), names)
    assert names["LocalCheckpointManager"] is ml_flashpoint.local.LocalCheckpointManager
    exec(block_with("this_process"), names)
    assert names["DDict"] is DDict
    exec(block_with("import AsyncCheckpointerType"), names)
    assert names["AsyncCheckpointerType"].PROCESS
    assert names["MemoryStorageReader"]


@pytest.mark.slow
def test_values_of_another_dictionary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"weights": torch.arange(3), "epoch": 7}, "values.pt")
    seen: dict[str, Any] = {}
    block = block_with("values.pt") + "    seen.update((key, d[key]) for key in ('weights', 'epoch'))\n"
    exec(block, {"seen": seen})
    assert torch.equal(seen["weights"], torch.arange(3))
    assert seen["epoch"] == 7


def test_all_blocks_are_run() -> None:
    marks = ("def load_long_term", "fallback=load_long_term", "checkpoint_future", "    AsyncCallsQueue,\n")
    marks += ("compat.install()", "this_process", "import AsyncCheckpointerType", "values.pt")
    assert len(blocks_of("migration.md", "python")) == len(marks)
