"""`flashpoint ls` and `flashpoint verify` on base containers made by the engine: sound, damaged, empty, live."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ml_flashpoint.cli import output, view
from ml_flashpoint.cli.main import app
from ml_flashpoint.format.names import manifest_name
from ml_flashpoint.stores.location import BaseContainer
from ml_flashpoint.tools.check import CheckedPart, check_part, look_at
from tests.support.forked import Child, call
from tests.workers import cli_bases
from tests.workers.cli_bases import BLOCK, RUN, Part

pytestmark = [pytest.mark.slow, pytest.mark.stores_any_bytes]


def flashpoint(*args: object) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "ml_flashpoint.cli.main", *map(str, args)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60)


def flashpoint_json(command: str, base: Path, *, code: int) -> Any:
    done = flashpoint(command, base, "--json")
    assert done.returncode == code, done
    return json.loads(done.stdout)


def versions(base: Path, *, code: int = 0) -> dict[int, dict[str, Any]]:
    found = flashpoint_json("ls", base, code=code)
    return {version["step"]: version for version in found["versions"]}


def snapshot(base: Path) -> dict[str, tuple[int, ...]]:
    found = {}
    for path in [base, *base.rglob("*")]:
        status = path.lstat()
        found[str(path)] = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_nlink)
    return found


def full(step: int) -> list[Part]:
    """All four parts of a version, as node 0 with ranks 0 and 1 holds them."""
    return [Part(0, step), Part(1, step), Part(2, step), Part(3, step)]


@pytest.fixture
def base(tmpfs: Path) -> Path:
    return tmpfs / "job"


def part_path(base: Path, part: Part, *, manifest: bool = False) -> Path:
    folder = base / f"step-{part.step}_ckpt"
    return folder / (manifest_name(part.rank, part.save_id) if manifest else part.name)


def checked(base: Path) -> list[CheckedPart]:
    store = BaseContainer(base)
    looked = [part for version in store.versions() for part in look_at(store, version)]
    return [check_part(store, part) for part in looked]


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


# ---- what is listed ---------------------------------------------------------------------------------------------


def test_a_save_of_the_real_engine_is_listed_and_verified(base: Path) -> None:
    call(cli_bases.save_once, base)
    before = snapshot(base)
    listed = flashpoint_json("ls", base, code=0)
    (version,) = listed["versions"]
    assert listed["ok"] is True
    assert listed["base"] == str(base)
    assert listed["live"] == {}
    assert listed["resident_bytes"] >= version["bytes"] > 70_000
    assert (version["version"], version["step"], version["state"]) == ("step-7_ckpt", 7, "local")
    assert (version["complete"], version["world_size"]) == (True, 1)
    assert (version["own_ranks"], version["copied_ranks"], version["writing_ranks"]) == ([0], [], [])
    (part,) = version["parts"]
    assert part["bytes"] == version["bytes"]
    verified = flashpoint_json("verify", base, code=0)
    assert (verified["ok"], verified["objects"], verified["bytes"]) == (True, 1, version["bytes"])
    assert verified["versions"][0]["parts"][0]["result"] == "ok"
    assert snapshot(base) == before


def test_copies_make_a_version_replicated(base: Path) -> None:
    call(cli_bases.make, base, [0, 1], [*full(5), *full(6)[:3], Part(0, 7), Part(1, 7)])
    found = versions(base)
    assert [found[step]["state"] for step in (5, 6, 7)] == ["replicated", "local", "local"]
    assert [found[step]["complete"] for step in (5, 6, 7)] == [True, False, False]
    assert found[5]["own_ranks"] == [0, 1]
    assert found[5]["copied_ranks"] == [2, 3]
    assert found[6]["copied_ranks"] == [2]
    nodes = {part["rank"]: part["node"] for part in found[5]["parts"]}
    assert nodes == {0: "node-0", 1: "node-0", 2: "node-1", 3: "node-1"}


def test_versions_come_newest_save_first_and_saves_of_one_step_stand_side_by_side(base: Path) -> None:
    later = RUN + 1
    call(cli_bases.make, base, [0], [Part(0, 9, world_size=1), Part(0, 8, world_size=1, run=later)])
    call(cli_bases.make, base, [0], [Part(0, 9, world_size=1, run=later)])
    listed = flashpoint_json("ls", base, code=0)["versions"]
    assert [(v["step"], int(v["save_id"])) for v in listed] == [(9, later), (8, later), (9, RUN)]


def test_a_version_without_the_part_of_a_rank_that_has_ended_is_partial(base: Path) -> None:
    call(cli_bases.make, base, [0, 1], [*full(5), Part(0, 6), Part(2, 6)])
    found = versions(base)
    assert (found[6]["state"], found[6]["writing_ranks"]) == ("partial", [])
    assert found[5]["state"] == "replicated"


def test_the_first_save_is_writing_until_all_live_ranks_have_committed(base: Path) -> None:
    with Child(cli_bases.make_and_live, base, [0, 1], [Part(0, 1)]) as child:
        child.next_report("ready")
        listed = flashpoint_json("ls", base, code=0)
        assert listed["live"] == {"0": child.pid, "1": child.pid}
        assert [(v["state"], v["writing_ranks"]) for v in listed["versions"]] == [("writing", [1])]
        # The look has not taken anything from the job: its lock still holds.
        with Child(cli_bases.take, base) as second:
            assert second.result() == "JobInUseError"
    assert versions(base)[1]["state"] == "partial"  # nobody runs


def test_live_ranks_are_expected_in_the_newest_save_only(base: Path) -> None:
    later = RUN + 1
    call(cli_bases.make, base, [0], [Part(0, 5, world_size=1)])
    parts = [Part(0, 6, run=later), Part(2, 6, run=later)]
    with Child(cli_bases.make_and_live, base, [0, 1], parts) as child:
        child.next_report("ready")
        found = versions(base)
        assert (found[6]["state"], found[6]["writing_ranks"]) == ("writing", [1])
        assert (found[5]["state"], found[5]["writing_ranks"]) == ("partial", [])


def test_ranks_that_have_moved_here_do_not_turn_older_versions_into_writing(base: Path) -> None:
    call(cli_bases.make, base, [0, 1], full(5))
    with Child(cli_bases.make_and_live, base, [2, 3], []) as child:
        child.next_report("ready")
        assert versions(base)[5]["state"] == "replicated"


def test_copies_alone_are_partial(base: Path) -> None:
    call(cli_bases.make, base, [0, 1], [*full(5), Part(2, 6), Part(3, 6)])
    assert versions(base)[6]["state"] == "partial"


def test_a_base_container_without_versions_is_empty_and_sound(base: Path) -> None:
    call(cli_bases.make, base, [0, 1], [])
    assert flashpoint_json("ls", base, code=0)["versions"] == []
    assert flashpoint_json("verify", base, code=0)["objects"] == 0
    assert "no versions" in flashpoint("ls", base).stdout


def test_a_copy_of_the_versions_alone_can_be_looked_at(base: Path, tmp_path: Path) -> None:
    call(cli_bases.make, base, [0, 1], full(5))
    away = tmp_path / "away"
    (away / "step-5_ckpt").mkdir(parents=True)
    for path in (base / "step-5_ckpt").iterdir():
        (away / "step-5_ckpt" / path.name).write_bytes(path.read_bytes())
    assert versions(away)[5]["complete"] is True
    assert flashpoint("verify", away).returncode == 0


def test_objects_without_a_manifest_are_no_version_and_no_damage(base: Path) -> None:
    call(cli_bases.make, base, [0], [Part(0, 5, world_size=1), Part(0, 6, world_size=1)])
    part_path(base, Part(0, 6), manifest=True).unlink()
    listed = flashpoint_json("ls", base, code=0)
    assert [(v["step"], v["state"]) for v in listed["versions"]] == [(5, "local")]
    assert flashpoint_json("verify", base, code=0)["objects"] == 1


# ---- damage -----------------------------------------------------------------------------------------------------


@pytest.mark.damages_on_purpose
def test_verify_names_the_file_and_block_of_a_flipped_bit(base: Path) -> None:
    call(cli_bases.make, base, [0, 1], [*full(5), *full(6)])
    hurt = part_path(base, Part(2, 5))
    flip(hurt, 2 * BLOCK + 5)
    assert flashpoint("ls", base).returncode == 0  # it does not read bytes
    found = flashpoint_json("verify", base, code=1)
    assert found["ok"] is False
    problems = [problem for version in found["versions"] for problem in version["problems"]]
    assert [p["path"] for p in problems] == [str(hurt)]
    assert f"block 2, from byte {2 * BLOCK} on," in problems[0]["message"]
    assert [(v["step"], v["state"]) for v in found["versions"]] == [(6, "complete"), (5, "damaged")]
    text = flashpoint("verify", base)
    assert text.returncode == 1
    assert f"damaged {hurt}: " in text.stdout
    assert "1 of 8 parts are damaged" in text.stdout
    rows = [line.split() for line in text.stdout.splitlines()[1:3]]
    assert [row[:3] for row in rows] == [["ok", "step-6_ckpt", "0-3"], ["damaged", "step-5_ckpt", "0-3"]]
    assert 0 <= found["seconds"] < 60


@pytest.mark.damages_on_purpose
@pytest.mark.parametrize("offset", [0, BLOCK - 1, BLOCK, 3 * BLOCK + 99])
def test_verify_finds_any_flipped_bit_that_counts(base: Path, offset: int) -> None:
    call(cli_bases.make, base, [0], [Part(0, 5, world_size=1)])
    flip(part_path(base, Part(0, 5)), offset)
    assert flashpoint("verify", base, "--threads", 1).returncode == 1


@pytest.mark.damages_on_purpose
def test_verify_finds_every_block_with_many_threads(base: Path) -> None:
    parts = [Part(0, 5, world_size=1, size=40 * BLOCK + 1)]
    call(cli_bases.make, base, [0], parts)
    assert flashpoint("verify", base, "--threads", 8).returncode == 0
    for block in (7, 8, 40):
        flip(part_path(base, parts[0]), block * BLOCK)
    ((version,),) = (flashpoint_json("verify", base, code=1)["versions"],)
    assert "block 7, from byte" in version["problems"][0]["message"]


def test_an_object_without_bytes_verifies(base: Path) -> None:
    call(cli_bases.make, base, [0], [Part(0, 5, world_size=1, size=0)])
    assert flashpoint("verify", base).returncode == 0


def test_what_lies_behind_the_bytes_that_count_does_not_matter(base: Path) -> None:
    call(cli_bases.make, base, [0], [Part(0, 5, world_size=1)])
    flip(part_path(base, Part(0, 5)), Part(0, 5).size)
    assert flashpoint("verify", base).returncode == 0


@pytest.mark.damages_on_purpose
@pytest.mark.parametrize("command", ["ls", "verify"])
@pytest.mark.parametrize("how", ["flipped", "truncated", "emptied", "renamed", "directory"])
def test_a_damaged_manifest_is_found_and_named(base: Path, command: str, how: str) -> None:
    call(cli_bases.make, base, [0, 1], full(5))
    path = part_path(base, Part(1, 5), manifest=True)
    match how:
        case "flipped":
            flip(path, path.stat().st_size // 2)
        case "truncated":
            path.write_bytes(path.read_bytes()[:-1])
        case "emptied":
            path.write_bytes(b"")
        case "renamed":
            path.write_bytes(part_path(base, Part(0, 5), manifest=True).read_bytes())
        case "directory":
            path.unlink()
            path.mkdir()
    found = flashpoint_json(command, base, code=1)
    assert found["ok"] is False
    (version,) = found["versions"]
    assert [problem["path"] for problem in version["problems"]] == [str(path)]
    if command == "verify":
        assert "1 of 4 parts are damaged" in flashpoint("verify", base).stdout
    if command == "ls":
        assert (version["state"], version["complete"]) == ("damaged", False)
        assert version["own_ranks"] == [0, 1]
        assert version["world_size"] == 4


@pytest.mark.damages_on_purpose
def test_a_copy_with_a_damaged_manifest_is_still_a_copy(base: Path) -> None:
    call(cli_bases.make, base, [0, 1], full(5))
    flip(part_path(base, Part(2, 5), manifest=True), 100)
    version = versions(base, code=1)[5]
    assert (version["state"], version["own_ranks"], version["copied_ranks"]) == ("damaged", [0, 1], [2, 3])


@pytest.mark.damages_on_purpose
@pytest.mark.parametrize("command", ["ls", "verify"])
@pytest.mark.parametrize("how", ["missing", "short", "long", "symlink"])
def test_an_object_that_is_not_as_committed_is_found_and_named(base: Path, command: str, how: str) -> None:
    call(cli_bases.make, base, [0, 1], full(5))
    path = part_path(base, Part(3, 5))
    match how:
        case "missing":
            path.unlink()
        case "short":
            os.truncate(path, Part(3, 5).size - 1)
        case "long":
            os.truncate(path, 1 << 20)
        case "symlink":
            path.rename(base / "elsewhere")
            path.symlink_to(base / "elsewhere")
    found = flashpoint_json(command, base, code=1)
    text = flashpoint(command, base)
    assert text.returncode == 1
    assert str(path) in text.stdout
    assert found["ok"] is False


# ---- no base container ------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("args", [[], ["verify"], ["ls", "--nope", "/x"], ["verify", "/x", "--threads", "0"], ["nope"]])
def test_misuse_is_a_usage_error(args: list[str]) -> None:
    assert flashpoint(*args).returncode == 2


# ---- a live job -------------------------------------------------------------------------------------------------


def test_a_job_that_saves_and_prunes_all_the_time_never_looks_damaged(base: Path) -> None:
    with Child(cli_bases.save_for_ever, base) as child:
        child.next_report("ready")
        assert flashpoint_json("ls", base, code=0)["live"] == {"0": child.pid}
        assert flashpoint("verify", base).returncode == 0
        steps, pruned, looks = set(), 0, 0
        give_up = time.monotonic() + 60
        # Enough looks, at enough different steps, and one at what was pruned meanwhile: what this test is about.
        while looks < 300 or len(steps) <= 100 or not pruned:
            assert time.monotonic() < give_up, (looks, len(steps), pruned)
            looks += 1
            seen = view.read(base)
            assert seen.versions
            assert seen.problems == []
            assert {version.state for version in seen.versions} <= {"local", "writing"}
            results = checked(base)
            assert [result.problems for result in results if result.problems] == []
            pruned += sum(result.removed for result in results)
            steps.update(version.step for version in seen.versions)
        assert child.alive


def test_pruning_between_the_look_and_the_reading_is_not_damage(base: Path) -> None:
    call(cli_bases.make, base, [0], [Part(0, 5, world_size=1)])
    store = BaseContainer(base)
    ((part,),) = (look_at(store, version) for version in store.versions())
    # What the job does: the manifest goes first, then the slot is written to, then the link goes.
    part_path(base, Part(0, 5), manifest=True).unlink()
    flip(part_path(base, Part(0, 5)), 0)
    assert check_part(store, part).removed
    part_path(base, Part(0, 5)).unlink()
    assert (check_part(store, part).removed, check_part(store, part).problems) == (True, ())


# ---- how it looks -----------------------------------------------------------------------------------------------


def test_lines_are_one_a_version_and_do_not_depend_on_a_width(base: Path) -> None:
    call(cli_bases.make, base, [0, 1], [*full(5), *full(6)])
    lines = flashpoint("ls", base).stdout.splitlines()
    assert len(lines) == 4
    assert lines[0].startswith(f"{base}: 2 versions, ")
    assert lines[0].endswith("no rank is running here")
    columns = ["version", "state", "own ranks", "copies of", "not yet", "whole", "of", "size", "run"]
    assert re.split(r"  +", lines[1]) == columns
    assert lines[2].split()[:7] == ["step-6_ckpt", "replicated", "0-1", "2-3", "-", "yes", "4"]
    assert "\x1b" not in "".join(lines)


@pytest.mark.parametrize("columns", [200, 80, 60])
def test_a_terminal_gets_a_table_that_cuts_nothing(base: Path, columns: int) -> None:
    call(cli_bases.make, base, [0, 1], full(5))
    shown = _on_terminal("ls", base, columns=columns)
    head, row = (line for line in shown.splitlines() if line.startswith(("version", "step-5")))
    assert len(head) <= columns
    assert row.split()[:4] == ["step-5_ckpt", "replicated", "0-1", "2-3"]
    assert ("run" in head.split()) == ("too narrow for" not in shown)
    assert "all as saved" in _on_terminal("verify", base, columns=columns)


def test_ls_and_verify_do_not_import_torch(base: Path) -> None:
    call(cli_bases.make, base, [0], [Part(0, 5, world_size=1)])
    script = f"""if True:
        import sys
        from ml_flashpoint.cli.main import app
        for command in ("ls", "verify"):
            try:
                app([command, {str(base)!r}])
            except SystemExit as done:
                assert done.code == 0
        assert "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize(("ranks", "text"), [((), "-"), ((3,), "3"), ((0, 1, 2), "0-2"), ((5, 0, 1, 7, 6), "0-1,5-7")])
def test_ranks_in_short(ranks: tuple[int, ...], text: str) -> None:
    assert output.ranks_text(ranks) == text


def test_bytes_for_people() -> None:
    assert [output.bytes_text(n) for n in (0, 1023, 1536, 3 << 40)] == ["0 B", "1023 B", "1.5 KiB", "3.0 TiB"]


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
