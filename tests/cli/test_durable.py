"""What `flashpoint ls` and `flashpoint verify` say of persisted versions."""

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

from ml_flashpoint.cli import listing
from ml_flashpoint.format.digest import digest_block
from ml_flashpoint.format.manifest import Manifest, ObjectRecord
from ml_flashpoint.format.names import SaveId, object_name
from ml_flashpoint.stores.durable import MARKER, DurableVersions
from ml_flashpoint.stores.location import open_durable
from tests.support.commands import flashpoint

RUN = "00000007"
BLOCK = 1000
CONTENT = bytes(range(256)) * 20
pytestmark = pytest.mark.damages_on_purpose


def write_parts(store: DurableVersions, step: int, world_size: int = 2, *, only: int | None = None) -> None:
    for rank in range(world_size if only is None else only):
        digests = tuple(digest_block(CONTENT[at : at + BLOCK]) for at in range(0, len(CONTENT), BLOCK))
        record = ObjectRecord(len(CONTENT), len(CONTENT) + 8, digests, BLOCK)
        manifest = Manifest(SaveId(int(RUN), step), rank, world_size, "node", record)
        store.write_part(manifest, lambda: [CONTENT, bytes(8)])


def persist(store: DurableVersions, step: int) -> None:
    write_parts(store, step)
    store.complete(SaveId(int(RUN), step), 2)


def path_of(root: Path, step: int, rank: int, suffix: str = "safetensors") -> Path:
    return root / f"run-{RUN}" / f"step-{step}_ckpt" / f"rank-{rank:05d}-{RUN}.{suffix}"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture(params=["path", "file", "memory"])
def url(request: pytest.FixtureRequest, root: Path) -> Iterator[str]:
    where = {"path": str(root), "file": f"file://{root}", "memory": f"memory://{root.parent.name}"}[request.param]
    store = open_durable(f"file://{root}" if request.param == "path" else where)
    for step in (3, 7):
        persist(store, step)
    write_parts(store, 9, only=1)
    yield where
    if request.param == "memory":
        fsspec.filesystem("memory").rm(where, recursive=True)


@pytest.fixture
def store(root: Path) -> DurableVersions:
    made = open_durable(f"file://{root}")
    persist(made, 3)
    persist(made, 7)
    return made


