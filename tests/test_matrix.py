"""`make matrix`: what it finds, counts and writes, without the environments that take it minutes each."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support import matrix
from tests.support.matrix import Result, SkippedError, counted, find_python, read_results, table, written

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="good"/><testcase classname="tests.a" name="bad"><failure>no</failure></testcase>
<testcase classname="tests.b" name="worse"><error>no</error></testcase>
<testcase classname="tests.b" name="none"><skipped/></testcase></testsuite></testsuites>"""


def test_outcomes_are_counted() -> None:
    found = counted(Result("3.12", "2.6"), "Python 3.12.1, torch 2.6.0", REPORT)
    assert (found.passed, found.failed, found.skipped) == (1, 2, 1)
    assert found.failures == ("tests.a::bad", "tests.b::worse")
    assert found.cell == "2 of 3 failed"
    assert Result("3.12", "2.6", tests="tests/core", passed=4).cell == "4 passed, some tests"


def test_the_table_says_what_was_not_run_and_why() -> None:
    text = table([Result("3.12", "2.6", passed=5, day="2026-01-01"), Result("3.13", "2.6", why="no torch")])
    assert "| 2.6 | not run | not run | 5 passed | skipped |" in text
    assert text.count("not run") == len(matrix.TORCHES) * len(matrix.PYTHONS) - 2
    assert "* Python 3.13, torch 2.6 (): skipped, no torch" in text


def test_the_page_is_what_its_results_say() -> None:
    page = matrix.PAGE.read_text(encoding="utf-8")
    assert written(page, read_results(matrix.RESULTS).values()) == page
    assert written(written(page, []), read_results(matrix.RESULTS).values()) == page


def test_an_interpreter_is_one_of_that_release() -> None:
    assert find_python(f"{sys.version_info[0]}.{sys.version_info[1]}") == sys.executable
    with pytest.raises(SkippedError, match=r"no Python 3\.99"):
        find_python("3.99")


def test_what_cannot_be_had_is_skipped_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "FOLDER", tmp_path)
    assert matrix.run_pair("3.99", "2.6", ["tests/core"]).why == "no Python 3.99 on this machine"
    pip = "import sys; sys.exit('trying\\nERROR: No matching distribution found for torch==2.6.*\\nsee elsewhere')"
    with pytest.raises(SkippedError, match=r"^installing: ERROR: No matching distribution found for torch==2\.6\.\*$"):
        matrix.run([sys.executable, "-c", pip], "installing", 60)
    with pytest.raises(SkippedError, match=r"not within 0 s"):
        matrix.run([sys.executable, "-c", "import time; time.sleep(60)"], "waiting", 0.1)


def test_the_pythons_are_those_that_are_supported() -> None:
    project = (matrix.REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    assert f'requires-python = ">={matrix.PYTHONS[0]}"' in project
    assert f'"torch>={matrix.TORCHES[0]}"' in project
    pinned = re.search(r"^TORCH \?= torch==(\d+\.\d+)", (matrix.REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert pinned is not None
    assert pinned[1] == matrix.TORCHES[-1]
