"""Local checkpoints in a training loop: saves in the background, copies in cliques, goes on after a crash.

    torchrun --nproc-per-node=2 examples/local/train.py --dir /dev/shm/mlf-jobs --session job-145

Interrupt it, start it again, and it goes on from the newest iteration that is complete. On one machine there is no
other node to hold copies; to play two, give each rank a node and a folder of its own with --play-nodes.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil

import torch
import torch.distributed as dist

from ml_flashpoint.local import (
    AsyncCallsQueue,
    BasicTensorAwareStateDict,
    LazyCliqueReplicationStrategy,
    LocalCheckpointManager,
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a toy model with local checkpoints.")
    parser.add_argument("--dir", default="/dev/shm/mlf-jobs", help="folder on a tmpfs")
    parser.add_argument("--session", default="example", help="name of the job")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--jump", type=int, default=None, help="ranks between members of a clique; default: GPUs")
    parser.add_argument("--play-nodes", action="store_true", help="let every rank play a node of its own")
    parser.add_argument("--remove", action="store_true", help="remove the checkpoints at the end")
    return parser.parse_args()


def main() -> None:
    options = parse()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    rank, folder = int(os.environ["RANK"]), options.dir
    if options.play_nodes:
        os.environ["FLASHPOINT_NODE_ID"] = f"node-{rank}"
        folder = os.path.join(folder, f"node-{rank}")
    dist.init_process_group("gloo")

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters())

    strategy = LazyCliqueReplicationStrategy(replication_jump=options.jump, replication_factor=2)
    manager = LocalCheckpointManager(folder, session_id=options.session, repl_strategy=strategy)
    queue = AsyncCallsQueue()
    iteration = manager.find_latest()
    if iteration != -1:
        state, checkpoint_id = manager.load()
        model.load_state_dict(state.state_dict["model"])
        optimizer.load_state_dict(state.state_dict["optimizer"])
        print(f"rank {rank} goes on from {checkpoint_id}")

    loss = torch.zeros(())
    while iteration < options.iterations - 1:
        iteration += 1
        optimizer.zero_grad()
        loss = model(torch.randn(16, 32)).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
        optimizer.step()
        queue.maybe_finalize_async_calls()
        if iteration % options.save_every == 0:
            state = BasicTensorAwareStateDict({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            request = manager.save(state, iteration, is_async=True)
            queue.schedule_async_request(request)
    queue.close()
    print(f"rank {rank}: iteration {iteration}, loss {loss.item():.4f}, newest checkpoint {manager.latest_iteration}")
    manager.close()
    if options.remove:
        shutil.rmtree(manager.local_ckpt_dir, ignore_errors=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
