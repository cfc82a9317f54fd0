"""The blocks of docs/migration.md, one after the other: what the old program has left is gone on from."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ml_flashpoint.local
from ml_flashpoint.adapter.pytorch.memory_storage_writer import MemoryStorageWriter
from ml_flashpoint.checkpoint_object_manager.checkpoint_object_manager import CheckpointObjectManager
from ml_flashpoint.core.checkpoint_loader import DefaultMLFlashpointCheckpointLoader
from ml_flashpoint.core.checkpoint_saver import DefaultMLFlashpointCheckpointSaver
from ml_flashpoint.ddict import DDict, NULLCheckpointPersister
from ml_flashpoint.local import AsyncCallsQueue
from ml_flashpoint.replication.replication_manager import ReplicationManager
from tests.support.forked import call_team
from tests.test_guides import blocks_of
from tests.workers.migrating import Loop, loops_with_ddp, weights_of

LAST = 205


def block_with(text: str) -> str:
    (found,) = [block for block in blocks_of("migration.md", "python") if text in block]
    return found


def test_a_loop_with_plain_dcp(tmp_path: Path, tmpfs: Path) -> None:
    before, after = block_with("def load_long_term"), block_with("fallback=load_long_term")
    functions = before[: before.index("\n\nfor step")]
    undisturbed = Loop(tmp_path / "undisturbed", seed=1, last_step=LAST)
    undisturbed.run(before, tmpfs)

    old = Loop(tmp_path / "steps", seed=1, last_step=LAST, die_at=150)
    old.run(before, tmpfs)
    new = Loop(tmp_path / "steps", seed=2, last_step=LAST, die_at=203)
    new.run(functions + after, tmpfs)
    assert new.steps == list(range(101, 203)), "it goes on from what DCP has saved"
    assert {path.name for path in (tmp_path / "steps").iterdir()} == {"100", "200"}
    again = Loop(tmp_path / "steps", seed=3, last_step=LAST)
    again.run(functions + after, tmpfs)
    assert again.names["fp"].last_recovery.version == f"step-{again.steps[0] - 1}_ckpt", "and then from memory"
    assert again.steps == list(range(again.steps[0], LAST + 1))
    assert weights_of(again) == weights_of(undisturbed)


@pytest.fixture
def alone() -> Iterator[None]:
    """A gloo group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def assert_goes_on(first: list[int], again: list[int], last_step: int) -> None:
    """The second life goes on from a save of the first one, and leaves no step out."""
    assert first == list(range(1, len(first) + 1))
    assert 1 < again[0] <= len(first) + 1, "resumed, from memory: nothing else is saved"
    assert again == list(range(again[0], last_step + 1))


def test_a_loop_with_asynchronous_saves(tmp_path: Path, tmpfs: Path, alone: None) -> None:
    block = block_with("checkpoint_future")
    undisturbed = Loop(tmp_path, seed=1, last_step=9).run(block, tmpfs / "undisturbed")
    first = Loop(tmp_path, seed=1, last_step=9, die_at=6).run(block, tmpfs)
    again = Loop(tmp_path, seed=2, last_step=9).run(block, tmpfs)
    assert_goes_on(first.steps, again.steps, 9)
    assert weights_of(again) == weights_of(undisturbed)


