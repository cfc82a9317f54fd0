"""A manager's folder on a Ray node, when its start fails. Ray itself is not needed for that, and is played."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from ml_flashpoint.ddict.runtime import ray_runtime
from ml_flashpoint.ddict.runtime import reaper as folder_reaper
from ml_flashpoint.ddict.runtime.folder import BASE_VARIABLE, join_folder
from ml_flashpoint.ddict.runtime.ray_runtime import RayManager, node_base
from tests.ddict.test_folder_reaper import DEADLINE_S, end, held_by_another, reapers
from tests.support.forked import wait_until

pytestmark = pytest.mark.slow

DICTIONARY, NODE = "a dictionary", "a node"


def play_ray(monkeypatch: pytest.MonkeyPatch, *, restarted: bool) -> None:
    context = SimpleNamespace(was_current_actor_reconstructed=restarted, get_node_id=lambda: NODE)
    util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
    monkeypatch.setattr(ray_runtime, "ray", SimpleNamespace(get_runtime_context=lambda: context, util=util))


def start(base: Path) -> RayManager:
    return RayManager({"dictionary": DICTIONARY}, 0, {BASE_VARIABLE: str(base)})


@pytest.mark.parametrize("broken", ["the reaper", "the manager"])
def test_a_first_start_that_fails_leaves_no_folder(tmpfs: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    monkeypatch.setenv(BASE_VARIABLE, "")
    play_ray(monkeypatch, restarted=False)
    if broken == "the reaper":
        monkeypatch.setattr(folder_reaper.sys, "executable", "/bin/false")

    with pytest.raises(Exception, match="bin/false" if broken == "the reaper" else "options"):
        start(tmpfs)

    assert list(tmpfs.iterdir()) == []
    wait_until(lambda: not reapers(node_base(tmpfs, DICTIONARY, NODE)), "the reaper has ended", DEADLINE_S)


@pytest.mark.parametrize("broken", ["the reaper", "the manager"])
def test_a_restart_that_fails_leaves_the_folder_to_the_next_one(
    tmpfs: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    monkeypatch.setenv("FLASHPOINT_DDICT_KEEP_FOLDER_S", "600")
    play_ray(monkeypatch, restarted=True)
    folder = node_base(tmpfs, DICTIONARY, NODE)
    if broken == "the reaper":
        monkeypatch.setattr(folder_reaper.sys, "executable", "/bin/false")
        join_folder(folder).close()  # held by nobody: the first thing that a sweep would take
    else:
        end(held_by_another(folder, 600.0))
    (folder / "value").write_text("kept")

    child = os.fork()
    if child == 0:
        try:
            start(tmpfs)
        finally:
            os._exit(0)  # but a restart that fails ends the process itself, with another code
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1

    assert (folder / "value").read_text() == "kept"
    for reaper in reapers(folder):
        reaper.kill()
    wait_until(lambda: not reapers(folder), "the reapers have ended", DEADLINE_S)
