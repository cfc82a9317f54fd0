"""`flashpoint ls` and `flashpoint verify` on base containers and durable stores: sound, damaged, empty, live."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from typer.testing import CliRunner

from ml_flashpoint.cli import listing, output, view
from ml_flashpoint.cli.main import app
from ml_flashpoint.format.names import SaveId, manifest_name
from ml_flashpoint.stores.durable import MARKER, DurableVersions
from ml_flashpoint.stores.location import BaseContainer, open_durable
from ml_flashpoint.tools.check import check_part, look_at
from tests.support.commands import flashpoint
from tests.support.forked import Child, call
from tests.workers import cli_bases
from tests.workers.cli_bases import BLOCK, RUN, Part, content_of, manifest_of

pytestmark = pytest.mark.stores_any_bytes

Out = pytest.CaptureFixture[str]
SIZE = Part(0, 0).size
RUN_TEXT = f"{RUN:08d}"


def told(command: str, source: object, capsys: Out, *, code: int = 0) -> Any:
    capsys.readouterr()
    assert flashpoint(command, source, "--json") == code
    return json.loads(capsys.readouterr().out)


def versions(base: Path, capsys: Out, *, code: int = 0) -> dict[int, dict[str, Any]]:
    return {version["step"]: version for version in told("ls", base, capsys, code=code)["versions"]}


def states(found: Any) -> list[tuple[int, str]]:
    return [(each["step"], each["state"]) for each in found["versions"]]


def full(step: int, size: int = SIZE) -> list[Part]:
    """All four parts of a version, as node 0 with ranks 0 and 1 holds them."""
    return [Part(rank, step, size=size) for rank in range(4)]


def persist(store: DurableVersions, step: int, *, only: int | None = None) -> None:
    for part in full(step)[:only]:
        store.write_part(manifest_of(part), lambda part=part: [content_of(part)])  # type: ignore[misc]
    if only is None:
        store.complete(SaveId(RUN, step), 4)


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


@pytest.fixture
def base(tmpfs: Path) -> Path:
    return tmpfs / "job"


@pytest.fixture(params=["base container", "durable store"])
def kept(request: pytest.FixtureRequest, tmpfs: Path) -> Path:
    """Steps 5 and 6 of four ranks, in memory or persisted."""
    if request.param == "base container":
        call(cli_bases.make, tmpfs / "job", [0, 1], [*full(5), *full(6)])
        return tmpfs / "job"
    store = open_durable(f"file://{tmpfs}/store")
    for step in (5, 6):
        persist(store, step)
    return tmpfs / "store"


def path_of(kept: Path, part: Part, *, manifest: bool = False) -> Path:
    (folder,) = (path for path in kept.rglob("*") if path.name == f"step-{part.step}_ckpt")
    return folder / (manifest_name(part.rank, part.save_id) if manifest else part.name)


# ---- versions in memory -----------------------------------------------------------------------------------------


def snapshot(base: Path) -> dict[str, tuple[int, ...]]:
    found = {}
    for path in [base, *base.rglob("*")]:
        status = path.lstat()
        found[str(path)] = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_nlink)
    return found


def test_a_save_of_the_real_engine_is_listed_and_verified(base: Path, capsys: Out) -> None:
    call(cli_bases.save_once, base)
    before = snapshot(base)
    listed = told("ls", base, capsys)
    (version,) = listed["versions"]
    assert (listed["ok"], listed["base"], listed["live"]) == (True, str(base), {})
    assert listed["resident_bytes"] >= version["bytes"] > 70_000
    assert (version["version"], version["step"], version["state"]) == ("step-7_ckpt", 7, "local")
    assert (version["complete"], version["world_size"]) == (True, 1)
    assert (version["own_ranks"], version["copied_ranks"], version["writing_ranks"]) == ([0], [], [])
    (part,) = version["parts"]
    assert part["bytes"] == version["bytes"]
    verified = told("verify", base, capsys)
    assert (verified["ok"], verified["objects"], verified["bytes"]) == (True, 1, version["bytes"])
    assert verified["versions"][0]["parts"][0]["result"] == "ok"
    assert snapshot(base) == before


def test_copies_make_a_version_replicated_and_what_lacks_own_parts_is_partial(base: Path, capsys: Out) -> None:
    parts = [Part(0, 7), Part(1, 7), Part(0, 8), Part(2, 8), Part(2, 9), Part(3, 9)]
    call(cli_bases.make, base, [0, 1], [*full(5), *full(6)[:3], *parts])
    found = versions(base, capsys)
    shown = [found[step]["state"] for step in (5, 6, 7, 8, 9)]
    assert shown == ["replicated", "local", "local", "partial", "partial"]
    assert [step for step in found if found[step]["complete"]] == [5]
    assert (found[5]["own_ranks"], found[5]["copied_ranks"]) == ([0, 1], [2, 3])
    assert (found[6]["copied_ranks"], found[8]["writing_ranks"]) == ([2], [])
    nodes = {part["rank"]: part["node"] for part in found[5]["parts"]}
    assert nodes == {0: "node-0", 1: "node-0", 2: "node-1", 3: "node-1"}


def test_the_first_save_is_writing_until_all_live_ranks_have_committed(base: Path, capsys: Out) -> None:
    with Child(cli_bases.make_and_live, base, [0, 1], [Part(0, 1)]) as child:
        child.next_report("ready")
        listed = told("ls", base, capsys)
        assert listed["live"] == {"0": child.pid, "1": child.pid}
        assert [(v["state"], v["writing_ranks"]) for v in listed["versions"]] == [("writing", [1])]
        # The look has not taken anything from the job: its lock still holds.
        with Child(cli_bases.take, base) as second:
            assert second.result() == "JobInUseError"
    assert versions(base, capsys)[1]["state"] == "partial"  # nobody runs


def test_live_ranks_are_expected_in_the_newest_save_only(base: Path, capsys: Out) -> None:
    later = RUN + 1
    call(cli_bases.make, base, [0], [Part(0, 5, world_size=1)])
    with Child(cli_bases.make_and_live, base, [0, 1], [Part(0, 6, run=later), Part(2, 6, run=later)]) as child:
        child.next_report("ready")
        found = versions(base, capsys)
        assert (found[6]["state"], found[6]["writing_ranks"]) == ("writing", [1])
        assert (found[5]["state"], found[5]["writing_ranks"]) == ("partial", [])
    call(cli_bases.make, base, [0, 1], full(7))
    with Child(cli_bases.make_and_live, base, [2, 3], []) as child:  # which have moved here
        child.next_report("ready")
        assert versions(base, capsys)[7]["state"] == "replicated"


def test_versions_come_newest_save_first_and_need_manifests_and_nothing_else(
    base: Path, tmp_path: Path, capsys: Out
) -> None:
    call(cli_bases.make, base, [0, 1], [])
    assert told("ls", base, capsys)["versions"] == []
    assert told("verify", base, capsys)["objects"] == 0
    assert flashpoint("ls", base) == 0
    assert "no versions" in capsys.readouterr().out
    empty, large = Part(0, 3, world_size=1, size=0), Part(0, 9, world_size=1, size=40 * BLOCK + 1)
    call(cli_bases.make, base, [0, 1], [empty, large, Part(0, 6), *(replace(part, run=RUN + 1) for part in full(5))])
    path_of(base, Part(0, 6), manifest=True).unlink()
    assert [step for step, _ in states(told("ls", base, capsys))] == [5, 9, 3]
    assert told("verify", base, capsys)["objects"] == 6
    away = tmp_path / "away"
    (away / "step-5_ckpt").mkdir(parents=True)
    for path in (base / "step-5_ckpt").iterdir():
        (away / "step-5_ckpt" / path.name).write_bytes(path.read_bytes())
    assert versions(away, capsys)[5]["complete"] is True
    assert flashpoint("verify", away) == 0


# ---- persisted versions -----------------------------------------------------------------------------------------


@pytest.fixture(params=["path", "file", "memory"])
def url(request: pytest.FixtureRequest, tmpfs: Path) -> Iterator[str]:
    root = tmpfs / "store"
    where = {"path": str(root), "file": f"file://{root}", "memory": f"memory://{tmpfs.name}"}[request.param]
    store = open_durable(f"file://{root}" if request.param == "path" else where)
    for step in (3, 7):
        persist(store, step)
    persist(store, 9, only=1)
    yield where
    if request.param == "memory":
        fsspec.filesystem("memory").rm(where, recursive=True)


def test_persisted_versions_are_listed_and_verified_newest_first(url: str, capsys: Out) -> None:
    found = told("ls", url, capsys)
    assert found["ok"]
    assert states(found) == [(9, "incomplete"), (7, "complete"), (3, "complete")]
    first = found["versions"][1]
    assert (first["own_ranks"], first["world_size"], first["bytes"]) == ([0, 1, 2, 3], 4, 4 * SIZE)
    assert states(told("verify", url, capsys)) == [(9, "incomplete"), (7, "complete"), (3, "complete")]
    assert states(told("verify", f"{url}@3", capsys)) == [(3, "complete")]
    assert flashpoint("verify", f"{url}@4") == 2
    assert "no version of step 4" in capsys.readouterr().err


@pytest.mark.damages_on_purpose
def test_a_version_with_the_marker_of_another_one_is_damaged(tmpfs: Path, capsys: Out) -> None:
    store = open_durable(f"file://{tmpfs}/store")
    for step in (3, 7):
        persist(store, step)
    older, newest = (path_of(tmpfs / "store", Part(0, step)).parent for step in (3, 7))
    (newest / MARKER).write_bytes((older / MARKER).read_bytes())
    for command in ("ls", "verify"):
        found = told(command, tmpfs / "store", capsys, code=1)
        assert states(found) == [(7, "damaged"), (3, "complete")]
        assert newest.name in str(found["versions"][0]["problems"])


def test_what_retention_removes_meanwhile_is_no_damage(
    tmpfs: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    store, check = open_durable(f"file://{tmpfs}/store"), listing.check_part
    for step in (3, 7):
        persist(store, step)

    def removed_first(*args: Any, **options: Any) -> Any:
        store.keep_newest(1, SaveId(RUN, 7))
        return check(*args, **options)

    monkeypatch.setattr(listing, "check_part", removed_first)
    assert states(told("verify", tmpfs / "store", capsys)) == [(7, "complete"), (3, "removed")]


# ---- damage -----------------------------------------------------------------------------------------------------


@pytest.mark.damages_on_purpose
@pytest.mark.parametrize("offset", [0, 2 * BLOCK + 5, SIZE - 1])
def test_verify_names_the_file_and_block_of_a_flipped_bit(kept: Path, offset: int, capsys: Out) -> None:
    hurt = path_of(kept, Part(2, 5))
    flip(hurt, offset)
    flip(path_of(kept, Part(1, 5)), SIZE)  # behind the bytes that count
    assert flashpoint("ls", kept) == 0  # it does not read bytes
    found = told("verify", kept, capsys, code=1)
    assert found["ok"] is False
    (problem,) = (problem for version in found["versions"] for problem in version["problems"])
    assert problem["path"] == str(hurt)
    assert f"block {offset // BLOCK}, from byte {offset // BLOCK * BLOCK} on," in problem["message"]
    assert states(found) == [(6, "complete"), (5, "damaged")]
    flip(hurt, (offset + BLOCK) % SIZE)
    assert flashpoint("verify", kept, "--threads", 8) == 1
    text = capsys.readouterr().out
    assert f"damaged {hurt}: " in text
    assert "1 of 8 parts are damaged" in text
    rows = [line.split() for line in text.splitlines()[1:3]]
    assert [row[:3] for row in rows] == [["ok", "step-6_ckpt", "0-3"], ["damaged", "step-5_ckpt", "0-3"]]


MANIFESTS = ["flipped", "truncated", "emptied", "another's", "folder"]


def damage(path: Path, how: str, elsewhere: Path) -> None:
    match how:
        case "flipped":
            flip(path, path.stat().st_size // 2)
        case "truncated":
            os.truncate(path, path.stat().st_size - 1)
        case "emptied":
            os.truncate(path, 0)
        case "another's":
            path.write_bytes(path.with_name(path.name.replace("00001", "00000")).read_bytes())
        case "folder":
            path.unlink()
            path.mkdir()
        case "short":
            os.truncate(path, SIZE - 1)
        case _:
            path.rename(elsewhere)
            if how == "link":
                path.symlink_to(elsewhere)
            elif how == "fifo":
                os.mkfifo(path)


@pytest.mark.damages_on_purpose
@pytest.mark.parametrize("how", [*MANIFESTS, "short", "missing", "link", "fifo"])
def test_what_is_not_what_was_written_is_found_and_named(kept: Path, how: str, capsys: Out) -> None:
    path = path_of(kept, Part(1, 6), manifest=how in MANIFESTS)
    damage(path, how, kept / "elsewhere")
    for command in ("ls", "verify"):
        found = told(command, kept, capsys, code=1)
        tells_copies = command == "ls" and kept.name == "job"
        assert found["ok"] is False
        assert states(found) == [(6, "damaged"), (5, "replicated" if tells_copies else "complete")]
        damaged = found["versions"][0]
        (problem,) = damaged["problems"]
        assert str(path) in problem["path"]
        assert (damaged["own_ranks"], damaged["world_size"]) == ([0, 1] if tells_copies else [0, 1, 2, 3], 4)
        assert flashpoint(command, kept) == 1
        assert str(path) in capsys.readouterr().out


def test_pruning_between_the_look_and_the_reading_is_not_damage(base: Path) -> None:
    call(cli_bases.make, base, [0], [Part(0, 5, world_size=1)])
    store = BaseContainer(base)
    ((part,),) = (look_at(store, version) for version in store.versions())
    # What the job does: the manifest goes first, then the slot is written to, then the link goes.
    path_of(base, Part(0, 5), manifest=True).unlink()
    flip(path_of(base, Part(0, 5)), 0)
    assert check_part(store, part).removed
    path_of(base, Part(0, 5)).unlink()
    assert (check_part(store, part).removed, check_part(store, part).problems) == (True, ())


@pytest.mark.slow
def test_a_job_that_saves_and_prunes_all_the_time_never_looks_damaged(base: Path, capsys: Out) -> None:
    with Child(cli_bases.save_for_ever, base) as child:
        child.next_report("ready")
        assert told("ls", base, capsys)["live"] == {"0": child.pid}
        assert flashpoint("verify", base) == 0
        store, steps, pruned, looks = BaseContainer(base), set[int | None](), 0, 0
        give_up = time.monotonic() + 60
        # Enough looks, at enough different steps, and one at what was pruned meanwhile: what this test is about.
        while looks < 100 or len(steps) <= 50 or not pruned:
            assert time.monotonic() < give_up, (looks, len(steps), pruned)
            looks += 1
            seen = view.read(base)
            assert seen.versions
            assert seen.problems == []
            assert {version.state for version in seen.versions} <= {"local", "writing"}
            results = [check_part(store, part) for version in store.versions() for part in look_at(store, version)]
            assert [result.problems for result in results if result.problems] == []
            pruned += sum(result.removed for result in results)
            steps.update(version.step for version in seen.versions)
        assert child.alive


# ---- no store ---------------------------------------------------------------------------------------------------


def test_wrong_paths_give_the_same_error_from_all_commands(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder" / "step-07_ckpt").mkdir(parents=True)
    for path in (tmp_path / "absent", tmp_path / "file", tmp_path / "folder"):
        said = set()
        for command in ("ls", "status", "verify", "inspect", "diff", "copy", "export", "persist", "rm", "metrics"):
            more: list[object] = {"diff": [path], "copy": [tmp_path / "to"], "rm": ["--yes"]}.get(command, [])
            more = ["--to", tmp_path / "to"] if command in ("export", "persist") else more
            done = CliRunner().invoke(app, [*map(str, [command, path, *more])])
            assert (done.exit_code, done.stdout) == (2, ""), (command, done.output)
            said.add(done.stderr)
        (error,) = said
        assert error.startswith("flashpoint: ")
        assert f"[path {path}]" in error
        assert not (tmp_path / "to").exists()


def test_misuse_is_a_usage_error(tmp_path: Path, capsys: Out) -> None:
    for args in ([], ["verify"], ["ls", "--nope", "/x"], ["verify", "/x", "--threads", "0"], ["nope"]):
        assert CliRunner().invoke(app, args).exit_code == 2
    for url in (f"file://{tmp_path}/nothing", str(tmp_path), "file://relative", "nosuchscheme://x"):
        for command in ("ls", "verify", "inspect", "copy"):
            assert flashpoint(command, url, *[tmp_path / "made"] * (command == "copy")) == 2
            assert "flashpoint: " in capsys.readouterr().err


# ---- how it looks -----------------------------------------------------------------------------------------------


def test_lines_are_one_a_version_and_no_command_here_imports_torch(kept: Path) -> None:
    script = f"""if True:
        import sys
        sys.modules["torch"] = None
        from ml_flashpoint.cli.main import app
        for command in ("ls", "verify"):
            assert app([command, {str(kept)!r}], standalone_mode=False) == 0
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2 * 4
    assert f"{kept}: 2 versions" in lines[0]
    if kept.name == "store":
        assert lines[2].split() == ["step-6_ckpt", "complete", "0-3", "4", "48.4", "KiB", RUN_TEXT]
        return
    assert lines[0].endswith("no rank is running here")
    columns = ["version", "state", "own ranks", "copies of", "not yet", "whole", "of", "size", "run"]
    assert re.split(r"  +", lines[1]) == columns
    assert lines[2].split()[:7] == ["step-6_ckpt", "replicated", "0-1", "2-3", "-", "yes", "4"]
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("columns", [200, 80, 60])
def test_a_terminal_gets_a_table_that_cuts_nothing(base: Path, columns: int) -> None:
    call(cli_bases.make, base, [0, 1], full(5))
    shown = _on_terminal("ls", base, columns=columns)
    head, row = (line for line in shown.splitlines() if line.startswith(("version", "step-5")))
    assert len(head) <= columns
    assert row.split()[:4] == ["step-5_ckpt", "replicated", "0-1", "2-3"]
    assert ("run" in head.split()) == ("too narrow for" not in shown)


