"""`flashpoint metrics`: the status of the ranks of a node, for Prometheus to collect.

All metrics are made anew from the ranks' files at each scrape, so the job knows nothing of it.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from ml_flashpoint.cli.view import memory_of, read_ranks
from ml_flashpoint.extras import require
from ml_flashpoint.format.errors import InvalidArgumentError, ObjectNotFoundError
from ml_flashpoint.memory.capacity import available_bytes
from ml_flashpoint.status import Status

require("metrics", "prometheus_client")

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_GAUGES: dict[str, tuple[str, Callable[[Status], float | None]]] = {
    "committed_step": ("Newest step of which this rank's part is on its node.", lambda told: told.committed),
    "replicated_step": ("Newest step whose copies were acknowledged.", lambda told: told.replicated),
    "verified_step": ("Newest step that all ranks have, with all copies.", lambda told: told.verified),
    "verified_timestamp_seconds": ("Time at which that was verified.", lambda told: told.verified_s or None),
    "persisted_step": ("Newest step whose part is in the durable store.", lambda told: told.persisted),
    "resumed_step": ("Step that this process went on from.", lambda told: told.resumed),
    "loop_held_seconds": ("Time for which the newest save has held the training loop.", lambda told: told.held_s),
    "commit_seconds": ("From the begin of the newest save to its commit.", lambda told: told.committed_after_s),
    "verify_seconds": ("From the begin of a save until it was verified.", lambda told: told.verified_after_s),
    "copies_lag_steps": (
        "Steps from the newest one with copies to the newest one.",
        lambda told: _steps_between(told.replicated, told.committed),
    ),
    "copies_seconds": ("Time that the newest copies of this rank's part took.", lambda told: told.copied_in_s or None),
    "persist_lag_steps": (
        "Steps from the newest one that is persisted to the newest verified one.",
        lambda told: _steps_between(told.persisted, told.verified),
    ),
    "part_bytes": ("Size of this rank's newest part.", lambda told: told.part_bytes),
    "degraded": ("1 if copies are missing, ranks do not agree, or nothing is persisted.", lambda told: told.degraded),
}
_COUNTERS: dict[str, tuple[str, Callable[[Status], float]]] = {
    "saves": ("Parts committed by this process.", lambda told: told.saves),
    "save_failures": ("Saves of this process that failed.", lambda told: told.failures),
    "step_backs": ("Versions that could not be recovered or loaded.", lambda told: told.stepped_back),
}


def _steps_between(older: int | None, newer: int | None) -> int | None:
    return None if older is None or newer is None else max(0, newer - older)


class NodeCollector(Collector):
    """Metrics of one base container.

    Args:
        base: its path.
    """

    def __init__(self, base: str) -> None:
        self._base = base

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics, now."""
        try:
            ranks = read_ranks(self._base)
        except ObjectNotFoundError:  # the job was removed, or has not begun
            ranks = []
        up = GaugeMetricFamily("flashpoint_up", "1 if the rank's process runs.", labels=("rank",))
        for rank in ranks:
            up.add_metric([str(rank.rank)], float(rank.pid is not None))
        yield up
        memory = GaugeMetricFamily("flashpoint_slot_bytes", "Memory of checkpoints on this node, copies included.")
        left = GaugeMetricFamily("flashpoint_available_bytes", "Memory left, of filesystem, machine and container.")
        if ranks:
            memory.add_metric([], float(memory_of(Path(self._base))))
            left.add_metric([], float(_left(self._base)))
        yield from (memory, left)
        told = [([str(rank.rank), rank.node], rank.status) for rank in ranks if rank.status is not None]
        for name, (text, gauge_of) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"flashpoint_{name}", text, labels=("rank", "node"))
            for labels, status in told:
                if (value := gauge_of(status)) is not None:
                    gauge.add_metric(labels, float(value))
            yield gauge
        for name, (text, count_of) in _COUNTERS.items():
            counter = CounterMetricFamily(f"flashpoint_{name}", text, labels=("rank", "node"))
            for labels, status in told:
                counter.add_metric(labels, float(count_of(status)))
            yield counter


def _left(base: str) -> int:
    try:
        return available_bytes(Path(base))
    except OSError:
        return 0


def serve(base: str, *, host: str, port: int) -> None:
    """Serve until a signal ends it."""
    read_ranks(base)
    registry = CollectorRegistry()
    registry.register(NodeCollector(base))
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: ended.set())
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
