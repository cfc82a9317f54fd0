"""A NeMo training of one rank, with overlap, which on the CPU changes nothing. Something changes a parameter, once, and
tells nobody. Owns nothing: see `tests.support.nemo_training`.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import pytest

from tests.support.worker import leave

warnings.filterwarnings("ignore")


def main() -> None:
    import torch

    from tests.support.nemo_cpu import play_cuda
    from tests.support.nemo_training import Meddler, train
    from tests.support.witness import Witness

    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--meddle", type=int, default=-1, help="after the save of this step")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    play_cuda()
    with pytest.MonkeyPatch.context() as monkeypatch:
        meddler = Meddler(Witness(monkeypatch), arguments.meddle)
        train("watched", arguments.folder, ours=True, meddler=meddler)
    leave()


if __name__ == "__main__":
    main()
