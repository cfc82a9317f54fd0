"""`flashpoint metrics`, asked as Prometheus asks, and the dashboard for it."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ml_flashpoint import Flashpoint
from ml_flashpoint.cli import metrics
from ml_flashpoint.cli.metrics import NodeCollector
from ml_flashpoint.cli.view import RankView
from ml_flashpoint.status import Status
from tests.flashpoint.test_overlap import Job
from tests.support.processes import REPOSITORY, child_environment


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


@pytest.mark.slow
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


# ---- the dashboard in docs/: it asks for what is exported, for all of it, and has the form of one -------------------


_OF_PROMETHEUS = {"job", "instance"}  # labels that it adds itself
_WIDTH = 24


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    text = (REPOSITORY / "docs/grafana-dashboard.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """Labels of all metrics, of a rank that has everything to tell."""
    told = Status(
        rank=0, node="n", committed=1, replicated=1, verified=1, verified_s=1.0, persisted=1, resumed=1, copied_in_s=1.0
    )  # fmt: skip
    monkeypatch.setattr(metrics, "read_ranks", lambda base: [RankView(0, "n", 1, told)])
    samples = [sample for family in NodeCollector("/base").collect() for sample in family.samples]
    return {sample.name: set(sample.labels) for sample in samples}


def _queries(dashboard: dict[str, Any]) -> list[str]:
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return asked + [each["definition"] for each in dashboard["templating"]["list"] if each["type"] == "query"]


def test_it_asks_for_what_is_exported_and_for_all_of_it(
    dashboard: dict[str, Any], exported: dict[str, set[str]]
) -> None:
    asked = {name for query in _queries(dashboard) for name in re.findall(r"\bflashpoint_\w+", query)}
    assert asked == set(exported)


def test_metrics_have_the_labels_that_it_asks_for(dashboard: dict[str, Any], exported: dict[str, set[str]]) -> None:
    for query in _queries(dashboard):
        selected = re.findall(r"(flashpoint_\w+)\{([^}]*)\}", query)
        for name, selectors in selected:
            assert set(re.findall(r"(\w+)\s*[=!]", selectors)) <= exported[name] | _OF_PROMETHEUS, query
        grouped = {label.strip() for labels in re.findall(r"by \(([^)]*)\)", query) for label in labels.split(",")}
        assert all(grouped <= exported[name] | _OF_PROMETHEUS for name, _ in selected), query


def test_it_has_the_form_of_a_dashboard(dashboard: dict[str, Any]) -> None:
    panels = dashboard["panels"]
    names = {each["name"] for each in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(panels) + json.dumps(_queries(dashboard))))
    assert used - {"__rate_interval"} == names
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    cells: list[tuple[int, int]] = []
    for panel in panels:
        at = panel["gridPos"]
        assert 0 <= at["x"] < at["x"] + at["w"] <= _WIDTH
        cells += itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"]))
        assert panel["type"] in {"stat", "timeseries"}
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        refs = [target["refId"] for target in panel["targets"]]
        assert refs == sorted(set(refs))
        for target in panel["targets"]:
            assert target["datasource"] == panel["datasource"]
            assert target["expr"].count("(") == target["expr"].count(")")
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= {"rank", "node"}
    assert len(cells) == len(set(cells)), "no two overlap"
    assert dashboard["id"] is None, "or Grafana would replace another one"


def test_the_page_lists_all_metrics(exported: dict[str, set[str]]) -> None:
    page = (REPOSITORY / "docs/operations.md").read_text(encoding="utf-8")
    assert not [name for name in exported if f"`{name}`" not in page]
