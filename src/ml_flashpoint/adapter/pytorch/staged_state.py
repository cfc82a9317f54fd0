"""A staged state: how the save that reads it learns that it does.

DCP stages on one thread, then saves what was staged on another one, or sends it with the writer to another process, and
says neither. So the state itself tells: the thread that saves calls `listen` as its save begins, and then reads it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _collections_abc import dict_items

_local = threading.local()


def listen(on_read: Callable[[Any], None] | None) -> None:
    """Have a function called with what was staged when the calling thread reads a staged state; None: not any more."""
    _local.on_read = on_read


class StagedStateDict(dict[str, Any]):
    """A staged state. The save that the reading thread has begun is the one that it was staged for.

    Args:
        state: the state, with staged tensors in it.
        staged: a `saves.Staged`, or in another process a `saving_process.ArrivedState`.
    """

    def __init__(self, state: dict[str, Any], staged: Any) -> None:
        super().__init__(state)
        self.staged = staged

    def items(self) -> dict_items[str, Any]:
        """Return the items to the planner of a save."""
        if (on_read := getattr(_local, "on_read", None)) is not None:
            on_read(self.staged)
        return super().items()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        reduced: tuple[Any, ...] = self.staged.sent(dict(self))
        return reduced
