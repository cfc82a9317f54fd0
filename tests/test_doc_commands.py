"""Commands in README, CONTRIBUTING and docs/: each line runs as it stands, after what a reader has before it.

In this process, but for those that go on until somebody ends them. Of lines for clusters, what follows ``flashpoint``
runs here. A bucket is a folder of fsspec's in memory.
"""

from __future__ import annotations

import glob
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import safetensors.torch
import torch
from torch import nn
from typer.testing import CliRunner

from ml_flashpoint import Flashpoint
from ml_flashpoint.cli.main import app
from ml_flashpoint.tools.copy import persist_version
from tests.support.processes import REPOSITORY, child_environment

pytestmark = pytest.mark.slow(60)

_BLOCK = re.compile(r"^```(bash|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_PAGES = [
    *(REPOSITORY / f"{name}.md" for name in ("README", "CONTRIBUTING")),
    *sorted((REPOSITORY / "docs").glob("*.md")),
]
_ELSEWHERE = {
    "five-minutes.md": "runs below, as one script",
    "slurm.md: #!/bin/bash": "tests/test_clusters.py runs the script, with stand-ins for srun and scontrol",
}
_NOT_RUN = {
    "make ": "they run the tests, among them this one, or take hours",
    "python -m benchmarks.": "they measure for minutes, on a machine that does nothing else",
    "pip install ": "tests/test_release.py installs wheel and sdist, into environments of its own",
    "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1": "it is for the next line",
    "torchrun --standalone --nproc-per-node 2 --max-restarts 3 train.py": "tests/e2e has such jobs",
    "accelerate launch --multi_gpu --num_processes 2 --rdzv_backend": "tests/e2e/test_hugging_face.py launches so",
    "until deepspeed --num_gpus 2 ": "tests/e2e/test_deepspeed.py has such a loop",
    "torchrun --nnodes=2 --nproc-per-node=8 ": "it takes two machines with GPUs; tests/e2e has jobs of two nodes",
}
_CODES = {"diff": (1,), "doctor": (0, 1)}
"""Exit codes: two steps differ, and a machine may have findings. Of all others, 0."""
_RUNS_ON = ("metrics", "--watch")


def _lines_of(page: Path) -> Iterator[str]:
    """The commands of a page."""
    for kind, block in _BLOCK.findall(page.read_text(encoding="utf-8")):
        if page.name in _ELSEWHERE or f"{page.name}: {block.splitlines()[0]}" in _ELSEWHERE:
            continue
        for line in block.replace("\\\n", " ").splitlines():
            if kind == "bash" and line.strip():
                yield line
            elif line.startswith("$ "):
                yield line[2:]


def _arguments_of(line: str) -> list[str] | None:
    """What follows `flashpoint` in a command."""
    words = shlex.split(line, comments=True)
    return words[words.index("flashpoint") + 1 :] if "flashpoint" in words else None


_COMMANDS = {
    page.name: found for page in _PAGES if (found := [each for each in map(_arguments_of, _lines_of(page)) if each])
}


def test_every_command_is_run() -> None:
    """Or it says here why not."""
    for page in _PAGES:
        for line in _lines_of(page):
            assert _arguments_of(line) or line.startswith(tuple(_NOT_RUN)), (page.name, line)
    assert {"ls", "metrics", "persist", "rm", "doctor", "plan", "report"} <= {
        name for found in _COMMANDS.values() for each in found for name in (each[0], " ".join(each[:2]))
    }


