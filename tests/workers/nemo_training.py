"""A NeMo training job that is killed and goes on, from memory and from the strategy's own long-term checkpoints.

Owns the job's lives, which a torchrun agent gives it: in each but the last, all ranks kill themselves at a step. The
last one also trains without any of ours, from the beginning, and tells what both came to.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import warnings
from pathlib import Path

from tests.support.worker import base_path, leave, rank, report

warnings.filterwarnings("ignore")


def main() -> None:
    # Not above: a long-term save starts a process that imports this file, too.
    import torch
    from nemo.utils import AppState

    from tests.support.cuts import cut_in_the_midst
    from tests.support.nemo_cpu import play_cuda
    from tests.support.nemo_training import train

    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["plain", "distributed", "real"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kill", type=int, nargs="*", default=[], help="at these steps, one in each life")
    parser.add_argument("--lose", nargs="*", default=[], help="LIFE:RANK or LIFE:all, whose memory is gone before it")
    parser.add_argument("--persist")
    parser.add_argument("--cut", action="store_true", help="in each life, the first connection that carries anything")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    play_cuda()
    life = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if {f"{life}:{rank()}", f"{life}:all"} & set(arguments.lose):
        shutil.rmtree(base_path())
    kill_at = arguments.kill[life] if life < len(arguments.kill) else -1
    with cut_in_the_midst() if arguments.cut else contextlib.nullcontext([]) as cuts:
        resumed = train(
            arguments.kind, arguments.folder / "resumed", ours=True, kill_at=kill_at, persist=arguments.persist
        )
        report(resumed=resumed)
    report(cuts=cuts)
    AppState().log_dir = None
    report(undisturbed=train(arguments.kind, arguments.folder / "undisturbed", ours=False))
    leave()


if __name__ == "__main__":
    main()
