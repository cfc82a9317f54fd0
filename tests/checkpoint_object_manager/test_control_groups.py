"""What the control groups of a container leave, from files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ml_flashpoint.checkpoint_object_manager import capacity
from ml_flashpoint.checkpoint_object_manager.control_groups import memory_left
from ml_flashpoint.core.errors import CapacityError

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
