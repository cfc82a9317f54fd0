"""Ranks that keep and go back to versions, as a script says; for `tests.support.forked`.

Owns what one rank does. Its state is its own, a function of rank, step and attempt, so that whatever is loaded can be
compared with what was saved, bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from ml_flashpoint import Flashpoint
from ml_flashpoint.format.errors import FlashpointError
from tests.support.forked import Report

Command = tuple[Any, ...]


def content(rank: int, step: int, attempt: int, count: int) -> torch.Tensor:
    """What a rank has at a step; ``attempt`` tells saves of one step apart."""
    return torch.arange(count, dtype=torch.int64) * (step + 1000 * attempt) + rank


class State:
    """What one rank tracks."""

    def __init__(self, count: int) -> None:
        self.values = torch.zeros(count, dtype=torch.int64)
        self.name = [0, 0, 0]

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "name": self.name}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values.copy_(state["values"])
        self.name = list(state["name"])

    def set(self, rank: int, step: int, attempt: int) -> None:
        self.values.copy_(content(rank, step, attempt, len(self.values)))
        self.name = [rank, step, attempt]

    def checked(self) -> list[int]:
        """Whose state this is: rank, step, attempt. Fails if a bit of it is another's."""
        rank, step, attempt = self.name
        assert torch.equal(self.values, content(rank, step, attempt, len(self.values))), self.name
        return self.name


def shown(versions: Sequence[Any]) -> list[Any]:
    """Step, and whether it is unverified, of each version."""
    return [(each.step, *(() if each.verified else ("unverified",))) for each in versions]


def play(report: Report, rank: int, script: Sequence[Command], store: str | None = None) -> list[Any]:
    """Do what each line of a script says; returns what came of each that returns something."""
    said: list[Any] = []
    state = State(5000)
    with Flashpoint(os.environ["FLASHPOINT_TEST_BASE"], keep=3, deadline_s=60, persist=store) as fp:
        fp.track(state=state)
        for name, *arguments in script:
            try:
                if name == "resume":
                    said.append((fp.resume(step=arguments[0] if arguments else None), state.checked()[1:]))
                elif name == "versions":
                    said.append(shown(fp.versions()))
                else:  # save: steps, attempt
                    for step in arguments[0]:
                        state.set(rank, step, arguments[1])
                        fp.save(step)
                        fp.wait()
            except FlashpointError as error:
                said.append(f"{type(error).__name__}: {error.message}")
    return said
