"""A store of a board in a process of its own, which tests stop, kill and start again."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import TCPStore

from tests.support.forked import Report


def serve(report: Report, port: int) -> None:
    """Host a store on a port, report the port, and end when the test says so."""
    store = TCPStore("127.0.0.1", port, None, True, timedelta(seconds=30), wait_for_workers=False)
    report("port", store.port)
    report.listen()
