"""Runs the NeMo example on the CPU, with its own command line, where there is no GPU. Owns playing one for it."""

from __future__ import annotations

import runpy
import warnings

from tests.support.cluster import REPOSITORY

warnings.filterwarnings("ignore")

if __name__ == "__main__":
    # Not above: a long-term save starts a process that imports this file, too.
    from tests.support.nemo_cpu import play_cuda

    play_cuda()
    runpy.run_path(str(REPOSITORY / "examples" / "nemo" / "pretrain_gpt.py"), run_name="__main__")
