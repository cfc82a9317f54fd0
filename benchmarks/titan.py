"""torchtitan: how long a save keeps the training loop, beside torchtitan's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

from benchmarks.timing import Memcpy, Result, measure, of_peer
from ml_flashpoint.adapter.torchtitan import FlashpointManager

STATE = "torchtitan, AdamW"
_NEVER = 1 << 40


class _Job:
    """160 MiB of parameters in 40 tensors, and AdamW's state of them: 480 MiB; what torchtitan hands to a manager."""

    def __init__(self, scale: float) -> None:
        rows = max(1, int(1024 * scale))
        self.model = torch.nn.ParameterList(torch.rand(rows, 1024) for _ in range(40))
        optimizers: Any = default_adamw(lr=1e-3).build(model_parts=[self.model])
        schedulers = LRSchedulersContainer.Config(warmup_steps=0).build(optimizers=optimizers, training_steps=100)
        for parameter in self.model:
            parameter.grad = torch.ones_like(parameter)
        optimizers.step()
        optimizers.zero_grad()
        self.step = 0
        self._parts = {"model_parts": [self.model], "optimizers": optimizers, "lr_schedulers": schedulers}

    def manager(self, config: Any, folder: Path) -> Any:
        trainer = SimpleNamespace(state_dict=lambda: {"step": self.step}, load_state_dict=lambda state: None)
        states = {"train_state": trainer}
        made = config.build(dataloader=None, states=states, sd_adapter=None, base_folder=str(folder), **self._parts)
        made.load()
        return made

    def timed(self, manager: Any) -> Callable[[int], float]:
        """Return what does a step's save, and returns how long that took."""

        def save(_: int) -> float:
            self.step += 1
            began = time.perf_counter()
            manager.save(self.step)
            return time.perf_counter() - began

        return save


def results(folder: Path, scale: float) -> Iterator[Result]:
    """Rows of the same model's saves, one after the other."""
    job = _Job(scale)
    memcpy = Memcpy({str(number): torch.cat([weight.detach()] * 3) for number, weight in enumerate(job.model)})
    base = str(folder / "job")
    ours = FlashpointManager.Config(enable=True, base=base, interval=_NEVER, options={"strict": True})
    manager = job.manager(ours, folder / "ours")
    yield measure(
        STATE, "ours: FlashpointManager, blocked", job.timed(manager), memcpy, after=lambda: manager.flashpoint.wait(60)
    )
    manager.close()
    for mode in ("disabled", "async"):
        case = f"torchtitan's own save, {'blocked' if mode == 'disabled' else 'async, blocked'}"
        yield from of_peer(STATE, case, _own(case, job, memcpy, folder / mode, mode))


def _own(case: str, job: _Job, memcpy: Memcpy, folder: Path, mode: Any) -> Iterator[Result]:
    config = CheckpointManager.Config(enable=True, interval=1, keep_latest_k=2, async_mode=mode)
    manager = job.manager(config, folder)
    yield measure(STATE, case, job.timed(manager), memcpy, after=manager.maybe_wait_for_saving)
    manager.close()
