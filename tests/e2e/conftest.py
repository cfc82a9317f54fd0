"""Runs of cases that the tests of a file share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.cases import CaseRuns


@pytest.fixture(scope="module")
def case_runs() -> Iterator[CaseRuns]:
    made = CaseRuns()
    yield made
    made.close()
