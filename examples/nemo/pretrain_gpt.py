"""The recipe of the guide on a very small GPT, with NeMo's `MegatronStrategy`.

    torchrun --nproc-per-node 2 --max-restarts 3 examples/nemo/pretrain_gpt.py --base /dev/shm/mlf-jobs/job-145

It needs a GPU a rank, and NeMo's container or what docs/nemo.md lists. Kill a rank meanwhile (`kill -9`): torchrun
starts the ranks again, and they go on from the newest step in memory. The lines with `# ours` are all that it takes.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from pathlib import Path
from typing import Any

import nemo.lightning as nl
import torch
from lightning.pytorch import LightningDataModule
from megatron.core.num_microbatches_calculator import update_num_microbatches
from megatron.core.optimizer import OptimizerConfig
from nemo.collections import llm
from nemo.collections.common.tokenizers.bytelevel_tokenizers import ByteLevelTokenizer
from nemo.lightning.pytorch.plugins import MegatronDataSampler
from torch.utils.data import DataLoader, Dataset

from ml_flashpoint.adapter.nemo.checkpoint_callback import MLFlashpointCheckpointCallback  # ours
from ml_flashpoint.adapter.nemo.wrapper_util import wrap_trainer_and_auto_resume_with_mlflashpoint  # ours

LENGTH, MICRO_BATCH = 128, 4


class Bytes(Dataset):  # type: ignore[type-arg]
    """The bytes of a text, `LENGTH` at a time."""

    def __init__(self) -> None:
        source = b"".join(each.read_bytes() for each in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60])
        self._text = torch.frombuffer(bytearray(source), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return (len(self._text) - 1) // LENGTH

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        piece = self._text[number * LENGTH : (number + 1) * LENGTH + 1]
        return {
            "tokens": piece[:-1],
            "labels": piece[1:],
            "loss_mask": torch.ones(LENGTH),
            "position_ids": torch.arange(LENGTH),
            "attention_mask": torch.ones(1, LENGTH, LENGTH).triu(1) > 0,
        }


class Text(LightningDataModule):
    """Goes on with the next batch, as NeMo's `PreTrainingDataModule` does, and its `MockDataModule` does not."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self.tokenizer = ByteLevelTokenizer(vocab_size=256)
        self.data_sampler = MegatronDataSampler(
            seq_len=LENGTH, micro_batch_size=MICRO_BATCH, global_batch_size=MICRO_BATCH * world_size
        )

    def train_dataloader(self) -> Any:
        """NeMo gives it the sampler."""
        self.data_sampler.init_global_step = self.trainer.global_step
        return DataLoader(Bytes())

    def state_dict(self) -> dict[str, Any]:
        """Return the number of consumed samples."""
        steps = self.trainer.global_step - self.data_sampler.init_global_step
        return {"consumed": self.data_sampler.compute_consumed_samples(steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after these samples."""
        self.data_sampler.init_consumed_samples = self.data_sampler.prev_consumed_samples = state["consumed"]
        update_num_microbatches(consumed_samples=state["consumed"], consistency_check=False)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, help="a folder in memory, by job")
    parser.add_argument("--log-dir", default="nemo-runs", help="for long-term checkpoints")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ckpt-mlf-every-n-steps", type=int, default=5)
    parser.add_argument("--ckpt-std-every-n-steps", type=int, default=50)
    parser.add_argument("--sync-save", action="store_true")
    args = parser.parse_args()

    mlflashpoint_base_path = args.base  # ours
    os.makedirs(mlflashpoint_base_path, exist_ok=True)  # ours

    data = Text(int(os.environ.get("WORLD_SIZE", "1")))
    model = llm.GPTModel(
        llm.GPTConfig(
            num_layers=2,
            hidden_size=128,
            ffn_hidden_size=512,
            num_attention_heads=4,
            seq_length=LENGTH,
            # Kernels of Apex's and Megatron-LM's, which NeMo's container has, and others may not.
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
        ),
        tokenizer=data.tokenizer,
    )
    optimizer = nl.MegatronOptimizerModule(
        OptimizerConfig(optimizer="adam", lr=1e-3, bf16=True, use_distributed_optimizer=True)
    )
    callbacks = [
        MLFlashpointCheckpointCallback(  # ours
            mlflashpoint_base_path,
            args.ckpt_mlf_every_n_steps,
            skip_every_n_steps=args.ckpt_std_every_n_steps,
        )
    ]
    trainer = nl.Trainer(
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        strategy=nl.MegatronStrategy(ckpt_async_save=True),
        plugins=nl.MegatronMixedPrecision(precision="bf16-mixed"),
        max_steps=args.steps,
        limit_val_batches=0,
        callbacks=callbacks,
        logger=False,
    )
    logger = nl.NeMoLogger(
        log_dir=args.log_dir,
        ckpt=nl.ModelCheckpoint(every_n_train_steps=args.ckpt_std_every_n_steps, save_last=True, save_top_k=1),
    )
    auto_resume = nl.AutoResume(resume_if_exists=True, resume_ignore_no_checkpoint=True)

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    trainer.strategy.setup_environment()  # ours
    auto_resume = wrap_trainer_and_auto_resume_with_mlflashpoint(  # ours
        trainer=trainer,
        flashpoint_base_container=mlflashpoint_base_path,
        async_save=not args.sync_save,
        default_auto_resume=auto_resume,
    )
    llm.train(model=model, data=data, trainer=trainer, log=logger, resume=auto_resume, optim=optimizer)


if __name__ == "__main__":
    main()
