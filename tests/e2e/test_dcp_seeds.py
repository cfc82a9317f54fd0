"""The user guide's code on DCP, and the two programs of torch's tutorial on asynchronous saves with our writer in place
of theirs, started as a user starts them, cold.

The programs are as they stand there; ADAPTATIONS lists every change, each of which must fit exactly once.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster import Cluster, free_port
from tests.support.processes import child_environment

pytestmark = pytest.mark.timeout(240)

PROGRAM = '''\
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
import torch.nn as nn

from torch.distributed.fsdp import fully_shard
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

CHECKPOINT_DIR = "checkpoint"


class AppState(Stateful):
    """This is a useful wrapper for checkpointing the Application State. Since this object is compliant
    with the Stateful protocol, DCP will automatically call state_dict/load_stat_dict as needed in the
    dcp.save/load APIs.

    Note: We take advantage of this wrapper to hande calling distributed state dict methods on the model
    and optimizer.
    """

    def __init__(self, model, optimizer=None):
        self.model = model
        self.optimizer = optimizer

    def state_dict(self):
        # this line automatically manages FSDP FQN's, as well as sets the default state dict type to FSDP.SHARDED_STATE_DICT
        model_state_dict, optimizer_state_dict = get_state_dict(self.model, self.optimizer)
        return {
            "model": model_state_dict,
            "optim": optimizer_state_dict
        }

    def load_state_dict(self, state_dict):
        # sets our state dicts on the model and optimizer, now that we've loaded
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"]
        )

class ToyModel(nn.Module):
    def __init__(self):
        super(ToyModel, self).__init__()
        self.net1 = nn.Linear(16, 16)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(16, 8)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def setup(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355 "

    # initialize the process group
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.cuda.set_device(rank)


def cleanup():
    dist.destroy_process_group()


def run_fsdp_checkpoint_save_example(rank, world_size):
    print(f"Running basic FSDP checkpoint saving example on rank {rank}.")
    setup(rank, world_size)

    # create a model and move it to GPU with id rank
    model = ToyModel().to(rank)
    model = fully_shard(model)

    loss_fn = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    checkpoint_future = None
    for step in range(10):
        optimizer.zero_grad()
        model(torch.rand(8, 16, device="cuda")).sum().backward()
        optimizer.step()

        # waits for checkpointing to finish if one exists, avoiding queuing more then one checkpoint request at a time
        if checkpoint_future is not None:
            checkpoint_future.result()

        state_dict = { "app": AppState(model, optimizer) }
        checkpoint_future = dcp.async_save(state_dict, checkpoint_id=f"{CHECKPOINT_DIR}_step{step}")

    cleanup()


if __name__ == "__main__":
    world_size = torch.cuda.device_count()
    print(f"Running async checkpoint example on {world_size} devices.")
    mp.spawn(
        run_fsdp_checkpoint_save_example,
        args=(world_size,),
        nprocs=world_size,
        join=True,
    )
'''  # noqa: E501

# Where the second program of the tutorial differs from the first.
DIFFERENCES = (
    (
        "import Stateful\n",
        "import Stateful\nfrom torch.distributed.checkpoint import FileSystemWriter as StorageWriter\n",
    ),
    (
        "    checkpoint_future = None\n",
        """\
    # The storage writer defines our 'staging' strategy, where staging is considered the process of copying
    # checkpoints to in-memory buffers. By setting `cached_state_dict=True`, we enable efficient memory copying
    # into a persistent buffer with pinned memory enabled.
    # Note: It's important that the writer persists in between checkpointing requests, since it maintains the
    # pinned memory buffer.
    writer = StorageWriter(cache_staged_state_dict=True, path=CHECKPOINT_DIR)
    checkpoint_future = None
""",
    ),
    (
        "        # waits for checkpointing to finish if one exists, avoiding queuing more then one checkpoint request at a time\n",  # noqa: E501
        '        state_dict = { "app": AppState(model, optimizer) }\n',
    ),
    (
        "            checkpoint_future.result()\n\n",
        """\
            # waits for checkpointing to finish, avoiding queuing more then one checkpoint request at a time
            checkpoint_future.result()
