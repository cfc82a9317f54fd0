"""Embedded managers that note what they are told, and creators of them in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ml_flashpoint.ddict.runtime import embedded
from ml_flashpoint.ddict.runtime.embedded import EmbeddedRuntime
from tests.support.processes import child_environment
from tests.workers import ddict_entries

DEADLINE_S = 30.0


def server_pid() -> int:
    """The fork server of this process, as it is now."""
    return embedded.fork_server().pid


def runtime_of(root: Path, entry: str = "note_and_wait") -> EmbeddedRuntime:
    return EmbeddedRuntime(entry=f"{ddict_entries.__name__}:{entry}", root=root)


def configs_of(runtime: EmbeddedRuntime, count: int) -> list[dict[str, Any]]:
    its = {"folder": str(runtime.base)}
    return [{"manager": number, "number": number, "secret": f"s-{number}", **its} for number in range(count)]


@contextlib.contextmanager
def started(root: Path, count: int, entry: str = "note_and_wait") -> Iterator[EmbeddedRuntime]:
    runtime = runtime_of(root, entry)
    try:
        runtime.start(configs_of(runtime, count))
        yield runtime
    finally:
        runtime.stop()


def seen_by(runtime: EmbeddedRuntime, number: int) -> dict[str, Any]:
    seen: dict[str, Any] = json.loads((runtime.base / f"seen-{number}").read_text())
    return seen


class Watch:
    """Names processes before they die, to wait for their end."""

    def __init__(self, *pids: int) -> None:
        self._descriptors = {pid: os.pidfd_open(pid) for pid in pids}

    def alive(self) -> list[int]:
        return [pid for pid, descriptor in self._descriptors.items() if not select.select([descriptor], [], [], 0)[0]]

    def await_end(self, timeout_s: float = DEADLINE_S) -> None:
        give_up = time.monotonic() + timeout_s
        for pid, descriptor in self._descriptors.items():
            ended, _, _ = select.select([descriptor], [], [], max(0.0, give_up - time.monotonic()))
            assert ended, f"process {pid} is alive after {timeout_s} s: {psutil.Process(pid).cmdline()}"

    def close(self, *, kill: bool) -> None:
        for descriptor in self._descriptors.values():
            if kill:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)


@contextlib.contextmanager
def watching(*pids: int, kill: bool = False) -> Iterator[Watch]:
    watch = Watch(*pids)
    try:
        yield watch
    finally:
        watch.close(kill=kill)


@dataclass
class Creator:
    """A process of its own that made managers."""

    process: subprocess.Popen[str]
    base: Path
    managers: list[int]
    fork_server: int
    children: list[int]


@contextlib.contextmanager
def creator(root: Path, count: int = 2, how: str = "wait", entry: str = "note_and_wait") -> Iterator[Creator]:
    argv = [sys.executable, ddict_entries.__file__, str(root), str(count), entry, how]
    # It lets go of the output at its end, so reading a line has an end, too.
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=child_environment())
    try:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        yield Creator(process, Path(told["base"]), told["pids"], told["fork_server"], told["children"])
    finally:
        process.kill()
        process.wait(DEADLINE_S)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()
