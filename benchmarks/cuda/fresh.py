"""Loading in a process that has just started: ``python -m benchmarks.cuda.fresh DEVICE BASE COUNT BYTES``."""

from __future__ import annotations

import sys
import time

import torch

from benchmarks.cuda.jobs import Held
from ml_flashpoint import Flashpoint


def main() -> None:
    """Print the seconds of one ``resume``: recovery, verification, and the copy to the device."""
    device, base, count, nbytes = torch.device(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    state = {f"blocks.{n}.weight": torch.zeros(nbytes // 4, device=device) for n in range(count)}
    with Flashpoint(base, strict=True) as fp:
        fp.track(module=Held(state))
        began = time.perf_counter()
        assert fp.resume() > 0
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        print(time.perf_counter() - began)


if __name__ == "__main__":
    main()