def _on_terminal(*args: object, columns: int) -> str:
    leader, follower = os.openpty()
    argv = [sys.executable, "-m", "ml_flashpoint.cli.main", *map(str, args)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns)}
    process = subprocess.Popen(argv, stdout=follower, stderr=follower, stdin=follower, env=environment)
    os.close(follower)
    shown = b""
    try:
        while chunk := os.read(leader, 65536):
            shown += chunk
    except OSError:
        pass  # how Linux reports that the other side is closed
    finally:
        os.close(leader)
    assert process.wait(60) == 0
    return re.sub(r"\x1b\[[0-9;]*m", "", shown.decode())


def test_numbers_for_people() -> None:
    assert [output.bytes_text(n) for n in (0, 1023, 1536, 3 << 40)] == ["0 B", "1023 B", "1.5 KiB", "3.0 TiB"]
    seconds = [0.19, 5, 119, 121, 7300, 200000]
    assert [*map(output.time_text, seconds)] == ["0.19 s", "5.0 s", "119.0 s", "2.0 min", "2.0 h", "2.3 days"]
    ranks = [(), (3,), (0, 1, 2), (5, 0, 1, 7, 6)]
    assert [*map(output.ranks_text, ranks)] == ["-", "3", "0-2", "0-1,5-7"]
