"""Every command line in README and docs/ runs as it stands there, on versions of a test's own, or fits its parser."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.run import get_args_parser
from typer.main import get_command
from typer.testing import CliRunner

from ml_flashpoint import Flashpoint
from ml_flashpoint.cli.main import app
from tests.support.processes import REPOSITORY

_PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
_OPERATIONS = REPOSITORY / "docs" / "operations.md"
_BLOCK = re.compile(r"^```(?:bash|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_RUN_ELSEWHERE = {
    "five-minutes.md": "tests/test_guides.py",
    "slurm.md": "tests/test_clusters.py",
    "kubernetes.md": "tests/test_clusters.py",
}
# Runs until it is stopped, or looks at jobs of this machine: their options are parsed, and no more.
_ONLY_PARSED = ("metrics", "ls --all")


class Playground:
    """A base container with steps 60 and 61, the same in a store, and files of other tools, in the working folder."""

    def __init__(self, memory: Path, disk: Path) -> None:
        self.memory, self.disk = memory, disk
        model = nn.Sequential()
        model.add_module("layer", nn.Linear(4, 4))
        base = str(memory / "job-145")
        with Flashpoint(base, keep=2) as fp:
            fp.track(model=model)
            fp.resume()
            for step in (60, 61):
                fp.save(step)
                fp.wait()
        for step in (60, 61):
            assert CliRunner().invoke(app, ["persist", f"{base}@{step}", "--to", self._store]).exit_code == 0
        for name in ("of-node-0", "of-node-1"):
            assert CliRunner().invoke(app, ["copy", base, str(disk / name)]).exit_code == 0
        (event,) = re.findall(r"^```json\n(.*?)^```", _OPERATIONS.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        (disk / "events.jsonl").write_text(event)
        save_file({"layer.weight": torch.ones(4, 4)}, disk / "llama.safetensors")

    @property
    def _store(self) -> str:
        return f"file://{self.disk}/bucket/job-145"

    def here(self, line: str) -> str:
        line = line.replace("/dev/shm/mlf-jobs", str(self.memory)).replace("s3://bucket/job-145", self._store)
        return line.replace("/var/log/job-145-*.jsonl", str(self.disk / "events.jsonl"))


def command_lines(page: Path) -> list[str]:
    """What a reader would type, without what is printed, and without remarks."""
    lines = []
    for block in _BLOCK.findall(page.read_text(encoding="utf-8")):
        block = block.replace("\\\n", " ")
        for line in block.splitlines():
            typed = line.removeprefix("$ ").strip()
            if re.match(r"(flashpoint|torchrun|make|pip|srun|kubectl|export) ", typed):
                lines.append(re.split(r"\s+#", typed)[0].strip())
    return lines


def _commands(page: Path, program: str) -> list[str]:
    return [each for each in command_lines(page) if each.startswith(f"{program} ")]


@pytest.mark.parametrize(
    "page", [each for each in _PAGES if each.name not in _RUN_ELSEWHERE], ids=lambda each: each.name
)
def test_every_flashpoint_command_works(
    page: Path, tmpfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [each.removeprefix("flashpoint ") for each in _commands(page, "flashpoint")]
    monkeypatch.chdir(tmp_path)
    playground = Playground(tmpfs, tmp_path) if lines else None
    for line in sorted(lines, key=lambda each: each.startswith("rm")):  # afterwards, nothing is left
        if line.startswith(_ONLY_PARSED) or "--watch" in line:
            _parse(line)
            continue
        assert playground is not None
        options = shlex.split(playground.here(line)) + (["--yes"] if line.startswith("rm") else [])
        if line.startswith("rm s3://bucket/job-145@60"):
            options.append("--newest")
        if line.startswith(("copy ", "export ")):
            _clear(line)
        done = CliRunner().invoke(app, options)
        allowed = {0, 1} if line.startswith(("doctor", "status")) else {0}  # 1: what they find is amiss here
        assert done.exit_code in allowed, (line, done.output, done.exception)
        assert not isinstance(done.exception, Exception), line


def _clear(line: str) -> None:
    """Commands of one page write to the same names, which readers would choose for themselves."""
    words = shlex.split(line)
    target = Path(words[words.index("--to") + 1] if "--to" in words else words[2])
    shutil.rmtree(target, ignore_errors=True)


def _parse(line: str) -> None:
    command = get_command(app)
    name, *options = shlex.split(line)
    of = command.commands[name]  # type: ignore[attr-defined]
    of.make_context(name, options, resilient_parsing=False)


@pytest.mark.parametrize("page", _PAGES, ids=lambda each: each.name)
def test_targets_and_launchers_are_what_they_say(page: Path) -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    for line in _commands(page, "make"):
        target = shlex.split(line)[1]
        assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), line
        for variable, _ in re.findall(r"\b([A-Z_]+)=(\S+)", line):
            assert re.search(rf"^{variable} \?=", makefile, re.MULTILINE), line
    for line in _commands(page, "torchrun"):
        options = get_args_parser().parse_args(shlex.split(line)[1:])
        assert options.rdzv_backend == "c10d", "the static rendezvous hangs: see docs/operations.md"
        if options.training_script == "flashpoint":
            _parse(shlex.join(options.training_script_args))


def test_commands_are_found() -> None:
    """The patterns of this file find what they are for."""
    for program, at_least in (("flashpoint", 30), ("make", 5), ("torchrun", 2)):
        assert sum(len(_commands(page, program)) for page in _PAGES) >= at_least, program
