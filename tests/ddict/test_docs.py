"""The Python of the pages on dictionaries runs as it stands there, and does what it says when managers die."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ml_flashpoint.ddict import DDict

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], dict[str, Any]]]:
    """Runs all blocks of a page, one after the other in one namespace, and returns that."""
    monkeypatch.chdir(tmp_path)
    namespaces: list[dict[str, Any]] = []

    def run_page(name: str) -> dict[str, Any]:
        text = (DOCS / name).read_text()
        # What processes of a group run is then pickled with its globals, as from a script.
        namespace: dict[str, Any] = {"__name__": "__main__"}
        namespaces.append(namespace)
        for block in BLOCK.finditer(text):
            lines = text[: block.start(1)].count("\n")
            source = block.group(1).replace("/lustre/me", str(tmp_path))
            exec(compile("\n" * lines + source, name, "exec"), namespace)
        return namespace

    yield run_page
    for namespace in namespaces:
        for value in namespace.values():
            if isinstance(value, DDict):
                value.__exit__()  # destroys it, or detaches what is only another handle


@pytest.mark.slow  # starts processes of a group
@pytest.mark.parametrize(("page", "blocks"), [("ddict.md", 8), ("ddict-persistence.md", 1)])
def test_every_block_of_a_page_runs(run: Callable[[str], dict[str, Any]], page: str, blocks: int) -> None:
    assert len(BLOCK.findall((DOCS / page).read_text())) >= blocks
    assert run(page)["DDict"] is DDict


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "at"), [(0, [4]), (1, [1]), (2, [6]), (1, [3, 5])])
def test_the_loop_of_the_page_survives_the_death_of_any_manager(victim: int, at: list[int]) -> None:
    text = (DOCS / "ddict.md").read_text()
    namespace: dict[str, Any] = {"torch": torch}
    exec(next(block for block in BLOCK.findall(text) if "def train(" in block).split("\nwith ")[0], namespace)
    calls: list[int] = []

    def one_step(done: int, weights: torch.Tensor) -> torch.Tensor:
        calls.append(done)
        if len(calls) in at:
            d[key] = done  # so that it has something to lose
            os.kill(d._runtime.pids()[victim], signal.SIGKILL)  # type: ignore[union-attr]
        return weights * 0.5 + done

    with DDict(1, 3, 1 << 28, working_set_size=2, replication="ring", timeout=30) as d:
        key = next(each for each in range(1000) if d.which_manager(each) == victim)
        weights = namespace["train"](d, 6, one_step)
        expected = torch.zeros(100_000)
        for done in range(6):
            expected = expected * 0.5 + done
        assert torch.equal(weights, expected)
        assert d["done"] == 6
        assert len(calls) > 6


def test_what_is_said_about_names_is_there() -> None:
    text = (DOCS / "ddict.md").read_text()
    errors = re.findall(r"^\| `(DDict\w+)` \|", text, re.MULTILINE)
    import ml_flashpoint.ddict as ddict

    assert {*errors, "DDictError"} == {name for name in ddict.__all__ if name.endswith("Error")}
    from ml_flashpoint.ddict import native

    table = text[text.index("## Programs written for Dragon") :]
    named = set(re.findall(r"`(System|ProcessGroup|ProcessTemplate|Barrier|CollectiveGroup|RankInfo)`", table))
    assert len(named) == 6
    assert all(hasattr(native, name) for name in (*named, "this_process"))
