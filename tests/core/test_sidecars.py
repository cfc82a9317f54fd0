"""Files beside the parts of a version: kept in an object, and back on every node after a recovery."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ml_flashpoint.checkpoint_object_manager import version_files
from ml_flashpoint.checkpoint_object_manager.checkpoint_object_manager import CheckpointObjectManager
from ml_flashpoint.checkpoint_object_manager.version_files import write_sidecars
from ml_flashpoint.core.checkpoint_loader import DefaultMLFlashpointCheckpointLoader
from ml_flashpoint.core.checkpoint_saver import DefaultMLFlashpointCheckpointSaver
from ml_flashpoint.core.engine import CheckpointEngine
from ml_flashpoint.core.persist_options import PersistOptions
from ml_flashpoint.core.sidecars import carrier_of, sidecar_items, sidecar_labels
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import InvalidNameError, ManifestError, NothingLoadableError
from ml_flashpoint.format.manifest import manifest_name, object_name, read_manifest
from tests.support.forked import Team, wait_until
from tests.support.persisting import await_store
from tests.support.tmpfs import remove_folder
from tests.workers import sidecar_saves
from tests.workers.fault_engine import fill
from tests.workers.sidecar_saves import FILES


def version(base: Path, step: int) -> CheckpointContainerId:
    name = CheckpointContainerId.format_version_container(step)
    return CheckpointContainerId.create_child(CheckpointContainerId(base), name)


def run(function: Any, root: Path, world_size: int, *args: Any) -> list[Any]:
    """What a function returns on each rank; none ends before all have done their work."""
    with Team(function, root, world_size, *args) as team:
        for rank in team.ranks:
            rank.next_report("done")
        for rank in team.ranks:
            rank.say("end")
        return team.results()


@pytest.mark.parametrize("carrier", [0, 1])
def test_a_replaced_node_has_them_again(tmpfs: Path, carrier: int) -> None:
    run(sidecar_saves.save, tmpfs, 2, [1, 2], carrier)
    for node in (0, 1):
        remove_folder(tmpfs / f"node-{node}")
        assert run(sidecar_saves.recover, tmpfs, 2) == [("step-2_ckpt", FILES)] * 2


def test_nodes_that_were_not_there_have_them_too(tmpfs: Path) -> None:
    run(sidecar_saves.save, tmpfs, 2, [1], 1)
    assert run(sidecar_saves.recover, tmpfs, 3) == [("step-1_ckpt", FILES)] * 3


class TestOneRank:
    def save(self, base: Path, steps: list[int], files: dict[str, bytes]) -> None:
        objects = CheckpointObjectManager()
        saver = DefaultMLFlashpointCheckpointSaver(ckpt_obj_manager=objects)
        for step in steps:
            items = sidecar_items(files)
            saver.save(version(base, step), [("w", torch.ones(9))], items, labels=sidecar_labels(0))
            write_sidecars(base, f"step-{step}_ckpt", files)
        saver.wait(10)
        saver.close()
        objects.close()

    def recover(self, base: Path) -> CheckpointContainerId | None:
        objects = CheckpointObjectManager()
        found = DefaultMLFlashpointCheckpointLoader(objects).get_latest_complete_checkpoint(base)
        objects.close()
        return found

    def test_a_damaged_file_is_replaced(self, tmpfs: Path) -> None:
        self.save(tmpfs, [1], FILES)
        folder = tmpfs / "step-1_ckpt"
        (folder / "common.pt").write_bytes(b"damaged")
        (folder / "metadata.json").unlink()
        (folder / "metadata.json").symlink_to(tmpfs / "elsewhere")
        assert self.recover(tmpfs) == version(tmpfs, 1)
        assert {name: (folder / name).read_bytes() for name in FILES} == FILES
        assert not (tmpfs / "elsewhere").exists()

    def test_a_full_filesystem_has_room_for_them(self, small_tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Else there would be versions, and none could be loaded, for want of a few pages."""
        monkeypatch.setenv("FLASHPOINT_RECOVERY_DEADLINE_S", "1")
        files = {**FILES, "large": bytes(range(256)) * 400}
        base = small_tmpfs / "job"
        self.save(base, [1, 2], files)
        for name in files:
            (base / "step-2_ckpt" / name).unlink()
        fill(small_tmpfs / "others", 0)
        assert self.recover(base) == version(base, 2)
        assert {name: (base / "step-2_ckpt" / name).read_bytes() for name in files} == files

    def test_they_go_with_the_version(self, tmpfs: Path) -> None:
        self.save(tmpfs, [1, 2, 3], FILES)
        assert sorted(p.name for p in tmpfs.iterdir() if p.name != ".flashpoint") == ["step-3_ckpt"]

    def test_what_is_not_ours_stays(self, tmpfs: Path) -> None:
        (tmpfs / "step-1_ckpt").mkdir()
        (tmpfs / "step-1_ckpt" / "notes.txt").write_text("mine")
        self.save(tmpfs, [1, 2], FILES)
        assert os.listdir(tmpfs / "step-1_ckpt") == ["notes.txt"]

    def test_what_a_crash_left_without_a_part_is_swept(self, tmpfs: Path) -> None:
        for step, age_s in ((7, 1e6), (8, 0)):
            write_sidecars(tmpfs, f"step-{step}_ckpt", FILES)
            (tmpfs / f"step-{step}_ckpt" / ".common.pt.0f.tmp").write_bytes(b"cut short")
            if age_s:
                os.utime(tmpfs / f"step-{step}_ckpt", (1e9, 1e9))
        self.save(tmpfs, [1], {})
        # The other one may be another rank's that is about to save there.
        assert sorted(p.name for p in tmpfs.iterdir() if p.name != ".flashpoint") == ["step-1_ckpt", "step-8_ckpt"]

    def test_a_folder_that_another_rank_has_just_made_for_them_stays(self, tmpfs: Path) -> None:
        """`torch.save` is about to write there. One of an earlier life goes, although a part is swept from it first."""
        for step, age_s in ((7, 1e6), (8, 0), (9, 1e6)):
            (tmpfs / f"step-{step}_ckpt").mkdir()
            if step == 9:
                (tmpfs / "step-9_ckpt" / f".{manifest_name(0, 'a1')}.0f.tmp").write_bytes(b"cut short")
            if age_s:
                os.utime(tmpfs / f"step-{step}_ckpt", (1e9, 1e9))
        self.save(tmpfs, [1], {})
        assert sorted(p.name for p in tmpfs.iterdir() if p.name != ".flashpoint") == ["step-1_ckpt", "step-8_ckpt"]

    @pytest.mark.parametrize("times", [1, 5])
    def test_a_folder_that_goes_meanwhile_is_made_again(
        self, tmpfs: Path, monkeypatch: pytest.MonkeyPatch, times: int
    ) -> None:
        opened, gone = version_files.open_folder, []

        def removed_at_once(directory: Path) -> int:
            folder = opened(directory)
            if len(gone) < times:
                gone.append(directory)
                directory.rmdir()
            return folder

        monkeypatch.setattr(version_files, "open_folder", removed_at_once)
        write_sidecars(tmpfs, "step-1_ckpt", FILES)
        assert len(gone) == times
        assert {name: (tmpfs / "step-1_ckpt" / name).read_bytes() for name in FILES} == FILES

    def test_a_name_that_could_be_a_part_s_is_refused(self, tmpfs: Path) -> None:
        for name in (object_name(0, "a1"), ".hidden", "up/down", ".."):
            with pytest.raises(InvalidNameError):
                write_sidecars(tmpfs, "step-1_ckpt", {name: b""})
            with pytest.raises(InvalidNameError):
                sidecar_items({name: b""})
        assert list(tmpfs.iterdir()) == []

    def test_a_name_that_came_from_elsewhere_is_refused(self, tmpfs: Path) -> None:
        objects = CheckpointObjectManager()
        saver = DefaultMLFlashpointCheckpointSaver(ckpt_obj_manager=objects)
        for step, name in ((1, "fine"), (2, "../../escaped")):
            items = [(f"__file__/{name}", b"content")]
            saver.save(version(tmpfs / "job", step), [], items, labels=sidecar_labels(0))
        assert saver.wait(10)
        saver.close()
        objects.close()
        with pytest.raises(NothingLoadableError, match=r"step-2_ckpt.*a name must not hold a slash"):
            self.recover(tmpfs / "job")
        assert sorted(p.name for p in tmpfs.iterdir()) == ["job"]

    def test_a_carrier_that_is_no_rank_of_the_version_is_refused(self, tmpfs: Path) -> None:
        objects = CheckpointObjectManager()
        saver = DefaultMLFlashpointCheckpointSaver(ckpt_obj_manager=objects)
        for step, said in enumerate(["1", "-1", "x", "²"], 1):
            saver.save(version(tmpfs, step), [], labels={"companions": said})
            (path,) = (tmpfs / f"step-{step}_ckpt").glob("*.manifest")
            with pytest.raises(ManifestError, match="no rank keeps its files"):
                carrier_of(read_manifest(path))
        saver.close()
        objects.close()


