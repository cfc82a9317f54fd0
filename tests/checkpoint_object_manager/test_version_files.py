"""The files of a version: how parts come and go, also with another rank at work in the same directory."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ml_flashpoint.checkpoint_object_manager import version_files
from ml_flashpoint.checkpoint_object_manager.rank_store import RankStore
from ml_flashpoint.checkpoint_object_manager.version_files import commit_part, list_versions, map_object, remove_part
from ml_flashpoint.format.errors import CapacityError, InvalidNameError, ObjectNotFoundError, SaveError
from ml_flashpoint.format.manifest import manifest_name, object_name, read_manifest
from tests.checkpoint_object_manager.store_support import ARENA, commit, content, files, manifest_of, write
from tests.support.stepwise import Operation

pytestmark = pytest.mark.stores_any_bytes


@pytest.fixture
def arena(tmpfs: Path) -> Path:
    path = tmpfs / "arena"
    path.write_bytes(content(0, "a1").ljust(ARENA))
    return path


class TestPublish:
    def test_links_the_files_and_writes_the_manifest(self, tmpfs: Path, arena: Path) -> None:
        manifest = manifest_of(7, 0, "a1")
        (tmpfs / "job").mkdir()
        commit_part(tmpfs / "job", manifest, [arena])
        directory = tmpfs / "job" / "step-7_ckpt"
        assert sorted(os.listdir(directory)) == [manifest_name(0, "a1"), object_name(0, "a1")]
        assert (directory / object_name(0, "a1")).samefile(arena)
        assert read_manifest(directory / manifest_name(0, "a1")) == manifest

    def test_a_part_may_be_published_again(self, tmpfs: Path, arena: Path) -> None:
        manifest = manifest_of(7, 0, "a1")
        other = tmpfs / "other"
        other.write_bytes(arena.read_bytes())
        for path in (arena, other, other, arena):
            commit_part(tmpfs, manifest, [path])
            assert (tmpfs / "step-7_ckpt" / object_name(0, "a1")).samefile(path)
            assert len(files(tmpfs)) == 2

    def test_an_object_that_is_replaced_is_there_at_every_instant(self, tmpfs: Path, arena: Path) -> None:
        manifest = manifest_of(7, 0, "a1")
        other = tmpfs / "other"
        other.write_bytes(arena.read_bytes())
        commit_part(tmpfs, manifest, [arena])
        operation = Operation(lambda: commit_part(tmpfs, manifest, [other]))
        while not operation.step():
            assert {object_name(0, "a1"), manifest_name(0, "a1")} <= set(os.listdir(tmpfs / "step-7_ckpt"))

    def test_nothing_is_left_of_a_part_that_cannot_be_published(self, tmpfs: Path, arena: Path) -> None:
        manifest = manifest_of(7, 0, "a1", kinds=("safetensors", "dcp"))
        with pytest.raises(SaveError, match="step 7, rank 0"):
            commit_part(tmpfs, manifest, [arena, tmpfs / "missing"])
        assert list_versions(tmpfs) == []

    @pytest.mark.slow
    def test_a_directory_that_others_remove_all_the_time_is_made_again(self, tmpfs: Path, arena: Path) -> None:
        def come_and_go(rank: int) -> None:
            for _ in range(2000):
                commit_part(tmpfs, manifest_of(7, rank, "a1"), [arena])
                remove_part(tmpfs, "step-7_ckpt", rank, "a1", [object_name(rank, "a1")])

        context = multiprocessing.get_context("fork")
        ranks = [context.Process(target=come_and_go, args=(rank,)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(60)
            assert process.exitcode == 0
        assert list_versions(tmpfs) == []

    def test_a_file_in_the_place_of_the_directory_is_a_save_error(self, tmpfs: Path, arena: Path) -> None:
        (tmpfs / "step-7_ckpt").write_text("a file")
        with pytest.raises(SaveError, match="step 7, rank 0"):
            commit_part(tmpfs, manifest_of(7, 0, "a1"), [arena])
        assert (tmpfs / "step-7_ckpt").read_text() == "a file"

    def test_a_manifest_that_finds_no_room_is_a_capacity_error(
        self, tmpfs: Path, arena: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*args: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("ml_flashpoint.format.manifest._write_new_file", full)
        with pytest.raises(CapacityError):
            commit_part(tmpfs, manifest_of(7, 0, "a1"), [arena])
        assert list_versions(tmpfs) == []
        monkeypatch.undo()
        monkeypatch.setattr(os, "link", full)
        with pytest.raises(CapacityError, match="step 7, rank 0"):
            commit_part(tmpfs, manifest_of(7, 0, "a1"), [arena])
        assert list_versions(tmpfs) == []

    def test_unpublish_removes_the_manifest_before_the_bytes(self, tmpfs: Path, arena: Path) -> None:
        commit_part(tmpfs, manifest_of(7, 0, "a1"), [arena])
        operation = Operation(lambda: remove_part(tmpfs, "step-7_ckpt", 0, "a1", [object_name(0, "a1")]))
        seen = []
        while not operation.step():
            seen.append(sorted(files(tmpfs)))
        assert seen == [[f"step-7_ckpt/{object_name(0, 'a1')}"], []]
        assert list_versions(tmpfs) == []
        remove_part(tmpfs, "step-7_ckpt", 0, "a1", [object_name(0, "a1")])
        assert arena.exists()


class TestReading:
    def test_versions_are_directories_of_their_name(self, tmpfs: Path) -> None:
        for name in ("step-1_ckpt", "step-20_ckpt", "step-01_ckpt", "other"):
            (tmpfs / name).mkdir()
        (tmpfs / "step-3_ckpt").write_text("a file")
        (tmpfs / "step-4_ckpt").symlink_to(tmpfs / "step-1_ckpt")
        assert sorted(list_versions(tmpfs)) == ["step-1_ckpt", "step-20_ckpt"]
        assert list_versions(tmpfs / "missing") == []

    def test_what_is_written_to_a_mapped_object_stays_private(self, tmpfs: Path, arena: Path) -> None:
        commit_part(tmpfs, manifest_of(7, 0, "a1"), [arena])
        before = arena.read_bytes()
        with map_object(tmpfs, "step-7_ckpt", object_name(0, "a1")) as view:
            assert bytes(view) == before
            view[0] ^= 1
            assert arena.read_bytes() == before
            kept = view[10:20]
        assert bytes(kept) == before[10:20]

    def test_what_cannot_be_mapped(self, tmpfs: Path, arena: Path) -> None:
        (tmpfs / "step-7_ckpt").mkdir()
        (tmpfs / "step-7_ckpt" / "empty").touch()
        (tmpfs / "step-7_ckpt" / "link").symlink_to(arena)
        for name in ("missing", "empty", "link"):
            with pytest.raises(ObjectNotFoundError), map_object(tmpfs, "step-7_ckpt", name):
                pass
        for version, name in (("..", "arena"), ("step-7_ckpt", "../arena"), ("/", "x")):
            with pytest.raises(InvalidNameError), map_object(tmpfs, version, name):
                pass


Function = Callable[[], object]
Prepare = Callable[[Path, contextlib.ExitStack], tuple[Function, Function]]


def interleavings(one: int, other: int) -> Iterator[str]:
    """All orders of so many steps of the first and of the second of two operations."""
    if not one or not other:
        yield "1" * one + "2" * other
        return
    yield from ("1" + rest for rest in interleavings(one - 1, other))
    yield from ("2" + rest for rest in interleavings(one, other - 1))


class TestTwoRanksOfOneNode:
    """Two ranks at work in one version's directory: every order of their changes to files."""

    def run(self, tmpfs: Path, prepare: Prepare, within: str = "/step-") -> int:
        count = 0
        for order in self.orders(tmpfs, prepare, within):
            base = tmpfs / f"job-{count}"
            with contextlib.ExitStack() as stack:
                one, other = (Operation(function, within) for function in prepare(base, stack))
                for which in order:
                    (one if which == "1" else other).step()
                one.finish()
                other.finish()
                self.check(base, order)
            count += 1
        return count

    def orders(self, tmpfs: Path, prepare: Prepare, within: str) -> Iterator[str]:
        steps = []
        with contextlib.ExitStack() as stack:
            for function in prepare(tmpfs / "count", stack):
                operation = Operation(function, within)
                steps.append(0)
                while not operation.step():
                    steps[-1] += 1
        # A step more for each, since they may have to begin anew.
        yield from interleavings(steps[0] + 1, steps[1] + 1)

    def check(self, base: Path, order: str) -> None:
        """Rank 0 has its part of save id a2, and it is whole; of rank 1 nothing is left."""
        assert files(base) == {
            f"step-3_ckpt/{manifest_name(0, 'a2')}",
            f"step-3_ckpt/{object_name(0, 'a2')}",
        }, order
        manifest = read_manifest(base / "step-3_ckpt" / manifest_name(0, "a2"))
        data = (base / "step-3_ckpt" / object_name(0, "a2")).read_bytes()
        assert data[: manifest.objects[0].size] == content(0, "a2"), order

    def test_one_commits_while_the_other_prunes(self, tmpfs: Path) -> None:
        def prepare(base: Path, stack: contextlib.ExitStack) -> tuple[Function, Function]:
            mine, other = (opened(base, rank, stack) for rank in (0, 1))
            old = commit(other, 3, "a1")
            return lambda: commit(mine, 3, "a2"), lambda: other.drop(old)

        assert self.run(tmpfs, prepare) > 30

    @pytest.mark.slow
    def test_one_commits_while_the_other_adopts(self, tmpfs: Path) -> None:
        """Rank 1 was killed in the middle of a commit."""

        def prepare(base: Path, stack: contextlib.ExitStack) -> tuple[Function, Function]:
            mine, dead = opened(base, 0, stack), RankStore(base, 1)
            arena = write(dead.acquire(ARENA, exact=True), 1, "a1")
            dying = Operation(lambda: dead.commit(manifest_of(3, 1, "a1"), [arena]))
            while not dying.at.startswith("os.rename"):
                dying.step()
            dying.kill()
            dead.close()
            os.utime(base / "step-3_ckpt", (1e9, 1e9))
            assert len(files(base)) == 2
            return lambda: commit(mine, 3, "a2"), lambda: opened(base, 1, stack)

        assert self.run(tmpfs, prepare) > 30

    @pytest.mark.slow
    def test_one_adopts_while_the_other_does(self, tmpfs: Path) -> None:
        """Rank 1 was killed while it pruned, so that there is a directory to remove for either."""

        def prepare(base: Path, stack: contextlib.ExitStack) -> tuple[Function, Function]:
            mine, dead = RankStore(base, 0), RankStore(base, 1)
            commit(mine, 3, "a2")
            part = commit(dead, 4, "a1")
            dying = Operation(lambda: dead.drop(part))
            dying.step()
            dying.kill()
            for store in (mine, dead):
                store.close()
            os.utime(base / "step-4_ckpt", (1e9, 1e9))
            assert len(files(base)) == 3
            return lambda: opened(base, 0, stack), lambda: opened(base, 1, stack)

        # In the directory of the other version neither changes anything: no need to stop there.
        assert self.run(tmpfs, prepare, "/step-4_ckpt") > 30


def opened(base: Path, rank: int, stack: contextlib.ExitStack) -> RankStore:
    store = RankStore(base, rank)
    stack.callback(store.close)
    return store


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), OSError(5, "no")])
def test_what_interrupts_a_commit_leaves_nothing_of_it(
    tmpfs: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Its arena goes to the next save, whose bytes must not pass for this one's."""
    store = RankStore(tmpfs, 0)
    part = manifest_of(1, 0, "attempt-1")
    arena = write(store.acquire(ARENA, exact=True), 0, part.save_id)
    real = version_files.write_manifest

    def write_and_be_interrupted(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        raise error

    monkeypatch.setattr(version_files, "write_manifest", write_and_be_interrupted)
    with pytest.raises((SaveError, type(error))):
        commit_part(tmpfs, part, [arena.path])
    assert list_versions(tmpfs) == []
    store.close()
