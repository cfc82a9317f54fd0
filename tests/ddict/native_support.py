"""Groups and barriers that tests of both end."""

from __future__ import annotations

import contextlib
import json
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ml_flashpoint.ddict.native import (
    Barrier,
    ProcessGroup,
    ProcessTemplate,
)
from tests.support.processes import child_environment

DEADLINE_S = 60.0


@contextlib.contextmanager
def group_of(count: int, target: Callable[..., object], *args: Any, **options: Any) -> Iterator[ProcessGroup]:
    group = ProcessGroup(**options)
    group.add_process(count, ProcessTemplate(target, args))
    group.init()
    group.start()
    try:
        yield group
    finally:
        group.close()


def puids_of(group: ProcessGroup) -> list[int]:
    """Numbers of all members, also of those that have ended before this was called."""
    return sorted({*group.puids, *dict(group.inactive_puids)})


@contextlib.contextmanager
def barrier_of(parties: int, **options: Any) -> Iterator[Barrier]:
    barrier = Barrier(parties, **options)
    try:
        yield barrier
    finally:
        barrier.close()


def notes(folder: Path, puids: list[int]) -> list[Any]:
    return [json.loads((folder / str(puid)).read_text()) for puid in puids]


def in_threads(count: int, function: Callable[[int], object]) -> list[Any]:
    """What a function returns, or raises, in some threads at once."""
    results: list[Any] = [None] * count

    def run(index: int) -> None:
        try:
            results[index] = function(index)
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    return results


@contextlib.contextmanager
def barrier_elsewhere(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], Barrier]]:
    """A barrier of another process, whose temporary files are in a folder."""
    program = (
        "import pickle, sys; from ml_flashpoint.ddict.native import Barrier; barrier = Barrier(2); "
        "print(pickle.dumps(barrier).hex(), flush=True); sys.stdin.read()"
    )
    maker = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**child_environment(), "TMPDIR": str(folder)},
    )
    try:
        assert maker.stdout is not None
        yield maker, pickle.loads(bytes.fromhex(maker.stdout.readline().decode()))
    finally:
        maker.kill()
        maker.communicate(timeout=DEADLINE_S)
