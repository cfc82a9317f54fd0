"""The Trainer of Transformers: how long a save keeps the training loop, beside the Trainer's own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

from benchmarks.timing import RUNS, WARMUPS, Memcpy, Result, measure, of_peer
from ml_flashpoint.adapter.transformers import attach
from ml_flashpoint.adapter.transformers.attached import TrainerFlashpoint

STATE = "Trainer, Adam"


class _Model(torch.nn.Module):
    """160 MiB of parameters in 40 tensors, and Adam's state of them: 480 MiB."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        rows = max(1, int(1024 * scale))
        self.weights = torch.nn.ParameterList(torch.rand(rows, 1024) for _ in range(40))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.stack([weight.sum() for weight in self.weights]).sum() * 1e-9}


class _Waits(TrainerCallback):  # type: ignore[misc]
    """Has each step begin when the save of the one before has ended, and keeps how long that held the loop."""

    def __init__(self) -> None:
        self.flashpoint: TrainerFlashpoint | None = None
        self.blocked: list[float] = []

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self.flashpoint is not None and state.global_step:
            assert self.flashpoint.wait(60)
            self.blocked.append(self.flashpoint.health.blocked_s)


def results(folder: Path, scale: float) -> Iterator[Result]:
    """Rows of the same model's saves, one after the other."""
    folder.mkdir(parents=True, exist_ok=True)
    model = _Model(scale)
    memcpy = Memcpy({str(number): torch.cat([weight.detach()] * 3) for number, weight in enumerate(model.weights)})
    yield from _rows("ours: attach, blocked", model, memcpy, folder, is_ours=True)
    peer = "Trainer's own save, blocked"
    yield from of_peer(STATE, peer, _rows(peer, model, memcpy, folder, is_ours=False))


def _rows(case: str, model: _Model, memcpy: Memcpy, folder: Path, *, is_ours: bool) -> Iterator[Result]:
    waits = _Waits()
    steps = WARMUPS + RUNS
    args = TrainingArguments(
        output_dir=str(folder / "own"),
        max_steps=steps + 1,
        per_device_train_batch_size=1,
        save_strategy="no" if is_ours else "steps",
        save_steps=1,
        save_total_limit=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    data: Any = [{"x": torch.zeros(1)}] * (2 * steps)
    trainer = Trainer(model, args, train_dataset=data, callbacks=[waits])
    if is_ours:
        attach(trainer, folder / "job", strict=True)
        waits.flashpoint = trainer._ml_flashpoint.flashpoint
    else:
        save = trainer._save_checkpoint

        def timed(*given: Any) -> None:
            began = time.perf_counter()
            save(*given)
            waits.blocked.append(time.perf_counter() - began)

        trainer._save_checkpoint = timed
    trainer.train()
    blocked = iter(waits.blocked)
    yield measure(STATE, case, lambda _: next(blocked), memcpy)
