"""The two loops that all kinds of saves are measured in. Needs nothing but torch.

An optimizer such as AdamW moves more bytes in a step than a copy of the state does, on a CPU, so that the step of an
ordinary loop is always the longer one. The loop with short steps therefore trains a large embedding, of which a step
touches the rows of its batch only, and `Adagrad` goes with that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpt import GPT


class Loop:
    """One training loop: a model, an optimizer, and a batch that is always the same.

    Attributes:
        name: "long" or "short", as its steps are. steps: how many of them make a run.
        nbytes: of the state.
    """

    def __init__(self, name: str, scale: float) -> None:
        torch.manual_seed(1)
        self.name = name
        if name == "long":
            width, self.steps = max(64, int(512 * scale**0.5) // 32 * 32), 4
            self.model = GPT(256, width, 6)
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
            self._tokens = torch.randint(256, (1, 64))
        else:
            vocabulary, self.steps = max(256, int(131_072 * scale)), 10
            self.model = GPT(vocabulary, 256, 1, sparse=True)
            self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=1e-3)
            self._tokens = torch.randint(vocabulary, (1, 32))
        self.step()
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors())

    def step(self, before_update: Callable[[], object] | None = None) -> None:
        """One step.

        Args:
            before_update: called when the gradients are there, and the state is still that of the step before.
        """
        self.optimizer.zero_grad()
        self.model(self._tokens).backward()
        if before_update is not None:
            before_update()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """What a loop hands to a checkpointer. The tensors are those of the training."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the state, without their names."""
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*(p.detach() for p in self.model.parameters()), *(m for m in moments if torch.is_tensor(m))]


LOOPS = ("long", "short")
