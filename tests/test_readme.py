"""The lines that README and the pages of docs begin with, run as they stand."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ml_flashpoint import Flashpoint
from tests.support.forked import Child, Report, call
from tests.support.processes import REPOSITORY

STEPS = 10
SAMPLES = 200


class Crash(Exception):
    """Ends a life."""


def lines_of(page: str, base: Path, with_a: str = "Flashpoint(") -> str:
    """The first Python block of a page that has something in it, with another base container."""
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    block = next(each for each in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if with_a in each)
    block = block.replace("/lustre/me/job-145", f"{base}-persisted")
    return block.replace("/dev/shm/mlf-jobs/job-145", str(base)).replace("/dev/shm/mlf-jobs", str(base))


def script_of_readme(base: Path) -> str:
    """The script of README's first screen, with another base container and fewer samples."""
    block = lines_of("README.md", base)
    assert len(block.splitlines()) <= 15
    return block.replace("/dev/shm/mlf-jobs/first", str(base)).replace("4096", str(SAMPLES))


def run_script(report: Report, script: str) -> dict[int, float]:
    """Run it as a program; returns the weight after each step that it prints, which it reports at once, too."""
    weights: dict[int, float] = {}

    def note(step: int, weight: float) -> None:
        weights[step] = weight
        report("printed", step)

    exec(script, {"print": note})
    return weights


def test_the_first_screen_is_there() -> None:
    """In README's first 40 lines: one sentence, status, picture, gain, cost, script, table of frameworks."""
    text = "\n".join((REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()[:40])
    for part in (
        "\n**",
        "> **Status",
        "```text",
        "`make demo`",
        "**For**",
        "**Not for**",
        "**It costs**",
        "```python",
        "| PyTorch DCP",
    ):
        assert part in text, part
    assert text.count("```") == 4


def test_the_script_of_the_first_screen_is_killed_and_goes_on(tmpfs: Path) -> None:
    undisturbed = call(run_script, script_of_readme(tmpfs / "undisturbed"))
    assert list(undisturbed) == list(range(1, SAMPLES + 1))
    script = script_of_readme(tmpfs / "killed")
    with Child(run_script, script) as child:
        child.next_report("printed", SAMPLES // 2)
        child.kill()
    rest = call(run_script, script)
    assert 1 < min(rest) <= SAMPLES, "it goes on, from the newest save that was committed"
    assert rest == {step: weight for step, weight in undisturbed.items() if step >= min(rest)}
    assert call(run_script, script) == {}, "there is nothing left to do"


def live(block: str, seed: int, crash_at: int | None = None) -> tuple[list[float], list[bytes]]:
    """Runs the block after what a reader has before it: a model, an optimizer, data."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses: list[float] = []

    def loss_of(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        program["fp"].wait()  # else a slow machine skips saves
        if len(losses) == crash_at:
            raise Crash
        inputs, targets = batch
        loss = nn.functional.cross_entropy(model(inputs), targets)
        losses.append(loss.item())
        return loss

    inputs = torch.linspace(-9, 9, 40 * 8).sin().view(40, 8)
    program: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS),
        "loader": DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), batch_size=4, shuffle=True),
        "load_from_long_term": lambda: 0,
        "loss_of": loss_of,
    }
    try:
        exec(block, program)
    except Crash:
        pass
    finally:
        fp: Flashpoint = program["fp"]
        fp.close()
    assert fp.health.failures == 0
    return losses, [p.detach().numpy().tobytes() for p in model.parameters()]


@pytest.mark.parametrize("page", ["docs/flashpoint.md", "docs/persist.md"])
def test_lines_run_and_go_on(tmpfs: Path, page: str) -> None:
    undisturbed = live(lines_of(page, tmpfs / "undisturbed"), seed=1)
    assert len(undisturbed[0]) == STEPS
    block = lines_of(page, tmpfs / "job")
    first, _ = live(block, seed=1, crash_at=3)
    rest, parameters = live(block, seed=2)
    assert (first + rest, parameters) == undisturbed
    assert live(block, seed=3) == ([], parameters), "there is nothing left to do"
    if page == "docs/persist.md":
        shutil.rmtree(tmpfs / "job")
        assert live(block, seed=4) == ([], parameters), "it is persisted"


@pytest.mark.parametrize("part", ["Checkpointer(", "async_save"])
def test_lines_for_dcp_save_and_load(tmpfs: Path, part: str) -> None:
    def program(step: int) -> dict[str, Any]:
        state = {"weight": torch.full((64, 64), float(step)), "step": step}
        return {"state_dict": state, "last_step": step, "step": step, "train": lambda: None}

    block = lines_of("docs/pytorch-dcp.md", tmpfs / "job", part)
    first, second = program(3), program(5)
    exec(block, first)
    if "future" in first:
        first["future"].result()
    second["train"] = lambda: loaded.append(second["state_dict"]["weight"][0, 0].item())
    loaded: list[float] = []
    exec(block, second)
    if "future" in second:
        second["future"].result()
        loaded.append(second["state_dict"]["weight"][0, 0].item())
    assert loaded[0] == 3
    if part == "Checkpointer(":
        assert len(loaded) == 2, "steps 4 and 5"


def test_lines_for_local_checkpoints_save_and_load(tmpfs: Path) -> None:
    block = lines_of("docs/local-checkpointing.md", tmpfs / "jobs", "find_latest")
    saved: list[int] = []

    def life(seed: int, saves: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Linear(8, 8)

        def save_condition() -> bool:
            if len(saved) == saves:
                raise Crash
            saved.append(program["iteration"])
            return True

        program: dict[str, Any] = {
            "model": model,
            "state_dict": model.state_dict(),
            "save_condition": save_condition,
        }
        with pytest.raises(Crash):
            exec(block, program)
        program["ckpt_manager"].close()
        return model

    first, second = life(seed=1, saves=2), life(seed=2, saves=3)
    assert saved == [0, 1, 2]
    assert torch.equal(first.weight, second.weight)
