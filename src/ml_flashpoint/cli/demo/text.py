"""Training text that every machine has: the source files of the running Python's standard library.

Owns reading it, and a loader that knows its place in it.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

_MAX_BYTES = 4 << 20


def read_text() -> torch.Tensor:
    """The first 4 MiB of the standard library's source, by file name, as `uint8` of one dimension.

    Raises:
        FileNotFoundError: this Python comes without the source of its library.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= _MAX_BYTES:
            break
    if not text:
        raise FileNotFoundError(f"{folder} holds no source files to train on")
    return torch.frombuffer(text[:_MAX_BYTES], dtype=torch.uint8)


class TextLoader:
    """An endless iterator over batches of one rank, that can be put back to where it was.

    Yields ``(inputs, targets)``, both `int64` of shape [batch, context]; targets are the next bytes.

    Args:
        text: from `read_text`.
        batch, context: shape of what it yields.
        rank, world_size: which batches are this rank's.
        seed: other seeds give other batches.
    """

    def __init__(self, text: torch.Tensor, *, batch: int, context: int, rank: int, world_size: int, seed: int) -> None:
        self._text = text
        self._batch, self._context = batch, context
        self._rank, self._world_size = rank, world_size
        self._seed = seed
        self._position = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        # A generator made from the place, so that the place is all there is to save.
        place = self._position * self._world_size + self._rank
        chance = torch.Generator().manual_seed((self._seed << 32) + place)
        starts = torch.randint(len(self._text) - self._context, (self._batch, 1), generator=chance)
        windows = self._text[starts + torch.arange(self._context + 1)].long()
        self._position += 1
        return windows[:, :-1], windows[:, 1:]

    def state_dict(self) -> dict[str, int]:
        """The place in the text."""
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a place."""
        self._position = int(state["position"])
