"""Who shares a node: those that share its memory."""

from __future__ import annotations

import ctypes
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ml_flashpoint.engine.checkpointer import Checkpointer
from ml_flashpoint.format.errors import InvalidNameError, TopologyError
from ml_flashpoint.ranks.rank_group import local_node_id
from tests.support.forked import Report, Team, call

_NEW_MOUNTS, _PRIVATE_AND_BELOW = 0x20000, 0x44000


def node_with_memory_of_its_own(report: Report) -> str | None:
    """The node of a process in a container with host networking; None where such a thing cannot be made."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS) or libc.mount(None, b"/", None, _PRIVATE_AND_BELOW, None):
        return None
    if libc.mount(b"none", b"/dev/shm", b"tmpfs", 0, None):
        return None
    return local_node_id()


def node_here(report: Report) -> str:
    return local_node_id()


def test_processes_that_share_memory_share_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHPOINT_NODE_ID", raising=False)
    assert call(node_here) == call(node_here) == local_node_id()
    monkeypatch.setenv("FLASHPOINT_NODE_ID", "rack-7")
    assert local_node_id() == "rack-7"
    monkeypatch.setenv("FLASHPOINT_NODE_ID", "../rack")
    with pytest.raises(InvalidNameError):
        local_node_id()


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs /dev/shm")
def test_a_container_with_shared_memory_of_its_own_is_a_node_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHPOINT_NODE_ID", raising=False)
    there = call(node_with_memory_of_its_own)
    if there is None:
        pytest.skip("needs the right to mount")
    assert there != local_node_id()
    assert there.rsplit("-", 1)[0] == local_node_id().rsplit("-", 1)[0]


_NEW_NAMES, _BIND = 0x4000000, 0x1000


def another_machine(name: str, boot_id: str, folder: Path) -> bool:
    """Make this process one of another machine, with a name and a boot id of its own; False if that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS | _NEW_NAMES) or libc.mount(None, b"/", None, _PRIVATE_AND_BELOW, None):
        return False
    socket.sethostname(name)
    file = folder / f"boot-id-{name}"
    file.write_text(boot_id)
    return not libc.mount(os.fsencode(file), b"/proc/sys/kernel/random/boot_id", None, _BIND, None)


def open_on(report: Report, rank: int, name: str, boot_id: str | None, base: str, folder: Path) -> str | None:
    """Open a base container on such a machine; the error or None, or "skip" if there cannot be such a machine."""
    made = another_machine(name, boot_id, folder) if boot_id is not None else True
    gathered: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(gathered, made)
    if not all(gathered):
        return "skip"
    try:
        Checkpointer(base).close()
    except TopologyError as error:
        return str(error)
    return None


def opened(tmpfs: Path, nodes: list[int], machines: list[tuple[str, str | None, str]]) -> list[str]:
    """What each rank says; of a rank, the number in its node id, and its host, boot id and base container."""

    def args_of(rank: int) -> tuple[Any, ...]:
        name, boot_id, base = machines[rank]
        return name, boot_id, str(tmpfs / base), tmpfs

    with Team(open_on, tmpfs, len(nodes), placement=nodes, args_of=args_of) as team:
        said = team.results()
    if "skip" in said:
        pytest.skip("needs the right to mount")
    return said


def test_a_node_id_of_two_machines_is_refused(tmpfs: Path) -> None:
    """Also where the folders have one name, and look alike."""
    machines = [("here", "1111-1", "job"), ("there", "2222-2", "job"), ("third", "3333-3", "job")]
    for said in opened(tmpfs, [0, 0, 1], machines):
        assert "ranks 0, on host here (boot id 1111-1), and 1, on host there (boot id 2222-2)" in said
        assert "FLASHPOINT_NODE_ID" in said


def test_ranks_of_one_node_that_share_no_base_container_are_refused(tmpfs: Path) -> None:
    """Containers with a /dev/shm each, say."""
    for said in opened(tmpfs, [0, 1, 1], [("any", None, "a"), ("any", None, "b"), ("any", None, "c")]):
        assert "ranks 1, on host" in said
        assert "do not share a base container" in said


@pytest.mark.parametrize(
    ("nodes", "machines"),
    [
        ([0, 0], [("one", "1111-1", "job"), ("another", "1111-1", "job")]),  # containers that share a machine's memory
        ([0, 1], [("same", "1111-1", "a"), ("same", "1111-1", "b")]),  # one machine that plays two nodes
        ([0, 1], [("same", "1111-1", "job-a"), ("same", "2222-2", "job-b")]),  # machines of one name
    ],
)
def test_what_is_one_node_is_not_refused(
    tmpfs: Path, nodes: list[int], machines: list[tuple[str, str | None, str]]
) -> None:
    assert opened(tmpfs, nodes, machines) == [None] * len(nodes)
