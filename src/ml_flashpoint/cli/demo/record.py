"""What happened in a run of the demo, from what its ranks reported.

Owns the sorting of reports by process and by fault, and the numbers that follow from them. Pure: reports in,
numbers out. Whether the numbers are good enough is `verdict`'s business.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

PHASES = ("detect_s", "plan_s", "fetch_s", "load_s")
"""What a rank reports of its recovery, in seconds."""


@dataclass(frozen=True, slots=True)
class Injected:
    """A fault, as it was brought about.

    Attributes:
        kind: whether a rank or a whole node was killed.
        victim: ``rank 2`` or ``node-1``.
        at: when, on the clock of the reports.
        pids: the processes that were running before and dead afterwards.
        lost_bytes: memory that was deleted with the node.
        gone: whether what should be gone is: the process, or the node's processes and folder.
        replacement: the node that took the place of the lost one.
    """

    kind: Literal["rank", "node"]
    victim: str
    at: float
    pids: tuple[int, ...]
    gone: bool
    lost_bytes: int = 0
    replacement: str | None = None


@dataclass(slots=True)
class RunRecord:
    """One run of the job, in the order in which things were learned.

    Attributes:
        name: what to call it.
        steps: steps that it was to train.
        ranks: its world size.
        reports: everything that its ranks reported, each with the `node` added.
        faults: what was done to it, in order.
        wall_s: from the start of its nodes to their end.
        bases_ok: for each node at the end, whether its checkpoints verify.
    """

    name: str
    steps: int
    ranks: int
    reports: list[dict[str, Any]] = field(default_factory=list)
    faults: list[Injected] = field(default_factory=list)
    wall_s: float = 0.0
    bases_ok: dict[str, bool] = field(default_factory=dict)

    def of(self, event: str, rank: int | None = None) -> Iterator[dict[str, Any]]:
        """The reports of one kind, of one rank or of all."""
        return (report for report in self.reports if report["event"] == event and rank in (None, report["rank"]))

    def last(self, event: str, rank: int) -> dict[str, Any] | None:
        """The last report of a kind by a rank."""
        return next(
            (report for report in reversed(self.reports) if report["event"] == event and report["rank"] == rank), None
        )

    def finished(self) -> bool:
        """Whether every rank has reported its result."""
        return all(self.last("finished", rank) is not None for rank in range(self.ranks))

    def blocked_s(self) -> list[float]:
        """How long each save held up its rank."""
        return [report["blocked_s"] for report in self.of("save")]

    def saves(self) -> int:
        """Saves that all ranks made, those repeated after a fault included."""
        counts = [sum(1 for _ in self.of("save", rank)) for rank in range(self.ranks)]
        return min(counts, default=0)

    def losses(self, rank: int) -> dict[int, list[float]]:
        """The loss of a rank at each step, as often as the step was made."""
        losses: dict[int, list[float]] = {}
        for report in self.of("step", rank):
            losses.setdefault(report["step"], []).append(report["loss"])
        return losses

    def digests(self, rank: int) -> dict[str, str]:
        """The digests of all full tensors at the end, as a rank sees them."""
        return {report["name"]: report["digest"] for report in self.of("digest", rank)}


@dataclass(frozen=True, slots=True)
class Recovery:
    """How a run went on after a fault. Times in seconds, each of the slowest rank.

    Attributes:
        fault: the fault.
        last_step: last step that was made before.
        replicated: newest step that the job knew to be on every copy before; ``None`` if there was none.
        resumed: step that each rank went on from, by rank.
        sources: where each rank's state came from, and the version if that was memory, by rank.
        restart_s: from the fault until all ranks run again: noticing, rendezvous, starting Python.
        phases: of `PHASES`, the recovery itself.
        total_s: from the fault until the first step after it.
        fetched_bytes: bytes that ranks received from peers.
        fetched_by: nodes whose ranks received them.
    """

    fault: Injected
    last_step: int
    replicated: int | None
    resumed: Mapping[int, int]
    sources: Mapping[int, tuple[str, str | None]]
    restart_s: float
    phases: Mapping[str, float]
    total_s: float
    fetched_bytes: int
    fetched_by: tuple[str, ...]

    @property
    def resumed_step(self) -> int | None:
        """The step that all ranks went on from; ``None`` if they did not agree."""
        steps = set(self.resumed.values())
        return steps.pop() if len(steps) == 1 else None

    @property
    def lost_steps(self) -> int | None:
        """Steps whose work had to be done again."""
        return None if self.resumed_step is None else self.last_step - self.resumed_step


def recoveries(run: RunRecord) -> list[Recovery]:
    """How the run went on after each of its faults."""
    ends = [fault.at for fault in run.faults[1:]] + [float("inf")]
    return [_recovery(run, fault, end) for fault, end in zip(run.faults, ends, strict=False)]


def summary(run: RunRecord) -> dict[str, Any]:
    """The numbers of a run, as plain JSON values."""
    blocked = run.blocked_s()
    return {
        "name": run.name,
        "steps": run.steps,
        "ranks": run.ranks,
        "saves": run.saves(),
        "blocked_median_ms": _ms(statistics.median(blocked)) if blocked else None,
        "blocked_max_ms": _ms(max(blocked)) if blocked else None,
        "wall_s": round(run.wall_s, 2),
        "faults": [_recovery_summary(recovery) for recovery in recoveries(run)],
    }


def _recovery(run: RunRecord, fault: Injected, end: float) -> Recovery:
    # By process, not by time: what a process wrote before it died may be read after its death.
    born = {report["pid"]: report["at"] for report in run.of("started")}
    before = [report for report in run.reports if born.get(report["pid"], fault.at) < fault.at]
    after = [report for report in run.reports if fault.at < born.get(report["pid"], fault.at) < end]
    resumed = _last_by_rank(after, "resumed")
    started = _last_by_rank(after, "started")
    pids = {report["pid"] for report in resumed.values()}
    first_steps = _first_by_rank([report for report in after if report["pid"] in pids], "step")
    return Recovery(
        fault=fault,
        last_step=max((report["step"] for report in before if report["event"] == "step"), default=0),
        replicated=max((s["replicated"] for s in before if s.get("replicated") is not None), default=None),
        resumed={rank: report["step"] for rank, report in resumed.items()},
        sources={rank: (report["source"], report["version"]) for rank, report in resumed.items()},
        restart_s=_latest(started.values()) - fault.at,
        phases={phase: max((report[phase] for report in resumed.values()), default=0.0) for phase in PHASES},
        total_s=_latest(first_steps.values()) - fault.at,
        fetched_bytes=sum(report["fetched_bytes"] for report in resumed.values()),
        fetched_by=tuple(sorted({report["node"] for report in resumed.values() if report["fetched_bytes"]})),
    )


def _recovery_summary(recovery: Recovery) -> dict[str, Any]:
    fault = recovery.fault
    return {
        "kind": fault.kind,
        "victim": fault.victim,
        "killed_pids": list(fault.pids),
        "lost_bytes": fault.lost_bytes,
        "replacement": fault.replacement,
        "last_step": recovery.last_step,
        "replicated_step": recovery.replicated,
        "resumed_step": recovery.resumed_step,
        "lost_steps": recovery.lost_steps,
        "restart_s": round(recovery.restart_s, 3),
        **{phase: round(seconds, 4) for phase, seconds in recovery.phases.items()},
        "total_s": round(recovery.total_s, 3),
        "fetched_bytes": recovery.fetched_bytes,
    }


def _last_by_rank(reports: Sequence[dict[str, Any]], event: str) -> dict[int, dict[str, Any]]:
    return {report["rank"]: report for report in reports if report["event"] == event}


def _first_by_rank(reports: Sequence[dict[str, Any]], event: str) -> dict[int, dict[str, Any]]:
    return {report["rank"]: report for report in reversed(reports) if report["event"] == event}


def _latest(reports: Any) -> float:
    return max((report["at"] for report in reports), default=float("nan"))


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)
