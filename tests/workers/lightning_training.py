"""A Lightning training job that is killed and goes on, whose every step depends on all that a checkpoint brings back.

Its lives are those that a torchrun agent gives it, or each of an agent of its own. In each but the last, ranks kill
themselves at a step, or have Lightning end them. The last one also trains without any of ours, from the beginning, and
tells what both came to. The job of real size has 256 MiB a rank.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import re
import shutil
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.plugins import FSDPPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from ml_flashpoint.adapter.lightning import FlashpointCallback, resume_path
from tests.support.cuts import cut_in_the_midst
from tests.support.forked import wait_until
from tests.support.state_digest import digest
from tests.support.worker import base_path, leave, report

EPOCH, VALIDATE_EVERY = 7, 3
# Features, width and steps. With two moments, the second is 3 × 4 bytes × 2 × 2,730 × 4,099 = 256 MiB.
SMALL, REAL = (8, 33, 16), (4099, 2730, 4)

warnings.filterwarnings("ignore")
fails_at = -1


class Loader:
    """Batches of one rank that know their place, in an order of their own for each epoch.

    Without a length, Lightning fetches a batch ahead.
    """

    def __init__(self, rank: int, features: int) -> None:
        self.rank, self.features = rank, features
        self.epoch = self.place = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self.place >= EPOCH:
            self.epoch, self.place = self.epoch + 1, 0
        generator = torch.Generator().manual_seed(1000 * self.epoch + self.rank)
        order = torch.randperm(EPOCH, generator=generator).tolist()
        while self.place < EPOCH:
            number = order[self.place]
            self.place += 1
            data = torch.linspace(-1, number, 4 * self.features).sin()
            yield {"number": torch.tensor([self.epoch, number]), "data": data}

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.place = state["epoch"], state["place"]


class SizedLoader(Loader):
    def __len__(self) -> int:
        return EPOCH


class Model(LightningModule):
    def __init__(self, kind: str, loader: Loader) -> None:
        super().__init__()
        features, width, _ = REAL if kind == "real" else SMALL
        self.save_hyperparameters({"width": width, "function": leave})  # not to be pickled
        self.net = nn.Sequential(nn.Linear(features, width), nn.GELU(), nn.Dropout(0.3), nn.Linear(width, features))
        self.register_buffer("seen", torch.zeros(1))
        self.batches: list[tuple[int, list[int]]] = []
        self.kind, self.loader = kind, loader
        self.restored: list[str] = []

    def configure_model(self) -> None:
        if self.kind == "fsdp" and not isinstance(self.net, FullyShardedDataParallel):
            # Lightning's own wrapping leaves it to torch to find a GPU.
            self.net = FullyShardedDataParallel(self.net, device_id=torch.device("cpu"), use_orig_params=True)
        if self.kind == "model_parallel" and not isinstance(next(self.parameters()), DTensor):
            mesh = self.device_mesh["data_parallel"]
            fully_shard(self.net[0], mesh=mesh)
            fully_shard(self.net[3], mesh=mesh)
            fully_shard(self.net, mesh=mesh)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        numbers = batch["number"].flatten().tolist()
        self.batches.append((self.trainer.global_step, numbers))
        report(step=self.trainer.global_step, batch=numbers)
        if fails_at == self.trainer.global_step:
            raise RuntimeError("as asked")
        self.seen += 1
        data = batch["data"].view(4, self.loader.features)
        return (self.net(data) - data).square().mean() + 0.001 * torch.rand(()) * self.seen.mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val", (self.net(batch) - batch).square().mean(), sync_dist=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["of_module"] = torch.tensor([self.trainer.global_step])

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.restored.append(str(checkpoint["of_module"].tolist()))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.8), "interval": "step"},
            {"scheduler": plateau, "interval": "epoch", "monitor": "val", "strict": False},
        ]

    def train_dataloader(self) -> Loader:
        return self.loader

    def val_dataloader(self) -> list[torch.Tensor]:
        return [torch.linspace(0, 1, 2 * self.loader.features).view(2, self.loader.features)]


class Tally(Callback):
    """A callback with a state: tensors and plain values, of this rank alone. It counts hooks, too."""

    def __init__(self, rank: int) -> None:
        self.total, self.calls = torch.zeros(3), dict.fromkeys(("batch", "epoch", "validation"), 0)
        self.rank = rank

    def on_train_batch_end(self, *args: Any) -> None:
        self.total += self.rank + torch.rand(3)
        self.calls["batch"] += 1

    def on_train_epoch_end(self, *args: Any) -> None:
        self.calls["epoch"] += 1

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.calls["validation"] += not trainer.sanity_checking

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "calls": dict(self.calls)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.calls = state["total"], dict(state["calls"])


class _Counting:
    count = 0

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return super().optimizer_step(*args, **kwargs)  # type: ignore[misc]

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class CountingPrecision(_Counting, Precision):
    pass


class CountingFSDPPrecision(_Counting, FSDPPrecision):
    pass


class CpuFSDPStrategy(FSDPStrategy):
    """Lightning allows its own class on GPUs only."""


class KillAt(Callback):
    def __init__(self, step: int, how: int = signal.SIGKILL) -> None:
        self.step, self.how = step, how

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        persists = any(self._await(each) for each in trainer.callbacks if isinstance(each, FlashpointCallback))
        if trainer.global_step == self.step or persists:
            # What is to be resumed from must be there; it is the kill that comes at any time, not the commit.
            for callback in trainer.callbacks:
                if isinstance(callback, FlashpointCallback) and callback.flashpoint is not None:
                    assert callback.flashpoint.wait(60)
            if dist.is_initialized():
                dist.barrier()
        if trainer.global_step == self.step:
            os.kill(os.getpid(), self.how)

    def _await(self, callback: FlashpointCallback) -> bool:
        """Has every version persisted that is due: no step is as long as that takes."""
        persister = callback.flashpoint and callback.flashpoint._checkpointer._persister
        if not persister:
            return False
        assert callback.flashpoint is not None
        assert callback.flashpoint.wait(60)
        wait_until(lambda: not persister.is_busy, "it is idle")
        return True


def strategy_of(kind: str) -> tuple[Any, Any]:
    if kind == "single":
        return "auto", CountingPrecision()
    if kind in ("ddp", "real"):
        return DDPStrategy(process_group_backend="gloo", find_unused_parameters=True), CountingPrecision()
    if kind == "fsdp":
        # Whole ones, which would be gathered for `ModelCheckpoint`, make torch crash without a GPU.
        return CpuFSDPStrategy(process_group_backend="gloo", state_dict_type="sharded"), CountingFSDPPrecision(
            "32-true"
        )
    return ModelParallelStrategy(process_group_backend="gloo", data_parallel_size=2, tensor_parallel_size=1), (
        CountingPrecision()
    )


def train(
    kind: str, folder: Path, ours: FlashpointCallback | None, kill_at: int = -1, how: int = signal.SIGKILL
) -> dict[str, Any]:
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    seed_everything(5 + rank)
    strategy, precision = strategy_of(kind)
    # Of sized and unsized loaders, each with sharded and unsharded strategies.
    features, _, steps = REAL if kind == "real" else SMALL
    loader = (Loader if kind in ("ddp", "fsdp") else SizedLoader)(rank, features)
    model = Model(kind, loader)
    tally = Tally(rank)
    checkpoints = ModelCheckpoint(folder, every_n_train_steps=5, save_top_k=-1, filename="{step}")
    averaging = [EMAWeightAveraging(decay=0.9)] if kind in ("single", "ddp") else []
    trainer = Trainer(
        accelerator="cpu",
        devices=here,
        num_nodes=int(os.environ.get("WORLD_SIZE", "1")) // here,
        strategy=strategy,
        plugins=[precision],
        # Ours in front, from where it has to move behind the others.
        callbacks=[*([ours] if ours else []), tally, *averaging, checkpoints, KillAt(kill_at, how)],
        max_steps=steps,
        max_epochs=-1,
        val_check_interval=VALIDATE_EVERY,
        check_val_every_n_epoch=1,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        use_distributed_sampler=False,
        default_root_dir=folder,
    )
    path = resume_path(trainer) if ours is not None else None
    report(life=os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), resumes=None if path is None else str(path))
    trainer.fit(model, ckpt_path=path)
    net: Any = trainer.strategy.model
    with contextlib.redirect_stderr(io.StringIO()):
        return {
            "weights": digest(get_model_state_dict(net)),
            "optimizer": digest(get_optimizer_state_dict(net, trainer.optimizers[0])["state"]),
            "groups": digest([{**g, "params": None} for g in trainer.optimizers[0].state_dict()["param_groups"]]),
            "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            "loops": trainer.fit_loop.state_dict(),
            "averaged": [digest(each._average_model.state_dict()) for each in averaging],
            "callbacks": [digest(tally.total), tally.calls],
            "precision": precision.count,
            "loader": loader.state_dict(),
            "next_random": torch.rand(2).tolist(),
            # One that a kill has cut short is written again by Lightning, as another version of it.
            "files": sorted({re.sub(r"-v\d+", "", path.name) for path in folder.glob("*")}),
            "batches": model.batches,
            "restored": model.restored,
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kill", type=int, nargs="*", default=[])
    parser.add_argument("--leave", action="store_true")
    parser.add_argument("--terminate", action="store_true")
    parser.add_argument("--persist")
    parser.add_argument("--lose", default="", help="node whose memory is gone after the first life")
    parser.add_argument(
        "--exit", choices=["ends", "fails"], help="end as a script does, at its last line or by an error"
    )
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    life = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if life and arguments.lose == os.environ["FLASHPOINT_NODE_ID"]:
        shutil.rmtree(base_path())
    kill_at = arguments.kill[life] if life < len(arguments.kill) else -1
    how = signal.SIGTERM if arguments.terminate else signal.SIGKILL
    ours = FlashpointCallback(
        base_path(), 1, strict=True, deadline_s=60, persist=arguments.persist, persist_every=2, grace_s=60
    )
    global fails_at
    fails_at = 5 if arguments.exit == "fails" else -1
    # The first connection of a life that carries anything of real size breaks in its midst.
    with cut_in_the_midst() if arguments.kind == "real" else contextlib.nullcontext([]) as cuts:
        resumed = train(arguments.kind, arguments.folder / "resumed", ours, kill_at, how)
    if arguments.exit:
        return
    engine = ours.flashpoint
    assert engine is not None
    report(resumed=resumed, health={"saves": engine.health.saves, "failures": engine.health.failures})
    report(source=engine.last_recovery and engine.last_recovery.source, last_saved=engine.last_saved)
    report(bytes=engine.health.bytes, cuts=cuts)
    report(undisturbed=train(arguments.kind, arguments.folder / "undisturbed", None))
    if arguments.leave:
        leave()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
