"""A small GPT-2 on bytes, trained by the Trainer of Transformers, that saves into memory and goes on after a crash.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # or torchrun's restarted ranks may hang
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/transformers/train_gpt.py --steps 200

Kill a rank meanwhile (`kill -9`), or let it happen with `--die-at 50`: torchrun starts the ranks again, and they go on
from the newest step in memory. The lines with `# ours` are all that it takes.
"""

from __future__ import annotations

import argparse
import os
import signal
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from ml_flashpoint.adapter.transformers import attach, resume_path  # ours

CONTEXT = 64


class Text(Dataset[dict[str, torch.Tensor]]):
    """Windows of the source of Python's standard library: bytes, which are the labels, too."""

    def __init__(self) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
        self._text = torch.frombuffer(bytearray(b"".join(each.read_bytes() for each in files)), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self._text) // CONTEXT

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self._text[index * CONTEXT : (index + 1) * CONTEXT].long()
        return {"input_ids": window, "labels": window}


class DieAt(TrainerCallback):
    """Kills rank 0 once, at a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Called before each step."""
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if first and state.global_step == self._step and state.is_world_process_zero:
            print(f"step {self._step}: rank 0 kills itself", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="/dev/shm/mlf-jobs/transformers-example", help="a folder in memory, by job")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=1, help="steps between saves into memory")
    parser.add_argument("--die-at", type=int, default=-1, metavar="STEP")
    arguments = parser.parse_args()

    torch.manual_seed(1)
    trainer = Trainer(
        GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=CONTEXT, n_embd=96, n_layer=3, n_head=4)),
        TrainingArguments(
            output_dir="build/transformers-example",
            max_steps=arguments.steps,
            per_device_train_batch_size=8,
            learning_rate=1e-3,
            logging_steps=10,
            save_strategy="no",  # your own checkpoints go on as before; this example needs none
            use_cpu=not torch.cuda.is_available(),  # else a Trainer takes several processes for one each
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Text(),
        callbacks=[DieAt(arguments.die_at)],
    )
    attach(trainer, arguments.base, every_n_steps=arguments.every)  # ours
    path = resume_path(trainer)  # ours
    if trainer.is_world_process_zero():
        print("going on from memory" if path else "starting anew", flush=True)
    trainer.train(resume_from_checkpoint=path)  # ours: the path


if __name__ == "__main__":
    main()
