"""What the control groups of a container leave, from files as the kernel writes them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from ml_flashpoint.checkpoint_object_manager import capacity
from ml_flashpoint.checkpoint_object_manager.arena_pool import ArenaPool
from ml_flashpoint.checkpoint_object_manager.control_groups import memory_left
from ml_flashpoint.core.checkpoint_saver import DefaultMLFlashpointCheckpointSaver
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import CapacityError

GIB = 1 << 30
V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNTS = """31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw
34 31 0:31 {inner} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 {inner} /sys/fs/cgroup/memory rw master:9 - cgroup cgroup rw,memory"""


def processes(root: Path, cgroup: str, mountinfo: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    (root / "proc/self/mountinfo").write_text("22 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + mountinfo + "\n")


def group(root: Path, path: str, **files: object) -> None:
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"memory.{name}").write_text(f"{content}\n")


STAT = "anon 5\nfile 99\nshmem 77\ninactive_file 1000\nactive_file 200"


def test_the_least_of_all_groups_around_the_process(tmp_path: Path) -> None:
    processes(tmp_path, "0::/pods/job", V2_MOUNT)
    group(tmp_path, "pods/job", max="max", high="max", current=GIB, stat=STAT)
    assert memory_left(tmp_path) is None
    group(tmp_path, "pods", max=8 * GIB, high="max", current=3 * GIB, stat=STAT)
    assert memory_left(tmp_path) == 5 * GIB + 1200
    group(tmp_path, "pods/job", max=4 * GIB)
    assert memory_left(tmp_path) == 3 * GIB + 1200
    group(tmp_path, "pods/job", high=2 * GIB)
    assert memory_left(tmp_path) == GIB + 1200
    group(tmp_path, "pods/job", current=9 * GIB)
    assert memory_left(tmp_path) == 0


def test_a_container_that_sees_its_own_group_as_the_top(tmp_path: Path) -> None:
    processes(tmp_path, "0::/", V2_MOUNT)
    group(tmp_path, "", max=2 * GIB, current=GIB, stat="inactive_file 1\nactive_file 2")
    assert memory_left(tmp_path) == GIB + 3


@pytest.mark.parametrize("inner", ["/", "/docker/abc", "/elsewhere"])
def test_version_1(tmp_path: Path, inner: str) -> None:
    processes(tmp_path, "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/", V1_MOUNTS.format(inner=inner))
    group(tmp_path, "memory", limit_in_bytes=2**63 - 4096, usage_in_bytes=GIB, stat="")
    group(
        tmp_path,
        "memory/docker/abc" if inner == "/" else "memory",
        limit_in_bytes=3 * GIB,
        usage_in_bytes=GIB,
        stat="inactive_file 7\ntotal_inactive_file 100\ntotal_active_file 10\ntotal_shmem 8",
    )
    assert memory_left(tmp_path) == 2 * GIB + 110


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"max": "what", "current": 1, "stat": STAT},
        {"max": 1000, "current": "", "stat": STAT},
        {"max": 1000, "current": 1, "stat": "alone\n\n"},
        {"max": 1000, "current": 1, "stat": "inactive_file much"},
    ],
)
def test_files_that_say_nothing_are_no_limit(tmp_path: Path, broken: dict[str, object]) -> None:
    assert memory_left(tmp_path) is None, "there are none at all"
    processes(tmp_path, "0::/job\nnonsense\n1:name=systemd:/\n", "short\n1 2 3 - \n" + V2_MOUNT)
    group(tmp_path, "job", **broken)
    assert memory_left(tmp_path) is None


def test_a_machine_says_something(tmp_path: Path) -> None:
    left = memory_left()
    assert left is None or left >= 0


def test_the_preflight_goes_by_the_container(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmpfs / "root"
    processes(root, "0::/job", V2_MOUNT)
    group(root, "job", max=100 << 20, current=60 << 20, stat="inactive_file 0\nactive_file 0\nshmem 999999999")
    capacity.preflight(tmpfs, 10 << 20)
    capacity.preflight(tmpfs, 30 << 20)
    monkeypatch.setattr(capacity, "memory_left", lambda: memory_left(root))
    capacity.preflight(tmpfs, 10 << 20)
    with pytest.raises(CapacityError, match="container") as raised:
        capacity.preflight(tmpfs, 30 << 20)
    assert raised.value.available_bytes == 40 << 20
    assert capacity.available_bytes(tmpfs) == 40 << 20


def test_an_arena_is_not_made_beyond_what_the_container_has(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [3 << 20]
    monkeypatch.setattr(capacity, "memory_left", lambda: left[0])
    pool = ArenaPool(tmpfs, threading.RLock())
    arena = pool.acquire(2 << 20)
    left[0] = 1 << 20
    with pytest.raises(CapacityError, match="container") as raised:
        arena.grow(4 << 20)
    assert (raised.value.needed_bytes, raised.value.available_bytes) == ((4 << 20) - arena.size, 1 << 20)
    assert arena.size == arena.path.stat().st_size < 4 << 20
    with pytest.raises(CapacityError, match="container"):
        pool.acquire(2 << 20)
    assert [path.name for path in tmpfs.iterdir()] == [arena.path.name]
    left[0] = 3 << 20
    pool.release(pool.acquire(2 << 20))
    pool.close()


def test_a_save_that_takes_no_more_does_not_ask(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left, asked = [1 << 40], []
    monkeypatch.setattr(capacity, "memory_left", lambda: asked.append(True) or left[0])
    saver = DefaultMLFlashpointCheckpointSaver()
    base = CheckpointContainerId(tmpfs)

    def save(step: int, numbers: int) -> None:
        saver.save(CheckpointContainerId.create_child(base, f"step-{step}_ckpt"), [("w", torch.ones(numbers))])
        assert saver.wait(30)

    for step in range(1, 4):
        save(step, 1 << 18)
    asked.clear()
    left[0] = 0
    for step in range(4, 10):
        save(step, 1 << 18)
    assert not asked
    with pytest.raises(CapacityError):
        save(10, 1 << 20)
    save(11, 1 << 18)
    left[0] = 1 << 40
    save(12, 1 << 20)
    assert saver.stats.last_verified == 12
    saver.close()
    saver._objects.close()


def test_what_is_memory(tmpfs: Path, tmp_path: Path) -> None:
    with open("/proc/self/status") as file:
        assert not capacity.is_memory(file.fileno())
    assert capacity.is_memory(Path("/dev/shm")) == (capacity.mount_of(Path("/dev/shm"))[1] == "tmpfs")
    assert not capacity.is_memory(tmpfs / "missing")
