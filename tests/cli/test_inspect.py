"""`flashpoint inspect` and `flashpoint diff`, of what several ranks have saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ml_flashpoint import Checkpointer
from tests.support.commands import flashpoint
from tests.support.forked import call_team
from tests.support.sharded import full_state
from tests.workers import exporting

pytestmark = pytest.mark.slow


def _out(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_what_is_in_a_version(tmpfs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call_team(exporting.save, tmpfs, 2, 2, [3], "none", placement=(0, 0))
    base = str(tmpfs / "node-0" / "job")
    assert flashpoint("inspect", base, "--prefix", "sharded.") == 0
    lines = _out(capsys)
    names = [f"sharded.{name}" for name in full_state(3)["sharded"]]
    assert [line.split()[0] for line in lines] == ["name", *names, "step"]
    told = {tuple(line.split()) for line in lines}
    assert {
        ("sharded.rows", "float32", "8x6", "192", "B", "0-1"),
        ("sharded.uneven_rows", "float32", "7x3", "84", "B", "0-1"),
    } <= told
    assert flashpoint("inspect", f"{base}@3", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["step"] == 3
    by_name = {each["name"]: each for each in told["items"]}
    assert by_name["step"]["dtype"] == "bytes"
    assert by_name["plain.scalar"] | {"ranks": []} == {
        "name": "plain.scalar", "dtype": "float32", "shape": "scalar", "bytes": 4, "ranks": []
    }  # fmt: skip
    assert flashpoint("diff", base, base) == 0
    assert _out(capsys) == [f"the same: {len(by_name)} items"]
    assert flashpoint("inspect", f"{base}@4") == 2
    assert flashpoint("inspect", base, "--prefix", "nobody") == 2


def test_what_differs(tmpfs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {
        "same": torch.tensor([1.0, float("nan")]),
        "bit": torch.zeros(4),
        "few": torch.arange(8, dtype=torch.bfloat16),
        "complex": torch.ones(2, dtype=torch.complex64),
        "fp8": torch.ones(2).to(torch.float8_e5m2),
        "wider": torch.ones(2),
        "gone": torch.ones(1),
        "text": "a",
        "number": 1,
        "kind": torch.ones(1),
    }
    with Checkpointer(tmpfs / "job") as engine:
        dcp.save(state, checkpoint_id=engine.id(1), storage_writer=engine.writer())
        assert flashpoint("copy", tmpfs / "job", tmp_path) == 0
        state["bit"][1] = -0.0
        state["few"][3] += 2
        state["complex"][0] += 4j
        state["fp8"][0] = 2
        state |= {"wider": torch.ones(3), "new": torch.ones(1), "text": "b", "kind": 3}
        del state["gone"]
        dcp.save(state, checkpoint_id=engine.id(2), storage_writer=engine.writer())
    capsys.readouterr()
    assert flashpoint("diff", tmp_path, tmpfs / "job") == 1
    assert sorted(_out(capsys)) == [
        "bit: 25 % of the elements differ, by 0 at most",
        "complex: 50 % of the elements differ, by 4 at most",
        "few: 12.5 % of the elements differ, by 2 at most",
        "fp8: 50 % of the elements differ, by 1 at most",
        "gone: only in the first",
        "kind: a tensor in one of them only",
        "new: only in the second",
        "text: other bytes",
        "wider: torch.float32 (2,) and torch.float32 (3,)",
    ]
    assert flashpoint("diff", tmp_path, tmpfs / "job", "--prefix", "few", "--json") == 1
    [told] = json.loads(capsys.readouterr().out)["differences"]
    assert (told["name"], told["share"], told["most"]) == ("few", 0.125, 2.0)
