"""Trains a small GPT of megatron-core's, tensor- and data-parallel, and saves it twice over: into memory every few
steps, by ML Flashpoint, and to a folder on disk every many, as `torch_dist`.

    torchrun --nproc-per-node 4 examples/megatron/train_gpt.py --base /dev/shm/mlf-jobs/gpt --disk /tmp/gpt

Kill it as you like, and start it again: it goes on from memory, or from disk if there is nothing in memory. It runs
on CPUs, over gloo.
"""

from __future__ import annotations

import argparse
import os
import shutil
import zlib
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map, optim_state_to_sharding_state
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig

from ml_flashpoint import Checkpointer, Config, Persist
from ml_flashpoint.adapter.megatron.load_strategies import MLFlashpointMegatronLoadStrategy
from ml_flashpoint.adapter.megatron.save_strategies import MLFlashpointMegatronAsyncSaveStrategy
from ml_flashpoint.adapter.megatron.save_utils import save_local_aware_megatron_checkpoint

VOCABULARY, LENGTH, BATCH = 64, 16, 4


class Training:
    """The model and the optimizer of this rank."""

    def __init__(self, tensor_parallel: int) -> None:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
        # megatron-core's random generators are CUDA's; without dropout nothing here is random.
        initialize_rng_tracker(inference_rng_tracker=True)
        torch.manual_seed(1)
        config = TransformerConfig(
            num_layers=2,
            hidden_size=32,
            num_attention_heads=4,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
            attention_dropout=0.0,
            hidden_dropout=0.0,
        )
        self.model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=VOCABULARY, max_sequence_length=LENGTH)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        # Momentum exists from the first step on. Then there is always something to load it into.
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()

    def step(self, number: int) -> float:
        """One step on this data-parallel rank's batch of that number; the loss over all of them."""
        group = parallel_state.get_data_parallel_group()
        generator = torch.Generator().manual_seed(1000 * number + dist.get_rank(group))
        start = torch.randint(0, VOCABULARY, (BATCH, 1), generator=generator)
        tokens = (start + 3 * torch.arange(LENGTH + 1)) % VOCABULARY  # something to learn
        positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
        mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1) > 0
        self.optimizer.zero_grad()
        loss = self.model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).mean()
        loss.backward()
        for value in (*(parameter.grad for parameter in self.model.parameters()), mean := loss.detach().clone()):
            if value is not None:
                dist.all_reduce(value, group=group)
                value /= dist.get_world_size(group)
        self.optimizer.step()
        return float(mean)

    def sharded_state(self, step: int) -> dict[str, Any]:
        """Return the state that `dist_checkpointing` saves, and loads into."""
        model = self.model.sharded_state_dict()
        # megatron-core's map is of what it is given, and changes it.
        by_id = get_param_id_to_sharded_param_map(self.model.sharded_state_dict(), self.model.parameters())
        optimizer = self.optimizer.state_dict()
        optim_state_to_sharding_state(optimizer, by_id)
        return {"model": model, "optimizer": optimizer, "step": step}

    def load(self, state: dict[str, Any]) -> int:
        """Take the loaded state. Return the number of steps done."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])

    def digest(self) -> int:
        """Return a checksum of this rank's weights."""
        crc = 0
        for parameter in self.model.parameters():
            crc = zlib.crc32(parameter.detach().numpy().tobytes(), crc)
        return crc


class Memory:
    """Checkpoints in memory, and those of them that are persisted, if any are to be: everything that ML Flashpoint
    needs, once a process."""

    def __init__(self, base: str, persist: str | None, persist_every: int) -> None:
        self.engine = Checkpointer(base, Config(persist=Persist.of(persist, persist_every)))
        # The queue below is of a kind that starts a process for each save, which this need not.
        self.save_strategy = MLFlashpointMegatronAsyncSaveStrategy(self.engine.writer(), child=False)
        self.load_strategy = MLFlashpointMegatronLoadStrategy(checkpoint_loader=self.engine)
        self.queue = AsyncCallsQueue()

    def save(self, training: Training, step: int) -> None:
        """Start a save, after finalizing the one before."""
        self.queue.maybe_finalize_async_calls(blocking=True)
        request = save_local_aware_megatron_checkpoint(
            training.sharded_state(step), self.engine.id(step), self.save_strategy, async_save=True
        )
        assert request is not None
        self.queue.schedule_async_request(request)

    def load(self, training: Training) -> int | None:
        """Load the newest version that every rank can load. Return None if there is none."""
        found = self.engine.latest()
        if found is None:
            return None
        state = dist_checkpointing.load(training.sharded_state(0), str(found), self.load_strategy)
        return training.load(state)

    @property
    def source(self) -> str:
        """Return the source of the loaded version: ``memory`` or ``persisted``."""
        recovery = self.engine.last_recovery
        return "memory" if recovery is None else recovery.tier

    def close(self) -> None:
        """Wait for unfinished saves, and persist the last version."""
        self.queue.maybe_finalize_async_calls(blocking=True)
        self.engine.wait(60)
        dist.barrier()
        self.engine.close()


class Disk:
    """Checkpoints on a filesystem that all nodes share, by megatron-core alone."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.newest = os.path.join(folder, "newest")

    def save(self, training: Training, step: int) -> None:
        """A synchronous save; the last one is kept until this is there."""
        folder = os.path.join(self.folder, f"iter_{step:07d}")
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            os.makedirs(folder)
        dist.barrier()
        dist_checkpointing.save(training.sharded_state(step), folder)
        if dist.get_rank() == 0:
            with open(f"{self.newest}.tmp", "w") as file:
                file.write(folder)
            os.replace(f"{self.newest}.tmp", self.newest)

    def load(self, training: Training) -> int | None:
        """Go on from the last one; None if there is none."""
        dist.barrier()
        if not os.path.exists(self.newest):
            return None
        with open(self.newest) as file:
            folder = file.read()
        return training.load(dist_checkpointing.load(training.sharded_state(0), folder))


def without_cuda() -> None:
    """megatron-core puts small tensors of its collectives on the current CUDA device; here that is the CPU."""
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *args: None


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=os.path.expandvars, required=True, help="folder in memory, one for each job")
    parser.add_argument("--disk", type=os.path.expandvars, required=True, help="folder that all nodes share")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--memory-every", type=int, default=2)
    parser.add_argument("--disk-every", type=int, default=50)
    parser.add_argument("--persist", help="URL to persist versions at; by default none are")
    parser.add_argument("--persist-every", type=int, default=10)
    parser.add_argument("--tensor-parallel", type=int, default=2)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    without_cuda()
    training = Training(args.tensor_parallel)
    memory, disk = Memory(args.base, args.persist, args.persist_every), Disk(args.disk)
    rank = dist.get_rank()

    done, source = memory.load(training), memory.source
    if done is None:
        done, source = disk.load(training), "disk"
    if rank == 0:
        print("starting afresh" if done is None else f"going on from {source} at step {done}", flush=True)
    for step in range((done or 0) + 1, args.steps + 1):
        loss = training.step(step)
        if rank == 0:
            # Before anything is saved: no run that goes on from here does this step again.
            print(f"step {step} loss {loss:.4f}", flush=True)
        if step % args.memory_every == 0:
            memory.save(training, step)
        else:
            memory.queue.maybe_finalize_async_calls()
        if step % args.disk_every == 0:
            disk.save(training, step)
    memory.close()
    print(f"rank {rank} ends with {training.digest():08x}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
