"""One training of a very small GPT, with NeMo's own trainer, `MegatronStrategy`, optimizer module, data sampler,
`ModelCheckpoint` and `AutoResume`, on the CPU; with checkpoints in memory, or without any of ours.

Owns the training, and what it tells of itself. When it is killed, and what is then lost, is the job's.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nemo.lightning as nl
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningDataModule
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.num_microbatches_calculator import update_num_microbatches
from megatron.core.optimizer import OptimizerConfig
from nemo.collections import llm
from nemo.collections.common.tokenizers.bytelevel_tokenizers import ByteLevelTokenizer
from nemo.lightning.pytorch.plugins import MegatronDataSampler
from torch.utils.data import DataLoader, Dataset

from ml_flashpoint.adapter.nemo.checkpoint_callback import MLFlashpointCheckpointCallback, flashpoint_io_of
from ml_flashpoint.adapter.nemo.wrapper_util import wrap_trainer_and_auto_resume_with_mlflashpoint
from tests.support.forked import wait_until
from tests.support.state_digest import digest
from tests.support.worker import base_path, rank, report, world_size

LENGTH, MICRO_BATCH, MICRO_BATCHES = 16, 2, 2


@dataclass(frozen=True)
class Kind:
    """What is trained, and when it is saved, by whom."""

    distributed: bool = True
    hidden: int = 32
    ffn: int = 64
    steps: int = 14
    every: int = 2
    long_term_every: int = 6


KINDS = {
    "plain": Kind(distributed=False),
    "distributed": Kind(),
    # Of two ranks each has 3 × 4 bytes / 2 of each of 2 × 2 × 512 × 23,000 parameters and more: 270 MiB.
    "real": Kind(hidden=512, ffn=23_000, steps=3, every=1, long_term_every=100),
}


class Samples(Dataset):  # type: ignore[type-arg]
    """Tokens by number; notes which were asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        self.asked.append(int(number))
        generator = torch.Generator().manual_seed(int(number))
        tokens = torch.randint(0, 256, (LENGTH + 1,), generator=generator)
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": torch.ones(LENGTH),
            "position_ids": torch.arange(LENGTH),
            "attention_mask": torch.ones(1, LENGTH, LENGTH).triu(1) > 0,
        }


class Data(LightningDataModule):  # type: ignore[misc]
    """A data module that goes on where it was, in the way of NeMo's `PreTrainingDataModule`."""

    def __init__(self) -> None:
        super().__init__()
        self.samples = Samples()
        self.data_sampler = MegatronDataSampler(
            seq_len=LENGTH, micro_batch_size=MICRO_BATCH, global_batch_size=MICRO_BATCH * MICRO_BATCHES * world_size()
        )

    def train_dataloader(self) -> Any:
        self.data_sampler.init_global_step = self.trainer.global_step
        return DataLoader(self.samples)

    def state_dict(self) -> dict[str, int]:
        steps = self.trainer.global_step - self.data_sampler.init_global_step
        return {"consumed": self.data_sampler.compute_consumed_samples(steps)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        sampler = self.data_sampler
        sampler.init_consumed_samples = sampler.prev_consumed_samples = state["consumed"]
        update_num_microbatches(consumed_samples=state["consumed"], consistency_check=False)
        sampler.if_first_step = 1


class Tally(Callback):  # type: ignore[misc]
    """A callback with a state; tells what each step was trained on, and its loss."""

    def __init__(self) -> None:
        self.total = torch.zeros(2)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        loss = float(trainer.callback_metrics["reduced_train_loss"])
        self.total += torch.tensor([loss, 1.0])
        samples = trainer.datamodule.samples
        asked, samples.asked = samples.asked, []
        report(step=trainer.global_step, trained_on=asked, loss=loss)

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"]


class KillAt(Callback):  # type: ignore[misc]
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self._await_store(trainer)
        if trainer.global_step != self.step:
            return
        # What is to be resumed from must be there; it is the kill that comes at any time, not the commit.
        io = flashpoint_io_of(trainer)
        assert io is not None
        assert io.engine.wait(60)
        if trainer.strategy.async_save:
            trainer.strategy.checkpoint_io.maybe_finalize_save_checkpoint(blocking=True)
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)

    def _await_store(self, trainer: Any) -> None:
        """Has every version persisted that is due: no step is as long as that takes."""
        io = flashpoint_io_of(trainer)
        persister = io and io.engine._persister
        if persister:
            assert io.engine.wait(60)
            wait_until(lambda: not persister.is_busy, "it is idle")


