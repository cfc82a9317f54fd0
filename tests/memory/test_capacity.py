"""The least of what the filesystem, the machine and the control groups leave."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from ml_flashpoint.memory.capacity import available_bytes, is_memory

MIB = 1 << 20
STAT = "anon 5\nfile 99\nshmem 77\ninactive_file 1000\nactive_file 200"


def processes(root: Path, cgroup: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)


def group(root: Path, path: str, **files: object) -> None:
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"memory.{name}").write_text(f"{content}\n")


def test_the_least_of_all_groups_around_the_process(tmpfs: Path) -> None:
    root = tmpfs / "root"
    processes(root, "0::/pods/job")
    group(root, "pods/job", max="max", high="max", current=MIB, stat=STAT)
    unlimited = available_bytes(tmpfs, root=root)
    group(root, "pods", max=8 * MIB, high="max", current=3 * MIB, stat=STAT)
    assert available_bytes(tmpfs, root=root) == 5 * MIB + 1200 < unlimited
    group(root, "pods/job", max=4 * MIB)
    assert available_bytes(tmpfs, root=root) == 3 * MIB + 1200
    group(root, "pods/job", high=2 * MIB)
    assert available_bytes(tmpfs / "not/there", root=root) == MIB + 1200
    group(root, "pods/job", current=9 * MIB)
    assert available_bytes(tmpfs, root=root) == 0


def test_a_container_that_sees_its_own_group_as_the_top(tmpfs: Path) -> None:
    processes(tmpfs, "0::/docker/abc/job/rank")
    group(tmpfs, "", max=2 * MIB, current=MIB, stat="inactive_file 1\nactive_file 2")
    assert available_bytes(tmpfs, root=tmpfs) == MIB + 3
    group(tmpfs, "job/rank", max="max", current=MIB, stat=STAT)
    group(tmpfs, "job", max=4 * MIB, current=MIB, stat=STAT)
    group(tmpfs, "", max=8 * MIB)
    assert available_bytes(tmpfs, root=tmpfs) == 3 * MIB + 1200


@pytest.mark.parametrize("seen", ["memory/docker/abc", "memory"])
def test_version_1(tmpfs: Path, seen: str) -> None:
    processes(tmpfs, "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/")
    group(tmpfs, "memory", limit_in_bytes=2**63 - 4096, usage_in_bytes=MIB, stat="")
    group(
        tmpfs,
        seen,
        limit_in_bytes=3 * MIB,
        usage_in_bytes=MIB,
        stat="inactive_file 7\ntotal_inactive_file 100\ntotal_active_file 10\ntotal_shmem 8",
    )
    assert available_bytes(tmpfs, root=tmpfs) == 2 * MIB + 110


@pytest.mark.parametrize(
    "broken",
    [{}, {"max": "what", "current": 1}, {"max": 1000, "current": ""}, {"max": 1000, "current": 1, "stat": "alone\n\n"}],
)
def test_files_that_say_nothing_are_no_limit(tmpfs: Path, broken: dict[str, object]) -> None:
    processes(tmpfs, "0::/../job\nnonsense\n1:name=systemd:/\n0::/job\n")
    group(tmpfs, "job", **broken)
    assert available_bytes(tmpfs, root=tmpfs) > 1000


def test_what_the_machine_has_left_is_a_limit(tmpfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=12345, total=1 << 40))
    assert available_bytes(tmpfs, root=tmp_path) == 12345


def test_a_small_tmpfs_is_the_limit(small_tmpfs: Path, tmp_path: Path) -> None:
    (small_tmpfs / "file").write_bytes(b"x" * MIB)
    assert (
        available_bytes(small_tmpfs) == os.statvfs(small_tmpfs).f_bavail * os.statvfs(small_tmpfs).f_frsize <= 3 * MIB
    )
    assert is_memory(small_tmpfs)
    assert not is_memory(Path("/proc"))
