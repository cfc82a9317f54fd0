"""Links planted where megatron-core's saves write: nothing behind them is written or deleted, and training goes on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core.dist_checkpointing import ShardedTensor

from ml_flashpoint.format.errors import UnsafePathError
from tests.support.megatron import Door, without_cuda

without_cuda()
pytestmark = pytest.mark.usefixtures("process_group")
NAMES = ("common.pt", "metadata.json", ".sidecars", "precious")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


@pytest.fixture
def base(tmpfs: Path) -> Path:
    return tmpfs / "job"


@pytest.fixture
def victim(tmpfs: Path) -> Iterator[Path]:
    """A long-term checkpoint of this user, which is as it was in the end."""
    folder = tmpfs / "iter_1"
    folder.mkdir(mode=0o700)
    for name in NAMES:
        (folder / name).write_bytes(b"precious\ncommon.pt\n")
    yield folder
    assert {each.name: each.read_bytes() for each in folder.iterdir()} == dict.fromkeys(NAMES, b"precious\ncommon.pt\n")


def state(step: int) -> dict[str, object]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.full((3, 700), float(step))), "step": step}


def check_newest(base: Path, step: int) -> None:
    door = Door(base)
    found = door.load_megatron({"w": state(0)["w"]}, step)
    assert (found["step"], found["w"].unique().tolist()) == (step, [step])
    door.close()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_version_that_is_a_link_fails_and_the_next_save_is_good(base: Path, victim: Path, asynchronous: bool) -> None:
    door = Door(base)
    door.save_megatron(state(1), 1)
    (base / "step-2_ckpt").symlink_to(victim)
    door.save_megatron(state(2), 2, asynchronous=asynchronous)
    assert "cannot be used as a folder" in str(door.save_strategy.last_error)
    door.save_megatron(state(3), 3, asynchronous=asynchronous)
    assert door.save_strategy.last_error is None
    door.close()
    check_newest(base, 3)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_files_that_are_links_are_replaced(base: Path, victim: Path, asynchronous: bool) -> None:
    version = base / "step-1_ckpt"
    version.mkdir(parents=True, mode=0o700)
    base.chmod(0o700)
    names = ["common.pt", "metadata.json", ".sidecars"]
    for name in names:
        (version / name).symlink_to(victim / name)
    door = Door(base)
    door.latest()
    door.save_megatron(state(1), 1, asynchronous=asynchronous)
    assert door.save_strategy.last_error is None
    door.close()
    for name in names:
        assert not (version / name).is_symlink()
        (version / name).unlink()
        (version / name).symlink_to(victim / name)
    check_newest(base, 1)
    assert not (version / "common.pt").is_symlink()
    assert not (version / "metadata.json").is_symlink()


@as_root
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", ["", ".flashpoint", ".flashpoint/slots"])
def test_a_folder_that_is_somebody_elses_link_is_refused(
    base: Path, victim: Path, name: str, asynchronous: bool
) -> None:
    planted = base / name
    planted.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    planted.symlink_to(victim)
    os.lchown(planted, 54321, 54321)
    door = Door(base)
    door.save_megatron(state(1), 1, asynchronous=asynchronous)
    assert door.save_strategy.last_error is not None
    assert str(planted) in str(door.save_strategy.last_error)
    door.save_megatron(state(2), 2, asynchronous=asynchronous)
    if name != ".flashpoint/slots":
        with pytest.raises(UnsafePathError):
            door.latest()
    planted.unlink()
    door.save_megatron(state(3), 3, asynchronous=asynchronous)
    assert door.save_strategy.last_error is None
    door.close()
    check_newest(base, 3)