def test_the_same_loop_with_ddp_on_a_gloo_group(tmpfs: Path) -> None:
    block, last_step = block_with("checkpoint_future"), 24
    for first, again, same in call_team(loops_with_ddp, tmpfs, 2, block, last_step, last_step // 2, timeout_s=150):
        assert_goes_on(first, again, last_step)
        assert same


@pytest.fixture
def own_modules() -> Iterator[None]:
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("nvidia_resiliency_ext"):
            del sys.modules[name]


def test_imports_lead_here(own_modules: None) -> None:
    names: dict[str, Any] = {}
    exec(block_with("    AsyncCallsQueue,\n"), names)
    exec(block_with("compat.install()"), names)
    assert names["LocalCheckpointManager"] is ml_flashpoint.local.LocalCheckpointManager
    exec(block_with("this_process"), names)
    assert names["DDict"] is DDict
    exec(block_with("import AsyncCheckpointerType"), names)
    assert names["AsyncCheckpointerType"].PROCESS
    assert names["MemoryStorageReader"]


ACCEPTED: dict[str, Callable[[], Any]] = {
    "MemoryStorageWriter ignores thread_count=, mp_manager_future=": lambda: MemoryStorageWriter(
        DefaultMLFlashpointCheckpointSaver(), mp_manager_future=Future(), thread_count=4
    ),
    "MemoryStorageWriter ignores mp_manager=, thread_count=": lambda: MemoryStorageWriter(
        DefaultMLFlashpointCheckpointSaver(), Future(), 4
    ),
    "DefaultMLFlashpointCheckpointSaver ignores global_barrier_func=, use_optimized_save=": lambda: (
        DefaultMLFlashpointCheckpointSaver(global_barrier_func=dist.barrier, use_optimized_save=False)
    ),
    "DefaultMLFlashpointCheckpointLoader ignores local_rank_getter=, broadcast_object_list_func=, "
    "all_gather_object_func=, world_size_getter=": lambda: DefaultMLFlashpointCheckpointLoader(
        CheckpointObjectManager(),
        ReplicationManager(),
        global_rank_getter=lambda: 0,
        local_rank_getter=lambda: 0,
        broadcast_object_list_func=dist.broadcast_object_list,
        all_gather_object_func=dist.all_gather_object,
        world_size_getter=lambda: 1,
    ),
    "AsyncCallsQueue ignores cpu_priority=, sigterm_timeout=, cpu_shm_mode=": lambda: AsyncCallsQueue(
        cpu_priority=10, io_priority=None, sigterm_timeout=30.0, cpu_shm_mode=False
    ),
}


@pytest.mark.parametrize("said", ACCEPTED)
def test_what_others_pass_is_accepted_and_named_in_one_line(said: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ml_flashpoint")
    made = ACCEPTED[said]()
    assert caplog.messages == [f"{said}, which has no meaning here"]
    caplog.clear()
    type(made)(*([DefaultMLFlashpointCheckpointSaver()] if isinstance(made, MemoryStorageWriter) else []))
    assert caplog.messages == [], "what is not passed is not named"


def test_a_replication_manager_is_shut_down() -> None:
    replication = ReplicationManager()
    replication.initialize(CheckpointObjectManager())
    replication.shutdown()
    replication.close()


@pytest.mark.slow
def test_the_names_of_dragons_dictionary(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ml_flashpoint.format.arguments")
    options: dict[str, Any] = {"persister_class": NULLCheckpointPersister, "trace": True}
    with DDict(2, 1, 1 << 28, name="run-7", **options) as d:
        assert d.get_name() == "run-7"
        d["a"] = 1
        assert d.local_len() == len(d) == sum(each.keys for each in d.stats()) == 1
    assert caplog.messages == ["DDict ignores trace=, which has no meaning here"]


@pytest.mark.slow
def test_values_of_another_dictionary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"weights": torch.arange(3), "epoch": 7}, "values.pt")
    seen: dict[str, Any] = {}
    block = block_with("values.pt") + "    seen.update((key, d[key]) for key in ('weights', 'epoch'))\n"
    exec(block, {"seen": seen})
    assert torch.equal(seen["weights"], torch.arange(3))
    assert seen["epoch"] == 7


def test_all_blocks_are_run() -> None:
    marks = ("def load_long_term", "fallback=load_long_term", "checkpoint_future", "    AsyncCallsQueue,\n")
    marks += ("compat.install()", "this_process", "import AsyncCheckpointerType", "values.pt")
    assert len(blocks_of("migration.md", "python")) == len(marks)