def persisted_with_files(base: Path, store: Path, *steps: int) -> None:
    with CheckpointEngine(base, persist=PersistOptions(str(store), persist_every=1)) as engine:
        engine.latest()
        await_store(engine.persisting)
        for step in steps:
            tensors = [("w", torch.full((9000,), float(step)))]
            items = sidecar_items({"common.pt": b"%d" % step})
            engine.saver.save(engine.version(step), tensors, items, labels=sidecar_labels(0))
            assert engine.saver.wait(20)
            wait_until(lambda step=step: engine.persist_health.persisted == step, "it is persisted")  # type: ignore[misc]


def test_they_come_back_with_a_persisted_version(tmpfs: Path) -> None:
    base, store = tmpfs / "job", tmpfs / "store"
    persisted_with_files(base, store, 1, 2)
    remove_folder(base)
    with CheckpointEngine(base, persist=PersistOptions(str(store))) as engine:
        assert engine.latest() == engine.version(2)
        assert (base / "step-2_ckpt" / "common.pt").read_bytes() == b"2"


@pytest.mark.damages_on_purpose
def test_a_persisted_version_without_them_is_left_for_an_older_one(tmpfs: Path) -> None:
    base, store = tmpfs / "job", tmpfs / "store"
    persisted_with_files(base, store, 1, 2)
    remove_folder(base)
    for step in (2, 1):
        (path,) = store.glob(f"run-*/step-{step}_ckpt/*.safetensors")
        path.write_bytes(path.read_bytes().replace(b"\0" * 64, b"x" * 64, 1).replace(b"common.pt", b"commom.pt"))
        with CheckpointEngine(base, persist=PersistOptions(str(store))) as engine:
            if step == 2:
                assert engine.latest() == engine.version(1)
                assert (base / "step-1_ckpt" / "common.pt").read_bytes() == b"1"
            else:
                with pytest.raises(NothingLoadableError, match=r"step-2_ckpt.*step-1_ckpt"):
                    engine.latest()
