"""GPT-2's small model (124 M parameters, 1.5 GB of state with AdamW's) on two nodes, a checkpoint at every step.

Owns the three ways of training it: replicated (``ddp``), sharded (``fsdp2``) and with Lightning. Without a base
container (``--without``) it is the run that nothing disturbs.
"""

from __future__ import annotations

import argparse
import math
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ml_flashpoint import Flashpoint
from tests.support.state_digest import digest
from tests.support.worker import base_path, leave, rank, report

VOCABULARY, CONTEXT, WIDTH, HEADS, BLOCKS, DROPOUT = 50_304, 1024, 768, 12, 12, 0.1
TOKENS = 32
"""Of a batch: few, since it is the state that has to be large."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).unbind(-3)
        q, k, v = (each.transpose(-2, -3) for each in heads)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-2, -3).flatten(-2)
        x = x + F.dropout(self.out(attended), DROPOUT, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm_2(x)))), DROPOUT, self.training)


class GPT(nn.Module):
    """The head shares the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss of tokens [batch, time]."""
        x = self.tokens(tokens[:, :-1]) + self.places.weight[: tokens.shape[1] - 1]
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Loader:
    """Other tokens in each step and rank. Knows its place."""

    place = 0

    def __len__(self) -> int:
        return 1_000

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.place < len(self):
            self.place += 1
            generator = torch.Generator().manual_seed(1_000 * self.place + rank())
            yield torch.randint(VOCABULARY, (1, TOKENS + 1), generator=generator)

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


_said = False


def is_safe(fp: Flashpoint) -> bool:
    """Whether this life has a version of its own with all copies; True once only."""
    global _said
    now = not _said and fp.last_replicated is not None
    _said = _said or now
    return now


def train(kind: str, steps: int, protected: bool) -> None:
    """Replicated or sharded, with the façade."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    torch.manual_seed(3)
    model: Any = GPT()
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    torch.manual_seed(7 + rank())  # dropout differs from rank to rank
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: math.exp(-step / 100))
    loader = Loader()
    fp, step = None, 0
    if protected:
        fp = Flashpoint(base_path(), strict=True, deadline_s=120)
        step = fp.track(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader).resume()
        report(resumed=step)
    for tokens in loader:
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        step += 1
        if fp is not None:
            fp.step()
            report(step=step, replicated=fp.last_replicated, safe=is_safe(fp), blocked=round(fp.health.blocked_s, 3))
        if step == steps:
            break
    if fp is not None:
        assert fp.wait(120)
        fp.close()
    report(digest=digest([model.state_dict(), optimizer.state_dict(), torch.rand(2)]), steps=step)
    dist.destroy_process_group()


def train_with_lightning(steps: int, protected: bool) -> None:
    from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
    from lightning.pytorch.strategies import DDPStrategy

    from ml_flashpoint.adapter.lightning import FlashpointCallback, resume_path

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.gpt = GPT()

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.gpt(batch)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=3e-4)

        def train_dataloader(self) -> Any:
            return Loader()

    class Reports(Callback):
        def on_train_start(self, trainer: Trainer, *args: Any) -> None:
            report(resumed=trainer.global_step)

        def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
            if ours is not None and (fp := ours.flashpoint) is not None:
                report(step=trainer.global_step, replicated=fp.last_replicated, safe=is_safe(fp))

    os.environ.setdefault("NODE_RANK", os.environ["RANK"])  # where Lightning looks if torchrun has not started it
    ours = FlashpointCallback(base_path(), 1, strict=True, deadline_s=120) if protected else None
    seed_everything(5)
    module = Module()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        callbacks=[Reports(), *([ours] if ours is not None else [])],
        max_steps=steps,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, ckpt_path=resume_path(trainer) if ours is not None else None)
    state = [module.state_dict(), trainer.optimizers[0].state_dict(), torch.rand(2)]
    report(digest=digest(state), steps=trainer.global_step)
    dist.destroy_process_group()


def main() -> None:
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", required=True, choices=["ddp", "fsdp2", "lightning"])
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--without", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.kind == "lightning":
        train_with_lightning(arguments.steps, not arguments.without)
    else:
        train(arguments.kind, arguments.steps, not arguments.without)
    leave()


if __name__ == "__main__":
    main()
