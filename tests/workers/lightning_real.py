"""A Lightning DDP job of 256 MiB a rank on two nodes. Its ranks kill themselves at a step, once, and one node loses its
memory then. It says what it came to, and what an undisturbed run of the same process comes to. In each life, the first
connection that carries anything from a rank breaks in its midst."""

from __future__ import annotations

import os
import shutil
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from ml_flashpoint.adapter.lightning import FlashpointCallback, resume_path
from tests.support.cuts import cut_in_the_midst
from tests.support.state_digest import digest
from tests.support.worker import base_path, report

# With two moments: 3 × 4 bytes × 2 × 2,730 × 4,099 = 256 MiB.
ROWS, COLUMNS, STEPS, KILL_AT = 2730, 4099, 4, 2

warnings.filterwarnings("ignore")


class Loader:
    """Knows its place, as Lightning needs it to go on in the middle of an epoch."""

    place = 0

    def __len__(self) -> int:
        return 16

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.place < len(self):
            self.place += 1
            yield torch.linspace(-1, self.place, COLUMNS).sin()[None]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(COLUMNS, ROWS, bias=False), nn.Dropout(0.1), nn.Linear(ROWS, COLUMNS))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return (self.net(batch) - batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        return Loader()


class KillAt(Callback):
    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == KILL_AT and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            for callback in trainer.callbacks:
                if isinstance(callback, FlashpointCallback) and callback.flashpoint is not None:
                    assert callback.flashpoint.wait(120)
                    health = callback.flashpoint.health
                    assert (health.saves, health.replication_error, health.agreement_error) == (KILL_AT, None, None)
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)


def train(ours: FlashpointCallback | None) -> str:
    seed_everything(5)
    model = Model()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        callbacks=[ours, KillAt()] if ours is not None else [],
        max_steps=STEPS,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
        use_distributed_sampler=False,
    )
    path = resume_path(trainer) if ours is not None else None
    report(resumes=None if path is None else str(path))
    trainer.fit(model, ckpt_path=path)
    return digest([model.state_dict(), trainer.optimizers[0].state_dict(), torch.rand(2)])


def main() -> None:
    torch.set_num_threads(1)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0" and os.environ["FLASHPOINT_NODE_ID"] == "node-1":
        shutil.rmtree(base_path())
    ours = FlashpointCallback(base_path(), 1, strict=True, deadline_s=120)
    with cut_in_the_midst() as cuts:
        resumed = train(ours)
    assert ours.flashpoint is not None
    report(resumed=resumed, bytes=ours.flashpoint.health.bytes, cuts=cuts)
    report(undisturbed=train(None))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
