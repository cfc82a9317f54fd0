"""The kinds of saves that are compared: what they are called, where they come from, and which code calls them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rivals.loops import Loop


class Saves:
    """How a loop is saved by one of them. This one saves nothing.

    Attributes:
        warmups: saves that it takes to get into its stride.
    """

    warmups = 3

    def __init__(self, loop: Loop, folder: Path) -> None:
        self.loop, self.folder = loop, folder

    def save(self, step: int) -> None:
        """Called after a step, as the loop does: what it takes is time held."""

    def before_update(self) -> None:
        """Called when the next step's gradients are there: waits for what must not see the update. Time held, too."""

    def settle(self) -> None:
        """Wait until nothing goes on in the background. Not timed."""

    def stored(self) -> int:
        """Bytes of the newest checkpoint, where it lies."""
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())

    def close(self) -> None:
        """Give everything back."""


@dataclass(frozen=True)
class Kind:
    """One of them.

    Attributes:
        name: on the command line, and of its environment. label: on the page.
        factory: module and class, a `Saves`.
        package: its requirement, pinned; empty: the environment of this repository has it.
        needs: what else its environment needs. Requirements are installed without their own, so that none brings
            another torch.
        leaves: what is there after a save, in a few words.
    """

    name: str
    label: str
    factory: str
    package: str = ""
    needs: tuple[str, ...] = ()
    leaves: str = ""

    @property
    def is_ours(self) -> bool:
        return self.name.startswith("ours")

    def make(self, loop: Loop, folder: Path) -> Saves:
        """Import it, and make it ready."""
        module, _, name = self.factory.partition(":")
        made: Saves = getattr(importlib.import_module(module), name)(loop, folder)
        return made
