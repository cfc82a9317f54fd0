"""A small transformer on bytes, trained by DeepSpeed with ZeRO, that saves into memory and goes on after a crash.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # or restarted ranks may fail, or hang; see docs/operations.md
    torchrun --nproc-per-node 2 --max-restarts 3 examples/deepspeed/train_gpt.py --steps 200 --stage 1
    until deepspeed --num_gpus 2 examples/deepspeed/train_gpt.py --steps 200; do :; done  # or so

(on a CPU: with DS_ACCELERATOR=cpu.) Kill a rank meanwhile (`kill -9`), or let it happen with `--die-at 50`: the ranks
are started again, and go on from the newest step in memory. The lines with `# ours` are all that it takes.
"""

from __future__ import annotations

import argparse
import os
import signal
import sysconfig
from pathlib import Path

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn

from ml_flashpoint.adapter.deepspeed import DeepSpeedFlashpoint  # ours

CONTEXT, WIDTH = 64, 96


class ByteModel(nn.Module):
    """Gives the loss of each next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        text = text.to(self.head.weight.device)
        read, expected = text[:, :-1], text[:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=text.device)
        x = self.bytes(read) + self.places(torch.arange(CONTEXT, device=text.device))
        logits = self.head(self.blocks(x, mask=mask, is_causal=True))
        return F.cross_entropy(logits.flatten(0, 1), expected.flatten())


def windows() -> torch.Tensor:
    """Return windows of the source of Python's standard library: bytes [count, CONTEXT + 1]."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
    text = torch.frombuffer(bytearray(b"".join(each.read_bytes() for each in files)), dtype=torch.uint8)
    return text.unfold(0, CONTEXT + 1, CONTEXT).long()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="/dev/shm/mlf-jobs/deepspeed-example", help="a folder in memory, by job")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--stage", type=int, default=1, help="of ZeRO")
    parser.add_argument("--every", type=int, default=1, help="steps between saves into memory")
    parser.add_argument("--die-at", type=int, default=-1, metavar="STEP")
    parser.add_argument("--local_rank", type=int, default=-1, help="which DeepSpeed's launcher gives")
    arguments = parser.parse_args()

    torch.manual_seed(1)
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": arguments.stage},
    }
    engine, _, loader, _ = deepspeed.initialize(model=ByteModel(), config=config, training_data=list(windows()))
    fp = DeepSpeedFlashpoint(engine, arguments.base, every_n_steps=arguments.every)  # ours
    step = first = fp.resume()  # ours
    if engine.global_rank == 0:
        print(f"going on from step {step}" if step else "starting anew", flush=True)
    while step < arguments.steps:
        for text in fp.batches(loader):  # ours: fp.batches
            loss = engine(text)
            engine.backward(loss)
            engine.step()
            step = fp.step()  # ours
            if engine.global_rank == 0 and step % 4 == 0:
                print(f"step {step}: loss {loss.item():.3f}", flush=True)
            if not first and step == arguments.die_at and engine.global_rank == 0:
                print(f"step {step}: rank 0 kills itself", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            if step == arguments.steps:
                break
    fp.close()  # ours


if __name__ == "__main__":
    main()
