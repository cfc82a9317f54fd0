"""A device that is played for whole jobs: its memory is the host's, and its streams lag behind.

Owns what of a job is on it, and the patches that have the package see it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from ml_flashpoint.core.overlap import Overlap
from ml_flashpoint.staging import cuda, device_copy
from ml_flashpoint.staging.late_device_copy import LateDeviceCopy
from tests.support.played_cuda import PlayedRuntime, play
from tests.support.played_lane import PlayedLane, PlayedLanes

if TYPE_CHECKING:
    import pytest

    from ml_flashpoint.checkpoint_object_manager.rank_store import RankStore


class PlayedDevice(PlayedLanes):
    """Parameters, statistics and moments of a job are on it, but not the optimizer's steps.

    Args:
        monkeypatch: undoes it.
        models, optimizers: of the job; those that are made later may be added.

    Attributes:
        late: copies from it that went on while training did.
        lags: whether such a copy is over only once something waits for it.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        super().__init__(seed=3, eagerness=0.2)
        self._models, self._optimizers = models, optimizers
        self.late: list[LateDeviceCopy] = []
        play(monkeypatch, PlayedRuntime(), device=0)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)  # torch itself would go on to use it
        monkeypatch.setattr(cuda, "in_use", lambda: True)
        monkeypatch.setattr(cuda, "settle", lambda: None)
        monkeypatch.setattr(cuda, "is_capturing", lambda: False)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(cuda, "are_on_devices", lambda tensors: any(map(self.is_on, tensors)))
        monkeypatch.setattr(device_copy, "_process_lanes", self)
        # The optimizer of the host changes what it changes at once; a device's waits before that.
        monkeypatch.setattr(
            PlayedLane, "hold", lambda lane: [lane.sync(lane.record(s)) for s in (lane.pack, lane.move)] and 0.0
        )
        begin, late = LateDeviceCopy.__init__, self.late

        def noted(copy: LateDeviceCopy, *args: object, **options: object) -> None:
            begin(copy, *args, **options)  # type: ignore[arg-type]
            late.append(copy)

        monkeypatch.setattr(LateDeviceCopy, "__init__", noted)
        self.lags = False
        self._have_it_lag(monkeypatch)

    def _have_it_lag(self, monkeypatch: pytest.MonkeyPatch) -> None:
        start, finish, waited_for = Overlap._start, LateDeviceCopy.finish, threading.Event()

        def started(overlap: Overlap, late: LateDeviceCopy) -> None:
            waited_for.clear()
            if self.lags:
                overlap._thread.run(lambda: bool(waited_for.wait(30)))
            start(overlap, late)

        def finished(late: LateDeviceCopy) -> None:
            try:
                finish(late)
            finally:
                waited_for.set()

        monkeypatch.setattr(Overlap, "_start", started)
        monkeypatch.setattr(LateDeviceCopy, "finish", finished)

    def is_on(self, tensor: torch.Tensor) -> bool:
        storage = _local(tensor).untyped_storage().data_ptr()
        return any(t.untyped_storage().data_ptr() == storage for t in map(_local, self._all()) if t.dim())

    def _all(self) -> Iterable[torch.Tensor]:
        for model in self._models:
            yield from (*model.parameters(), *model.buffers())
        for optimizer in self._optimizers:
            yield from (parameter for group in optimizer.param_groups for parameter in group["params"])
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def indices(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        return [0 if self.is_on(tensor) else -1 for tensor in tensors]


def _local(tensor: Any) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # type: ignore[no-any-return]


def lock_arenas(store: RankStore | None) -> None:
    """Leave time to lock all arenas."""
    assert store is not None
    for arena in (*store.arenas._free, *store.arenas._in_use):
        arena.lock_in_background()
        if arena._prefault is not None:
            arena._prefault.join()