def told(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def states(found: Any) -> list[tuple[int, str]]:
    return [(each["step"], each["state"]) for each in found["versions"]]


def test_versions_are_listed_and_verified_newest_first(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert flashpoint("ls", url, "--json") == 0
    found = told(capsys)
    assert found["ok"]
    assert states(found) == [(9, "incomplete"), (7, "complete"), (3, "complete")]
    first = found["versions"][1]
    assert (first["own_ranks"], first["world_size"], first["bytes"]) == ([0, 1], 2, 2 * len(CONTENT))
    assert flashpoint("verify", url, "--json") == 0
    assert states(told(capsys)) == [(9, "incomplete"), (7, "complete"), (3, "complete")]
    assert flashpoint("verify", f"{url}@3", "--json") == 0
    assert states(told(capsys)) == [(3, "complete")]
    assert flashpoint("verify", f"{url}@4") == 2
    assert "no version of step 4" in capsys.readouterr().err


@pytest.mark.parametrize("offset", [0, BLOCK, len(CONTENT) - 1])
def test_verify_names_the_file_and_block_of_a_flipped_bit(
    root: Path, store: DurableVersions, offset: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path = path_of(root, 7, 1)
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    assert flashpoint("ls", root) == 0  # bytes are not read
    capsys.readouterr()
    assert flashpoint("verify", root) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:3]] == [["damaged", "step-7_ckpt"], ["ok", "step-3_ckpt"]]
    assert lines[3].startswith(f"damaged {path}: block {offset // BLOCK}, from byte {offset // BLOCK * BLOCK} on, ")
    assert lines[4].endswith("1 of 4 parts are damaged")


@pytest.mark.parametrize("how", ["gone", "short", "manifest", "link", "fifo", "marker"])
def test_what_is_not_what_was_written_is_found_and_named(
    root: Path, store: DurableVersions, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = path_of(root, 7, 0)
    if how == "short":
        os.truncate(path, 17)
    elif how == "manifest":
        path_of(root, 7, 0, "manifest").write_bytes(path_of(root, 3, 0, "manifest").read_bytes())
    elif how == "marker":
        (path.parent / MARKER).write_bytes((path_of(root, 3, 0).parent / MARKER).read_bytes())
    else:
        path.rename(root / "elsewhere")
        if how == "link":
            path.symlink_to(root / "elsewhere")
        elif how == "fifo":
            os.mkfifo(path)
    for command in ("ls", "verify"):
        assert flashpoint(command, root, "--json") == 1
        found = told(capsys)
        assert states(found) == [(7, "damaged"), (3, "complete")]
        assert "step-7_ckpt" in str(found["versions"][0]["problems"][0])


def test_what_retention_removes_meanwhile_is_no_damage(
    root: Path, store: DurableVersions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check = listing.check_part

    def removed_first(*args: Any, **options: Any) -> Any:
        store.keep_newest(1, SaveId(int(RUN), 7))
        return check(*args, **options)

    monkeypatch.setattr(listing, "check_part", removed_first)
    assert flashpoint("verify", root, "--json") == 0
    assert states(told(capsys)) == [(7, "complete"), (3, "removed")]


def test_a_persisted_version_is_copied(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert flashpoint("copy", url, tmp_path / "copies", "--json") == 0
    assert told(capsys)["copy"] == str(tmp_path / "copies" / "step-7_ckpt")
    assert flashpoint("copy", f"{url}@3", tmp_path / "copies") == 0
    assert flashpoint("verify", tmp_path / "copies") == 0
    for step in (3, 7):
        folder = tmp_path / "copies" / f"step-{step}_ckpt"
        assert sorted(os.listdir(folder)) == sorted(
            f"rank-{rank:05d}-{RUN}.{kind}" for rank in (0, 1) for kind in ("safetensors", "manifest")
        )
        for rank in (0, 1):
            assert (folder / object_name(rank, RUN)).read_bytes() == CONTENT + bytes(8)
    assert flashpoint("copy", f"{url}@3", tmp_path / "copies") == 1, "there is one already"
    assert flashpoint("copy", f"{url}@9", tmp_path / "copies") == 2, "it is not complete"
    assert sorted(os.listdir(tmp_path / "copies")) == ["step-3_ckpt", "step-7_ckpt"], "nothing is left of what failed"


def test_nothing_is_copied_that_is_damaged(store: DurableVersions, root: Path, tmp_path: Path) -> None:
    path = path_of(root, 7, 1)
    path.write_bytes(path.read_bytes()[:2500] + b"x" + path.read_bytes()[2501:])
    assert flashpoint("copy", f"{root}@7", tmp_path / "copies") == 1
    assert os.listdir(tmp_path / "copies") == []
    assert flashpoint("copy", str(root), tmp_path / "copies") == 0
    assert os.listdir(tmp_path / "copies") == ["step-3_ckpt"], "an older one is sound"


def test_a_typing_error_is_no_empty_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for url in (f"file://{tmp_path}/nothing", str(tmp_path), "file://relative", "nosuchscheme://x"):
        for command in ("ls", "verify", "inspect", "copy"):
            assert flashpoint(command, url, *[tmp_path / "made"] * (command == "copy")) == 2
            assert "flashpoint: " in capsys.readouterr().err


def test_nothing_of_it_needs_torch(root: Path, store: DurableVersions) -> None:
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from ml_flashpoint.cli.main import app\n"
        f"for command in ('ls', 'verify'): assert app([command, {str(root)!r}], standalone_mode=False) == 0"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    words = ["step-7_ckpt", "complete", "0-1", "2", "10.0", "KiB", RUN]
    assert done.stdout.splitlines()[2].split() == words
