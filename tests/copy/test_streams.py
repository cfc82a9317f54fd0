"""The calls that a stream makes, on a machine without CUDA: those that torch has, with what it takes, in their places.

Tensors of the device are the host's here, and streams do at once what they are given. tests/cuda tests what CUDA makes
of the calls.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ml_flashpoint.copy import cuda, transfers
from ml_flashpoint.copy.cpu import copy_all
from ml_flashpoint.copy.overlap import LateCopy
from ml_flashpoint.format.errors import SaveError
from tests.support.tensors import raw, tensor_of


class Torch:
    """The part of ``torch.cuda`` that a stream uses, with the parameters of the real one.

    Attributes:
        there: the device of each tensor that is on one, by its id. waits: the streams that were made to wait.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = threading.local()
        self.capturing = self.busy = False
        self.there: dict[int, int] = {}
        self.waits: list[Any] = []
        self.kept: list[Any] = []
        played = self
        real_stream, real_event = torch.cuda.Stream, torch.cuda.Event

        class Event:
            def __init__(self, **options: Any) -> None:
                inspect.signature(real_event.__new__).bind(real_event, **options)
                assert options["blocking"], "waiting would use the processor"
                self.stream: Any = None

            def record(self, stream: Any) -> None:
                self.stream = stream

            def synchronize(self) -> None:
                assert self.stream is not None, "nothing was recorded"

            def query(self) -> bool:
                assert self.stream is not None
                return not played.busy

        class Stream:
            def __init__(self, **options: Any) -> None:
                inspect.signature(real_stream.__new__).bind(real_stream, **options)
                self.device = played.device_of_thread

            def wait_event(self, event: Event) -> None:
                assert event.stream is not None
                played.waits.append(self)

            def wait_stream(self, stream: Stream) -> None:
                assert stream is caller

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
            "is_initialized": lambda: True,
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
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self.kept.append(tensor))
        monkeypatch.setattr(cuda, "_process", cuda._Process())
        monkeypatch.setattr(cuda, "_streams", {})
        monkeypatch.setattr(cuda, "indices", lambda tensors: [self.there.get(id(each), -1) for each in tensors])
        monkeypatch.setattr(cuda, "are_on_devices", lambda tensors: any(id(each) in self.there for each in tensors))

    @property
    def device_of_thread(self) -> Any:
        return getattr(self.current, "device", None)

    def on(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        self.there[id(tensor)] = index
        return tensor


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Torch:
    return Torch(monkeypatch)


def test_copies_both_ways(played: Torch) -> None:
    shapes = [(3, 4), (), (700_000,), (5,)]
    sources = [tensor_of(torch.float32, shape, seed=n) for n, shape in enumerate(shapes)]
    sources[0] = sources[0].t()
    views = [torch.zeros_like(source) for source in sources]
    copy_all(views, [played.on(n % 2, source) for n, source in enumerate(sources)])
    assert [raw(view) for view in views] == [raw(source) for source in sources]
    back = [played.on(1, torch.zeros(shape)) for shape in [(4, 3), *shapes[1:]]]
    copy_all(back, views)
    assert [raw(each) for each in back] == [raw(view) for view in views]
    assert played.device_of_thread is None


def test_a_late_copy_holds_the_stream_of_the_program_and_not_its_thread(
    played: Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, view = played.on(1, torch.arange(9.0).repeat(2)), torch.zeros(18)
    monkeypatch.setattr(transfers, "SMALL", 1)
    monkeypatch.setattr(cuda, "is_locked", lambda *_: True)
    late = LateCopy({0}, lambda: None)
    late.start(["weight"], [view], [source])
    assert any(each.data_ptr() == source.data_ptr() for each in played.kept), "its memory may be used again"
    played.busy = True
    assert not late.over
    late.hold()
    assert played.waits == [torch.cuda.current_stream()]
    with pytest.raises(SaveError, match="within 0 s"):
        late.wait(0.0)
    played.busy = False
    assert late.over
    late.wait(5)
    assert torch.equal(view, source)


def test_nothing_is_copied_while_a_graph_is_captured(played: Torch) -> None:
    played.capturing = True
    with pytest.raises(SaveError, match="graph is being captured"):
        copy_all([torch.zeros(3)], [played.on(0, torch.ones(3))])


def test_without_page_locked_memory_copies_are_made_all_the_same(
    played: Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = torch.empty

    def refused(*args: Any, **options: Any) -> torch.Tensor:
        if options.get("pin_memory"):
            raise RuntimeError("CUDA error: out of memory")
        return empty(*args, **options)

    monkeypatch.setattr(torch, "empty", refused)
    view = torch.zeros(3)
    copy_all([view], [played.on(0, torch.ones(3))])
    assert view.eq(1).all()


def test_the_host_is_no_device() -> None:
    assert cuda.indices([torch.ones(2), torch.ones(3)]) == [-1, -1]