def train(
    name: str,
    folder: Path,
    *,
    ours: bool,
    kill_at: int = -1,
    persist: str | None = None,
) -> dict[str, Any]:
    """Train, and tell what came of it."""
    kind = KINDS[name]
    data, tokenizer = Data(), ByteLevelTokenizer(vocab_size=256)
    model = llm.GPTModel(
        llm.GPTConfig(
            num_layers=2,
            hidden_size=kind.hidden,
            ffn_hidden_size=kind.ffn,
            num_attention_heads=4,
            seq_length=LENGTH,
            # Its random numbers are in no checkpoint of NeMo's.
            attention_dropout=0.0,
            hidden_dropout=0.0,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
        ),
        tokenizer=tokenizer,
    )
    optimizer = nl.MegatronOptimizerModule(
        OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=1.0, use_distributed_optimizer=kind.distributed),
        lr_scheduler=nl.lr_scheduler.CosineAnnealingScheduler(warmup_steps=3, constant_steps=0, min_lr=1e-3),
    )
    tally = Tally()
    callbacks: list[Callback] = [tally, KillAt(kill_at)]
    if ours:
        # In front, from where it has to move behind the others.
        callbacks.insert(
            0,
            MLFlashpointCheckpointCallback(base_path(), kind.every, skip_every_n_steps=kind.long_term_every),
        )
    trainer = nl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=world_size() // int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=nl.MegatronStrategy(
            ddp=DistributedDataParallelConfig(use_distributed_optimizer=kind.distributed),
            ckpt_async_save=kind.distributed,
            process_group_backend="gloo",
        ),
        max_steps=kind.steps,
        limit_val_batches=0,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
    )
    log = nl.NeMoLogger(
        log_dir=str(folder),
        ckpt=nl.ModelCheckpoint(
            every_n_train_steps=kind.long_term_every, monitor="step", save_top_k=-1, save_last=True, filename="{step}"
        ),
        use_datetime_version=False,
    )
    resume: Any = nl.AutoResume(resume_if_exists=True, resume_ignore_no_checkpoint=True)
    if ours:
        trainer.strategy.setup_environment()
        resume = wrap_trainer_and_auto_resume_with_mlflashpoint(
            trainer=trainer,
            flashpoint_base_container=base_path(),
            async_save=kind.distributed,
            default_auto_resume=resume,
            always_save_context=True,
            keep=2 if persist else 1,
            persist=persist,
            persist_every=1,
        )
    setup = resume.setup

    def told(trainer: Any, *args: Any) -> None:
        setup(trainer, *args)
        if (io := flashpoint_io_of(trainer)) is not None:
            recovery = io.engine.last_recovery
            report(tier="memory" if recovery is None else recovery.tier)
        report(resumes=None if trainer.ckpt_path is None else str(trainer.ckpt_path))

    resume.setup = told
    llm.train(model=model, data=data, trainer=trainer, log=log, resume=resume, optim=optimizer)
    io = flashpoint_io_of(trainer)
    if io is not None:
        assert io.save_strategy.last_error is None
        context = resume.get_context_path()
        assert io.engine.wait(60)
        report(persisted=io.engine.status.persisted)
        report(kept=[each.step for each in io.engine.versions()])
        report(committed=io.engine.status.saves)
        objects = [each.stat().st_size for each in base_path().glob(f"step-*/rank-{rank():05d}-*.safetensors")]
        report(bytes=max(objects))
        report(context=sorted(path.name for path in context.iterdir()) if context is not None else None)
    inner = trainer.optimizers[0].mcore_optimizer
    adams = [each.optimizer for each in getattr(inner, "chained_optimizers", [inner])]
    return {
        "weights": digest(dict(model.named_parameters())),
        "optimizer": digest([[each.state[p] for g in each.param_groups for p in g["params"]] for each in adams]),
        "groups": digest([[{**group, "params": None} for group in each.param_groups] for each in adams]),
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "loops": trainer.fit_loop.state_dict(),
        "data": data.state_dict(),
        "tally": tally.total.tolist(),
        "long_term": sorted(str(each.relative_to(folder)) for each in folder.rglob("weights/*")),
    }
