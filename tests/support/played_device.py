"""A device that is played for whole jobs: its memory is the host's, and its streams lag behind.

Owns what of a job is on it, and the patches that have the package see it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from ml_flashpoint.copy import transfers
from ml_flashpoint.copy.overlap import LateCopy
from tests.support.played_cuda import PlayedRuntime, play
from tests.support.played_streams import PlayedStreams

if TYPE_CHECKING:
    import pytest

    from ml_flashpoint.memory.pool import Pool


class PlayedDevice(PlayedStreams):
    """Parameters, statistics and moments of a job are on it, but not the optimizer's steps.

    Args:
        monkeypatch: undoes it.
        models, optimizers: of the job; those that are made later may be added.

    Attributes:
        late: copies from it that went on while training did.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        super().__init__(eagerness=0.2, seed=3)
        self._models, self._optimizers = models, optimizers
        self.late: list[LateCopy] = []
        play(monkeypatch, PlayedRuntime(), device=0)
        self.play(monkeypatch)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)  # torch itself would go on to use it
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(transfers, "SMALL", 1)
        start, late = LateCopy.start, self.late

        def noted(copy: LateCopy, *pairs: Any) -> None:
            start(copy, *pairs)
            if pairs[0]:
                late.append(copy)

        monkeypatch.setattr(LateCopy, "start", noted)

    def lag(self, lags: bool = True) -> None:
        """Have a late copy be over only once the program is held for it, or also before."""
        for (_, purpose), stream in self.streams.items():
            stream.lags = lags and purpose == "late"

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


def lock_slots(pool: Pool) -> None:
    """Lock all slots that the rank's own saves take."""
    for slot in pool.slots:
        slot.prepare()
