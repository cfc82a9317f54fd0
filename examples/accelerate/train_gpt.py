"""A small transformer on bytes, in a loop of Accelerate, that saves into memory and goes on after a crash.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # or restarted ranks may fail, or hang; see docs/operations.md
    accelerate launch --multi_gpu --num_processes 2 --rdzv_backend c10d --max_restarts 3 \\
        examples/accelerate/train_gpt.py --steps 200

(on a CPU: with ACCELERATE_USE_CPU=true.) Kill a rank meanwhile (`kill -9`), or let it happen with `--die-at 50`: the
launcher starts the ranks again, and they go on from the newest step in memory. The lines with `# ours` are all that it
takes.
"""

from __future__ import annotations

import argparse
import os
import signal
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from ml_flashpoint.adapter.accelerate import AcceleratorFlashpoint  # ours

CONTEXT, WIDTH = 64, 96


class ByteModel(nn.Module):
    """Gives the logits [batch, time, 256] of each next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        length = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=text.device)
        x = self.bytes(text) + self.places(torch.arange(length, device=text.device))
        logits: torch.Tensor = self.head(self.blocks(x, mask=mask, is_causal=True))
        return logits


def windows() -> torch.Tensor:
    """Return windows of the source of Python's standard library: bytes [count, CONTEXT + 1]."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
    text = torch.frombuffer(bytearray(b"".join(each.read_bytes() for each in files)), dtype=torch.uint8)
    return text.unfold(0, CONTEXT + 1, CONTEXT).long()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="/dev/shm/mlf-jobs/accelerate-example", help="a folder in memory, by job")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=1, help="steps between saves into memory")
    parser.add_argument("--die-at", type=int, default=-1, metavar="STEP")
    arguments = parser.parse_args()

    torch.manual_seed(1)
    accelerator = Accelerator()
    model = ByteModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(windows(), batch_size=8, shuffle=True)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    fp = AcceleratorFlashpoint(accelerator, arguments.base, every_n_steps=arguments.every)  # ours
    step = fp.resume()  # ours
    accelerator.print(f"going on from step {step}" if step else "starting anew", flush=True)
    while step < arguments.steps:
        for text in fp.batches(loader):  # ours: fp.batches
            loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step = fp.step()  # ours
            if step % 10 == 0:
                accelerator.print(f"step {step}: loss {loss.item():.3f}", flush=True)
            first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
            if first and step == arguments.die_at and accelerator.is_main_process:
                print(f"step {step}: rank 0 kills itself", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            if step == arguments.steps:
                break
    fp.close()  # ours
    accelerator.end_training()


if __name__ == "__main__":
    main()