""",
    ),
    (
        """\
        state_dict = { "app": AppState(model, optimizer) }
        checkpoint_future = dcp.async_save(state_dict, checkpoint_id""",
        "        dcp.async_save(state_dict, storage_writer=writer, checkpoint_id",
    ),
    ("async checkpoint example", "fsdp checkpoint example"),
)


# Every rank, at its end: what was saved last is what is loaded, into a model that differs.
_CHECK = """\
    writer.saver.wait(60)
    from ml_flashpoint.adapter.pytorch.memory_storage_reader import MemoryStorageReader
    from ml_flashpoint.core.checkpoint_loader import DefaultMLFlashpointCheckpointLoader
    if checkpoint_future is not None:
        checkpoint_future.result()
    loader = DefaultMLFlashpointCheckpointLoader()
    latest = loader.get_latest_complete_checkpoint(CHECKPOINT_DIR)
    other = fully_shard(ToyModel())
    other_optimizer = torch.optim.Adam(other.parameters(), lr=0.1)
    other(torch.rand(8, 16)).sum().backward()
    other_optimizer.step()
    state = {"app": AppState(other, other_optimizer)}
    dcp.load(state, checkpoint_id=str(latest), storage_reader=MemoryStorageReader(latest, loader))
    for one, two in ((model, other), (optimizer, other_optimizer)):
        assert_same(gathered(two.state_dict()), gathered(one.state_dict()))
    assert loader.get_latest_complete_checkpoint(CHECKPOINT_DIR) == latest
    print(f"rank {rank} of {world_size} has loaded {latest.name}")
    writer.close()
    cleanup()
"""

_IMPORTS = """\
import sys

from ml_flashpoint.adapter.pytorch.memory_storage_writer import MemoryStorageWriter
from ml_flashpoint.core.checkpoint_saver import DefaultMLFlashpointCheckpointSaver
from tests.support.sharded import gathered
from tests.support.tensors import assert_same

import os
"""

# (what stands there, what is run instead)
ADAPTATIONS = (
    ("import os\n", _IMPORTS),
    # our writer needs to know the base container, and versions by their names
    ('CHECKPOINT_DIR = "checkpoint"', "CHECKPOINT_DIR = sys.argv[1]"),
    ('f"{CHECKPOINT_DIR}_step{step}"', 'f"{CHECKPOINT_DIR}/step-{step}_ckpt"'),
    # no GPUs
    ("    torch.cuda.set_device(rank)\n", ""),
    ("ToyModel().to(rank)", "ToyModel()"),
    ('device="cuda"', 'device="cpu"'),
    ("world_size = torch.cuda.device_count()", "world_size = int(sys.argv[2])"),
    ('"12355 "', "sys.argv[3]"),
    ("    cleanup()\n\n\nif __name__", _CHECK + "\n\nif __name__"),
)
# On GPUs, training and saves have groups of their own, since backends differ. On one gloo group, the collectives
# of a save on its thread meet those of the next training step, which stock torch does not survive either.
_GROUP = "storage_writer=writer, process_group=group, "
_MADE = "writer = MemoryStorageWriter(DefaultMLFlashpointCheckpointSaver(){options})\n    group = dist.new_group()\n"
FIRST_ADAPTATIONS = (
    ("    checkpoint_future = None\n", f"    {_MADE.format(options='')}    checkpoint_future = None\n"),
    ("dcp.async_save(state_dict, ", f"dcp.async_save(state_dict, {_GROUP}"),
)
SECOND_ADAPTATIONS = (
    ("from torch.distributed.checkpoint import FileSystemWriter as StorageWriter\n", ""),
    (
        "writer = StorageWriter(cache_staged_state_dict=True, path=CHECKPOINT_DIR)\n",
        _MADE.format(options=", cache_staged_state_dict=True"),
    ),
    ("dcp.async_save(state_dict, storage_writer=writer, ", f"dcp.async_save(state_dict, {_GROUP}"),
)


def replaced(program: str, *replacements: tuple[str, str]) -> str:
    for old, new in replacements:
        assert program.count(old) == 1, old
        program = program.replace(old, new)
    return program


PLAIN = replaced(PROGRAM, *FIRST_ADAPTATIONS, *ADAPTATIONS)
WITH_CACHED_STAGING = replaced(PROGRAM, *DIFFERENCES, *SECOND_ADAPTATIONS, *ADAPTATIONS)


@pytest.mark.parametrize(
    ("program", "world_size"),
    [
        pytest.param(PLAIN, 1, id="plain-1"),
        pytest.param(WITH_CACHED_STAGING, 2, id="cached staging-2"),
        pytest.param(PLAIN, 2, id="plain-2", marks=pytest.mark.soak),
        pytest.param(WITH_CACHED_STAGING, 1, id="cached staging-1", marks=pytest.mark.soak),
    ],
)
def test_the_tutorial_runs_and_what_it_saved_is_loaded(
    tmpfs: Path, tmp_path: Path, program: str, world_size: int
) -> None:
    script = tmp_path / "tutorial.py"
    script.write_text(program)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(tmpfs / "job"), str(world_size), str(free_port())],
        capture_output=True,
        text=True,
        timeout=200,
        env=child_environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo"),
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    for rank in range(world_size):
        assert f"rank {rank} of {world_size} has loaded step-9_ckpt" in done.stdout


def test_the_guide_runs_unchanged_under_torchrun(tmpfs: Path) -> None:
    with Cluster(tmpfs, "dcp_seed", nodes=2, torchrun=True, cold=True) as cluster:
        cluster.wait(110)
        for rank in range(2):
            base = cluster.base_of(rank)
            assert cluster.reports(rank) == [
                {"step": step, "found": str(base / f"step-{step}_ckpt")} for step in (1, 2, 3)
            ]
