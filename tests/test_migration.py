"""Calls of people who come from other packages: what has no meaning here is accepted, and named in one line."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch.distributed as dist

from ml_flashpoint.adapter.pytorch.memory_storage_writer import MemoryStorageWriter
from ml_flashpoint.checkpoint_object_manager.checkpoint_object_manager import CheckpointObjectManager
from ml_flashpoint.core.checkpoint_loader import DefaultMLFlashpointCheckpointLoader
from ml_flashpoint.core.checkpoint_saver import DefaultMLFlashpointCheckpointSaver
from ml_flashpoint.ddict import DDict, NULLCheckpointPersister
from ml_flashpoint.local import AsyncCallsQueue
from ml_flashpoint.replication.replication_manager import ReplicationManager

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
