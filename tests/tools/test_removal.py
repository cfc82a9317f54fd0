"""Removing persisted versions by hand: not the one that a job would go on from, and not while one persists there."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest

from ml_flashpoint import Flashpoint
from ml_flashpoint.format.errors import DeadlineError, InvalidArgumentError, JobInUseError, ObjectNotFoundError
from ml_flashpoint.format.names import object_name
from ml_flashpoint.stores.durable import MARKER, DurableVersions
from ml_flashpoint.stores.files import Directory
from ml_flashpoint.tools import removal as module
from ml_flashpoint.tools.removal import remove_versions
from tests.flashpoint.test_persist import write_steps
from tests.stores.test_durable import LATER, RUN, content, counting, part, persist
from tests.support.commands import flashpoint
from tests.support.loops import Stored

pytestmark = [pytest.mark.damages_on_purpose, pytest.mark.stores_any_bytes]


@pytest.fixture
def root(tmpfs: Path) -> Path:
    return tmpfs / "store"


@pytest.fixture
def url(root: Path) -> str:
    return f"file://{root}"


@pytest.fixture
def store(root: Path) -> DurableVersions:
    """With steps 1 and 2, and step 1 of a later run, which is the newest."""
    store = DurableVersions(Directory(root))
    persist(store, 1)
    persist(store, 2)
    persist(store, 1, LATER)
    return store


def steps(store: DurableVersions) -> list[int]:
    return [version.step for version in counting(store)]


@pytest.mark.parametrize("scheme", ["file", "local"])
def test_a_step_goes_and_no_other(root: Path, store: DurableVersions, scheme: str) -> None:
    url = f"{scheme}://{root}"
    assert remove_versions(url, 2) == [f"run-{RUN}/step-2_ckpt"]
    assert steps(store) == [1, 1]
    with pytest.raises(ObjectNotFoundError, match="no version of step 2"):
        remove_versions(url, 2)
    with pytest.raises(ObjectNotFoundError):
        remove_versions(f"{scheme}://{root}/none")
    assert not (root / "none").exists(), "nothing is made where there is nothing"


def test_the_newest_goes_only_if_that_is_said(url: str, store: DurableVersions) -> None:
    for step in (1, None):
        with pytest.raises(InvalidArgumentError, match=r"--newest"):
            remove_versions(url, step)
    assert steps(store) == [1, 2, 1]
    assert len(remove_versions(url, 1, newest=True)) == 2  # both saves of it
    assert steps(store) == [2]
    assert [name for name in store.files.list() if name.startswith("run-")] == [f"run-{part(2).save.text}"]


def test_what_is_not_whole_is_not_what_a_job_goes_on_from(url: str, store: DurableVersions) -> None:
    newest = counting(store)[0]
    store.files.remove(f"{newest.folder}/{object_name(0, newest.save_id)}")
    with pytest.raises(InvalidArgumentError, match=r"step-2_ckpt is the newest complete version"):
        remove_versions(url, 2)
    assert len(remove_versions(url, 1)) == 2
    assert steps(store) == [2]


def test_all_goes_but_what_is_of_no_training_job(url: str, root: Path, store: DurableVersions) -> None:
    store.write_part(part(9), content)  # of a save that was cut short
    marker = f"{counting(store)[-1].folder}/{MARKER}"
    store.files.write(marker, [b"damaged"])
    (root / "dictionary" / "run-x").mkdir(parents=True)
    (root / "notes.txt").write_text("mine")
    assert len(remove_versions(url, newest=True)) == 4
    assert store.files.list() == ["dictionary", "lock", "notes.txt"]
    with pytest.raises(ObjectNotFoundError):
        remove_versions(url, newest=True)


class HangingFiles(Directory):
    """Does not come back from the removal of a folder, until it is told to."""

    go_on = threading.Event()
    ended = threading.Event()

    def remove_folder(self, folder: str) -> None:
        self.go_on.wait()
        self.ended.set()
        super().remove_folder(folder)


def test_a_store_that_hangs_is_given_up(
    url: str, root: Path, store: DurableVersions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "open_store", lambda source: DurableVersions(HangingFiles(root)))
    with pytest.raises(DeadlineError, match=r"nothing has happened for 0.3 s"):
        remove_versions(url, 2, deadline_s=0.3)
    assert steps(store) == [1, 1]  # the marker goes first
    HangingFiles.go_on.set()
    assert HangingFiles.ended.wait(60)


def test_the_command(url: str, root: Path, store: DurableVersions, capsys: pytest.CaptureFixture[str]) -> None:
    assert flashpoint("rm", f"{url}@2") == 2
    assert "pass --yes" in capsys.readouterr().err
    assert flashpoint("rm", f"{root}@1", "--yes") == 2
    assert "pass --newest" in capsys.readouterr().err
    with store.owned():
        assert flashpoint("rm", f"{root}@2", "--yes") == 1
    assert "a job persists at this URL" in capsys.readouterr().err
    assert steps(store) == [1, 2, 1]
    assert flashpoint("rm", f"{root}@2", "--yes", "--json") == 0
    assert json.loads(capsys.readouterr().out)["versions"] == [f"run-{RUN}/step-2_ckpt"]


@pytest.mark.slow
def test_a_job_goes_on_from_what_is_left(tmpfs: Path, url: str, root: Path) -> None:
    base = tmpfs / "job"
    with Flashpoint(base, persist=url, persist_every=1, strict=True) as fp:
        fp.track(value=Stored(1)).resume()
        write_steps(fp, 3)
        with pytest.raises(JobInUseError):
            remove_versions(url, 1)
    remove_versions(url, 3, newest=True)
    shutil.rmtree(base)
    with Flashpoint(base, persist=url, strict=True) as fp:
        assert fp.track(value=Stored()).resume() == 2
    assert flashpoint("rm", url, "--yes", "--newest") == 0
    shutil.rmtree(base)
    with Flashpoint(base, persist=url, strict=True) as fp:
        assert fp.track(value=Stored()).resume() == 0
