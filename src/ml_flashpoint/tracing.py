"""Recoveries as OpenTelemetry spans, for programs that trace; see `trace_recoveries`.

Owns the names of spans and attributes, and nothing of the job: spans are made from events, after the fact, with their
times. Needs the extra ``otel``, which no other module of this package imports.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from ml_flashpoint.events import add_subscriber
from ml_flashpoint.extras import require
from ml_flashpoint.format.events import Event
from ml_flashpoint.format.recoveries import Recoveries, Recovery

require("otel", "opentelemetry")

from opentelemetry import trace

_NAME = "flashpoint.recovery"


@contextlib.contextmanager
def trace_recoveries(
    provider: trace.TracerProvider | None = None, base: str | os.PathLike[str] | None = None
) -> Iterator[None]:
    """Have every recovery of this process traced, inside a ``with`` statement that is entered before it recovers.

    A span ``flashpoint.recovery`` has children for its phases (``detect``, ``plan``, ``fetch``, ``load``) and for each
    part that came from a peer (``fetch_part``). It has an event for each version that was gone back from. It is told of
    when it is over: as a `Flashpoint` resumes, or at the other doors with the next save.

    Args:
        provider: whose spans they are; by default the global one.
        base: base container whose recoveries are meant; by default all of this process.
    """
    tracer = trace.get_tracer(__name__, tracer_provider=provider)
    recoveries = Recoveries()

    def note(event: Event) -> None:
        for recovery in recoveries.add(event):
            _tell(tracer, recovery)

    end = add_subscriber(note, base, argument="base")
    try:
        yield
    finally:
        end()
        for recovery in recoveries.rest():
            _tell(tracer, recovery)


def _tell(tracer: trace.Tracer, recovery: Recovery) -> None:
    attributes: dict[str, str | int] = {
        "flashpoint.base": recovery.base,
        "flashpoint.rank": recovery.rank,
        "flashpoint.node": recovery.node,
        "flashpoint.fetched_bytes": sum(part.bytes for part in recovery.fetched),
    }
    if recovery.step is not None:
        attributes["flashpoint.step"] = recovery.step
    if recovery.source:
        attributes["flashpoint.source"] = recovery.source
    whole = tracer.start_span(
        _NAME,
        context=trace.set_span_in_context(trace.INVALID_SPAN),
        start_time=_ns(recovery.began_s),
        attributes=attributes,
    )  # a trace of its own: the span that happens to be current is another thread's, or nobody's
    inside = trace.set_span_in_context(whole)
    for phase in recovery.phases:
        span = tracer.start_span(f"flashpoint.{phase.name}", context=inside, start_time=_ns(phase.began_s))
        span.end(_ns(phase.ended_s))
    for part in recovery.fetched:
        of_part = {"flashpoint.part_rank": part.part_rank, "flashpoint.bytes": part.bytes}
        began = _ns(part.time_s - part.seconds)
        tracer.start_span("flashpoint.fetch_part", context=inside, start_time=began, attributes=of_part).end(
            _ns(part.time_s)
        )
    for left in recovery.stepped_back:
        told: dict[str, str | int] = {"flashpoint.error": left.error}
        if left.step is not None:
            told["flashpoint.step"] = left.step
        whole.add_event("flashpoint.stepped_back", told, timestamp=_ns(left.time_s))
    whole.end(_ns(recovery.ended_s))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
