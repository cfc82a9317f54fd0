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

from ml_flashpoint.adapter.pytorch.export import export_version
from ml_flashpoint.cli.inspect import diff
from ml_flashpoint.cli.inspect import inspect as inspect_command
from ml_flashpoint.core.persist_version import persist_version
from ml_flashpoint.format.errors import DigestMismatchError, InvalidArgumentError, LoadError, ObjectNotFoundError
from ml_flashpoint.persist.directory_store import DirectoryStore
from ml_flashpoint.persist.versions import list_persisted
from tests.support.forked import call_team
from tests.support.processes import child_environment
from tests.support.sharded import full_state
from tests.workers import exporting

pytestmark = pytest.mark.slow

FORMATS = ("dcp", "safetensors", "torch")
_READ = """
import sys
import torch, torch.distributed.checkpoint as dcp, safetensors.torch
expected = torch.load(sys.argv[1], weights_only=True)
again = {"sharded": {name: torch.zeros_like(t) for name, t in expected.items()}}
dcp.load(again, checkpoint_id=sys.argv[2] + "/dcp")
files = safetensors.torch.load_file(sys.argv[2] + "/safetensors/model.safetensors")
whole = torch.load(sys.argv[2] + "/torch", weights_only=True)
for name, tensor in expected.items():
    for found in (again["sharded"][name], files["sharded." + name], whole["sharded"][name]):
        assert found.dtype == tensor.dtype and found.shape == tensor.shape, name
        assert torch.equal(found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
assert not any(name.startswith("ml_flashpoint") for name in sys.modules)
print(len(expected))
"""


@pytest.fixture(params=["path", "memory"])
def url(request: pytest.FixtureRequest, tmpfs: Path) -> Iterator[str]:
    """Steps 1 and 2 of four ranks on two nodes, persisted."""
    call_team(exporting.save, tmpfs, 4, 4, [1, 2], "pairwise", placement=(0, 0, 1, 1))
    where = str(tmpfs / "store") if request.param == "path" else f"memory://{tmpfs.name}"
    persist_version(tmpfs / "node-0" / "job", where)
    yield where
    if request.param == "memory":
        fsspec.filesystem("memory").rm(where, recursive=True)


def test_other_programs_read_what_was_persisted(url: str, tmp_path: Path) -> None:
    for format in FORMATS:
        made = export_version(url, tmp_path / "out" / format, format=format)
        assert made.step == 2
    torch.save(full_state(2)["sharded"], tmp_path / "expected")
    argv = [sys.executable, "-c", _READ, str(tmp_path / "expected"), str(tmp_path / "out")]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(full_state(2)["sharded"])
    assert sorted(os.listdir(tmp_path / "out")) == sorted(FORMATS)


def test_it_is_the_version_in_memory(url: str, tmpfs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert diff(url, str(tmpfs / "node-1" / "job"), prefix="") == 0
    assert capsys.readouterr().out.startswith("the same: ")
    assert inspect_command(f"{url}@2", prefix="sharded.rows", as_json=True) == 0
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
    with pytest.raises(InvalidArgumentError, match="come alone"):
        export_version([base, store], tmp_path / "out")
    assert export_version(store, tmp_path / "out", 1).step == 1


@pytest.mark.damages_on_purpose
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("how", ["content", "gone"])
def test_nothing_is_left_of_what_is_damaged(tmpfs: Path, tmp_path: Path, format: str, how: str) -> None:
    call_team(exporting.save, tmpfs, 2, 2, [1], "none", placement=(0, 0))
    store = tmpfs / "store"
    persist_version(tmpfs / "node-0" / "job", store)
    [version], _ = list_persisted(DirectoryStore(store))
    path = store / version.folder / version.parts[1].files[0]
    if how == "gone":
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        data[-3000] ^= 1  # before the reserved end of the file
        for at in range(4096, len(data), 4096):
            data[at] ^= 1
        path.write_bytes(data)
    with pytest.raises((DigestMismatchError, ObjectNotFoundError)):
        export_version(store, tmp_path / "out", format=format)
    assert not os.listdir(tmp_path)


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
import contextlib, pathlib, resource, sys, threading
from ml_flashpoint.adapter.pytorch import export
folder, *sources = sys.argv[1:]
# What is mapped so that nobody else sees changes counts, though nothing is changed and it takes no memory.
mapped = sum(each.stat().st_size for each in pathlib.Path(sources[0]).glob("step-*/*.safetensors"))
export._DCP_FILE_BYTES = 16 << 20
threading.stack_size(1 << 18)  # stacks count, too

@contextlib.contextmanager
def bounded(mapped):
    now = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData"))
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (now + mapped + (96 << 20), most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))

try:
    with bounded(0):
        bytearray(100 << 20)
except MemoryError:
    print("refused")
for tier, source in zip(("base", "store"), sources):
    for format in ("dcp", "safetensors", "torch", "hf"):
        prefix = "t" if format == "hf" else ""
        with bounded(mapped if tier == "base" else 0):
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
