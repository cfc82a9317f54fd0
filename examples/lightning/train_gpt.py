"""A byte-level GPT, sharded with FSDP2 by Lightning, that saves into memory and goes on after a crash.

    torchrun --nproc-per-node 2 --max-restarts 3 examples/lightning/train_gpt.py --steps 200

Kill a rank meanwhile (`kill -9`), or let it happen with `--die-at 50`: torchrun starts the ranks again, and they go on
from the newest step in memory. The lines with `# ours` are all that it takes.
"""

from __future__ import annotations

import argparse
import os
import signal
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ml_flashpoint.adapter.lightning import FlashpointCallback, resume_path  # ours

CONTEXT, WIDTH, BATCH = 64, 96, 8


class Text:
    """Endless batches of the source of Python's standard library: inputs and next bytes. It has a ``state_dict()``, so
    that after a crash a job goes on with the next batch."""

    def __init__(self, rank: int) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
        self._text = torch.frombuffer(bytearray(b"".join(each.read_bytes() for each in files)), dtype=torch.uint8)
        self._rank, self._place = rank, 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        chance = torch.Generator().manual_seed((self._rank << 32) + self._place)
        starts = torch.randint(len(self._text) - CONTEXT, (BATCH, 1), generator=chance)
        windows = self._text[starts + torch.arange(CONTEXT + 1)].long()
        self._place += 1
        return windows[:, :-1], windows[:, 1:]

    def state_dict(self) -> dict[str, int]:
        """Return the place in the text."""
        return {"place": self._place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a place."""
        self._place = state["place"]


class ByteGPT(LightningModule):
    """The model and its training step."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
            for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 256, bias=False)
        self._rank = rank

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the logits [batch, time, 256] of each next byte."""
        length = text.shape[1]
        x = self.bytes(text) + self.places(torch.arange(length, device=text.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=text.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits: torch.Tensor = self.head(x)
        return logits

    def configure_model(self) -> None:
        """Shards the model; Lightning may call this more than once."""
        if isinstance(next(self.parameters()), DTensor):
            return
        mesh = self.device_mesh["data_parallel"]
        for layer in (*self.blocks, self.bytes, self.places, self.head):
            fully_shard(layer, mesh=mesh)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """The loss of one batch."""
        inputs, targets = batch
        loss = F.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())
        if self._rank == 0 and self.trainer.global_step % 10 == 0:
            print(f"step {self.trainer.global_step}: loss {loss.item():.3f}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> Text:
        """Batches of this rank."""
        return Text(self._rank)


class DieAt(Callback):
    """Kills rank 0 once, at a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """Called before each step."""
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if first and trainer.global_step == self._step and trainer.is_global_zero:
            print(f"step {self._step}: rank 0 kills itself", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="/dev/shm/mlf-jobs/lightning-example", help="a folder in memory, by job")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=5, help="steps between saves into memory")
    parser.add_argument("--die-at", type=int, default=-1, metavar="STEP")
    arguments = parser.parse_args()

    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    seed_everything(1, verbose=False)
    flashpoint = FlashpointCallback(arguments.base, every_n_steps=arguments.every)  # ours
    cuda = torch.cuda.is_available()
    trainer = Trainer(
        accelerator="gpu" if cuda else "cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        strategy=ModelParallelStrategy(data_parallel_size=world_size, tensor_parallel_size=1),
        max_steps=arguments.steps,
        callbacks=[flashpoint, DieAt(arguments.die_at)],
        logger=False,
        enable_checkpointing=False,  # your ModelCheckpoint goes on as before; this example needs none
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    path = resume_path(trainer)  # ours
    if rank == 0:
        print(f"going on from {path}" if path else "starting anew", flush=True)
    trainer.fit(ByteGPT(rank), ckpt_path=path)  # ours: the path
    if rank == 0 and flashpoint.flashpoint is not None:
        health = flashpoint.flashpoint.health
        print(f"{health.saves} saves, {health.failures} failed, {health.blocked_s * 1e3:.0f} ms each", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
