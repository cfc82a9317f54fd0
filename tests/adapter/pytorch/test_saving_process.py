"""A saving process: what it hands over is what is committed, and nothing is left of it wherever it ends.

DCP's own is slow to start, so these are forked, and given what DCP would send: the staged state, the writer, the
planner. `tests.e2e.test_dcp_ranks` has DCP's.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import safetensors
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from ml_flashpoint.adapter.pytorch.memory_storage_writer import MemoryStorageWriter
from ml_flashpoint.adapter.pytorch.saves import WIRE, ArrivedState
from ml_flashpoint.engine.save import Save
from ml_flashpoint.format.errors import FlashpointError, SaveError
from ml_flashpoint.format.names import CheckpointContainerId
from ml_flashpoint.net.client import Connection
from ml_flashpoint.net.messages import BLOBS, JSON_BYTES
from tests.support.dcp import RESULT_TIMEOUT_S, Door
from tests.support.forked import Child, call
from tests.support.planners import CastingPlanner, InPlacePlanner, ResolvingPlanner
from tests.support.tensors import assert_same, blank

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def _state(step: int) -> dict[str, Any]:
    return {
        "a": torch.full((50, 3), float(step)),
        "b": torch.arange(20.0) + step,
        "many": {f"w{i}": torch.full((i,), float(step)) for i in range(40)},
        "bf16": torch.full((7,), step, dtype=torch.bfloat16),
        "scalar": torch.tensor(step),
        "transposed": (torch.arange(12.0).view(3, 4) + step).t(),
        "tied": [torch.ones(4) * step] * 2,
        "note": {"step": step},
    }


def _sent(door: Door, state: dict[str, Any], step: int, planner: Any = None) -> bytes:
    """What DCP sends to its saving process."""
    return bytes(ForkingPickler.dumps((state, door.writer, planner, door.version(step))))


def _staged(door: Door, step: int) -> tuple[bytes, Save]:
    """The same for a state that the writer has staged, and the save that it leads to."""
    state: Any = door.writer.stage(_state(step))
    _kept.append(state)
    assert state.staged.save is not None
    return _sent(door, state, step), state.staged.save


_kept: list[Any] = []  # as DCP's thread keeps what it has sent


@pytest.fixture(autouse=True)
def _dropped_in_the_end() -> Iterator[None]:
    yield
    _kept.clear()


def _save(report: Any, request: bytes, stop: str = "") -> str | None:
    """What DCP's saving process does with it; it waits to be told to go on before a step. Returns why it failed."""
    if stop == "arrive":
        report("stopped")
        report.listen()
    state, writer, planner, version = pickle.loads(request)
    if stop:
        real = getattr(MemoryStorageWriter, stop, None)

        def stopping(*args: Any, **options: Any) -> Any:
            report("stopped")
            report.listen()
            return real(*args, **options)  # type: ignore[misc]

        if real is not None:
            setattr(MemoryStorageWriter, stop, stopping)
    try:
        dcp.save(state, checkpoint_id=version, storage_writer=writer, planner=planner)
    except CheckpointException as error:
        return str(error)
    return None


def _save_by_process(door: Door, state: dict[str, Any], step: int, planner: Any = None) -> None:
    staged = door.writer.stage(state)
    assert call(_save, _sent(door, staged, step, planner)) is None
    door.settle()


def _failed(save: Save) -> str:
    return str(save.committed.exception(RESULT_TIMEOUT_S))


def test_what_was_staged_is_the_object(door: Door) -> None:
    elements = 1 << 20
    for step in (1, 2, 3):
        state = {"w": torch.full((elements,), float(step))}
        _save_by_process(door, state, step)
        assert door.saver.status.verified == step
        assert_same(door.load(blank(state), step), state)
        assert door.object_path(step).stat().st_size < 4 * elements * 1.1, "it was copied once more"


def test_a_state_of_another_stager(door: Door) -> None:
    """Nothing of it lies in a slot, so all of it comes as bytes."""
    for step in (1, 2, 3):
        state = _state(step) | {"big": torch.full((40, 1 << 20), step, dtype=torch.int16)}
        assert call(_save, _sent(door, state, step)) is None
        assert_same(door.load(blank(state), step), state)


