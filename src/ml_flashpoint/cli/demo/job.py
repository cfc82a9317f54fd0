"""The demo's training job: a GPT trained with FSDP2, with a checkpoint at every step.

An ordinary training script for `torchrun`, which knows nothing of the faults that it will meet. The lines that
Flashpoint takes are those with `fp` in them; all `report` calls are for the audience.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import logging
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ml_flashpoint import Flashpoint
from ml_flashpoint.cli.demo.model import CONTEXT, GPT, VOCABULARY
from ml_flashpoint.cli.demo.reports import report
from ml_flashpoint.cli.demo.text import TextLoader, read_text

_BATCH = 8
_WARM_UP = 10


def train(base: str, steps: int, seed: int) -> None:
    """Train up to step ``steps``, from wherever the checkpoints in ``base`` allow."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)  # the same weights on every rank
    model = GPT()
    mesh = init_device_mesh("cpu", (world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / _WARM_UP))
    text = read_text()
    loader = TextLoader(text, batch=_BATCH, context=CONTEXT, rank=rank, world_size=world_size, seed=seed)
    torch.manual_seed(seed + 1 + rank)  # other dropout on every rank
    report("started", text=_digest(text), parameters=sum(p.numel() for p in model.parameters()))

    with Flashpoint(base, every_n_steps=1) as fp:
        fp.track(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
        step = fp.resume()
        _report_recovery(fp)
        for inputs, targets in itertools.islice(loader, steps - step):
            loss = F.cross_entropy(model(inputs).view(-1, VOCABULARY), targets.reshape(-1))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            report("step", step=step, loss=loss.item(), saved=fp.last_saved, replicated=fp.last_replicated)
            fp.step()
            report("save", step=step, blocked_s=fp.health.blocked_s)
        fp.wait()
        report("trained", saved=fp.last_saved, replicated=fp.last_replicated, failed=fp.health.failures)
    _report_result(model, optimizer, loader)


def _report_recovery(fp: Flashpoint) -> None:
    found = fp.last_recovery
    if found is not None:
        report(
            "resumed",
            step=found.step,
            source=found.source,
            version=found.version,
            detect_s=found.detect_s,
            plan_s=found.plan_s,
            fetch_s=found.fetch_s,
            load_s=found.load_s,
            fetched_bytes=found.fetched_bytes,
        )


def _report_result(model: GPT, optimizer: torch.optim.Optimizer, loader: TextLoader) -> None:
    """Report digests of the full tensors, put together from the shards of all ranks, and of this rank's rest."""
    for name, parameter in model.named_parameters():
        report("digest", name=f"model.{name}", digest=_digest(parameter))
        for key, value in sorted(optimizer.state[parameter].items()):
            report("digest", name=f"optimizer.{name}.{key}", digest=_digest(value))
    report("finished", position=loader.state_dict()["position"], random=_digest(torch.get_rng_state()))


def _digest(tensor: torch.Tensor) -> str:
    whole = tensor.detach()
    if isinstance(whole, DTensor):
        whole = whole.full_tensor()
    content = whole.contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(f"{whole.dtype} {tuple(whole.shape)} ".encode() + content.tobytes()).hexdigest()


def main() -> None:
    """Entry point of every rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--base", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    args = parser.parse_args()
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    dist.init_process_group("gloo")
    train(args.base, args.steps, args.seed)
    dist.destroy_process_group()
    # Gloo's threads free the tensors of the last collective some time after it, for which they need the interpreter:
    # one that is being finalized by then makes torch abort the process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
