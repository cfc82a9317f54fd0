"""What is read of a running job's version is what was saved, or the reader is told; the job goes on in any case."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from ml_flashpoint import Flashpoint, open_version
from ml_flashpoint.format.errors import (
    DamagedError,
    FlashpointError,
    ObjectNotFoundError,
    PrunedError,
    SaveError,
    UnreadableError,
    UnsafePathError,
)
from ml_flashpoint.tools.copy import copy_version
from tests.support.commands import flashpoint
from tests.support.forked import call
from tests.workers import cli_bases
from tests.workers.cli_bases import Part

_KEY = "model.weight"


class _Job:
    """A job whose weights are the number of its step."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.model = torch.nn.Linear(256, 256, bias=False)
        self.flashpoint = Flashpoint(base).track(model=self.model)
        self.flashpoint.resume()

    def save(self, count: int = 1) -> int:
        for _ in range(count):
            with torch.no_grad():
                self.model.weight.fill_(self.flashpoint.steps_done + 1)
            self.flashpoint.step()
            assert self.flashpoint.wait(60)
        assert self.flashpoint.health.failures == 0
        return self.flashpoint.steps_done


@pytest.fixture
def job(tmpfs: Path) -> _Job:
    made = _Job(tmpfs / "job")
    made.save(2)
    return made


def _is_all(tensor: torch.Tensor, value: int) -> bool:
    return bool((tensor == value).all())


def test_an_open_version_stays_what_it_was(job: _Job) -> None:
    with open_version(job.base) as version:
        tensor, array = version.tensor(0, _KEY), version.numpy(0, _KEY)
        assert (version.step, list(version.manifests)) == (2, [0])
        assert _KEY in list(version.keys(0))
        job.save(6)
        assert _is_all(tensor, 2)
        assert (array == 2).all()
        with open_version(job.base, 2) as again:
            assert _is_all(again.tensor(0, _KEY), 2)
    job.save(2)
    assert not (job.base / "step-2_ckpt").exists()
    with open_version(job.base) as newest:
        assert newest.step == 10
        with pytest.raises(ObjectNotFoundError):
            newest.tensor(1, _KEY)
    job.flashpoint.close()


def test_a_version_that_was_removed_is_told_of(job: _Job) -> None:
    with open_version(job.base) as version:
        tensor = version.tensor(0, _KEY)
        for path in job.base.glob("step-2_ckpt/*"):
            path.unlink()
        assert _is_all(tensor, 2), "what was read is the reader's own"
        with pytest.raises(PrunedError, match="step 2"):
            list(version.object(0).pieces())
    job.flashpoint.close()


@pytest.mark.stores_any_bytes
def test_a_version_that_is_not_whole_here_is_taken_only_if_asked_for(tmpfs: Path) -> None:
    base = tmpfs / "job"
    call(cli_bases.make, base, [0], [])
    with pytest.raises(ObjectNotFoundError, match="there is no complete version"):
        open_version(base)
    call(cli_bases.make, base, [0], [Part(0, 1)])
    with pytest.raises(ObjectNotFoundError, match=r"ranks 1, 2, 3 of 4 are missing.*--partial"):
        open_version(base)
    with open_version(base, partial=True) as version:
        assert list(version.manifests) == [0]


# ---- copies -------------------------------------------------------------------------------------------------------


def _weight(version: Path) -> torch.Tensor:
    [path] = version.glob("*.safetensors")
    with safe_open(path, "pt") as file:
        tensor: torch.Tensor = file.get_tensor(_KEY)
        return tensor


def test_a_copy_is_what_was_saved(job: _Job, tmpfs: Path) -> None:
    told: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        if not told:
            job.save(4)  # what is being copied is pruned by now, or would be
        told.append((done, total))

    copied = copy_version(job.base, tmpfs / "copies", 2, progress=progress)
    assert told[-1][0] == told[-1][1] > 256 * 256 * 4
    assert _is_all(_weight(copied), 2)
    assert flashpoint("verify", tmpfs / "copies") == 0
    newest = job.flashpoint.steps_done
    copy_version(job.base, tmpfs / "copies", newest)
    with pytest.raises(SaveError, match="already"):
        copy_version(job.base, tmpfs / "copies", newest)
    job.flashpoint.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
