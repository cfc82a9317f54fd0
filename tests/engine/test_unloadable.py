"""When a job may start from nothing, and what an error says where it may not."""

from __future__ import annotations

import json
from collections.abc import Collection

import pytest

from ml_flashpoint.engine.recovery import NodeReport, why_nothing
from ml_flashpoint.format.names import SaveId
from ml_flashpoint.memory.lineage import RunRecord
from ml_flashpoint.ranks.recovery import NodeInventory
from tests.ranks.recovery_support import part

BEGUN = RunRecord(1, begun=True)


def report(
    *steps: int, record: RunRecord = BEGUN, savers: Collection[int] = (0,), unread: tuple[tuple[str, str], ...] = ()
) -> NodeReport:
    """A node that has the parts of rank 0 of 2 of these steps of run 1."""
    parts = tuple(part(step, 0) for step in steps)
    return NodeReport(NodeInventory("node-0", parts), unread, frozenset(savers), (record,))


def why(*reports: NodeReport, **options: object) -> str | None:
    error = why_nothing(reports, **{"given_up": {}, "discarded": (), "world_size": 2, **options})  # type: ignore[arg-type]
    return None if error is None else error.message


@pytest.mark.parametrize(
    "found",
    [
        report(),
        report(3),  # the first save, cut short
        report(3, 4, savers=[0, 1]),  # rank 1 has saved here, and none of these
        report(record=RunRecord(2, begun=True)),
        report(3, 4, record=RunRecord(2, begun=True)),  # of a run that began anew
    ],
)
def test_a_job_that_never_had_a_version_starts_from_nothing(found: NodeReport) -> None:
    assert why(found) is None


def test_versions_that_are_lost_are_named() -> None:
    lost = "the parts of ranks 1 of 2 are on no node of this job"
    assert why(report(3, 4)) == f"there are versions and none can be loaded: step-4_ckpt ({lost}); step-3_ckpt ({lost})"
    assert lost in (why(report(3, record=RunRecord(1, begun=True, verified=True))) or "")
    assert "the job has gone back from it" in (why(report(3, record=RunRecord(2, {1: 2}, begun=True))) or "")


def test_what_cannot_be_read_is_a_reason_whatever_else_there_is() -> None:
    assert "step-9_ckpt on node-0 (damaged)" in (why(report(unread=(("step-9_ckpt", "damaged"),))) or "")
    assert "step-3_ckpt (no holder)" in (why(report(), given_up={SaveId(1, 3): "no holder"}) or "")
    assert "s3://x cannot be known" in (why(report(), durable=["s3://x cannot be known"]) or "")
    many = {SaveId(1, step): "gone" for step in range(20)}
    assert (why(report(), given_up=many) or "").endswith("and 12 more")


def test_versions_that_the_program_could_not_load_are_no_reason() -> None:
    assert why(report(3, 4), discarded=[SaveId(1, 2)]) is None


def test_reports_survive_the_way_to_other_ranks() -> None:
    told = report(3, record=RunRecord(7, {1: 4}, begun=True, verified=True), unread=(("", "x"),))
    assert NodeReport.decoded(json.loads(told.encode())) == told
