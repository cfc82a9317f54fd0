"""What the demo concludes from what it saw: every claim has a way to fail, and fails when it should."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from ml_flashpoint.cli.demo.display import LOST, Display, LiveDisplay
from ml_flashpoint.cli.demo.record import Injected, RunRecord, recoveries, summary
from ml_flashpoint.cli.demo.reports import PREFIX, parse
from ml_flashpoint.cli.demo.story import MIN_STEPS, NODES, RANKS_PER_NODE, plan_faults
from ml_flashpoint.cli.demo.verdict import FINAL_CLAIM, Check, judge

STEPS = 10
RANKS = 4

ONCE = "fault-free run: every rank made every step once"
COMPLETE = "faulted run: every rank made every step"
SAVED = "both runs: a checkpoint at every step"
RANK_LOST, RANK_BACK = "rank 2 was really lost", "rank 2: recovered from memory"
NODE_LOST, NODE_BACK = "node-1 was really lost", "node-1: recovered from memory"
LOSSES = "every step had the loss of the fault-free run"
REST = "random numbers and places in the data as in the fault-free run"
BASES = "the checkpoints left on every node verify"


def _life(
    run: RunRecord, *, at: float, pids: int, first: int, last: int, source: str, nodes: tuple[str, str], fetched: int
) -> None:
    """Reports of all ranks from one start to the last step before a fault, or to the end."""

    def say(event: str, rank: int, at: float, **values: Any) -> None:
        node = nodes[rank // 2]
        run.reports.append({"event": event, "rank": rank, "pid": pids + rank, "at": at, "node": node, **values})

    for rank in range(RANKS):
        say("started", rank, at + rank / 10, text="abc")
        received = fetched if nodes[rank // 2] == "node-2" else 0
        phases = {"detect_s": 0.1, "plan_s": 0.2, "fetch_s": 0.3 + rank, "load_s": 0.4}
        version = f"step-{first}_ckpt" if source == "memory" else None
        say("resumed", rank, at + 1, step=first, source=source, version=version, fetched_bytes=received, **phases)
    for step in range(first + 1, last + 1):
        for rank in range(RANKS):
            loss = 5.0 - step / 10 + rank
            say("step", rank, at + 1 + step - first, step=step, loss=loss, saved=step - 1, replicated=step - 1 or None)
            say("save", rank, at + 1.5 + step - first, step=step, blocked_s=0.01 * (rank + 1))
    if last == STEPS:
        for rank in range(RANKS):
            say("trained", rank, at + 50, saved=STEPS, replicated=STEPS, failed=0)
            for name in ("model.weight", "optimizer.weight.exp_avg"):
                say("digest", rank, at + 51, name=name, digest=f"digest of {name}")
            say("finished", rank, at + 52, position=STEPS, random=f"random {rank}")


def calm_run() -> RunRecord:
    run = RunRecord("fault-free", STEPS, RANKS, wall_s=12.5, bases_ok={"node-0": True, "node-1": True})
    _life(run, at=10, pids=100, first=0, last=STEPS, source="nothing", nodes=("node-0", "node-1"), fetched=0)
    return run


def faulted_run() -> RunRecord:
    run = RunRecord("faulted", STEPS, RANKS, wall_s=33.3, bases_ok={"node-0": True, "node-2": True})
    _life(run, at=10, pids=200, first=0, last=4, source="nothing", nodes=("node-0", "node-1"), fetched=0)
    run.faults.append(Injected("rank", "rank 2", 16.0, (202,), gone=True))
    _life(run, at=20, pids=300, first=3, last=7, source="memory", nodes=("node-0", "node-1"), fetched=0)
    run.faults.append(Injected("node", "node-1", 26.0, (390, 302, 303), True, 5 << 20, "node-2"))
    _life(run, at=30, pids=400, first=6, last=STEPS, source="memory", nodes=("node-0", "node-2"), fetched=1 << 20)
    return run


def failed(calm: RunRecord, faulted: RunRecord) -> list[str]:
    return [check.claim for check in judge(calm, faulted, ranks_per_node=2) if not check.ok]


def edit(run: RunRecord, event: str, change: Callable[[dict[str, Any]], object], **where: Any) -> None:
    """Changes every report of a kind that has these values."""
    found = [said for said in run.of(event) if all(said[name] == value for name, value in where.items())]
    assert found
    for said in found:
        change(said)


def drop(run: RunRecord, event: str, **where: Any) -> None:
    doomed = [said for said in run.of(event) if all(said[name] == value for name, value in where.items())]
    assert doomed
    run.reports = [said for said in run.reports if said not in doomed]


def test_all_claims_hold_for_what_should_happen() -> None:
    checks = judge(calm_run(), faulted_run(), ranks_per_node=2)
    assert [check.why_not for check in checks] == [None] * len(checks)
    assert [check.claim for check in checks] == [
        ONCE, COMPLETE, SAVED, RANK_LOST, RANK_BACK, NODE_LOST, NODE_BACK, LOSSES, REST, BASES, FINAL_CLAIM
    ]  # fmt: skip


Change = Callable[[RunRecord, RunRecord], object]

SABOTAGE: dict[str, tuple[Change, set[str]]] = {
    "a tensor differs on one rank": (
        lambda calm, run: edit(run, "digest", lambda d: d.update(digest="x"), rank=3, name="model.weight"),
        {FINAL_CLAIM},
    ),
    "an optimizer tensor differs on all ranks": (
        lambda calm, run: edit(run, "digest", lambda d: d.update(digest="x"), name="optimizer.weight.exp_avg"),
        {FINAL_CLAIM},
    ),
    "a tensor is not reported": (lambda calm, run: drop(run, "digest", rank=0, name="model.weight"), {FINAL_CLAIM}),
    "ranks of the fault-free run disagree": (
        lambda calm, run: edit(calm, "digest", lambda d: d.update(digest="x"), rank=1),
        {FINAL_CLAIM},
    ),
    "no optimizer digests anywhere": (
        lambda calm, run: [drop(r, "digest", name="optimizer.weight.exp_avg") for r in (calm, run)],
        {FINAL_CLAIM},
    ),
    "no digests at all": (lambda calm, run: [drop(r, "digest") for r in (calm, run)], {FINAL_CLAIM}),
    "a step made again had another loss": (
        lambda calm, run: edit(run, "step", lambda d: d.update(loss=1.0), rank=1, step=7, pid=401),
        {LOSSES},
    ),
    "the same wrong loss twice": (
        lambda calm, run: edit(run, "step", lambda d: d.update(loss=1.0), rank=1, step=7),
        {LOSSES},
    ),
    "random numbers differ": (
        lambda calm, run: edit(run, "finished", lambda d: d.update(random="x"), rank=2),
        {REST},
    ),
    "the place in the data differs": (
        lambda calm, run: edit(run, "finished", lambda d: d.update(position=9), rank=2),
        {REST},
    ),
    "a rank did not finish": (lambda calm, run: drop(run, "finished", rank=2), {COMPLETE, REST}),
    "a step is missing": (lambda calm, run: drop(run, "step", rank=2, step=9), {COMPLETE, LOSSES}),
    "a save is missing": (lambda calm, run: drop(calm, "save", rank=2, step=9), {SAVED}),
    "a save failed": (lambda calm, run: edit(run, "trained", lambda d: d.update(failed=1), rank=0), {SAVED}),
    "the last save was not replicated": (
        lambda calm, run: edit(run, "trained", lambda d: d.update(replicated=9), rank=0),
        {SAVED},
    ),
    "the last save was not committed": (
        lambda calm, run: edit(calm, "trained", lambda d: d.update(saved=None), rank=0),
        {SAVED},
    ),
    "nothing was learned": (
        lambda calm, run: [edit(r, "step", lambda d: d.update(loss=5.0)) for r in (calm, run)],
        {ONCE, COMPLETE},
    ),
    "other text": (lambda calm, run: edit(run, "started", lambda d: d.update(text="x"), pid=402), {COMPLETE}),
    "the fault-free run was restarted": (
        lambda calm, run: calm.reports.append({**next(calm.of("started")), "pid": 999}),
        {ONCE},
    ),
    "something was killed in the fault-free run": (lambda calm, run: calm.faults.append(run.faults[0]), {ONCE}),
    "the fault-free run made a step twice": (
        lambda calm, run: calm.reports.append(next(calm.of("step", 1))),
        {ONCE},
    ),
    "more than one rank was killed": (
        lambda calm, run: run.faults.__setitem__(0, replace(run.faults[0], pids=(202, 203))),
        {RANK_LOST},
    ),
    "no node took the place of the lost one": (
        lambda calm, run: run.faults.__setitem__(1, replace(run.faults[1], replacement=None)),
        {NODE_LOST, NODE_BACK},
    ),
    "a step that was never made was recovered": (
        lambda calm, run: [
            edit(run, "resumed", lambda d: d.update(step=9, version="step-9_ckpt"), pid=400 + rank) for rank in range(4)
        ],
        {NODE_BACK},
    ),
    "the killed rank lives": (
        lambda calm, run: run.faults.__setitem__(0, replace(run.faults[0], gone=False)),
        {RANK_LOST},
    ),
    "the lost node's folder is there": (
        lambda calm, run: run.faults.__setitem__(1, replace(run.faults[1], gone=False)),
        {NODE_LOST},
    ),
    "only the agent of the node was killed": (
        lambda calm, run: run.faults.__setitem__(1, replace(run.faults[1], pids=(390,))),
        {NODE_LOST},
    ),
    "the lost node had nothing in memory": (
        lambda calm, run: run.faults.__setitem__(1, replace(run.faults[1], lost_bytes=0)),
        {NODE_LOST},
    ),
    "nothing came from peers": (
        lambda calm, run: edit(run, "resumed", lambda d: d.update(fetched_bytes=0)),
        {NODE_BACK},
    ),
    "the survivors fetched, not the new node": (
        lambda calm, run: edit(run, "resumed", lambda d: d.update(node="node-0")),
        {NODE_BACK},
    ),
    "the state came from a fallback": (
        lambda calm, run: edit(run, "resumed", lambda d: d.update(source="fallback", version=None), pid=301),
        {RANK_BACK},
    ),
    "another version than it says": (
        lambda calm, run: edit(run, "resumed", lambda d: d.update(version="step-5_ckpt"), pid=401),
        {NODE_BACK},
    ),
    "training began anew": (
        lambda calm, run: [edit(run, "resumed", lambda d: d.update(step=0), pid=300 + rank) for rank in range(4)],
        {RANK_BACK},
    ),
    "ranks went on from different steps": (
        lambda calm, run: edit(run, "resumed", lambda d: d.update(step=5, version="step-5_ckpt"), pid=401),
        {NODE_BACK},
    ),
    "a replicated step was not recovered": (
        lambda calm, run: edit(run, "step", lambda d: d.update(replicated=7), pid=301, step=7),
        {NODE_BACK},
    ),
    "nothing was replicated before": (
        lambda calm, run: [edit(run, "step", lambda d: d.update(replicated=None), pid=200 + rank) for rank in range(4)],
        {RANK_BACK},
    ),
    "a rank did not go on": (lambda calm, run: drop(run, "resumed", pid=301), {RANK_BACK}),
    "damaged checkpoints are left": (lambda calm, run: run.bases_ok.update({"node-2": False}), {BASES}),
    "nobody looked at the checkpoints": (lambda calm, run: run.bases_ok.clear(), {BASES}),
}


@pytest.mark.parametrize("name", SABOTAGE)
def test_each_claim_fails_when_it_does_not_hold(name: str) -> None:
    change, broken_claims = SABOTAGE[name]
    calm, faulted = calm_run(), faulted_run()
    change(calm, faulted)
    assert set(failed(calm, faulted)) == broken_claims


def test_a_run_in_which_nothing_was_killed_proves_nothing() -> None:
    claims = failed(calm_run(), replace(calm_run(), name="faulted"))
    assert claims == ["a rank was killed, then a node"]


def test_a_fault_that_nobody_noticed_proves_nothing() -> None:
    # Reported as done, but the processes ran on.
    run = replace(calm_run(), name="faulted")
    run.faults.append(Injected("rank", "rank 2", 16.0, (102,), gone=True))
    run.faults.append(Injected("node", "node-1", 18.0, (190, 102, 103), True, 5 << 20, "node-2"))
    assert set(failed(calm_run(), run)) == {RANK_BACK, NODE_BACK}


def test_a_save_that_was_recovered_from_counts_although_its_rank_could_not_report_it() -> None:
    run = faulted_run()
    drop(run, "save", step=3, rank=2)
    assert failed(calm_run(), run) == []
    drop(run, "save", step=2, rank=2)
    assert failed(calm_run(), run) == [SAVED]


def test_numbers_of_a_recovery() -> None:
    first, second = recoveries(faulted_run())
    assert (first.last_step, first.replicated, first.resumed_step, first.lost_steps) == (4, 3, 3, 1)
    assert first.restart_s == pytest.approx(20.3 - 16)
    assert dict(first.phases) == {"detect_s": 0.1, "plan_s": 0.2, "fetch_s": 3.3, "load_s": 0.4}
    assert first.total_s == pytest.approx(22 - 16)
    assert (first.fetched_bytes, first.fetched_by) == (0, ())
    assert (second.last_step, second.resumed_step, second.lost_steps) == (7, 6, 1)
    assert (second.fetched_bytes, second.fetched_by) == (2 << 20, ("node-2",))


def test_a_report_read_after_the_fault_still_belongs_before_it() -> None:
    run = faulted_run()
    late = [said for said in run.reports if said["event"] == "step" and said["pid"] == 201 and said["step"] == 4]
    run.reports = [said for said in run.reports if said not in late] + late
    assert recoveries(run)[0].last_step == 4
    assert recoveries(run)[0].total_s == pytest.approx(22 - 16)


def test_numbers_of_a_run() -> None:
    numbers = summary(faulted_run())
    assert (numbers["steps"], numbers["ranks"], numbers["saves"], numbers["wall_s"]) == (10, 4, 12, 33.3)
    assert (numbers["blocked_median_ms"], numbers["blocked_max_ms"]) == (25.0, 40.0)
    assert [fault["victim"] for fault in numbers["faults"]] == ["rank 2", "node-1"]
    empty = summary(RunRecord("empty", STEPS, RANKS))
    assert (empty["saves"], empty["blocked_median_ms"]) == (0, None)


@pytest.mark.parametrize("steps", [MIN_STEPS, 11, 16, 40, 1000])
def test_faults_leave_room_before_between_and_after(steps: int) -> None:
    plans = [plan_faults(steps, seed) for seed in range(50)]
    for rank, node in plans:
        assert (rank.kind, node.kind) == ("rank", "node")
        assert 3 <= rank.step <= node.step - 2
        assert node.step <= steps - 2
    assert {rank.victim for rank, _ in plans} == set(range(NODES * RANKS_PER_NODE))
    assert {node.victim for _, node in plans} == set(range(NODES))
    assert plan_faults(steps, 7) == plan_faults(steps, 7)


def test_reports_are_told_from_other_output() -> None:
    assert parse(f'{PREFIX}{{"event": "step"}}') == {"event": "step"}
    for line in ("", "step 3", f"x{PREFIX}{{}}", f"{PREFIX}{{", f"{PREFIX}[]"):
        assert parse(line) is None


@pytest.mark.parametrize("kind", [Display, LiveDisplay])
def test_displays_show_everything_and_the_verdict(kind: type[Display]) -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=100, force_terminal=kind is LiveDisplay)
    calm, run = calm_run(), faulted_run()
    with kind(console, STEPS) as display:
        display.begin("faulted run", "a [rank] is killed")
        display.node("node-0", "starting")
        display.node("node-1", "starting")
        for said in run.of("step"):
            display.step(said["node"], copy.deepcopy(said))
        display.note("SIGKILL to rank 2", "bold red")
        display.node("node-1", LOST)
        checks = judge(calm, run, ranks_per_node=2)
        display.result([summary(calm), summary(run)], [*checks, Check("pigs fly", "they [do] not")])
        display.say("kept in /nowhere")
    shown = stream.getvalue()
    for text in ("a [rank] is killed", "node-1: lost", "SIGKILL to rank 2", "pigs fly -- NO: they [do] not"):
        assert text in shown
    for text in (FINAL_CLAIM, "25.0 ms", "rank 2 killed", "node-1 lost", "3.30 s", "2.0 MiB", "33.3 s", "kept in"):
        assert text in shown
    assert ("\x1b" in shown) == (kind is LiveDisplay)


def test_a_demo_without_runs_can_still_say_so() -> None:
    for kind in (Display, LiveDisplay):
        stream = io.StringIO()
        with kind(Console(file=stream, width=100), STEPS) as display:
            display.result([], [Check(FINAL_CLAIM, "the demo did not get to its end")])
        assert f"{FINAL_CLAIM} -- NO: the demo did not get to its end" in stream.getvalue()
