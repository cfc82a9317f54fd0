"""Programs forked from a template are to their tests what programs started cold are."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import warm
from tests.support.processes import CapturedProcess, child_environment, kill_marked, marked_processes

pytestmark = pytest.mark.slow

_SEEN = """
import atexit, json, os, random, signal, sys, threading
import numpy, torch
import multiprocessing
atexit.register(print, "at exit")
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "cwd": os.getcwd(), "main": sys.modules["__main__"].__dict__ is globals(),
    "session": os.getsid(0) == os.getpid(), "env": dict(os.environ), "name": __name__,
    "spec": getattr(__spec__, "name", None),
    "file": globals().get("__file__"), "alone": threading.active_count(), "parent": multiprocessing.parent_process(),
    "signals": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
    "descriptors": len(os.listdir("/proc/self/fd")), "threads": torch.get_num_threads(),
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
}))
authkey = multiprocessing.current_process().authkey.hex()
print(json.dumps([random.random(), torch.initial_seed(), numpy.random.rand(), authkey]))
"""


def env(**more: str) -> dict[str, str]:
    return child_environment(PYTHONUNBUFFERED="1", PYTHONFAULTHANDLER="1", OMP_NUM_THREADS="1", **more)


def described(how: str, argv: list[str]) -> tuple[dict[str, Any], list[Any]]:
    if how == "warm":
        done = warm.run(argv, env(PROBE="1"))
    else:
        done = subprocess.run(argv, env=env(PROBE="1"), capture_output=True, text=True, start_new_session=True)
    seen, drawn, last = done.stdout.splitlines()
    assert (done.returncode, done.stderr, last) == (0, "", "at exit")
    return json.loads(seen), json.loads(drawn)


@pytest.mark.parametrize("kind", ["a script", "a module", "code"])
def test_a_program_finds_what_it_finds_after_a_cold_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "script.py").write_text(_SEEN)
    (tmp_path / "probe.py").write_text(_SEEN)
    argv = {"a script": ["folder/script.py"], "a module": ["-m", "probe"], "code": ["-c", _SEEN]}[kind]
    (first, cold), (second, one), (third, other) = (
        described(how, [sys.executable, *argv, "more", "arguments"]) for how in ("cold", "warm", "warm")
    )
    first["descriptors"] += 1  # what it is marked with
    assert second == third == first
    assert len({*cold, *one, *other}) == 12


@pytest.mark.parametrize(
    ("code", "ended"),
    [
        ("", 0),
        ("raise SystemExit(3)", 3),
        ("raise ValueError('so it is')", 1),
        ("import os; os._exit(4)", 4),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("import os; os.abort()", -signal.SIGABRT),
    ],
)
def test_its_end_is_reported(code: str, ended: int) -> None:
    done = warm.run([sys.executable, "-c", code], env())
    assert done.returncode == ended
    assert ("so it is" in done.stderr) == (ended == 1)


def test_what_it_forks_and_what_it_starts_is_found_and_killed() -> None:
    code = """
import os, signal, subprocess, sys
if os.fork() == 0:
    os.setsid()
    print("forked", flush=True)
    signal.pause()
subprocess.Popen([sys.executable, "-c", "import signal; print('started', flush=True); signal.pause()"])
signal.pause()
"""
    process = CapturedProcess([sys.executable, "-c", code], env(PROBE="of this test"), lambda: None, cold=False)
    give_up = time.monotonic() + 60
    while not {"forked\n", "started\n"} <= set(process.lines):
        assert time.monotonic() < give_up, process.output
        time.sleep(0.01)
    found = marked_processes(PROBE="of this test")
    assert len(found) == 3
    assert kill_marked(PROBE="of this test") == 3
    assert process.join(60)
    assert process.returncode == -signal.SIGKILL
    assert marked_processes(PROBE="of this test") == []


def test_all_programs_end_with_their_template() -> None:
    made = warm.Template([], env())
    with open(os.devnull, "r+b") as nothing:
        argv = [sys.executable, "-c", "import signal; signal.pause()"]
        programs = [made.start(argv, env(), (nothing.fileno(),) * 3) for _ in range(2)]
    assert [program.poll() for program in programs] == [None, None]
    made.close()
    assert [program.wait(60) for program in programs] == [-signal.SIGKILL] * 2
    for program in programs:
        with contextlib.suppress(psutil.NoSuchProcess):
            assert psutil.Process(program.pid).status() == psutil.STATUS_ZOMBIE


def test_an_import_that_fails_is_shown() -> None:
    made = warm.Template(["there_is_no_such_module"], env())
    with open(os.devnull, "r+b") as nothing, pytest.raises(ChildProcessError, match="there_is_no_such_module"):
        made.start([sys.executable, "-c", ""], env(), (nothing.fileno(),) * 3)
    made.close()