@pytest.mark.timeout(300)
def test_any_number_of_items(door: Door) -> None:
    """More than one message takes: neither number nor length of names has a limit of its own."""
    count, long = BLOBS + 1, "long name " * 100
    saves: Any = door.writer.__getstate__()[0]
    staged = ArrivedState(None, others=frozenset(f"{i} {long}" for i in range(JSON_BYTES // len(long))))
    save = saves.begin(CheckpointContainerId(door.version(1)), staged)
    save.fill([(f"w{i}", torch.tensor(i)) for i in range(9)], [(f"b{i}", b"%d" % i) for i in range(count)])
    save.commit(extra=[("last", b"one")])
    with safetensors.safe_open(door.object_path(1), "pt") as saved:
        names = saved.keys()
        assert sum(name.startswith("b") for name in names) == count
        assert [saved.get_tensor(f"w{i}").item() for i in range(9)] == list(range(9))
        some = range(0, count, 4095)
        assert [bytes(saved.get_tensor(f"b{i}").tolist()) for i in some] == [b"%d" % i for i in some]
        assert bytes(saved.get_tensor("last").tolist()) == b"one"


def test_planners_that_change_what_was_staged(door: Door) -> None:
    """They change nothing that the trainer has, whose digests are of what was staged."""
    for step, planner in enumerate((CastingPlanner(), ResolvingPlanner(), InPlacePlanner()), 1):
        state = {"a": torch.rand(5000), "b": torch.rand(3)}
        _save_by_process(door, state, step, planner)
        for name, found in door.load(blank(state), step).items():
            assert torch.equal(found, -state[name] if step == 3 else state[name].bfloat16().float())


def test_what_cannot_be_staged_is_told_where_ranks_can_tell_each_other(door: Door) -> None:
    _save_by_process(door, _state(1), 1)
    staged = door.writer.stage({"bad": threading.Lock(), "w": torch.ones(3)})
    assert "staging failed" in str(call(_save, _sent(door, staged, 2)))
    _save_by_process(door, _state(3), 3)
    assert_same(door.load(blank(_state(3)), 3), _state(3))


@pytest.mark.parametrize("stop", ["write_data", "finish"])
def test_a_save_whose_process_is_killed_is_lost_at_once(door: Door, stop: str) -> None:
    _save_by_process(door, _state(1), 1)
    request, save = _staged(door, 2)
    with Child(_save, request, stop) as child:
        child.next_report("stopped")
        child.kill()
        assert "its process is gone" in _failed(save)
    assert door.latest() == 1
    _save_by_process(door, _state(3), 3)
    assert_same(door.load(blank(_state(3)), 3), _state(3))


def test_a_save_whose_process_is_killed_before_it_comes_is_given_up_once_dcp_drops_it(door: Door) -> None:
    _save_by_process(door, _state(1), 1)
    request, save = _staged(door, 2)
    with Child(_save, request, "arrive") as child:
        child.next_report("stopped")
        child.kill()
    _kept.clear()
    _save_by_process(door, _state(3), 3)
    assert "given up" in _failed(save)
    assert_same(door.load(blank(_state(3)), 3), _state(3))


@pytest.mark.parametrize("stop", ["arrive", "write_data", "finish"])
def test_a_process_that_hangs_beyond_the_deadline_comes_too_late(door: Door, stop: str) -> None:
    _save_by_process(door, _state(1), 1)
    request, _ = _staged(door, 2)
    with Child(_save, request, stop) as child:
        child.next_report("stopped")
        child.stop()
        staged = _kept[-1].staged
        staged.fail(SaveError("the deadline has passed"))
        _save_by_process(door, _state(3), 3)  # into the slot of the other, if need be
        _save_by_process(door, _state(4), 4)
        child.go_on()
        child.say("go on")
        why = "given up before this process began" if stop == "arrive" else "the deadline has passed"
        assert why in str(child.result())
    door.settle()
    assert_same(door.load(blank(_state(4)), 4), _state(4))


def test_a_save_is_given_up_at_its_deadline(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    _save_by_process(door, _state(1), 1)
    monkeypatch.setenv("FLASHPOINT_SEAL_DEADLINE_S", "0.2")
    _, save = _staged(door, 2)
    assert "was not committed within" in _failed(save)
    assert save.part.slot is None


def test_a_ticket_is_good_for_one_process(door: Door) -> None:
    _save_by_process(door, _state(1), 1)
    request, _ = _staged(door, 2)
    assert call(_save, request) is None
    assert "was saved or given up before" in str(call(_save, request))
    assert_same(door.load(blank(_state(2)), 2), _state(2))


def test_the_end_of_a_trainer_is_an_error_in_its_saving_process(
    make_door: Callable[..., Door], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHPOINT_EXIT_DEADLINE_S", "0.1")
    door = make_door()
    _save_by_process(door, _state(1), 1)
    request, _ = _staged(door, 2)
    with Child(_save, request, "write_data") as child:
        child.next_report("stopped")
        door.writer.close()
        child.say("go on")
        assert "Lost" in str(child.result())
    assert_same(make_door().load(blank(_state(1)), 1), _state(1))


def test_staged_tensors_whose_slot_is_gone_fail_their_save_and_not_the_saving_process(door: Door) -> None:
    """What cannot be unpickled would end torch's saving process, and with it all later saves."""
    _save_by_process(door, _state(1), 1)
    request, save = _staged(door, 2)
    assert save.part.slot is not None
    save.part.slot.path.unlink()
    assert "has no data" in str(call(_save, request))


def test_requests_that_no_save_makes_are_refused(door: Door) -> None:
    _save_by_process(door, _state(1), 1)
    _, save = _staged(door, 2)
    saves = door.writer.__getstate__()[0]
    address, secret = saves._address, saves._secret
    assert address.startswith("\0"), "there is a file of the socket"
    version = door.version(2)
    key = _kept[-1].staged.key
    with Connection(("unix", address), secret, WIRE, connect_timeout_s=RESULT_TIMEOUT_S) as connection:
        for op, fields in [
            ("commit", {}),
            ("begin", {"version": version, "key": "of no save"}),
            ("begin", {"version": "/etc/passwd", "key": None}),
            ("begin", {"key": key}),
            ("begin", {"version": version, "key": key}),
            ("no such thing", {}),
            ("fill", {"items": [["w", 0, "float32", [1 << 40], 0]]}),
            ("fill", {"items": [["w", 1, "float32", [4], None]]}),
            ("fill", {"items": [["w", 0, "float32", [4], None]]}),
            ("fill", {"items": [["b", -1]]}),
            ("fill", {"items": [["b", 1]]}),
            ("commit", {}),
        ]:
            if op == "begin" and fields.keys() == {"version", "key"} and fields["key"] == key:
                connection.request(op, fields, timeout_s=RESULT_TIMEOUT_S)
                continue
            with pytest.raises(FlashpointError):
                connection.request(op, fields, timeout_s=RESULT_TIMEOUT_S)
    assert "its process is gone" in _failed(save)
