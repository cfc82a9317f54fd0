"""The calls that a lane makes, on a machine without CUDA: those that torch has, with what it takes, each in its place.

Tensors of the device are the host's here, and streams do at once what they are given. What CUDA makes of the calls is
tested in tests/cuda.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ml_flashpoint.format.errors import SaveError
from ml_flashpoint.staging import cuda, lane
from ml_flashpoint.staging.copy import _copy
from ml_flashpoint.staging.device_copy import copy_through_lanes
from ml_flashpoint.staging.transfer_plan import Memo
from tests.support.tensors import raw, tensor_of


class Torch:
    """What of ``torch.cuda`` a lane uses, with the parameters of the real one.

    Attributes:
        current: the device and the stream of each thread. capturing: whether a graph is being captured.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = threading.local()
        self.capturing = False
        self.events: list[Any] = []
        played = self
        real_stream, real_event = torch.cuda.Stream, torch.cuda.Event

        class Event:
            def __init__(self, **options: Any) -> None:
                inspect.signature(real_event.__new__).bind(real_event, **options)
                self.options = options
                self.stream: Any = None

            def record(self, stream: Any) -> None:
                self.stream = stream
                played.events.append(self)

            def synchronize(self) -> None:
                assert self.stream is not None, "nothing was recorded"

            def elapsed_time(self, other: Event) -> float:
                assert self.options["enable_timing"]
                assert other.options["enable_timing"]
                return 1.0

        class Stream:
            def __init__(self, **options: Any) -> None:
                inspect.signature(real_stream.__new__).bind(real_stream, **options)
                self.device = played.device_of_thread

            def record_event(self, event: Event | None = None) -> Event:
                event = event or Event()
                event.record(self)
                return event

            def wait_event(self, event: Event) -> None:
                assert event.stream is not None

        @contextlib.contextmanager
        def device(wanted: torch.device) -> Iterator[None]:
            before, self.current.device = self.device_of_thread, wanted
            yield
            self.current.device = before

        @contextlib.contextmanager
        def stream(wanted: Any) -> Iterator[None]:
            assert wanted.device == self.device_of_thread, "the device is changed to and fro, which makes a context"
            before, self.current.stream = getattr(self.current, "stream", None), wanted
            yield
            self.current.stream = before

        caller = Stream()
        names: dict[str, object] = {
            "Event": Event,
            "Stream": Stream,
            "device": device,
            "stream": stream,
            "current_stream": lambda: caller,
            "is_current_stream_capturing": lambda: self.capturing,
        }
        for name, value in names.items():
            assert hasattr(torch.cuda, name)
            monkeypatch.setattr(torch.cuda, name, value)
        empty = torch.empty

        def made(*args: Any, **options: Any) -> torch.Tensor:
            if (on := options.pop("device", None)) is not None and torch.device(on).type == "cuda":
                assert torch.device(on) == self.device_of_thread
                assert getattr(self.current, "stream", None) is not None, "it belongs to no stream of ours"
            if options.pop("pin_memory", False):
                assert self.device_of_thread is not None, "it would make a context on the first device"
            return empty(*args, **options)

        monkeypatch.setattr(torch, "empty", made)
        monkeypatch.setattr(cuda, "_process", cuda._Process())

    @property
    def device_of_thread(self) -> Any:
        return getattr(self.current, "device", None)


class Lanes(lane.Lanes):
    def __init__(self) -> None:
        super().__init__()
        self.there: dict[int, int] = {}

    def indices(self, tensors: Any) -> list[int]:  # type: ignore[override]
        return [self.there.get(id(tensor), -1) for tensor in tensors]

    def on(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        self.there[id(tensor)] = index
        return tensor


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Torch:
    return Torch(monkeypatch)


@pytest.mark.parametrize("make_memo", [Memo, lambda: None], ids=["memo", "no memo"])
def test_copies_both_ways(played: Torch, make_memo: Callable[[], Memo | None]) -> None:
    lanes, memo = Lanes(), make_memo()
    shapes = [(3, 4), (), (700_000,), (5,)]
    sources = [tensor_of(torch.float32, shape, seed=n) for n, shape in enumerate(shapes)]
    sources[0] = sources[0].t()
    memory = torch.zeros(sum(source.nbytes for source in sources), dtype=torch.uint8)
    views, at = [], 0
    for source in sources:
        views.append(memory[at : at + source.nbytes].view(torch.float32).view(source.shape))
        at += source.nbytes
    for _ in range(2):
        copy_through_lanes(views, [lanes.on(n % 2, source) for n, source in enumerate(sources)], _copy, memo, lanes)
        assert [raw(view) for view in views] == [raw(source) for source in sources]
        memory.zero_()
    back = [lanes.on(1, torch.zeros(shape)) for shape in [(4, 3), *shapes[1:]]]
    copy_through_lanes(back, sources_on_host := [source.clone() for source in sources], _copy, None, lanes)
    assert [raw(each) for each in back] == [raw(source) for source in sources_on_host]
    assert cuda._process.device == 1
    assert played.device_of_thread is None


def test_waiting_for_an_event_uses_no_processor(played: Torch) -> None:
    one = lane.Lane(0)
    one.sync(one.record(one.move))
    assert one.end(one.begin()) == 1e-3
    waited_for = [event for event in played.events if event.stream is one.move]
    assert waited_for
    assert all(event.options.get("blocking") for event in waited_for)


@pytest.mark.parametrize("capturing", [False, True])
def test_a_stream_is_held_without_its_thread(played: Torch, capturing: bool) -> None:
    one = lane.Lane(0)
    played.capturing = capturing
    before = len(played.events)
    events = one.hold()
    streams = [event.stream for event in played.events[before:]]
    assert streams[-1] is (one.move if capturing else torch.cuda.current_stream())
    assert {one.pack, one.move} <= set(streams)
    assert one.held(events) == 1e-3


def test_nothing_is_copied_while_a_graph_is_captured(played: Torch) -> None:
    lanes = Lanes()
    played.capturing = True
    with pytest.raises(SaveError, match="graph is being captured"):
        copy_through_lanes([torch.zeros(3)], [lanes.on(0, torch.ones(3))], _copy, None, lanes)


def test_a_device_without_room_has_no_slabs(played: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    one = lane.Lane(0)
    assert one.ensure_slabs(100)
    kept = one.slabs
    assert one.ensure_slabs(50)
    assert one.slabs is kept
    one.freed = [one.record(one.move), None]

    def full(*args: object, **options: object) -> torch.Tensor:
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(torch, "empty", full)
    assert not one.ensure_slabs(1000)
    assert one.freed == [None, None]


def test_slots_that_may_not_be_locked_are_used_all_the_same(played: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    one, empty = lane.Lane(0), torch.empty

    def refused(*args: Any, **options: Any) -> torch.Tensor:
        if options.get("pin_memory"):
            raise RuntimeError("CUDA error: out of memory")
        return empty(*args, **options)

    monkeypatch.setattr(torch, "empty", refused)
    assert one.slot(2 << 20).nbytes == 2 << 20
    assert one.slot(9).nbytes == 9


def test_the_host_is_no_device() -> None:
    assert lane.Lanes.indices([torch.ones(2), torch.ones(3)]) == [-1, -1]