def test_nothing_is_copied_to_where_another_user_planted_a_link(job: _Job, tmpfs: Path) -> None:
    shared, elsewhere = tmpfs / "shared", tmpfs / "elsewhere"
    shared.mkdir()
    shared.chmod(0o1777)
    elsewhere.mkdir()
    (shared / "copies").symlink_to(elsewhere)
    os.lchown(shared / "copies", 54321, 54321)
    with pytest.raises(UnsafePathError, match="user 54321"):
        copy_version(job.base, shared / "copies")
    assert not list(elsewhere.iterdir())
    job.flashpoint.close()


def test_a_version_that_goes_meanwhile_is_not_copied_and_the_newest_is(
    job: _Job, tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ml_flashpoint.stores.version_store.PIECE_BYTES", 4096)
    saves = [1]

    def save_some(done: int, total: int) -> None:
        if saves:
            job.save(saves.pop())
            for path in job.base.glob(f"step-{job.flashpoint.steps_done - 1}_ckpt/*"):
                path.unlink()

    job.save()
    with pytest.raises(PrunedError):
        copy_version(job.base, tmpfs / "copies", 3, progress=save_some)
    assert not list((tmpfs / "copies").iterdir())
    saves.append(1)
    copied = copy_version(job.base, tmpfs / "copies", progress=save_some)
    assert copied.name == f"step-{job.flashpoint.steps_done}_ckpt"
    assert _is_all(_weight(copied), job.flashpoint.steps_done)
    job.flashpoint.close()


@pytest.mark.damages_on_purpose
def test_damage_is_not_copied(job: _Job, tmpfs: Path) -> None:
    [path] = (job.base / "step-2_ckpt").glob("*.safetensors")
    with open(path, "r+b") as file:
        file.seek(100_000)
        file.write(b"\xff")
    with pytest.raises(DamagedError, match="as recorded"):
        copy_version(job.base, tmpfs / "copies", 2)
    assert not list((tmpfs / "copies").iterdir())
    assert copy_version(job.base, tmpfs / "copies").name == "step-1_ckpt"  # what is damaged is left for an older one
    with pytest.raises(DamagedError), open_version(job.base, 2) as version:
        version.tensor(0, _KEY)
    [manifest] = (job.base / "step-2_ckpt").glob("*.manifest")
    manifest.unlink()
    manifest.symlink_to("nowhere")  # cannot be read, which is not passed over either
    with pytest.raises((DamagedError, UnreadableError)):
        open_version(job.base, 2)
    job.flashpoint.close()


@pytest.mark.parametrize("spare", [0, 2, 4])
def test_what_cannot_be_opened_just_now_is_not_taken_for_none(job: _Job, tmpfs: Path, spare: int) -> None:
    """Nor are descriptors lost on the way."""
    lowest = os.open("/dev/null", os.O_RDONLY)
    os.close(lowest)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + spare, limits[1]))
    found: list[object] = []
    try:
        for read in (lambda: _read(job.base), lambda: copy_version(job.base, tmpfs / "copies").name):
            try:
                found.append(read())
            except FlashpointError as error:
                found.append(error)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not [
        path
        for path in Path("/proc/self/fd").iterdir()
        if str(tmpfs) in (at := os.path.realpath(path)) and "step-2_ckpt" in at
    ]
    assert isinstance(found[0], UnreadableError) or found[0] == 2
    assert isinstance(found[1], (UnreadableError, SaveError)) or found[1] == "step-2_ckpt"
    assert _read(job.base) == 2
    job.flashpoint.close()


def _read(base: Path) -> float:
    with open_version(base) as version:
        return float(version.tensor(0, _KEY)[0, 0])
