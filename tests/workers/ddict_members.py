"""What the processes of test_native run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from ml_flashpoint.ddict.native import Barrier, BarrierBrokenError, RankInfo, this_process


def note(folder: str, value: Any) -> None:
    """Leaves a value under this process's number for the test."""
    path = Path(folder) / str(this_process.my_puid)
    path.with_suffix(".new").write_text(json.dumps(value))
    os.rename(path.with_suffix(".new"), path)


def pass_often(barrier: Barrier, times: int, folder: str) -> None:
    note(folder, [barrier.wait(timeout=60) for _ in range(times)])


def exit_with(code: int) -> None:
    sys.exit(code)


def fail_if(failing: str, barrier: Barrier, folder: str) -> None:
    """One fails, the others wait for it."""
    barrier.wait(timeout=60)
    if claims(Path(folder) / failing):
        raise ValueError(f"no luck for {failing}")
    barrier.wait(timeout=60)


def claims(path: Path) -> bool:
    """Whether this process is the first to ask."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def wait_for_lost(barrier: Barrier, folder: str, first: bool) -> None:
    """One never comes to the second meeting, or to the first; the others note what they are told."""
    if not first:
        barrier.wait(timeout=60)
    if claims(Path(folder) / "lost"):
        note(folder, "lost")
        threading.Event().wait()
    try:
        barrier.wait(timeout=60)
    except BarrierBrokenError as error:
        note(folder, str(error))


def hang(folder: str, deaf: bool = False, barrier: Barrier | None = None) -> None:
    if deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note(folder, os.getpid())
    threading.Event().wait()


def take_blocked_signal() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    os.kill(os.getpid(), signal.SIGUSR1)  # any thread may take it that has not blocked it
    signal.sigwait([signal.SIGUSR1])


def wait_once(barrier: Barrier) -> int:
    return barrier.wait(timeout=60)


class Waiter:
    """A Ray actor that is no member of any group."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    async def pid(self) -> int:
        return self._pid

    async def wait(self, barrier: Barrier) -> str:
        return await asyncio.get_running_loop().run_in_executor(None, self._wait, barrier)

    def _wait(self, barrier: Barrier) -> str:
        try:
            return str(barrier.wait(timeout=60))
        except BarrierBrokenError as error:
            return str(error)


def look_around(folder: str) -> None:
    names = ["FLASHPOINT_TEST_PROBE", "CUDA_VISIBLE_DEVICES"]
    note(folder, {"cwd": os.getcwd(), **{name: os.environ.get(name) for name in names}})


def reduce_ranks(folder: str) -> None:
    import torch
    import torch.distributed as dist

    info = RankInfo()
    address = f"tcp://{info.master_addr}:{info.master_port}"
    dist.init_process_group("gloo", init_method=address, world_size=info.world_size, rank=info.my_rank)
    total = torch.tensor([info.my_rank + 1])
    dist.all_reduce(total)
    dist.destroy_process_group()
    place = [info.my_rank, info.my_local_rank, info.my_local_world_size, info.my_node_rank, info.world_size]
    note(folder, {"total": total.item(), "place": place, "threads": torch.get_num_threads()})


def start_group_and_wait(folder: str) -> None:
    """The creator of a group, which itself is to be killed."""
    from ml_flashpoint.ddict.native import ProcessGroup, ProcessTemplate

    group = ProcessGroup()
    group.add_process(2, ProcessTemplate(hang, (folder,)))
    group.start()
    print(json.dumps(list(group.pids.values())), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    from tests.workers import ddict_members

    ddict_members.start_group_and_wait(sys.argv[1])
