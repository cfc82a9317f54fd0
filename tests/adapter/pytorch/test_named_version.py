"""What is read of a version by the names of its state: any tensor, the weights for inference, a file for torch.load."""

from __future__ import annotations

import datetime
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ml_flashpoint import Flashpoint, open_version
from ml_flashpoint.format.errors import InvalidArgumentError, ObjectNotFoundError
from ml_flashpoint.tools.export import export_version
from tests.support.commands import flashpoint
from tests.support.forked import call_team
from tests.support.loops import Stored
from tests.support.sharded import full_state
from tests.support.tensors import assert_same
from tests.workers import exporting


def test_a_tensor_is_found_whichever_ranks_have_saved_it(tmpfs: Path) -> None:
    call_team(exporting.save, tmpfs, 2, 2, [4], "none", placement=(0, 0))
    expected = full_state(4)
    whole = {f"sharded.{name}": tensor for name, tensor in expected["sharded"].items()}
    whole |= {f"plain.{name}": each for name, each in expected["plain"].items() if torch.is_tensor(each)}
    with open_version(tmpfs / "node-0" / "job") as version:
        savers = {rank for rank in (0, 1) for key in version.keys(rank) if key in whole}
        assert savers == {0, 1}, "what is replicated is divided among the ranks"
        for name, tensor in whole.items():
            assert_same(version.tensor(name), tensor)
        assert_same(torch.from_numpy(version.numpy("sharded.cube").copy()), whole["sharded.cube"])
        assert_same(version.state_dict("sharded."), expected["sharded"])
        assert_same(version.state_dict(), expected)
        for name in ("plain.weigh", "step", "sharded"):
            with pytest.raises(ObjectNotFoundError, match=f"no tensor '{name}'"):
                version.tensor(name)


def test_what_this_node_lacks_is_told_by_rank(tmpfs: Path) -> None:
    call_team(exporting.save, tmpfs, 2, 2, [4], "none")
    version = open_version(tmpfs / "node-0" / "job", partial=True)
    with version, pytest.raises(ObjectNotFoundError, match=r"the part is not here .*rank 1"):
        version.tensor("sharded.rows")


class _Scaled(nn.Module):
    """A module with extra state, which is nested."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scales: dict[str, Any] = {}

    def get_extra_state(self) -> dict[str, Any]:
        return self.scales

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.scales = state


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = _Scaled(), _Scaled()


@pytest.fixture
def job(tmpfs: Path) -> tuple[Path, _Model]:
    """A base container of a job that has tracked everything there is; and its model."""
    torch.manual_seed(3)
    model = _Model()
    model.inner.scales = {"amax": [torch.ones(2), torch.zeros(1)], "recipe": {"margin": 3, "name": "delayed"}}
    layers = [{"weight": torch.ones(2), "masks": [torch.zeros(1)]}, {"weight": torch.arange(3)}, torch.ones(1)]
    model.outer.scales = {"layers": layers, "recipe": None, "amax": []}
    optimizer = torch.optim.AdamW(model.parameters())
    model.inner.linear(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    stored = Stored({"array": np.arange(5), "number": np.float32(1.5), "plain": [1, "a", None], "deep": (2, {3})})
    with Flashpoint(tmpfs / "job", strict=True) as fp:
        fp.track(model=model, optimizer=optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2))
        fp.track(stored=stored, date=Stored(datetime.date(2024, 5, 6)), generator=torch.Generator())
        fp.track(loader=torch.utils.data.DataLoader(list(range(4)))).save(7)
    return tmpfs / "job", model


def test_the_weights_for_inference_in_one_call(job: tuple[Path, _Model]) -> None:
    base, model = job
    with open_version(base) as version:
        weights, inner = version.state_dict("model."), version.state_dict("model.inner.linear.")
        with pytest.raises(InvalidArgumentError, match=r"starts so .*names start with model\., optimizer\."):
            version.state_dict("modell.")
    assert_same(dict(weights), dict(model.state_dict()))  # with extra state, which is one value
    assert_same(inner, dict(model.inner.linear.state_dict()))
    for tensor in weights.values():
        if torch.is_tensor(tensor):
            tensor.zero_()  # it is the reader's own
    with open_version(base) as version:
        assert_same(version.tensor("model.inner.linear.weight"), model.inner.linear.weight.detach())


_READ = """
import sys, torch
state = torch.load(sys.argv[1], weights_only=True)
assert not any(name.startswith("ml_flashpoint") for name in sys.modules)
print(sorted(state), sorted(state["_flashpoint"]["rank-00000"]))
"""


def test_a_file_of_everything_is_read_by_torch_without_trusting_it(
    job: tuple[Path, _Model], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, model = job
    flashpoint("export", base, "--to", tmp_path / "all.pt", "--format", "torch")
    assert "the format cannot hold it: _flashpoint.rank-00000.date" in capsys.readouterr().err
    done = subprocess.run([sys.executable, "-c", _READ, str(tmp_path / "all.pt")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = ["_frozen", "_rng", "generator", "loader", "scheduler", "stored"]
    assert done.stdout == f"{['_flashpoint', 'model', 'optimizer']} {names}\n"
    state = torch.load(tmp_path / "all.pt", weights_only=True)
    stored = {"array": torch.arange(5), "number": 1.5, "plain": [1, "a", None], "deep": (2, {3})}
    assert_same(state["_flashpoint"]["rank-00000"]["stored"]["value"], stored)
    again = _Model()
    again.load_state_dict(state["model"])
    assert_same(dict(again.state_dict()), dict(model.state_dict()))
    export_version(base, tmp_path / "model.pt", format="torch", prefix="model.")
    again.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
