"""A rank that trains with `every_n_steps="auto"`, and tells at which steps it saved.

With ``--loses RANK``, that rank does not hear that the save was good in which ranks came to their first interval.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist

from ml_flashpoint import Flashpoint
from ml_flashpoint.facade.save_interval import SaveInterval
from tests.support.worker import base_path, leave, report


class Deaf(SaveInterval):
    """One that misses a choice, once."""

    missed = False

    def confirm(self) -> None:
        if not self.missed and self._heard is not None:
            self.missed, self._heard = True, None
        super().confirm()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--loses", type=int, default=-1)
    given = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with Flashpoint(base_path(), every_n_steps="auto", mtbf_s=3600.0, deadline_s=5) as fp:
        if rank == given.loses:
            fp._interval.__class__ = Deaf
        fp.track(model=model, optimizer=optimizer)
        found = fp.resume()
        saved: list[int] = []
        save = fp._saves.save

        def noted(version: Any) -> None:
            saved.append(version.step)
            save(version)

        fp._saves.save = noted  # type: ignore[method-assign]
        while fp.steps_done < given.steps:
            loss = model(torch.ones(8, 64)).sum()
            dist.all_reduce(loss.detach())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            fp.step()
        fp.wait()
        health = fp.health
        report(
            found=found,
            saved=saved,
            every=health.every_n_steps,
            reason=health.interval_reason,
            failures=health.failures,
            verified=fp.last_replicated,
        )
    dist.destroy_process_group()


main()
leave()
