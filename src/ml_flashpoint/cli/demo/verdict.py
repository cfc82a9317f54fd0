"""Whether the demo has shown what it says it shows.

Owns the claims and how each is checked. Pure. Nothing is taken for granted: a fault that was not really brought
about, or a recovery that did not come from memory, is a failure of the demo like different weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ml_flashpoint.cli.demo.record import Recovery, RunRecord, recoveries
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId

FINAL_CLAIM = "final weights equal to the fault-free run: bit for bit"


@dataclass(frozen=True, slots=True)
class Check:
    """One claim.

    Attributes:
        claim: what should hold.
        why_not: why it does not; ``None`` if it does.
    """

    claim: str
    why_not: str | None = None

    @property
    def ok(self) -> bool:
        """Whether it holds."""
        return self.why_not is None


def judge(reference: RunRecord, broken: RunRecord, *, ranks_per_node: int) -> list[Check]:
    """Check every claim of the demo.

    Args:
        reference: the run without faults.
        broken: the run with a rank killed and then a node.
        ranks_per_node: ranks on each node.
    """
    checks = [
        Check(f"{reference.name} run: every rank made every step once", _first(_undisturbed(reference))),
        Check(f"{broken.name} run: every rank made every step", _first(_complete(broken))),
        Check("both runs: a checkpoint at every step", _first([*_saved(reference), *_saved(broken)])),
    ]
    found = recoveries(broken)
    kinds = [recovery.fault.kind for recovery in found]
    if kinds != ["rank", "node"]:
        checks.append(Check("a rank was killed, then a node", f"what was killed: {', '.join(kinds) or 'nothing'}"))
    for recovery in found:
        victim = recovery.fault.victim
        checks.append(Check(f"{victim} was really lost", _first(_injected(recovery, ranks_per_node))))
        checks.append(Check(f"{victim}: recovered from memory", _first(_recovered(recovery, broken.ranks))))
    checks += [
        Check("every step had the loss of the fault-free run", _first(_losses(reference, broken))),
        Check("random numbers and places in the data as in the fault-free run", _first(_rest(reference, broken))),
        Check("the checkpoints left on every node verify", _first([*_bases(reference), *_bases(broken)])),
        Check(FINAL_CLAIM, _first(_weights(reference, broken))),
    ]
    return checks


def _first(reasons: Iterator[str] | list[str]) -> str | None:
    return next(iter(reasons), None)


def _undisturbed(run: RunRecord) -> Iterator[str]:
    if run.faults:
        yield "something was killed in it"
    for rank in range(run.ranks):
        if len(list(run.of("started", rank))) != 1:
            yield f"rank {rank} was started again"
        if any(len(losses) != 1 for losses in run.losses(rank).values()):
            yield f"rank {rank} made a step twice"
    yield from _complete(run)


def _complete(run: RunRecord) -> Iterator[str]:
    if not run.finished():
        yield "not every rank has finished"
    if len({report["text"] for report in run.of("started")}) != 1:
        yield "ranks trained on different texts"
    first, last = (run.losses(0).get(step, [0.0])[0] for step in (1, run.steps))
    if not last < first:
        yield f"nothing was learned: the loss was {first} at first and {last} at last"
    for rank in range(run.ranks):
        made = run.losses(rank)
        if sorted(made) != list(range(1, run.steps + 1)):
            yield f"rank {rank} made the steps {sorted(made)}"


def _saved(run: RunRecord) -> Iterator[str]:
    for rank in range(run.ranks):
        # A save from which the job went on was made, even if the rank was killed before it could report it.
        saved = {report["step"] for report in run.of("save", rank)} | {
            report["step"] for report in run.of("resumed", rank)
        }
        if not saved >= set(range(1, run.steps + 1)):
            yield f"{run.name} run: rank {rank} saved only {len(saved)} of {run.steps} steps"
        trained = run.last("trained", rank)
        if trained is None or trained["saved"] != run.steps or trained["replicated"] != run.steps:
            yield f"{run.name} run: the last save of rank {rank} was not committed and replicated: {trained}"
        elif trained["failed"]:
            yield f"{run.name} run: {trained['failed']} saves of rank {rank} failed"


def _injected(recovery: Recovery, ranks_per_node: int) -> Iterator[str]:
    fault = recovery.fault
    if not fault.gone:
        yield "it still runs or its memory is still there"
    if fault.kind == "rank" and len(fault.pids) != 1:
        yield f"{len(fault.pids)} processes were killed"
    if fault.kind == "node":
        if len(fault.pids) < 1 + ranks_per_node:
            yield f"only {len(fault.pids)} processes were killed"
        if not fault.lost_bytes:
            yield "it had no checkpoints to lose"
        if fault.replacement is None:
            yield "no node took its place"


def _recovered(recovery: Recovery, ranks: int) -> Iterator[str]:
    if sorted(recovery.resumed) != list(range(ranks)):
        yield f"only ranks {sorted(recovery.resumed)} went on"
    step = recovery.resumed_step
    if step is None:
        yield f"ranks went on from different steps: {dict(recovery.resumed)}"
        return
    if step < 1:
        yield "training began anew"
        return
    wanted = ("memory", CheckpointContainerId.format_version_container(step))
    if set(recovery.sources.values()) != {wanted}:
        yield f"step {step} did not come from {wanted[1]} in memory, but from {dict(recovery.sources)}"
    if step > recovery.last_step:
        yield f"step {step} was never made, only {recovery.last_step}"
    if recovery.replicated is None:
        yield "nothing had been replicated before"
    elif step < recovery.replicated:
        yield f"step {recovery.replicated} had been replicated, and yet only step {step} was recovered"
    fault = recovery.fault
    if fault.kind == "node" and fault.replacement not in recovery.fetched_by:
        yield f"{fault.replacement} began with no memory and received nothing from its peers"


def _losses(reference: RunRecord, broken: RunRecord) -> Iterator[str]:
    for rank in range(reference.ranks):
        wanted, found = reference.losses(rank), broken.losses(rank)
        for step, losses in sorted(wanted.items()):
            if set(found.get(step, ())) != set(losses):
                yield f"rank {rank}, step {step}: {found.get(step)} instead of {losses[0]}"


def _rest(reference: RunRecord, broken: RunRecord) -> Iterator[str]:
    for rank in range(reference.ranks):
        for name in ("position", "random"):
            wanted, found = ((run.last("finished", rank) or {}).get(name) for run in (reference, broken))
            if wanted is None or wanted != found:
                yield f"rank {rank}: {name} is {found} instead of {wanted}"


def _bases(run: RunRecord) -> Iterator[str]:
    if not run.bases_ok:
        yield f"{run.name} run: none were looked at"
    for node, ok in run.bases_ok.items():
        if not ok:
            yield f"{run.name} run: those of {node} do not"


def _weights(reference: RunRecord, broken: RunRecord) -> Iterator[str]:
    wanted = reference.digests(0)
    for part in ("model.", "optimizer."):
        if not any(name.startswith(part) for name in wanted):
            yield f"no digests of {part[:-1]} tensors were reported"
    for run in (reference, broken):
        for rank in range(run.ranks):
            found = run.digests(rank)
            different = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
            if different:
                yield f"{len(different)} of {len(wanted)} tensors differ on rank {rank}, {different[0]} for one"
