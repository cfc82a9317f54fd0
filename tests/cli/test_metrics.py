"""`flashpoint metrics`, asked as Prometheus asks."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ml_flashpoint import Flashpoint
from tests.flashpoint.test_overlap import Job
from tests.support.processes import child_environment

pytestmark = pytest.mark.slow


def _start(base: Path, *options: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "ml_flashpoint.cli.main", "metrics", str(base), *options]
    return subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env=child_environment())


def _ask(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url, timeout=30) as answer:
        text = answer.read().decode()
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


@pytest.fixture
def job(tmpfs: Path) -> Iterator[Flashpoint]:
    job = Job()
    with Flashpoint(tmpfs / "job") as fp:
        fp.track(**job.tracked).resume()
        yield fp


def test_what_a_scrape_gives(tmpfs: Path, job: Flashpoint) -> None:
    exporter = _start(tmpfs / "job", "--port", "0")
    try:
        assert exporter.stderr is not None
        found = re.search(r"http://127\.0\.0\.1:\d+/metrics", exporter.stderr.readline())
        assert found is not None
        url = found[0]
        assert _ask(url)["flashpoint_up"] == 1.0
        for _ in range(3):
            job.step()
            assert job.wait()
        part_bytes = job.health.bytes
        job.close()
        told = _ask(url)
        assert told["flashpoint_up"] == 0.0
        assert told["flashpoint_verified_step"] == told["flashpoint_committed_step"] == 3.0
        assert told["flashpoint_saves_total"] == 3.0
        assert told["flashpoint_save_failures_total"] == told["flashpoint_degraded"] == 0.0
        assert told["flashpoint_part_bytes"] == part_bytes
        assert told["flashpoint_verified_timestamp_seconds"] > 1.7e9
        assert {"flashpoint_replicated_step", "flashpoint_copies_lag_steps", "flashpoint_persist_lag_steps"}.isdisjoint(
            told
        )
        assert told["flashpoint_slot_bytes"] >= 2 * part_bytes
        assert told["flashpoint_available_bytes"] > 0
        shutil.rmtree(tmpfs / "job")
        assert {"flashpoint_up", "flashpoint_slot_bytes"}.isdisjoint(_ask(url))
        exporter.send_signal(signal.SIGTERM)
        assert exporter.wait(30) == 0
    finally:
        exporter.kill()
        exporter.wait()


def test_where_it_cannot_begin(tmpfs: Path, job: Flashpoint) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        exporter = _start(tmpfs / "job", "--port", str(taken.getsockname()[1]))
        _, text = exporter.communicate(timeout=60)
    assert exporter.returncode == 2
    assert "cannot listen there" in text
    exporter = _start(tmpfs / "nothing")
    _, text = exporter.communicate(timeout=60)
    assert exporter.returncode == 2
    assert "cannot be read" in text
