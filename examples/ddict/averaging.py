"""Averages samples in 30 processes that keep their state in a dictionary, and roll back where it went wrong.

    python examples/ddict/averaging.py

Each process draws 1000 samples, stores its sum after every 100, and goes on to the next checkpoint. A sample of 4 or
more is taken for a sign of corruption: the process goes back to its newest checkpoint and draws again from there.
With --seed, the samples are the same in every run.
"""

from __future__ import annotations

import argparse
import random

from ml_flashpoint.ddict import DDict
from ml_flashpoint.ddict.native import Barrier, ProcessGroup, ProcessTemplate, System, this_process

SAMPLES, SAMPLES_A_CHECKPOINT, LIMIT = 1000, 100, 4.0


def biased_sampler(ddict: DDict, barrier: Barrier, seed: int | None) -> None:
    my_puid = this_process.my_puid
    local_sample_agg = 0.0
    num_samples = 0
    if seed is not None:
        # The barrier gives each process another number, and together always the same ones.
        random.seed(seed * 1_000_000 + barrier.wait())

    while num_samples < SAMPLES:
        # some work
        sample = random.normalvariate(0.0, 1.0)
        local_sample_agg += sample
        num_samples += 1

        # condition suggesting state has been corrupted and we need to roll back
        if abs(sample) >= LIMIT and num_samples > SAMPLES_A_CHECKPOINT:
            # checkpoint current state before rolling back
            ddict.checkpoint()
            rollback_chkpt = ddict.checkpoint_id - 1
            print(f"Process {my_puid} rolling back to checkpoint {rollback_chkpt}", flush=True)
            ddict.rollback()
            local_sample_agg = ddict[f"puid_{my_puid}"]
            num_samples = rollback_chkpt * SAMPLES_A_CHECKPOINT
            continue

        # periodically checkpoint state of application
        if num_samples % SAMPLES_A_CHECKPOINT == 0:
            ddict[f"puid_{my_puid}"] = local_sample_agg
            ddict.checkpoint()  # proceed to the next checkpoint
            barrier.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="Average samples with checkpoints and rollback")
    parser.add_argument("--processes", type=int, default=30, help="on each node")
    parser.add_argument("--seed", type=int, default=None, help="of the samples; default: other ones in every run")
    options = parser.parse_args()

    my_alloc = System()
    nnodes = my_alloc.nnodes
    processes = nnodes * options.processes
    ddict = DDict(1, nnodes, nnodes * 4 * 1024 * 1024, working_set_size=4)
    barrier = Barrier(processes, timeout=300)
    pg = ProcessGroup()
    temp_proc = ProcessTemplate(target=biased_sampler, args=(ddict, barrier, options.seed))
    pg.add_process(template=temp_proc, nproc=processes)

    pg.init()
    pg.start()
    pg.join()

    avg = 0.0
    # update current process to the latest checkpoint
    ddict.sync_to_newest_checkpoint()
    for puid, _ in pg.inactive_puids:
        avg += ddict[f"puid_{puid}"]
    avg /= processes * SAMPLES
    print(f"Final average from all processes is {avg}", flush=True)
    pg.close()
    ddict.destroy()


if __name__ == "__main__":
    main()
