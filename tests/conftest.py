"""Fixtures and rules of all tests."""

from __future__ import annotations

import os

# Before torch is imported: runs that are compared bit for bit must add up in the same order in every process.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
# Every state of a test has many digest blocks, with boundaries in the middle of tensors, in every process it starts.
# A test about real blocks removes the variable.
os.environ["FLASHPOINT_TEST_BLOCK_BYTES"] = "4096"

import contextlib
import functools
import signal
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support import own_network
from tests.support import tmpfs as tmpfs_folders
from tests.support.part_checker import PartChecker

# No deadline an example: a busy machine is not a bug, and the timeout of the whole test stays.
settings.register_profile("repository", deadline=None, print_blob=True)
settings.load_profile("repository")


def pytest_configure(config: pytest.Config) -> None:
    """Gives each worker of pytest-xdist a network of its own, if that can be done, and asks for CUDA devices before
    tests are imported, some of which play one. The controller, which runs no tests, needs no torch for that."""
    is_worker = hasattr(config, "workerinput")
    if is_worker or config.getoption("dist", "no") == "no":
        _has_cuda()
    if is_worker:
        own_network.enter()


tmpfs_folders.have_temporary_files_of_ones_own()


@pytest.fixture(scope="session", autouse=True)
def _leftovers_are_swept() -> Iterator[None]:
    """Removes what killed runs have left in /dev/shm, before and after."""
    tmpfs_folders.sweep()
    yield
    tmpfs_folders.sweep()


@pytest.fixture(autouse=True)
def _sigterm_is_left_as_it_was() -> Iterator[None]:
    """Fails if a test leaves a handler of ours behind, which ends the process: so would a later test that sends one.

    Every test finds the default action, whatever ran before it: `ray.init` leaves a handler that exits. So it does of
    SIGINT, which shells have their background jobs ignore.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before = signal.getsignal(signal.SIGTERM)
    yield
    after = signal.getsignal(signal.SIGTERM)
    if after != before and getattr(after, "__module__", "").startswith("ml_flashpoint"):
        signal.signal(signal.SIGTERM, before)
        pytest.fail(f"the test left {after} as the handler of SIGTERM, which was {before}")


_part_checker = PartChecker()


def _verify(folder: Path, request: pytest.FixtureRequest) -> None:
    """Fails if a part below a folder is not what was committed, unless the test has damaged parts on purpose."""
    if request.node.get_closest_marker("damages_on_purpose") is not None:
        return
    any_bytes = request.node.get_closest_marker("stores_any_bytes") is not None
    if problems := _part_checker.problems(folder, any_bytes=any_bytes):
        pytest.fail("the test leaves damaged parts:\n" + "\n".join(problems), pytrace=False)


@pytest.fixture
def tmpfs(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A fresh folder in memory, removed whatever happens; on disk, with a warning, if there is no tmpfs.

    Afterwards every digest of every part in it is recomputed; see `_verify`.
    """
    if not tmpfs_folders.has_tmpfs():
        warnings.warn(f"{tmpfs_folders.SHM} is not a writable tmpfs: testing on disk", stacklevel=1)
        yield tmp_path
        _verify(tmp_path, request)
        return
    folder = tmpfs_folders.make_folder()
    try:
        yield folder
        _verify(folder, request)
    finally:
        tmpfs_folders.remove_folder(folder)


@pytest.fixture
def small_tmpfs(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A tmpfs of 4 MiB of our own."""
    folder = tmp_path / "small"
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(tmpfs_folders.mounted(folder))
        except OSError as error:
            pytest.skip(f"cannot mount a small tmpfs here, which takes root: {error}")
        yield folder
        _verify(folder, request)


@functools.cache
def _has_cuda() -> bool:
    import torch

    return torch.cuda.device_count() > 0  # which, unlike is_available(), does not initialise CUDA


def _can_make_netns() -> bool:
    try:
        probe = subprocess.run(["unshare", "--net", "ip", "link"], capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return probe.returncode == 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what lies in tests/e2e, skips what this machine cannot do, and puts files with slow tests first, the
    slowest before all, so that no worker has a long one left when the others are done."""
    end_to_end = config.rootpath / "tests" / "e2e"
    for item in items:
        if item.path.is_relative_to(end_to_end):
            item.add_marker("e2e")
    needs = {
        "cuda": (_has_cuda, "needs a CUDA device"),
        "netns": (_can_make_netns, "needs root and the `ip` and `unshare` tools, for network namespaces"),
    }
    for marker, (is_met, reason) in needs.items():
        marked = [item for item in items if item.get_closest_marker(marker)]
        if marked and not is_met():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))
    seconds: dict[Path, int] = {}
    for item in items:
        for mark in item.iter_markers("slow"):
            seconds[item.path] = max([seconds.get(item.path, 1), *mark.args])
    items.sort(key=lambda item: -seconds.get(item.path, 0))
