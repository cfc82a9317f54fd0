"""What child processes do with the handle of a dictionary that they are given. Spawned: so it must be importable."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any, cast

import torch

from ml_flashpoint.ddict import DDict
from ml_flashpoint.ddict.errors import DDictCheckpointRetiredError


def answer(dictionary: DDict, pipe: Connection) -> None:
    """Writes a key, and says what it reads, where it is, and whether its handle is another."""
    dictionary["child"] = os.getpid()
    pipe.send(
        {
            "pid": os.getpid(),
            "from the parent": dictionary["parent"],
            "tensor": dictionary["tensor"].sum().item(),
            "checkpoint_id": dictionary.checkpoint_id,
            "managers": dictionary.local_managers,
        }
    )
    dictionary.checkpoint()
    pipe.send(dictionary.checkpoint_id)


def add(dictionary: DDict, key: str, times: int) -> None:
    """Adds one to a number, many times."""
    for _ in range(times):
        dictionary.fetch_add(key)


def try_to_destroy(dictionary: DDict, pipe: Connection) -> None:
    """What a child may not do."""
    try:
        dictionary.destroy()
    except Exception as error:
        pipe.send(type(error).__name__)
    else:
        pipe.send("destroyed")


def write_for_ever(dictionary: DDict, name: str, pipe: Connection) -> None:
    """Writes its keys at each checkpoint, one after the other, and reports each that it has moved past."""
    big = torch.arange(100_000, dtype=torch.float32)
    while True:
        try:
            dictionary.sync_to_newest_checkpoint()
            dictionary[name, 0] = dictionary.checkpoint_id  # now others wait for this one
            break
        except DDictCheckpointRetiredError:
            pass  # they were faster
    while True:
        checkpoint_id = dictionary.checkpoint_id
        for number in range(4):
            dictionary[name, number] = checkpoint_id
        dictionary[name, "big"] = big + checkpoint_id
        dictionary.checkpoint()
        pipe.send(checkpoint_id)


def create_and_serve(pipe: Connection) -> None:
    """Make a dictionary, commit its first checkpoint, and stay until it is killed."""
    with DDict(1, 2, 64 << 20, working_set_size=4, replication="ring", timeout=20) as dictionary:
        dictionary["a"] = 1
        dictionary.checkpoint()
        assert dictionary.wait_for_commit() == 0
        serialized, runtime = dictionary.serialize(), cast(Any, dictionary._runtime)
        dictionary._access.detach(time.monotonic() + 20)  # it holds no commit up
        pipe.send((serialized, [*runtime.pids().values()]))
        time.sleep(600)


def create_and_wait(pipe: Connection) -> None:
    """Makes a dictionary, says where it is, and stays until it is killed."""
    with DDict(1, 2, 64 << 20, replication="ring", timeout=20) as dictionary:
        dictionary["a"] = torch.ones(200_000)
        dictionary.checkpoint()
        assert dictionary.sync_to_newest_checkpoint() == 0
        runtime: Any = dictionary._runtime
        pipe.send((str(runtime.base), list(runtime.pids().values())))
        time.sleep(600)


def create_and_fork(pipe: Connection) -> None:
    """The same, and has a child of its own, as a program does that forks workers."""
    with DDict(1, 2, 64 << 20, timeout=20) as dictionary:
        child = os.fork()
        if not child:
            signal.pause()
        runtime: Any = dictionary._runtime
        pipe.send((str(runtime.base), list(runtime.pids().values()), child))
        time.sleep(600)
