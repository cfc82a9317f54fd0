"""A slot is reserved, mapped and faulted in once, and is the object of the part that it holds."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest
import torch

from ml_flashpoint.format.errors import CapacityError, DamagedError, SaveError, UnsafePathError
from ml_flashpoint.memory.slot import PAGE, Slot
from tests.memory.support import layout_of
from tests.support.descriptors import NoDescriptors
from tests.support.tmpfs import SMALL_TMPFS_BYTES


def resident(slot: Slot) -> int:
    """Return the bytes of a slot that this process has mapped pages for."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith(f"{slot.address:x}-"))
    return 1024 * int(next(line for line in lines[begin:] if line.startswith("Rss:")).split()[1])


def test_a_new_slot_is_whole_private_and_faulted_in(tmpfs: Path) -> None:
    slot = Slot.make(tmpfs / "0", 10 * PAGE - 1)
    status = os.stat(tmpfs / "0")
    assert (slot.size, status.st_size, status.st_mode & 0o777) == (10 * PAGE, 10 * PAGE, 0o600)
    assert status.st_blocks * 512 == resident(slot) == slot.size
    assert os.listdir(tmpfs) == ["0"]
    slot.close()


def test_an_object_that_does_not_fit_leaves_the_slot_as_it_is(tmpfs: Path) -> None:
    slot = Slot.make(tmpfs / "0", PAGE)
    slot.tensor.fill_(7)
    with pytest.raises(CapacityError, match="does not fit"):
        slot.seal(layout_of(), [b"abc"])
    assert set(slot.buffer) == {7}
    slot.close()


def test_a_full_tmpfs_is_an_error_and_not_a_signal(small_tmpfs: Path) -> None:
    slot = Slot.make(small_tmpfs / "0", SMALL_TMPFS_BYTES // 2)
    with pytest.raises(CapacityError, match="no room") as raised:
        Slot.make(small_tmpfs / "1", SMALL_TMPFS_BYTES // 2 + PAGE)
    assert raised.value.available_bytes is not None
    assert os.listdir(small_tmpfs) == ["0"]
    slot.tensor.fill_(1)
    slot.remove()
    Slot.make(small_tmpfs / "1", SMALL_TMPFS_BYTES - PAGE).close()


def test_making_ends_where_it_is_told_to(tmpfs: Path) -> None:
    asked: list[int] = []

    def go_on(left: int) -> bool:
        asked.append(left)
        return len(asked) < 2

    with pytest.raises(CapacityError):
        Slot.make(tmpfs / "0", (64 << 20) + PAGE, go_on=go_on)
    assert asked == [(64 << 20) + PAGE, PAGE]
    assert os.listdir(tmpfs) == []


def test_a_process_that_goes_on_too_late_leaves_the_slot_of_the_next_job(tmpfs: Path) -> None:
    folder = tmpfs / "slots"
    folder.mkdir()

    def next_job(left: int) -> bool:
        shutil.rmtree(folder)
        folder.mkdir()
        Slot.make(folder / "0", PAGE).close()
        return True

    with pytest.raises(SaveError, match="cannot make a slot"):
        Slot.make(folder / "0", 2 * PAGE, go_on=next_job)
    assert os.listdir(folder) == ["0"]
    lost = Slot.open(folder / "0")
    lost.path.unlink()

    def remove_lost(left: int) -> bool:
        lost.remove()
        return True

    Slot.make(folder / "0", PAGE, go_on=remove_lost).close()
    assert os.listdir(folder) == ["0"]


def test_a_process_without_descriptors_leaves_nothing(tmpfs: Path) -> None:
    with NoDescriptors(), pytest.raises(SaveError, match="cannot make a slot"):
        Slot.make(tmpfs / "0", PAGE)
    assert os.listdir(tmpfs) == []


def test_what_cannot_be_a_slot_is_refused(tmpfs: Path) -> None:
    (tmpfs / "short").write_bytes(b"x" * (PAGE + 1))
    (tmpfs / "empty").touch()
    (tmpfs / "link").symlink_to(tmpfs / "short")
    os.mkfifo(tmpfs / "pipe")
    for name, error in (("short", DamagedError), ("empty", DamagedError), ("link", UnsafePathError)):
        with pytest.raises(error):
            Slot.open(tmpfs / name)
    with pytest.raises(UnsafePathError):
        Slot.open(tmpfs / "pipe")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
def test_a_slot_of_another_user_is_refused(tmpfs: Path) -> None:
    Slot.make(tmpfs / "0", PAGE).close()
    os.chown(tmpfs / "0", 65534, 65534)
    with pytest.raises(UnsafePathError, match="belongs to user 65534"):
        Slot.open(tmpfs / "0")


def test_views_outlive_the_slot_and_keep_their_bytes(tmpfs: Path) -> None:
    slot = Slot.make(tmpfs / "0", 2 * PAGE)
    with torch.inference_mode():
        view = slot.view(PAGE, PAGE + 16, torch.float64, (2,))
        slot.tensor.zero_()
    view[:] = 3.0
    assert view.storage_offset() == 0
    assert slot.view(8, 8, torch.int64, (0, 4)).shape == (0, 4)
    slot.close()
    slot.close()
    assert view.tolist() == [3.0, 3.0]


def test_a_removed_slot_frees_its_memory_although_a_forked_child_maps_it(small_tmpfs: Path) -> None:
    slot = Slot.make(small_tmpfs / "0", SMALL_TMPFS_BYTES // 2)
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:  # a worker of a data loader
        os.read(told, 1)
        os._exit(0)
    try:
        slot.remove()
        Slot.make(small_tmpfs / "1", SMALL_TMPFS_BYTES - PAGE).remove()
    finally:
        os.write(tell, b"x")
        os.waitpid(child, 0)
        os.close(told)
        os.close(tell)


def test_other_threads_run_while_pages_are_faulted_in(tmpfs: Path) -> None:
    ticks, done = 0, threading.Event()
    left: list[int] = []

    def make() -> None:
        slot = Slot.make(tmpfs / "0", 256 << 20)
        left.append(slot.size - resident(slot))
        slot.remove()
        done.set()

    thread = threading.Thread(target=make)
    thread.start()
    while not done.is_set():
        ticks += 1
    thread.join()
    assert ticks > 100
    assert left == [0]
