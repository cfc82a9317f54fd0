"""What the audience sees while the demo runs, and its result.

Owns looks only: a live table on a terminal, plain lines elsewhere.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ml_flashpoint.cli.base_view import format_bytes, format_ranks
from ml_flashpoint.cli.demo.record import PHASES
from ml_flashpoint.cli.demo.verdict import Check

LOST = "lost"
"""State of a node that does not exist any more."""

_SHOWN_NOTES = 12
_LINES_A_RUN = 8
_BAR = 24


@dataclass(slots=True)
class _NodeRow:
    state: str
    step: int = 0
    saved: int | None = None
    replicated: int | None = None


class Display:
    """Plain lines: one for each event, and some for the steps. Not thread-safe.

    Args:
        console: where to.
        steps: steps of a run.
    """

    def __init__(self, console: Console, steps: int) -> None:
        self.console = console
        self._steps = steps
        self._began = time.monotonic()
        self._shown_step = 0

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def begin(self, run: str, about: str) -> None:
        """A run begins."""
        self._shown_step = 0
        self.note(f"{run}: {about}")

    def node(self, name: str, state: str) -> None:
        """A node is in a new state."""
        self.note(f"{name}: {state}")

    def step(self, node: str, report: dict[str, Any]) -> None:
        """A rank has made a step."""
        step = report["step"]
        if step <= self._shown_step and step != self._steps:
            return
        if step - self._shown_step >= max(1, self._steps // _LINES_A_RUN) or step == self._steps:
            if step != self._shown_step:
                saved, replicated = _or_dash(report["saved"]), _or_dash(report["replicated"])
                self.note(
                    f"step {step}/{self._steps}, loss {report['loss']:.4f}, saved {saved}, replicated {replicated}"
                )
            self._shown_step = step

    def note(self, text: str, style: str = "") -> None:
        """Something happened."""
        print(f"[{time.monotonic() - self._began:6.1f} s] {text}", file=self.console.file, flush=True)

    def say(self, text: str) -> None:
        """Something to remember, after the result."""
        print(text, file=self.console.file, flush=True)

    def result(self, summaries: list[dict[str, Any]], checks: list[Check]) -> None:
        """The numbers and the verdict."""
        for run in summaries:
            print(_run_line(run), file=self.console.file)
        for fault in summaries[-1]["faults"] if summaries else ():
            print(_fault_line(fault), file=self.console.file)
        for check in checks:
            print(f"{'ok    ' if check.ok else 'FAILED'} {_claim(check)}", file=self.console.file)
        self.console.file.flush()


class LiveDisplay(Display):
    """A live table of the nodes, the loss and what happened last."""

    def __init__(self, console: Console, steps: int) -> None:
        super().__init__(console, steps)
        self._run = ""
        self._nodes: dict[str, _NodeRow] = {}
        self._node_of: dict[int, str] = {}
        self._loss: float | None = None
        self._notes: deque[Text] = deque(maxlen=_SHOWN_NOTES)
        self._live = Live(console=console, refresh_per_second=8, get_renderable=self._render)

    def __enter__(self) -> LiveDisplay:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def begin(self, run: str, about: str) -> None:
        """A run begins."""
        self._run = f"{run}: {about}"
        self._nodes.clear()
        self._node_of.clear()
        self._loss = None
        self.note(self._run, "bold")

    def node(self, name: str, state: str) -> None:
        """A node is in a new state."""
        row = self._nodes.setdefault(name, _NodeRow(state))
        row.state = state
        self.note(f"{name}: {state}", "bold red" if state == LOST else "cyan")

    def step(self, node: str, report: dict[str, Any]) -> None:
        """A rank has made a step."""
        row = self._nodes.setdefault(node, _NodeRow("training"))
        row.state, row.step = "training", report["step"]
        row.saved, row.replicated = report["saved"], report["replicated"]
        self._node_of[report["rank"]] = node
        self._loss = report["loss"]

    def note(self, text: str, style: str = "") -> None:
        """Something happened."""
        self._notes.append(Text(f"{time.monotonic() - self._began:6.1f} s  {text}", style=style))

    def result(self, summaries: list[dict[str, Any]], checks: list[Check]) -> None:
        """The numbers and the verdict, as tables."""
        self._live.stop()
        self.console.print(_runs_table(summaries))
        self.console.print(_faults_table(summaries[-1]["faults"] if summaries else []))
        for check in checks:
            mark = "[green]✓[/]" if check.ok else "[bold red]✗[/]"
            self.console.print(f"{mark} {escape(_claim(check))}", highlight=False, soft_wrap=True)

    def _render(self) -> RenderableType:
        table = Table("node", "ranks", "step", "", "saved", "replicated", "state", title=self._run, min_width=76)
        for name, row in self._nodes.items():
            done = round(_BAR * row.step / self._steps)
            bar = Text("█" * done, "green") + Text("░" * (_BAR - done), "dim")
            ranks = format_ranks(rank for rank, node in self._node_of.items() if node == name)
            steps = f"{row.step}/{self._steps}"
            table.add_row(name, ranks, steps, bar, _or_dash(row.saved), _or_dash(row.replicated), row.state)
        loss = Text(f"loss {self._loss:.4f}" if self._loss is not None else "loss -")
        return Group(table, loss, *self._notes)


def _claim(check: Check) -> str:
    return check.claim if check.ok else f"{check.claim} -- NO: {check.why_not}"


def _or_dash(step: int | None) -> str:
    return "-" if step is None else str(step)


def _seconds(value: float) -> str:
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.0f} ms" if value >= 0.01 else f"{value * 1e3:.1f} ms"


def _lost(fault: dict[str, Any]) -> str:
    return "?" if fault["lost_steps"] is None else str(fault["lost_steps"])


def _fault_title(fault: dict[str, Any]) -> str:
    return f"{fault['victim']} {'killed' if fault['kind'] == 'rank' else 'lost'}"


def _run_line(run: dict[str, Any]) -> str:
    return (
        f"{run['name']} run: {run['steps']} steps, {run['saves']} saves, blocked a save: median"
        f" {run['blocked_median_ms']} ms, max {run['blocked_max_ms']} ms; {run['wall_s']:.1f} s"
    )


def _fault_line(fault: dict[str, Any]) -> str:
    phases = ", ".join(f"{phase[:-2]} {_seconds(fault[phase])}" for phase in PHASES)
    return (
        f"{_fault_title(fault)} after step {fault['last_step']}: went on from step {fault['resumed_step']},"
        f" steps lost: {_lost(fault)}; restart {_seconds(fault['restart_s'])}, {phases};"
        f" training again after {_seconds(fault['total_s'])}; {format_bytes(fault['fetched_bytes'])} from peers"
    )


def _runs_table(summaries: list[dict[str, Any]]) -> Table:
    table = Table("", *(f"{run['name']} run" for run in summaries), title="two runs of the same job")
    rows = (
        ("steps", lambda run: str(run["steps"])),
        ("saves, on each rank", lambda run: str(run["saves"])),
        ("blocked a save, median", lambda run: f"{run['blocked_median_ms']} ms"),
        ("blocked a save, max", lambda run: f"{run['blocked_max_ms']} ms"),
        ("wall time", lambda run: f"{run['wall_s']:.1f} s"),
    )
    for title, cell in rows:
        table.add_row(title, *map(cell, summaries))
    return table


def _faults_table(faults: list[dict[str, Any]]) -> Table:
    table = Table("", *(_fault_title(fault) for fault in faults), title="what the faults cost")
    rows = (
        ("after step", lambda fault: str(fault["last_step"])),
        ("went on from step", lambda fault: str(fault["resumed_step"])),
        ("steps lost", _lost),
        ("restart of the processes", lambda fault: _seconds(fault["restart_s"])),
        *((f"recovery: {phase[:-2]}", lambda fault, phase=phase: _seconds(fault[phase])) for phase in PHASES),
        ("fault to next step, in all", lambda fault: _seconds(fault["total_s"])),
        ("received from peers", lambda fault: format_bytes(fault["fetched_bytes"])),
    )
    for title, cell in rows:
        table.add_row(title, *map(cell, faults))
    return table
