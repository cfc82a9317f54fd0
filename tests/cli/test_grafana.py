"""The dashboard in docs/: it asks for what `flashpoint metrics` exports, for all of it, and has the form of one."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest

from ml_flashpoint.cli import metrics
from ml_flashpoint.cli.metrics import NodeCollector
from ml_flashpoint.cli.view import RankView
from ml_flashpoint.status import Status
from tests.support.processes import REPOSITORY

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


def test_variables_are_defined(dashboard: dict[str, Any]) -> None:
    names = {each["name"] for each in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard["panels"]) + json.dumps(_queries(dashboard))))
    assert used - {"__rate_interval"} == names
    for panel in dashboard["panels"]:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])


def test_panels_have_places_of_their_own(dashboard: dict[str, Any]) -> None:
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    cells: list[tuple[int, int]] = []
    for panel in panels:
        at = panel["gridPos"]
        assert 0 <= at["x"] < at["x"] + at["w"] <= _WIDTH
        cells += itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"]))
        assert panel["type"] in {"stat", "timeseries"}
        refs = [target["refId"] for target in panel["targets"]]
        assert refs == sorted(set(refs))
        for target in panel["targets"]:
            assert target["expr"].count("(") == target["expr"].count(")")
            labels = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
            assert set(labels) <= {"rank", "node"}
    assert len(cells) == len(set(cells)), "no two overlap"
    assert isinstance(dashboard["schemaVersion"], int)
    assert dashboard["id"] is None, "or Grafana would replace another one"


def test_the_page_lists_all_metrics(exported: dict[str, set[str]]) -> None:
    page = (REPOSITORY / "docs/operations.md").read_text(encoding="utf-8")
    assert not [name for name in exported if f"`{name}`" not in page]
