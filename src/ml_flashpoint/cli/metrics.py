"""`flashpoint metrics`: what the ranks of a node tell of themselves, for Prometheus to collect.

Owns the names of the metrics. All are made anew from the ranks' files when somebody asks, so nothing here can be
behind, and the job knows nothing of it.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType

from ml_flashpoint.cli import output
from ml_flashpoint.cli.base_view import NotABaseContainerError
from ml_flashpoint.cli.status import RankView, memory_of, read_node
from ml_flashpoint.extras import require
from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.status import Status

require("metrics", "prometheus_client")

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_LABELS = ("rank", "node")

_GAUGES: dict[str, tuple[str, Callable[[Status], float | None]]] = {
    "committed_step": ("Newest step of which this rank's part is on its node.", lambda told: told.committed),
    "replicated_step": ("Newest step whose copies were acknowledged.", lambda told: told.replicated),
    "verified_step": ("Newest step that all ranks have, with all copies.", lambda told: told.verified),
    "verified_timestamp_seconds": ("When that was verified.", lambda told: told.verified_s or None),
    "persisted_step": ("Newest step whose part is in the durable store.", lambda told: told.persisted),
    "resumed_step": ("Step that this process went on from.", lambda told: told.resumed),
    "loop_held_seconds": ("For how long the newest save has held the training loop.", lambda told: told.held_s),
    "commit_seconds": ("From the begin of the newest save to its commit.", lambda told: told.committed_after_s),
    "verify_seconds": ("From the begin of a save until it was verified.", lambda told: told.verified_after_s),
    "copies_lag_steps": (
        "Steps from the newest one with copies to the newest one.",
        lambda told: _steps_between(told.replicated, told.committed),
    ),
    "copies_seconds": ("That the newest copies of this rank's part took.", lambda told: told.copied_in_s or None),
    "persist_lag_steps": (
        "Steps from the newest one that is persisted to the newest verified one.",
        lambda told: _steps_between(told.persisted, told.verified),
    ),
    "part_bytes": ("Size of this rank's newest part.", lambda told: told.part_bytes),
    "degraded": (
        "Whether copies are missing, ranks do not agree, or nothing is persisted.",
        lambda told: told.degraded,
    ),
}
_COUNTERS: dict[str, tuple[str, Callable[[Status], float]]] = {
    "saves": ("Parts committed by this process.", lambda told: told.saves),
    "save_failures": ("Saves of this process that failed.", lambda told: told.failures),
    "step_backs": ("Versions that could not be recovered or loaded.", lambda told: told.stepped_back),
}


_OF_THE_NODE = (
    ("slot_bytes", "Memory that checkpoints take on this node, own parts and copies."),
    ("available_bytes", "Memory that is left for more, of filesystem, machine and container."),
)


class NodeCollector(Collector):
    """Metrics of one base container.

    Args:
        base: its path.
    """

    def __init__(self, base: str) -> None:
        self._base = base

    def collect(self) -> Iterable[Metric]:
        """All metrics, now."""
        try:
            ranks = read_node(self._base)
        except NotABaseContainerError:  # the job was removed, or has not begun
            ranks = []
        up = GaugeMetricFamily("flashpoint_up", "Whether the rank's process runs.", labels=("rank",))
        for rank in ranks:
            up.add_metric([str(rank.rank)], float(rank.pid is not None))
        yield up
        memory = memory_of(Path(self._base))
        for (name, text), count in zip(_OF_THE_NODE, memory, strict=True):
            gauge = GaugeMetricFamily(f"flashpoint_{name}", text)
            if ranks:
                gauge.add_metric([], float(count))
            yield gauge
        for name, (text, gauge_of) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"flashpoint_{name}", text, labels=_LABELS)
            for labels, told in _told(ranks):
                if (value := gauge_of(told)) is not None:
                    gauge.add_metric(labels, float(value))
            yield gauge
        for name, (text, count_of) in _COUNTERS.items():
            counter = CounterMetricFamily(f"flashpoint_{name}", text, labels=_LABELS)
            for labels, told in _told(ranks):
                counter.add_metric(labels, float(count_of(told)))
            yield counter


def _steps_between(older: int | None, newer: int | None) -> int | None:
    return None if older is None or newer is None else max(0, newer - older)


def _told(ranks: Iterable[RankView]) -> list[tuple[list[str], Status]]:
    return [([str(rank.rank), rank.status.node], rank.status) for rank in ranks if rank.status is not None]


@output.command
def serve(base: str, *, host: str, port: int) -> None:
    """Serve until a signal ends it; returns the exit code of the command."""
    read_node(base)
    registry = CollectorRegistry()
    registry.register(NodeCollector(base))
    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        ended.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise InvalidArgumentError(f"cannot listen there: {error}", argument="--port", value=port) from error
    print(f"metrics of {base} at http://{host}:{server.server_port}/metrics", file=sys.stderr, flush=True)
    while not ended.wait(3600.0):
        pass
    server.shutdown()
    server.server_close()
    thread.join(10.0)
