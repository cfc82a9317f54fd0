"""A job of two ranks on two machines: ``rank, interface, address, root``. Says what it has done, as lines of JSON, and
goes on at each line that it is told."""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist

STEPS = 10


def main(rank: int, interface: str, address: str, root: str) -> None:
    os.environ |= {"GLOO_SOCKET_IFNAME": interface, "FLASHPOINT_NODE_ID": f"node-{rank}", "FLASHPOINT_HOST": address}
    dist.init_process_group("gloo", init_method="tcp://10.77.0.1:29500", rank=rank, world_size=2)
    from ml_flashpoint import Flashpoint

    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(1 << 20))
    fp = Flashpoint(f"{root}/node-{rank}/job")
    fp.track(model=model).resume()
    say("open")
    for _ in range(STEPS):
        with torch.no_grad():
            model.weight.add_(1)
        fp.step()
    say({"copied": fp.last_replicated, "steps": fp.steps_done, "failures": fp.health.failures})
    fp.wait()
    say({"copied": fp.last_replicated})
    fp.close()


def say(what: object) -> None:
    print(json.dumps(what), flush=True)
    input()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
