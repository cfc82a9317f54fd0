"""`make matrix`: the quick tests over releases of Python and torch, each pair in an environment of its own.

Owns the environments in build/matrix, which stay for the next time, and the table in docs/compatibility.md. A pair that
cannot be had is skipped, with the reason. What is tested is the wheel, built from this tree, with nothing but torch and
what the tests themselves need: tests of doors to other packages skip themselves. Needs no more than this Python::

    python -m tests.support.matrix --python 3.12 --torch 2.6 tests/engine tests/adapter/pytorch
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "build" / "matrix"
PAGE = REPOSITORY / "docs" / "compatibility.md"
RESULTS = REPOSITORY / "docs" / "compatibility.json"

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TORCHES = ("2.6", "2.7", "2.8", "2.9", "2.10", "2.11", "2.12", "2.13")
QUICK = "not slow and not e2e and not cuda and not soak"

_FOR_TESTS = (
    "setuptools>=77", "cloudpickle", "fsspec", "hypothesis>=6.100",
    "prometheus-client>=0.20", "pytest>=8.4", "pytest-timeout>=2.3", "pytest-xdist>=3.7",
)  # fmt: skip
_INSTALL_S = 3600.0
_TEST_S = 3600.0
_BEGIN, _END = "<!-- matrix -->", "<!-- /matrix -->"
_MOST_FAILED = 20


@dataclass(frozen=True)
class Result:
    """What came of a pair. Errors count as failed; ``failures`` are the first few; ``why`` says why nothing was run."""

    python: str
    torch: str
    releases: str = ""
    tests: str = "all"
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    failures: tuple[str, ...] = ()
    why: str | None = None
    day: str = ""

    @property
    def cell(self) -> str:
        """In the table."""
        if self.why is not None:
            return "skipped"
        found = f"{self.failed} of {self.passed + self.failed} failed" if self.failed else f"{self.passed} passed"
        return found if self.tests == "all" else f"{found}, some tests"


class SkippedError(Exception):
    """A pair cannot be had here; says why."""


def find_python(version: str) -> str:
    """An interpreter of a release: this one, one on the PATH, or one that pyenv has. Raises if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = [sys.executable, shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python"))]
    for candidate in filter(None, found):
        script = "import sys; print('%d.%d' % sys.version_info[:2])"
        done = subprocess.run([candidate, "-c", script], capture_output=True, text=True, timeout=60)
        if done.returncode == 0 and done.stdout.strip() == version:  # what pyenv puts on the PATH may refuse
            return str(candidate)
    raise SkippedError(f"no Python {version} on this machine")


def run(argv: Sequence[object], what: str, deadline_s: float) -> str:
    """What a command prints. Raises if it fails, with the line that says most."""
    words = [str(each) for each in argv]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=deadline_s, cwd=FOLDER, env=_clean())
    except subprocess.TimeoutExpired:
        raise SkippedError(f"{what}: not within {deadline_s:.0f} s") from None
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")]
        raise SkippedError(f"{what}: {(errors or lines or ['it failed'])[-1].strip()[:300]}")
    return done.stdout


def _clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "FLASHPOINT"))}


def build_wheel(python: str) -> Path:
    """The wheel of this tree, built in a copy: what is left in build/ from earlier times does not get into it."""
    tree, wheels = FOLDER / "tree", FOLDER / "wheel"
    for folder in (tree, wheels):
        shutil.rmtree(folder, ignore_errors=True)
    ignored = shutil.ignore_patterns("*.egg-info", "__pycache__")
    shutil.copytree(REPOSITORY / "src", tree / "src", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, tree / name)
    pip = (python, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels)
    run([*pip, tree], "building the wheel", _INSTALL_S)
    (wheel,) = wheels.glob("*.whl")
    return wheel


def environment(python: str, torch: str) -> str:
    """The interpreter of the environment of a pair, which is made if it is not there, or not complete."""
    base = find_python(python)
    folder = FOLDER / f"py{python}-torch{torch}"
    inside, stamp = folder / "bin" / "python", folder / ".complete"
    if not stamp.exists():
        shutil.rmtree(folder, ignore_errors=True)
        run([base, "-m", "venv", folder], "making the environment", 300.0)
        pip = (inside, "-m", "pip", "install", "-q")
        try:
            run([*pip, f"torch=={torch}.*"], f"installing torch {torch}", _INSTALL_S)
            run([*pip, *_FOR_TESTS], "installing what tests need", _INSTALL_S)
        except SkippedError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        stamp.touch()
    return str(inside)


