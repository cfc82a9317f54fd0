"""Trains with the usage guide's loop for local checkpoints, as it stands there; dies once; and is started again.

In its first life it trains some iterations in every mode and is then killed by one of its ranks. In its second, it
goes on in every mode from what it finds, and compares the end with training that was never interrupted.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist

from tests.support.worker import base_path, leave, rank, report, world_size

THEIR_IMPORTS = """\
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
"""
OUR_IMPORTS = """\
from ml_flashpoint.local import LocalCheckpointManager
from ml_flashpoint.local import BasicTensorAwareStateDict
"""
LOOP = """\
# Initialize CheckpointManager with the checkpoint directory
ckpt_manager = LocalCheckpointManager(ckpt_dir)

# Load the latest checkpoint if available
iteration = ckpt_manager.find_latest()
if iteration != -1:
    ta_state_dict, ckpt_part_id = ckpt_manager.load()
    # Use the loaded state_dict to resume training
    model.load_state_dict(ta_state_dict.state_dict)
else:
    # An iteration value of -1 indicates that no local checkpoint was found.
    # In this case, either return an error or initialize the model from scratch.
    print('Starting training from scratch')

# Training loop
while True:
    # Perform a training iteration
    PERFORM

    # Save checkpoint if conditions are met
    if save_condition():
        ta_state_dict = BasicTensorAwareStateDict(state_dict)
        ckpt_manager.save(ta_state_dict, iteration, is_async=False)
"""
PERFORM = """\
if finished(iteration): break
    iteration, state_dict = perform(iteration)
"""
QUEUED = """\
        async_calls.maybe_finalize_async_calls()
        async_calls.schedule_async_request(ckpt_manager.save(ta_state_dict, iteration, is_async=True))
"""

LAST_OF_FIRST_LIFE = 5
LAST = 8
MODES: dict[str, tuple[bool, int | None]] = {
    "sync": (False, None),
    "async": (True, None),
    "sync clique 1": (False, 1),
    "async clique 1": (True, 1),
    "sync clique 2": (False, 2),
    "async clique 2": (True, 2),
}


class Training:
    """A model and its optimizer, which load and save as one, as the loop's `model`."""

    def __init__(self) -> None:
        torch.manual_seed(11)
        inner = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 4))
        self.module = inner.to(_device())
        self.optimizer = torch.optim.AdamW(inner.parameters(), lr=0.01)
        self.iteration = -1

    def perform(self, iteration: int) -> tuple[int, dict[str, Any]]:
        """The iteration after this one."""
        self.iteration = iteration = iteration + 1
        generator = torch.Generator().manual_seed(100 * iteration + dist.get_rank())
        batch = torch.randn(8, 16, generator=generator).to(_device())
        self.optimizer.zero_grad()
        self.module(batch).square().mean().backward()
        for parameter in self.module.parameters():
            # Not by DDP: its buckets, and so the order of its sums, change after the first iteration of a process.
            dist.all_reduce(parameter.grad)
        self.optimizer.step()
        return iteration, self.state()

    def state(self) -> dict[str, Any]:
        return {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict(), "rank": dist.get_rank()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["rank"] == dist.get_rank()
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def flat(self) -> list[torch.Tensor]:
        moments = [value for each in self.optimizer.state.values() for value in each.values()]
        return [*self.module.state_dict().values(), *moments]


def _device() -> torch.device:
    return torch.device("cuda", rank() % torch.cuda.device_count()) if "cuda" in sys.argv else torch.device("cpu")


def run(mode: str, last: int) -> Training:
    """The guide's loop, up to an iteration."""
    is_async, jump = MODES[mode]
    from ml_flashpoint.local import AsyncCallsQueue, CliqueReplicationStrategy

    training = Training()
    names: dict[str, Any] = {
        "ckpt_dir": str(base_path().parent / f"of-rank-{rank()}" / mode.replace(" ", "-")),
        "model": training,
        "perform": training.perform,
        "finished": lambda iteration: iteration == last,
        "save_condition": lambda: training.iteration % 2 == 0,
        "async_calls": AsyncCallsQueue(),
    }
    exec(THEIR_IMPORTS if "their-imports" in sys.argv else OUR_IMPORTS, names)
    loop = LOOP.replace("    PERFORM\n", "    " + PERFORM)
    if jump is not None:
        names["repl_strategy"] = CliqueReplicationStrategy.from_replication_params(jump, 2)
        loop = loop.replace("(ckpt_dir)", "(ckpt_dir, repl_strategy=repl_strategy)")
    if is_async:
        loop = loop.replace("        ckpt_manager.save(ta_state_dict, iteration, is_async=False)\n", QUEUED)
    exec(loop, names)
    names["async_calls"].close()
    report(mode=mode, life=_life(), found=names.get("ckpt_part_id"), latest=names["ckpt_manager"].latest_iteration)
    names["ckpt_manager"].close()
    return training


def _life() -> int:
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def main() -> None:
    # The ranks of one launcher play nodes of their own.
    os.environ["FLASHPOINT_NODE_ID"] = f"node-of-rank-{rank()}"
    if "their-imports" in sys.argv:
        from ml_flashpoint.local import compat

        compat.install()
    dist.init_process_group("gloo")
    modes = [mode for mode, (_, jump) in MODES.items() if jump is None or jump < world_size()]
    if _life() == 0:
        for mode in modes:
            run(mode, LAST_OF_FIRST_LIFE)
        dist.barrier()
        if rank() == world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()  # never passed
    uninterrupted = Training()
    for iteration in range(-1, LAST):
        uninterrupted.perform(iteration)
    for mode in modes:
        resumed = run(mode, LAST)
        for one, other in zip(uninterrupted.flat(), resumed.flat(), strict=True):
            assert torch.equal(one, other), mode
        report(equal=mode)
    dist.destroy_process_group()
    leave()


if __name__ == "__main__":
    main()
