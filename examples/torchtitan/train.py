"""A small Llama 3 of torchtitan, on bytes, that saves into memory at every step and goes on after a crash.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # or restarted ranks may fail, or hang; see docs/operations.md
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/torchtitan/train.py --steps 200

Kill a rank meanwhile (`kill -9`), or let it happen with `--die-at 50`: torchrun starts the ranks again, and they go on
from the newest step in memory. The lines with `# ours` are all that it takes. Without a GPU it runs by `on_cpu.py`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

if not torch.cuda.is_available():
    import on_cpu

import datasets
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

from ml_flashpoint.adapter.torchtitan import attach  # ours


class ByteTokenizer(BaseTokenizer):
    """Tokens are bytes; 256 begins and ends a text."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()
        self.eos_id = 256

    def encode(self, text: str, *, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        return [256] * add_bos + list(text.encode()) + [256] * add_eos

    def decode(self, tokens: list[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def get_vocab_size(self) -> int:
        return 257


class DroppingFeedForward(FeedForward):
    """torchtitan's, with dropout: so that the run depends on the random numbers."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(x), 0.1, self.training)


def _texts(path: str) -> datasets.Dataset:
    """Return sources of Python's standard library."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]
    return datasets.Dataset.from_list([{"text": file.read_text(encoding="utf-8")} for file in files])


def _text_of(sample: dict[str, Any]) -> str:
    return str(sample["text"])


DATASETS["python"] = DatasetConfig(path="", loader=_texts, sample_processor=_text_of)


def small(steps: int, folder: str) -> Trainer.Config:
    """Return the settings of the job: a stock config, made smaller."""
    config = llama3_debugmodel()
    model = config.model_spec.model
    model.layers = model.layers[:2]
    for layer in model.layers:
        stock = layer.feed_forward
        layer.feed_forward = DroppingFeedForward.Config(w1=stock.w1, w2=stock.w2, w3=stock.w3)
    config.dump_folder = folder
    config.tokenizer = ByteTokenizer.Config()
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset="python")
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 2, 64, steps
    config.metrics = MetricsProcessor.Config(log_freq=10)
    config.checkpoint.interval, config.checkpoint.last_save_model_only = 100, True
    return config if torch.cuda.is_available() else on_cpu.adapted(config)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="/dev/shm/mlf-jobs/torchtitan-example", help="a folder in memory, by job")
    parser.add_argument("--folder", default="outputs", help="for what torchtitan writes: its own checkpoints are there")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=1, help="steps between saves into memory")
    parser.add_argument("--die-at", type=int, default=-1, metavar="STEP")
    arguments = parser.parse_args()
    init_logger()
    config = small(arguments.steps, arguments.folder)
    attach(config, arguments.base, every_n_steps=arguments.every)  # ours
    trainer: Any = config.build()
    train_step = trainer.train_step
    is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"

    def train_or_die(batches: Any) -> None:
        if is_first and trainer.step == arguments.die_at + 1 and torch.distributed.get_rank() == 0:
            print(f"step {arguments.die_at}: rank 0 kills itself", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        train_step(batches)

    trainer.train_step = train_or_die
    try:
        trainer.train()
    finally:
        trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
