"""The reader by itself: what it reads from, when it is used again, and how it says no."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import StorageMeta

from ml_flashpoint.adapter.pytorch.memory_storage_reader import MemoryStorageReader
from ml_flashpoint.adapter.pytorch.memory_storage_writer import MemoryStorageWriter
from ml_flashpoint.adapter.pytorch.seed import DefaultMLFlashpointCheckpointLoader, ReplicationManager
from ml_flashpoint.format.errors import InvalidArgumentError, InvalidNameError, NothingLoadableError
from tests.support.dcp import Door
from tests.support.forked import Report, call_team
from tests.support.tensors import assert_same, blank


def _state(step: int) -> dict[str, Any]:
    return {"w": torch.full((100,), float(step)), "step": step}


def _load(door: Door, step: int, reader: MemoryStorageReader | None = None, **options: Any) -> dict[str, Any]:
    state = blank(_state(step))
    reader = reader or MemoryStorageReader(checkpoint_loader=door.loader)
    dcp.load(state, checkpoint_id=door.version(step), storage_reader=reader, **options)
    return state


def test_without_a_recovery_first(door: Door) -> None:
    door.save(_state(1), 1)
    assert_same(_load(door, 1), _state(1))
    if "no_dist" in inspect.signature(dcp.load).parameters:
        assert_same(_load(door, 1, no_dist=True), _state(1))


def test_one_reader_serves_several_checkpoints(door: Door) -> None:
    reader = MemoryStorageReader(path=door.version(1), checkpoint_loader=door.loader)
    for step in (1, 2, 3):
        door.save(_state(step), step)
        if step == 1:  # the path given first is used until there is another
            state = blank(_state(1))
            dcp.load(state, storage_reader=reader)
            assert_same(state, _state(1))
        assert_same(_load(door, step, reader), _state(step))
        assert_same(_load(door, step, reader), _state(step))
        assert reader.checkpoint_id == door.version(step)


def test_loaded_tensors_are_nobodys_but_the_callers(door: Door) -> None:
    door.save(_state(1), 1)
    loaded = _load(door, 1)
    loaded["w"].fill_(7)
    assert_same(_load(door, 1), _state(1))
    for step in range(2, 6):
        door.save(_state(step), step)
    assert loaded["w"].tolist() == [7.0] * 100


def test_a_failed_load_lets_go_of_what_it_opened(door: Door) -> None:
    for step in (1, 2, 3, 4, 5, 6):
        door.save(_state(step), step)
        with pytest.raises(CheckpointException, match=r"(?s)shape"):
            _load(door, step, planner=_WrongShapes())
    door.settle()
    assert len(door.slot_bytes()) <= 4  # that of a part which is still open could not be reused


class _WrongShapes(dcp.DefaultLoadPlanner):
    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return torch.zeros(3)


STEPS = ("read_metadata", "set_up_storage_reader", "prepare_local_plan", "read_data")


def failing(call: Callable[..., Any], tries: int) -> Callable[..., Any]:
    """The same call, which fails so many times at first."""
    left = [tries]

    @functools.wraps(call)  # torch looks at the signature
    def made(*args: Any, **named: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise OSError("this rank fails")
        return call(*args, **named)

    return made


def load_where_one_rank_fails(report: Report, rank: int) -> list[str]:
    """What became of a load in which each call of the reader fails on rank 1, and of one in which it fails once."""
    base = Path(os.environ["FLASHPOINT_TEST_BASE"])
    door, found = Door(base), []
    door.save({f"w{rank}": torch.full((100,), float(rank))}, 1)
    door.settle()
    for step, tries in itertools.product(STEPS, (1, 2)):
        reader = MemoryStorageReader(checkpoint_loader=door.loader)
        setattr(reader, step, failing(getattr(reader, step), tries if rank == 1 else 0))
        state = {f"w{rank}": torch.zeros(100)}
        try:
            dcp.load(state, checkpoint_id=door.version(1), storage_reader=reader)
        except CheckpointException as error:
            found.append(f"{step} {tries} {sorted(error.failures)}")
        assert_same(door.load(state, 1), {f"w{rank}": torch.full((100,), float(rank))})
    door.close()
    return found


def test_a_load_that_fails_on_one_rank_fails_on_all_at_once(tmpfs: Path) -> None:
    """However torch asks: it may not go on without collectives on one rank beside others that use them."""
    expected = [f"{step} {tries} [1]" for step, tries in itertools.product(STEPS, (1, 2))]
    assert call_team(load_where_one_rank_fails, tmpfs, 2) == [expected, expected]


def test_metadata_says_what_torchs_own_does(door: Door, tmp_path: Path) -> None:
    """Planners, and what looks at checkpoints, are told by these which save and which load it is."""
    seen: list[StorageMeta | None] = []

    class Planner(DefaultSavePlanner):
        def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
            seen.append(storage_meta)
            super().set_up_planner(state_dict, storage_meta, is_coordinator)

    state = {"x": torch.ones(3), "nested": {"list": [torch.zeros(2, 0, dtype=torch.bfloat16), {"n": 1}], "text": "t"}}
    state["images"] = torch.ones(1, 2, 3, 4).to(memory_format=torch.channels_last)
    state["parameter"] = torch.nn.Parameter(torch.ones(2))
    for step in (1, 2):
        door.save(state, step, planner=Planner())
    dcp.save(state, checkpoint_id=tmp_path / "torch")
    theirs = dcp.FileSystemReader(tmp_path / "torch").read_metadata()
    found = door.loader.get_latest_complete_checkpoint(door.base)
    reader = MemoryStorageReader(found, door.loader)
    loads = []
    for _ in range(2):
        reader.reset()
        metadata = reader.read_metadata()
        assert getattr(metadata, "version", None) == getattr(theirs, "version", None)
        assert list(metadata.state_dict_metadata.items()) == list(theirs.state_dict_metadata.items())
        assert metadata.planner_data == theirs.planner_data
        assert set(metadata.storage_data) == set(theirs.storage_data)
        assert metadata.storage_meta is not None
        loads.append(metadata.storage_meta.load_id)
    saves = [meta.save_id for meta in seen if meta is not None]
    assert metadata.storage_meta.save_id == saves[1]
    assert len({*saves, *loads} - {None}) == 4


def test_versions_of_other_doors_and_those_that_are_not_there_are_refused(
    door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    door.put(3, [("w", torch.ones(100))])
    for step, why in ((3, "not saved through DCP"), (9, "step-9_ckpt")):
        with pytest.raises(CheckpointException) as raised:
            _load(door, step)
        assert why in _why(raised.value, caplog)


def _why(error: CheckpointException, log: pytest.LogCaptureFixture) -> str:
    """What a user is told about metadata that cannot be read: by the log, since torch 2.9's error does not say."""
    if "AssertionError" not in str(error):
        return str(error)
    return "\n".join(record.message for record in log.records if record.name.startswith("ml_flashpoint"))


