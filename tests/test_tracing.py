"""Spans of recoveries: of a real one, and of one that went back and fetched."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from ml_flashpoint import Flashpoint, events
from ml_flashpoint.tracing import trace_recoveries
from tests.facade.test_overlap import Job
from tests.support.processes import REPOSITORY, child_environment


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter: InMemorySpanExporter) -> TracerProvider:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider


def _by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    spans = exporter.get_finished_spans()
    found = {span.name.removeprefix("flashpoint."): span for span in spans}
    assert len(found) == len(spans)
    return found


def test_a_job_that_goes_on(tmpfs: Path, exporter: InMemorySpanExporter, provider: TracerProvider) -> None:
    def live() -> int:
        job = Job()
        with Flashpoint(tmpfs / "job") as fp:
            step = fp.track(**job.tracked).resume()
            job.step()
            fp.step()
            assert fp.wait()
            return step

    live()
    with trace_recoveries(provider, tmpfs / "job"):
        assert live() == 1
    spans = _by_name(exporter)
    assert set(spans) == {"recovery", "detect", "plan", "fetch", "load"}
    whole = spans.pop("recovery")
    assert whole.parent is None
    assert whole.attributes is not None
    told = {name.removeprefix("flashpoint."): value for name, value in whole.attributes.items()}
    assert told["base"] == str(tmpfs / "job")
    assert (told["rank"], told["step"], told["source"], told["fetched_bytes"]) == (0, 1, "memory", 0)
    assert whole.start_time is not None
    assert whole.end_time is not None
    for span in spans.values():
        assert span.parent is not None
        assert span.parent.span_id == whole.get_span_context().span_id  # type: ignore[union-attr]
        assert span.start_time is not None
        assert span.end_time is not None
        assert whole.start_time - 1_000_000 <= span.start_time <= span.end_time <= whole.end_time


def test_what_was_fetched_and_gone_back_from(exporter: InMemorySpanExporter, provider: TracerProvider) -> None:
    class Rank:
        rank, node = 3, "node-1"

    def emit(kind: type[events.Event], step: int, **fields: Any) -> None:
        events.emit(kind, Rank(), "/dev/shm/a", step, **fields)

    with trace_recoveries(provider):
        emit(events.SteppedBack, 8, error="damaged")
        emit(events.PartFetched, 7, part_rank=3, bytes=10, seconds=2.0)
        emit(events.VersionRecovered, 7, detect_s=1.0, plan_s=0.5, fetch_s=2.0, fetched_bytes=10, tries=2)
        assert events.flush()
        assert exporter.get_finished_spans() == (), "it is not over"
    spans = _by_name(exporter)
    assert set(spans) == {"recovery", "detect", "plan", "fetch", "fetch_part"}
    part, whole = spans["fetch_part"], spans["recovery"]
    assert part.attributes == {"flashpoint.part_rank": 3, "flashpoint.bytes": 10}
    assert part.end_time - part.start_time == pytest.approx(2e9)  # type: ignore[operator]
    (back,) = whole.events
    assert back.attributes == {"flashpoint.error": "damaged", "flashpoint.step": 8}
    assert (whole.attributes or {})["flashpoint.fetched_bytes"] == 10
    assert "flashpoint.source" not in (whole.attributes or {})


def test_the_lines_of_the_documentation_run() -> None:
    page = (REPOSITORY / "docs/operations.md").read_text(encoding="utf-8")
    (block,) = (each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "trace_recoveries" in each)
    exec(block, {})


def test_nothing_else_imports_it() -> None:
    script = "import sys, ml_flashpoint.events, ml_flashpoint.cli.main; sys.exit('opentelemetry' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, env=child_environment(), timeout=60)
