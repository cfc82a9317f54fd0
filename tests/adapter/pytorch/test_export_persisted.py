"""Exports of persisted versions: the version, bit for bit, to programs that know nothing of this package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from ml_flashpoint.format.errors import DigestMismatchError, LoadError, ObjectNotFoundError
from ml_flashpoint.format.names import object_name
from ml_flashpoint.stores.location import open_store
from ml_flashpoint.tools.copy import persist_version
from ml_flashpoint.tools.export import export_version
from tests.support.commands import flashpoint
from tests.support.forked import call_team
from tests.support.processes import child_environment
from tests.support.sharded import full_state
from tests.support.tensors import assert_same
from tests.workers import exporting

pytestmark = pytest.mark.slow

FORMATS = ("dcp", "safetensors", "torch")


@pytest.fixture(params=["path", "memory"])
def url(request: pytest.FixtureRequest, tmpfs: Path) -> Iterator[str]:
    """Steps 1 and 2 of four ranks on two nodes, persisted."""
    call_team(exporting.save, tmpfs, 4, 4, [1, 2], "pairwise", placement=(0, 0, 1, 1))
    where = str(tmpfs / "store") if request.param == "path" else f"memory://{tmpfs.name}"
    persist_version(tmpfs / "node-0" / "job", where)
    yield where
    if request.param == "memory":
        fsspec.filesystem("memory").rm(where, recursive=True)


def test_it_is_the_version_in_memory(url: str, tmpfs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert flashpoint("diff", url, tmpfs / "node-1" / "job") == 0
    assert capsys.readouterr().out.startswith("the same: ")
    assert flashpoint("inspect", f"{url}@2", "--prefix", "sharded.rows", "--json") == 0
    (item,) = json.loads(capsys.readouterr().out)["items"]
    assert item["ranks"] == [0, 1, 2, 3]


def test_which_version_is_exported(tmpfs: Path, tmp_path: Path) -> None:
    call_team(exporting.save, tmpfs, 2, 2, [1], "none", placement=(0, 0))
    base, store = tmpfs / "node-0" / "job", tmpfs / "store"
    persist_version(base, store)
    for wrong, error in (
        ((store, 7), "no complete version of step 7"),
        ((f"file://{tmpfs}/nothing", None), "no complete version"),
    ):
        with pytest.raises(ObjectNotFoundError, match=error):
            export_version(wrong[0], tmp_path / "out", wrong[1])
    assert export_version(store, tmp_path / "out", 1).step == 1
    assert export_version([base, store], tmp_path / "of both", 1).step == 1


@pytest.mark.damages_on_purpose
@pytest.mark.parametrize("how", ["content", "gone"])
def test_nothing_is_left_of_what_is_damaged(tmpfs: Path, tmp_path: Path, how: str) -> None:
    call_team(exporting.save, tmpfs, 2, 2, [1], "none", placement=(0, 0))
    base, store = tmpfs / "node-0" / "job", tmpfs / "store"
    persist_version(base, store)
    [version] = open_store(store).versions()
    path = store / version.folder / object_name(1, version.save_id)
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(bytes(byte ^ (at % 4096 == 0) for at, byte in enumerate(path.read_bytes())))
    with pytest.raises((DigestMismatchError, ObjectNotFoundError)):
        export_version(store, tmp_path / "out")
    assert not os.listdir(tmp_path)
    made = export_version([store, base], tmp_path / "out", format="torch")
    assert_same(torch.load(made.path, weights_only=True), full_state(1))  # what one lacks, the other gives


@pytest.mark.timeout(300)
def test_memory_stays_bounded(tmpfs: Path, tmp_path: Path) -> None:
    """A version of 192 MiB is exported from either tier by a process that may have 96 MiB more than
    before: whatever it asks for beyond that, be it used or not, is refused by the kernel."""
    call_team(exporting.save_large, tmpfs, 2, 2, 12, 16 << 20, placement=(0, 0))
    base, store = tmpfs / "node-0" / "job", tmp_path / "store"
    persist_version(base, store)
    # Or malloc would keep what is free, and nobody could tell it from what is in use.
    environment = child_environment(MALLOC_MMAP_THRESHOLD_="131072", MALLOC_ARENA_MAX="1", OMP_NUM_THREADS="1")
    argv = [sys.executable, "-c", _BOUNDED, str(tmp_path), str(base), str(store)]
    done = subprocess.run(argv, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["refused", *(f"{tier}-{each}" for tier in ("base", "store") for each in ALL)]


ALL = (*FORMATS, "hf")
_BOUNDED = """
import contextlib, resource, sys, threading
from ml_flashpoint.tools import export
folder, *sources = sys.argv[1:]
export._DCP_FILE_BYTES = 16 << 20
threading.stack_size(1 << 18)  # stacks count, too

@contextlib.contextmanager
def bounded():
    now = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData"))
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (now + (96 << 20), most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))

try:
    with bounded():
        bytearray(100 << 20)
except MemoryError:
    print("refused")
for tier, source in zip(("base", "store"), sources):
    for format in ("dcp", "safetensors", "torch", "hf"):
        prefix = "t" if format == "hf" else ""
        with bounded():
            export.export_version(source, f"{folder}/{format}-{tier}", format=format, prefix=prefix)
        print(f"{tier}-{format}", flush=True)
"""


def test_what_has_no_dcp_metadata_is_refused(tmpfs: Path, tmp_path: Path) -> None:
    from ml_flashpoint.local import BasicTensorAwareStateDict, LocalCheckpointManager

    manager: Any = LocalCheckpointManager(tmpfs, "local")
    manager.save(BasicTensorAwareStateDict({"a": torch.ones(3)}), 1)
    manager.close()
    persist_version(manager.local_ckpt_dir, tmpfs / "store")
    with pytest.raises(LoadError, match="was not saved through DCP"):
        export_version(tmpfs / "store", tmp_path / "out")