def test_arguments_are_checked(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InvalidArgumentError, match="checkpoint_loader"):
        MemoryStorageReader(path=door.version(1))
    with pytest.raises(InvalidArgumentError, match="checkpoint_saver"):
        MemoryStorageWriter(checkpoint_saver=None)  # type: ignore[arg-type]
    with pytest.raises(InvalidNameError):
        MemoryStorageReader(path="relative", checkpoint_loader=door.loader)
    with pytest.raises(CheckpointException) as raised:
        dcp.load({"w": torch.zeros(1)}, storage_reader=MemoryStorageReader(checkpoint_loader=door.loader))
    assert "checkpoint_id" in _why(raised.value, caplog)
    for name in ("/tmp/job/step-5_ckpt", "/tmp/job/step-5", "step-5_ckpt", "/tmp/job"):
        for storage in (MemoryStorageReader, MemoryStorageWriter):
            assert storage.validate_checkpoint_id(name) is (name == "/tmp/job/step-5_ckpt")


def test_a_base_container_has_one_strategy(door: Door) -> None:
    door.save(_state(1), 1)
    other = ReplicationManager("none")
    other.initialize(door.objects)
    with pytest.raises(InvalidArgumentError, match="open with another replication strategy"):
        DefaultMLFlashpointCheckpointLoader(door.objects, other).get_latest_complete_checkpoint(door.base)
    assert door.latest() == 1


@pytest.mark.damages_on_purpose
def test_a_damaged_object_is_named(make_door: Callable[..., Door], caplog: pytest.LogCaptureFixture) -> None:
    door = make_door()
    door.save(_state(1), 1)
    path = door.object_path(1)
    door = make_door()
    with path.open("r+b") as file:
        file.seek(path.read_bytes().index(_state(1)["w"].numpy().tobytes()))
        file.write(b"\xff")
    with pytest.raises(CheckpointException) as raised:
        _load(door, 1)
    assert re.search(rf"(?s)digest.*{path.name}", _why(raised.value, caplog))
    with pytest.raises(NothingLoadableError, match=path.name):
        door.latest()
