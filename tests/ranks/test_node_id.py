"""Who shares a node: those that share its memory."""

from __future__ import annotations

import ctypes
import os

import pytest

from ml_flashpoint.ranks.rank_group import local_node_id
from tests.support.forked import Report, call

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


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs /dev/shm")
def test_a_container_with_shared_memory_of_its_own_is_a_node_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHPOINT_NODE_ID", raising=False)
    there = call(node_with_memory_of_its_own)
    if there is None:
        pytest.skip("needs the right to mount")
    assert there != local_node_id()
    assert there.rsplit("-", 1)[0] == local_node_id().rsplit("-", 1)[0]