class _World:
    """What a reader has: a job that runs, with steps 30, 60 and 90 in memory, 60 and 90 in a bucket, and its events."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.base, self.url = folder, folder / "job-145", f"memory://{folder.name}/job-145"
        (folder / "log").mkdir()
        monkeypatch.setenv("FLASHPOINT_EVENTS", str(folder / "log" / "job-145-{rank}.jsonl"))
        monkeypatch.setenv("FLASHPOINT_METRICS_PORT", "0")
        model = nn.Linear(4, 4)
        self.job = Flashpoint(self.base, keep=3)
        self.job.track(model=model).resume()
        for step in (30, 60, 90):
            with torch.no_grad():
                model.weight.fill_(step)
            self.job.save(step)
            assert self.job.wait()
        for step in (60, 90):
            persist_version(self.base, self.url, step)
        for node in ("of-node-0", "of-node-1"):
            self.run(["copy", str(self.base), node])
        Path("llama").mkdir()
        safetensors.torch.save_file({"weight": torch.ones(4)}, "llama/model.safetensors")

    def here(self, word: str) -> list[str]:
        """A word of a command, in this world."""
        for theirs, ours in {
            "/dev/shm/mlf-jobs/job-145": str(self.base),
            "/dev/shm/mlf-jobs/train": str(self.base),
            "/dev/shm/me/job-145": str(self.base),
            "s3://bucket/job-145": self.url,
            "/lustre/me": str(self.folder / "lustre"),
            "/var/log": str(self.folder / "log"),
        }.items():
            word = word.replace(theirs, ours)
        return (sorted(glob.glob(word)) if "*" in word else []) or [word]

    def run(self, command: list[str]) -> str:
        if command[0] == "rm" and str(self.base) in command:
            self.job.close()
        made = command[command.index("--to") + 1] if "--to" in command else command[-1]
        if made.startswith("./") and command[0] != "diff":
            shutil.rmtree(made, ignore_errors=True)  # of another line of the page, which is an alternative to it
        done = CliRunner().invoke(app, command + ["--yes"] * (command[0] == "rm"))
        assert done.exit_code in _CODES.get(command[0], (0,)), (command, done.output, done.exception)
        return done.output

    def run_for_a_while(self, command: list[str]) -> None:
        """Run what goes on until it is ended, and end it as a user does."""
        # Where tests have no network of their own, another one may have that port.
        words = ["0" if before == "--port" else word for before, word in zip(["", *command], command, strict=False)]
        argv = [sys.executable, "-m", "ml_flashpoint.cli.main", *words]
        pipe = subprocess.PIPE
        process = subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True, env=child_environment())
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            if command[0] == "metrics":
                lines = [process.stderr.readline()]
                found = re.search(r":(\d+)/metrics", lines[0])
                assert found is not None, (words, lines, process.poll(), process.stdout.read())
                with urllib.request.urlopen(f"http://127.0.0.1:{found[1]}/metrics", timeout=30) as answer:
                    assert "flashpoint_verified_step" in answer.read().decode()
            else:
                for _ in range(2):  # again and again
                    lines = list(iter(process.stdout.readline, "\n"))
                    assert any(line.split()[4:5] == ["90"] for line in lines), lines
            process.send_signal(signal.SIGINT)
            assert process.wait(30) in (0, 130, -signal.SIGINT), process.stderr.read()
        finally:
            process.kill()
            process.communicate()


@pytest.fixture
def world(tmpfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_World]:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    found = _World(tmpfs, monkeypatch)
    yield found
    found.job.close()
    fsspec.filesystem("memory").rm(f"memory://{tmpfs.name}", recursive=True)


@pytest.mark.parametrize("page", _COMMANDS)
def test_commands_run(world: _World, page: str) -> None:
    for command in sorted(_COMMANDS[page], key=lambda command: command[0] == "rm"):  # what goes, goes last
        words = [each for word in command for each in world.here(word)]
        if any(word in _RUNS_ON for word in command):
            world.run_for_a_while(words)
        else:
            world.run(words)
            if "-o" in words:
                assert os.path.getsize(words[words.index("-o") + 1])


def test_the_five_minutes(tmpfs: Path, tmp_path: Path) -> None:
    """The whole page, with fewer steps, and with `python` and `flashpoint` of this process."""
    programs = tmp_path / "bin"
    programs.mkdir()
    command = "-c 'import sys; from ml_flashpoint.cli.main import main; sys.exit(main())'"
    for name, arguments in {"python": "", "flashpoint": command}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        (programs / name).chmod(0o755)
    page = (REPOSITORY / "docs" / "five-minutes.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(program.replace("600", "250"))
    install, *commands = (block for _, block in _BLOCK.findall(page))
    assert install.strip() in _PAGES[0].read_text(encoding="utf-8"), "tests/test_release.py installs"
    script = "set -e\n" + "".join(commands).replace("/dev/shm/mlf-jobs", str(tmpfs)).replace(
        "tail -n 300", "tail -n 40"
    )
    environment = child_environment(PATH=f"{programs}{os.pathsep}{os.environ['PATH']}", OMP_NUM_THREADS="1")
    result = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "the same to the last digit" in result.stdout
    printed = {line.split()[0] for line in (tmp_path / "killed.log").read_text().splitlines()}
    assert len(printed) >= 249, "the step at which it was killed may be saved and not printed"
    assert list(tmpfs.iterdir()) == [], "`flashpoint rm` has left something"