def run_pair(python: str, torch: str, paths: Sequence[str], options: Sequence[str] = ()) -> Result:
    """Test a pair: install the wheel, run the quick tests, count."""
    result = Result(python, torch, tests=" ".join(paths) or "all", day=time.strftime("%Y-%m-%d"))
    try:
        inside = environment(python, torch)
        wheel = build_wheel(inside)
        pip = (inside, "-m", "pip", "install", "-q")
        run([*pip, wheel], "installing what it needs", _INSTALL_S)
        run([*pip, "--force-reinstall", "--no-deps", wheel], "installing the wheel", _INSTALL_S)
        script = "import sys, torch; print(sys.version.split()[0], torch.__version__)"
        releases = "Python {}, torch {}".format(*run([inside, "-c", script], "importing torch", 300.0).split())
        report = FOLDER / f"py{python}-torch{torch}.xml"
        report.unlink(missing_ok=True)
        argv = [inside, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", "-m", QUICK]
        subprocess.run([*argv, *options, *(paths or ["tests"])], cwd=REPOSITORY, env=_clean(), timeout=_TEST_S)
        if not report.exists():
            raise SkippedError("pytest ended without a report")
        return counted(result, releases, report.read_text(encoding="utf-8"))
    except SkippedError as error:
        return replace(result, why=str(error))
    except subprocess.TimeoutExpired:
        return replace(result, why=f"the tests did not end within {_TEST_S:.0f} s")


def counted(result: Result, releases: str, report: str) -> Result:
    """A result with what pytest's report says."""
    passed, skipped, failures = 0, 0, []
    for case in ElementTree.fromstring(report).iter("testcase"):
        outcomes = {child.tag for child in case}
        if outcomes & {"failure", "error"}:
            failures.append(f"{case.get('classname')}::{case.get('name')}")
        elif "skipped" in outcomes:
            skipped += 1
        else:
            passed += 1
    first = tuple(failures[:_MOST_FAILED])
    return replace(result, releases=releases, passed=passed, failed=len(failures), skipped=skipped, failures=first)


def table(results: Iterable[Result]) -> str:
    """The table of the page, and below it what failed or was skipped."""
    found = {(each.python, each.torch): each for each in results}
    rows = [f"| torch | {' | '.join(f'Python {each}' for each in PYTHONS)} |", "|---" * (1 + len(PYTHONS)) + "|"]
    for torch in reversed(TORCHES):
        cells = [found[pair].cell if (pair := (python, torch)) in found else "not run" for python in PYTHONS]
        rows.append(f"| {torch} | {' | '.join(cells)} |")
    notes = []
    for each in sorted(found.values(), key=lambda each: (each.torch, each.python)):
        about = f"* Python {each.python}, torch {each.torch} ({each.day})"
        if each.why is not None:
            notes.append(f"{about}: skipped, {each.why}")
            continue
        shown = f", of `{each.tests}`" if each.tests != "all" else ""
        failed = f"; failed: {', '.join(f'`{name}`' for name in each.failures)}" if each.failures else ""
        notes.append(f"{about}: {each.releases}{shown}: {each.passed} passed, {each.skipped} skipped{failed}")
    return "\n".join([*rows, "", *notes])


def written(page: str, results: Iterable[Result]) -> str:
    """A page with the table between its marks."""
    pattern = re.compile(f"{re.escape(_BEGIN)}.*?{re.escape(_END)}", re.DOTALL)
    made = f"{_BEGIN}\n{table(results)}\n{_END}"
    assert len(pattern.findall(page)) == 1, f"the page has no {_BEGIN}"
    return pattern.sub(lambda _: made, page)


def read_results(path: Path) -> dict[tuple[str, str], Result]:
    """What earlier runs found, by pair."""
    if not path.exists():
        return {}
    told: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    results = [Result(**{**each, "failures": tuple(each["failures"])}) for each in told]
    return {(each.python, each.torch): each for each in results}


def main(argv: Sequence[str] | None = None) -> int:
    """Run some of the matrix, or all of it; 1 if a test failed."""
    parser = argparse.ArgumentParser(prog="make matrix", description="The quick tests over Python and torch.")
    parser.add_argument("--python", action="append", choices=PYTHONS, help="may be repeated; by default all")
    parser.add_argument("--torch", action="append", choices=TORCHES, help="may be repeated; by default all")
    parser.add_argument("--pytest", action="append", default=[], metavar="OPTION", help="such as --pytest=-n3")
    parser.add_argument("--find", choices=PYTHONS, help="only print the interpreter of a release, if there is one")
    parser.add_argument("paths", nargs="*", help="of tests; by default all quick ones")
    given = parser.parse_args(argv)
    if given.find:
        try:
            print(find_python(given.find))
        except SkippedError as error:
            print(error, file=sys.stderr)
            return 1
        return 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    failed = False
    for torch in given.torch or TORCHES:
        for python in given.python or PYTHONS:
            result = run_pair(python, torch, given.paths, given.pytest)
            print(f"Python {python}, torch {torch}: {result.why or result.cell}", flush=True)
            failed = failed or result.failed > 0
            results = {**read_results(RESULTS), (python, torch): result}  # after each: the whole takes hours
            told = [asdict(each) for _, each in sorted(results.items())]
            RESULTS.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
            PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), results.values()), encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
