"""A rank for testing the harness: sums ranks over gloo, then does what its first argument says.

end: ends. fail: rank 1 raises. hang: each rank waits for what no peer ever sends, and has a child that is in
a session of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import torch
import torch.distributed as dist

from tests.support.worker import base_path, node_id, rank, report, world_size


def main(behaviour: str) -> None:
    dist.init_process_group("gloo")
    total = torch.tensor([rank() + 1])
    dist.all_reduce(total)
    base_path().mkdir(parents=True, exist_ok=True)
    (base_path() / f"rank-{rank()}").write_text("here")
    report(
        total=int(total),
        node=node_id(),
        pid=os.getpid(),
        world_size=world_size(),
        threads=torch.get_num_threads(),
    )
    if behaviour == "fail" and rank() == 1:
        raise RuntimeError("the probe fails as it was told to")
    if behaviour == "hang":
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
        report(child=child.pid)
        if world_size() == 1:
            signal.pause()
        # In a ring, so that every rank fails soon after any other one has died.
        dist.recv(total, src=(rank() + 1) % world_size())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
