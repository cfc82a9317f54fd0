"""A link that trickles: the loop goes on, whatever is on its way to the peer."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.netns import two_namespaces
from tests.support.processes import child_environment
from tests.workers.trickling import STEPS


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.skipif(shutil.which("tc") is None, reason="needs tc, for a link that trickles")
def test_no_step_waits_for_a_copy_that_trickles(tmpfs: Path) -> None:
    """At 300 kbit/s, a copy of 4 MB takes two minutes."""
    with two_namespaces() as sides, contextlib.ExitStack() as stack:
        ranks: list[Any] = []
        for rank, side in enumerate(sides):
            argv = [
                sys.executable,
                "-m",
                "tests.workers.trickling",
                str(rank),
                side.interface,
                side.address,
                str(tmpfs),
            ]
            process = subprocess.Popen(
                side.command(argv),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=child_environment(),
            )
            ranks.append(stack.enter_context(process))
            stack.callback(process.kill)

        def told() -> list[Any]:
            return [json.loads(process.stdout.readline()) for process in ranks]

        def go_on() -> None:
            for process in ranks:
                process.stdin.write("\n")
                process.stdin.flush()

        assert told() == ["open", "open"]
        for side in sides:
            side.throttle("300kbit")
        go_on()
        for found in told():
            assert found == {"copied": None, "steps": STEPS, "failures": 0}
        for side in sides:
            side.throttle(None)
        go_on()
        first, second = told()
        assert first == second
        assert 1 <= first["copied"] <= STEPS
        go_on()
        assert [process.wait(60) for process in ranks] == [0, 0]
