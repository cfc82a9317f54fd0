"""The recipe of the guide on a very small GPT, with NeMo's `MegatronStrategy`. Needs a GPU a rank and NeMo's container.

    torchrun --nproc-per-node 2 --max-restarts 3 examples/nemo/pretrain_gpt.py --base /tmp/mlf-jobs/job-145

It is not run by the tests of this repository, which have no GPU: `MegatronStrategy` trains on CUDA devices only, see
docs/nemo.md. Everything between the lines marked `# ours` is NeMo's own.
"""

from __future__ import annotations

import argparse
import os

import nemo.lightning as nl
import torch
from megatron.core.optimizer import OptimizerConfig
from nemo.collections import llm

from ml_flashpoint.adapter.nemo.checkpoint_callback import MLFlashpointCheckpointCallback  # ours
from ml_flashpoint.adapter.nemo.wrapper_util import wrap_trainer_and_auto_resume_with_mlflashpoint  # ours


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

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    batch = 4 * world_size
    data = llm.MockDataModule(seq_length=128, micro_batch_size=4, global_batch_size=batch)
    model = llm.GPTModel(
        llm.GPTConfig(num_layers=2, hidden_size=128, ffn_hidden_size=512, num_attention_heads=4, seq_length=128),
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
        accelerator="gpu",
        strategy=nl.MegatronStrategy(ckpt_async_save=True),
        plugins=nl.MegatronMixedPrecision(precision="bf16-mixed"),
        max_steps=args.steps,
        limit_val_batches=0,
        callbacks=callbacks,
    )
    logger = nl.NeMoLogger(
        log_dir=args.log_dir,
        ckpt=nl.ModelCheckpoint(every_n_train_steps=args.ckpt_std_every_n_steps, save_last=True, save_top_k=1),
    )
    auto_resume = nl.AutoResume(resume_if_exists=True, resume_ignore_no_checkpoint=True)

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
