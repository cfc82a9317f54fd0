"""The demo itself: one run without faults, one in which a rank is killed and then a node.

Owns the order of events: when what is killed, how long anything may take, and what is collected from a run.
"""

from __future__ import annotations

import queue
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ml_flashpoint.cli.base_view import NotABaseContainerError, format_bytes, read_base
from ml_flashpoint.cli.demo.display import LOST, Display
from ml_flashpoint.cli.demo.nodes import Nodes
from ml_flashpoint.cli.demo.record import Injected, RunRecord
from ml_flashpoint.cli.demo.reports import parse
from ml_flashpoint.cli.verify import verify_part
from ml_flashpoint.format.errors import FlashpointError

JOB = "ml_flashpoint.cli.demo.job"
NODES = 2
RANKS_PER_NODE = 2
MIN_STEPS = 10

_STALL_S = 120.0
_EXIT_S = 60.0
_TICK_S = 0.1
_LAST_WORDS_S = 2.0
_LONGEST_DELAY_S = 0.15
_SHOWN_LINES = 40
# One is what it takes, unless the rendezvous does not know yet that a node is gone.
_RESTARTS_A_FAULT = 3


class DemoError(FlashpointError):
    """A run of the demo did not get to its end. Carries the last lines that its processes printed."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault to bring about.

    Attributes:
        kind: what to kill.
        victim: number of the rank, or of the node in the order of starting.
        step: when a rank has made this step, ...
        delay_s: ... and this long after.
    """

    kind: Literal["rank", "node"]
    victim: int
    step: int
    delay_s: float


