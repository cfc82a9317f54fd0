"""Trains on all GPUs, or on two CPU processes, with the state of every rank in a distributed dictionary.

    python examples/ddict/training.py                        # checkpoints persist in the current directory
    python examples/ddict/training.py --crash-at-epoch 7     # a rank is killed in the middle of an epoch
    python examples/ddict/training.py --restart              # goes on from the last finished epoch, from disk
    python examples/ddict/training.py --in-memory --crash-at-epoch 7    # goes on by itself, from memory

With --in-memory each manager has verified copies of its checkpoints at another one. When the training fails, or a
manager is lost, the ranks are started again from the newest checkpoint that all of them have passed; no file is read.
"""

from __future__ import annotations

import argparse
import getpass
import os
import signal

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim as optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

# DAOSCheckpointPersister takes the place of PosixCheckpointPersister where there is a DAOS store.
from ml_flashpoint.ddict import DDict, DDictWritesLostError, PosixCheckpointPersister
from ml_flashpoint.ddict.native import CollectiveGroup, Policy, ProcessFailedError, RankInfo, System

INPUT_SIZE, HIDDEN_SIZE, OUTPUT_SIZE = 10, 20, 1
SAMPLES, BATCH_SIZE, LEARNING_RATE = 100, 10, 0.01


class SimpleNN(nn.Module):
    def __init__(self, input_size: int, hidden_size: int, output_size: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(input_size, hidden_size)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(hidden_size, output_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.relu(self.fc1(x)))


def training_fn(ddict: DDict, restart: bool, options: argparse.Namespace) -> None:
    rank_info = RankInfo()
    rank = rank_info.my_rank
    world_size = rank_info.world_size
    print(f"Rank {rank} of {world_size}: local rank {rank_info.my_local_rank}", flush=True)
    use_cuda = torch.cuda.is_available()
    dist.init_process_group(
        backend="nccl" if use_cuda else "gloo",
        init_method=f"tcp://{rank_info.master_addr}:{rank_info.master_port}",
        world_size=world_size,
        rank=rank,
    )
    # Each process sees its own GPU only.
    device = torch.device("cuda:0" if use_cuda else "cpu")
    criterion = nn.MSELoss().to(device)
    torch.manual_seed(options.seed)
    model = SimpleNN(INPUT_SIZE, HIDDEN_SIZE, OUTPUT_SIZE).to(device)
    optimizer = optim.Adam(model.parameters(), lr=LEARNING_RATE)

    # The loader is the same for all; it was put once, for all checkpoints.
    if restart:
        train_dataset = ddict["train_loader"].dataset
    else:
        train_dataset = TensorDataset(torch.randn(SAMPLES, INPUT_SIZE), torch.randn(SAMPLES, OUTPUT_SIZE))
    # A loader's sampler knows its rank, so each rank makes its own.
    sampler = DistributedSampler(train_dataset, world_size, rank)
    train_loader = DataLoader(train_dataset, batch_size=BATCH_SIZE, shuffle=False, sampler=sampler)
    if not restart and rank == 0:
        ddict.pput("train_loader", train_loader)

    # A manager on this node, so that checkpoints go to local memory.
    ddict = ddict.manager(ddict.local_managers[rank_info.my_local_rank])
    first_epoch = 0
    if restart:
        # Views of the dictionary's memory, which these copy from.
        model.load_state_dict(ddict[f"model_state_dict_{rank}"])
        optimizer.load_state_dict(ddict[f"optimizer_state_dict_{rank}"])
        first_epoch = ddict.checkpoint()  # checkpoint n is the state after epoch n
        print(f"Rank {rank} goes on with epoch {first_epoch + 1}", flush=True)
    ddp_model = DDP(model, device_ids=[0] if use_cuda else None)

    for epoch in range(first_epoch, options.epochs):
        for inputs, labels in train_loader:
            outputs = ddp_model(inputs.to(device))
            loss = criterion(outputs, labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            if epoch == options.crash_at_epoch and rank == world_size - 1 and not restart:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()

        ddict[f"model_state_dict_{rank}"] = model.state_dict()
        ddict[f"optimizer_state_dict_{rank}"] = optimizer.state_dict()
        # Nobody leaves an epoch before everybody has stored it: so what is committed is there for all ranks.
        dist.barrier()
        ddict.checkpoint()
        if rank == 0:
            # What is said to be finished is not lost again, whatever is.
            ddict.wait_for_commit()
            print(f"Epoch [{epoch + 1}/{options.epochs}], Loss: {loss.item():.4f}", flush=True)

    if options.save and rank == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, options.save)
    dist.destroy_process_group()


def train(ddict: DDict, restart: bool, options: argparse.Namespace, policies: list[Policy]) -> None:
    with CollectiveGroup(training_fn, training_args=(ddict, restart, options), policies=policies) as training_group:
        training_group.init()
        training_group.start()
        training_group.join()


def main() -> None:
    parser = argparse.ArgumentParser(description="Training with DDict checkpoint persistence")
    parser.add_argument("--restart", action="store_true", help="restart from the last persisted checkpoint")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu-ranks", type=int, default=2, help="ranks where there are no GPUs")
    parser.add_argument("--persist-path", default="", help="default: the current directory")
    parser.add_argument("--in-memory", action="store_true", help="go on from memory after failures; persist nothing")
    parser.add_argument("--retries", type=int, default=3, help="how often, with --in-memory")
    parser.add_argument("--crash-at-epoch", type=int, default=None, help="kill a rank in the middle of it, from 0")
    parser.add_argument("--save", default=None, help="file for the final model and optimizer")
    options = parser.parse_args()

    my_alloc = System()
    policies = my_alloc.gpu_policies() or [Policy()] * options.cpu_ranks
    nnodes = my_alloc.nnodes
    managers_per_node = len(policies) // nnodes
    if options.in_memory:
        # Copies go to another node; on a single machine, every manager plays one.
        nodes, persistence = len(policies), {"replication": "ring"}
        managers_per_node = 1
    else:
        nodes = nnodes
        persistence = {
            "persister_class": PosixCheckpointPersister,  # DAOSCheckpointPersister on DAOS
            "persist_freq": 2,
            "persist_count": 2,
            "persist_path": options.persist_path,
        }
    ddict = DDict(
        managers_per_node,
        nodes,
        nnodes * 4 * 1024 * 1024 * 1024,
        wait_for_keys=True,
        working_set_size=2,
        name=f"chkpt_persistence_example_{getpass.getuser()}",
        **persistence,
    )

    restart = options.restart or my_alloc.restarted
    if restart:
        available_persisted_chkpt = ddict.persisted_ids()
        print(f"available persisted checkpoints: {available_persisted_chkpt}", flush=True)
        ddict.restore(available_persisted_chkpt[-1])

    try:
        for retries_left in range(options.retries if options.in_memory else 0, -1, -1):
            try:
                train(ddict, restart, options, policies)
                break
            except ProcessFailedError as error:
                print(f"training failed: {error.message.splitlines()[-1]}", flush=True)
                if not retries_left:
                    raise
            try:
                newest = ddict.sync_to_newest_checkpoint()
            except DDictWritesLostError as error:
                # A manager was lost with what was not committed yet. This is said once.
                print(f"not committed: {error}", flush=True)
                newest = ddict.sync_to_newest_checkpoint()
            print(f"going on from memory, from checkpoint {newest}", flush=True)
            restart = True
    finally:
        # Orderly: the newest committed checkpoint is persisted first, whichever it is.
        ddict.destroy()


if __name__ == "__main__":
    main()
