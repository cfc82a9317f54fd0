"""The dictionary that Lightning's ``Trainer.save_checkpoint`` would save, as something that is tracked."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from ml_flashpoint.state.dictionary import OWN, SHARED, DictionaryState, Slot

REST = "lightning"

# Parts of the dictionary that strategies which are not sharded keep alike on all ranks; `current_model_state` is
# where Lightning's weight averaging puts the model's.
_ALIKE = ("state_dict.", "current_model_state.", "optimizer_states.")
_OF_MODEL = _ALIKE[:2]


class TrainerSlot(Slot):
    """A `Slot` for a trainer's dictionary, or what is left of it."""

    @staticmethod
    def has_place(state: Any) -> bool:
        """Return True if a dictionary has the places of loaders, which Lightning saves of those that have a state."""
        for key in ("loops", "fit_loop", "state_dict", "combined_loader"):
            state = state.get(key) if isinstance(state, dict) else None
        return bool(state)


class TrainerState(DictionaryState):
    """Tracks one checkpoint dictionary; nothing else needs to be added.

    Attributes:
        parameters: names of the model's parameters in the dictionary. Of its buffers, rank 0's are saved, as Lightning
            does. None: there is one rank, or all ranks have the same.
    """

    title = REST
    slot = TrainerSlot

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self.parameters: Collection[str] | None = None

    def how_to_decide(self, names: Iterable[str]) -> str:
        """See `TrackedState.how_to_decide`. What is a rank's own here are loops, callbacks and loaders of Lightning."""
        return (
            "start as many ranks as there were (loops, callbacks and loaders are theirs), or make the callback with"
            ' FlashpointCallback(..., on_world_size_change="keep")'
        )

    def part_of(self, path: str) -> str | None:
        """See `DictionaryState.part_of`."""
        if not path.startswith(_ALIKE):
            return OWN
        prefix = next((each for each in _OF_MODEL if path.startswith(each)), None)
        if self.rank == 0 or self.parameters is None or prefix is None:
            return SHARED
        return SHARED if path.removeprefix(prefix) in self.parameters else None