def plan_faults(steps: int, seed: int) -> list[Fault]:
    """A rank in the second eighth of the steps or so, a node around the middle; which and when, by the seed. Whoever
    strikes may be late on a busy machine: many steps are left then."""
    spread = steps // 5

    def fault(kind: Literal["rank", "node"], victims: int, earliest: int) -> Fault:
        chance = random.Random(f"{kind} {seed}")
        victim, delay_s = chance.randrange(victims), chance.uniform(0, _LONGEST_DELAY_S)
        return Fault(kind, victim, earliest + chance.randrange(spread), delay_s)

    return [
        fault("rank", NODES * RANKS_PER_NODE, max(3, steps // 8)),
        fault("node", NODES, max(4 + spread, 3 * steps // 8)),
    ]


class Run:
    """One run of the job, from empty nodes to their end.

    Args:
        name: what to call it.
        root: an empty folder of its own.
        steps, seed: for the job.
        faults: what to do to it, by rising step.
        display: who shows it.
    """

    def __init__(
        self, name: str, root: Path, *, steps: int, seed: int, faults: Sequence[Fault], display: Display
    ) -> None:
        self.record = RunRecord(name, steps, NODES * RANKS_PER_NODE)
        self._display = display
        self._faults = deque(faults)
        args = ["--base", "{base}", "--steps", str(steps), "--seed", str(seed)]
        restarts = _RESTARTS_A_FAULT * len(faults)
        self._nodes = Nodes(root, JOB, args, count=NODES, ranks=RANKS_PER_NODE, restarts=restarts)
        self._names = [f"node-{number}" for number in range(NODES)]
        self._pid_of: dict[int, int] = {}
        self._lost: set[str] = set()
        self._output: list[str] = []
        self._log = (root / "output.log").open("w")

    def play(self) -> RunRecord:
        """Run the job and returns what happened; kills whatever is left of it in any case.

        Raises:
            DemoError: it failed, or nothing happened for too long.
        """
        plan = [f"{fault.kind} killed after step {fault.step}" for fault in self._faults] or ["nothing is killed"]
        self._display.begin(f"{self.record.name} run", ", ".join(plan))
        began = time.monotonic()
        with self._log, self._nodes:
            for node in self._names:
                self._display.node(node, "starting")
            self._nodes.start(self._names)
            self._watch()
            self._await_exit()
            self.record.wall_s = time.monotonic() - began
            for node in self._names:
                if node not in self._lost:
                    self.record.bases_ok[node] = _verify(self._nodes.base(node))
        return self.record

    def _watch(self) -> None:
        """Follow the job until every rank has reported its result."""
        last = time.monotonic()
        while not self.record.finished():
            report = self._next()
            if report is not None:
                last = time.monotonic()
                self._hear(report)
            elif time.monotonic() - last > _STALL_S:
                raise self._error(f"nothing happened for {_STALL_S:.0f} s")
            for node in self._names:
                code = self._nodes.ended(node)
                if node not in self._lost and code is not None and code != 0:
                    raise self._error(f"the agent of {node} ended with exit code {code}", ended=node)

    def _await_exit(self) -> None:
        give_up = time.monotonic() + _EXIT_S
        while any(self._nodes.ended(node) is None for node in self._names):
            report = self._next()
            if report is not None:
                self._hear(report)
            if time.monotonic() > give_up:
                left = [node for node in self._names if self._nodes.ended(node) is None]
                raise self._error(f"{', '.join(left)} did not end within {_EXIT_S:.0f} s of the result")
        for node in self._names:
            if node not in self._lost and self._nodes.ended(node) != 0:
                raise self._error(f"the agent of {node} ended with exit code {self._nodes.ended(node)}", ended=node)

    def _next(self) -> dict[str, Any] | None:
        """The next report, None if there is none for a moment."""
        try:
            line = self._nodes.lines.get(timeout=_TICK_S)
        except queue.Empty:
            return None
        if line.text is None:
            return None
        report = parse(line.text)
        if report is None:
            if line.text.strip():
                self._output.append(f"{line.node}: {line.text}")
                self._log.write(f"{line.node}: {line.text}\n")
            return None
        report["node"] = line.node
        self._log.write(f"{report}\n")
        return report

    def _hear(self, report: dict[str, Any]) -> None:
        self.record.reports.append(report)
        rank, node = report["rank"], report["node"]
        match report["event"]:
            case "started":
                self._pid_of[rank] = report["pid"]
                self._display.note(f"rank {rank} runs on {node}, pid {report['pid']}")
            case "resumed" if report["step"]:
                source = f", {format_bytes(report['fetched_bytes'])} from peers" if report["fetched_bytes"] else ""
                self._display.note(f"rank {rank} goes on from step {report['step']}, from memory{source}", "green")
            # Not from processes that were killed, or whose peers were: they may have more to say than was read then.
            case "step" if self._pid_of.get(rank) == report["pid"]:
                self._display.step(node, report)
                everyone = len(self._pid_of) == self.record.ranks
                if self._faults and everyone and report["step"] >= self._faults[0].step:
                    self._strike(self._faults.popleft())

    def _strike(self, fault: Fault) -> None:
        # So that not all faults come right after a step. Nothing is waited for, hence no event to wait for.
        time.sleep(fault.delay_s)
        if fault.kind == "rank":
            self._strike_rank(fault.victim)
        else:
            self._strike_node(self._names[fault.victim])
        self._pid_of.clear()

    def _strike_rank(self, rank: int) -> None:
        pid = self._pid_of[rank]
        at = time.monotonic()
        gone = self._nodes.kill_rank(pid)
        self.record.faults.append(Injected("rank", f"rank {rank}", at, (pid,), gone))
        self._display.note(f"SIGKILL to rank {rank}, pid {pid}", "bold red")
        self._restarting()

    def _strike_node(self, node: str) -> None:
        at = time.monotonic()
        lost = self._nodes.kill_node(node)
        gone = not self._nodes.folder(node).exists()
        self._lost.add(node)
        self._display.node(node, LOST)
        self._restarting()
        self._display.note(
            f"SIGKILL to all {len(lost.pids)} processes of {node}, and {format_bytes(lost.bytes)} of memory deleted",
            "bold red",
        )
        spare = f"node-{len(self._names)}"
        self._names.append(spare)
        self._display.node(spare, "starting")
        self._nodes.start([spare])
        self.record.faults.append(Injected("node", node, at, lost.pids, gone, lost.bytes, spare))

    def _restarting(self) -> None:
        for node in self._names:
            if node not in self._lost:
                self._display.node(node, "restarting")

    def _error(self, message: str, *, ended: str | None = None) -> DemoError:
        # Whoever has ended may have said why just before.
        self._nodes.await_output(_LAST_WORDS_S)
        give_up = time.monotonic() + _LAST_WORDS_S
        while not self._nodes.lines.empty() and time.monotonic() < give_up:
            self._next()
        output = "\n".join(shown_of(self._output, ended))
        return DemoError(f"{self.record.name} run: {message}; what its processes printed:\n{output}")


def shown_of(output: Sequence[str], ended: str | None) -> list[str]:
    """The lines of an output that an error shows.

    What came first tells why it all began. What came last tells why it did not end: from the node whose agent has
    ended, if one has, as the others have more to say once it is gone.
    """
    if len(output) <= 2 * _SHOWN_LINES:
        return [*output]
    rest = output[_SHOWN_LINES:]
    last = [line for line in rest if line.startswith(f"{ended}: ")] or rest
    return [*output[:_SHOWN_LINES], "...", *last[-_SHOWN_LINES:]]


def _verify(base: Path) -> bool:
    """Whether all checkpoints of a node are as they were saved."""
    try:
        view = read_base(base)
    except NotABaseContainerError:
        return False
    parts = [part for version in view.versions for part in version.parts]
    return bool(parts) and not any(verify_part(part).problems for part in parts)
