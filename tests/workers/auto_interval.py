"""A rank that trains with `every_n_steps="auto"`, and tells at which steps it saved.

With ``--loses RANK``, that rank does not hear that the save was good in which ranks came to their first interval; with
``--strays RANK``, all have four steps, and that rank takes eight for once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ml_flashpoint import Flashpoint
from ml_flashpoint.core.save_interval import Choice, Measured, SaveInterval
from tests.support.worker import base_path, leave, report

_STRAYS_AT = 9


class Deaf(SaveInterval):
    """One that misses a choice, once."""

    missed = False

    def confirm(self) -> None:
        if not self.missed and self._heard is not None:
            self.missed, self._heard = True, None
        super().confirm()


class Steady(SaveInterval):
    """One that is four steps, whatever they take."""

    def agree(self, measured: Sequence[Measured | None]) -> Choice | None:
        return Choice(4, "as asked") if self.every == 1 else None


class Stray(Steady):
    """One that is twice as long once all have saved the step before."""

    strayed = False

    def is_due(self, step: int, before: int | None = None) -> bool:
        if not self.strayed and step == _STRAYS_AT:
            self.strayed, self.every = True, 8
        return super().is_due(step, before)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--loses", type=int, default=-1)
    parser.add_argument("--strays", type=int, default=-1)
    given = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with Flashpoint(base_path(), every_n_steps="auto", mtbf_s=3600.0, deadline_s=5) as fp:
        if rank == given.loses:
            fp._interval.__class__ = Deaf
        if given.strays >= 0:
            fp._interval.__class__ = Stray if rank == given.strays else Steady
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
            if fp.step() == _STRAYS_AT - 1:
                fp.wait()  # for what might put it right too early
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
