"""`StagedStateDict`: a staged state, which notes the thread that reads it."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _collections_abc import dict_items

_read = threading.local()


class StagedStateDict(dict[str, Any]):
    """A staged state. DCP saves it on a thread of its own, or sends it to another process, and says neither; so the
    state notes which thread reads it.

    Args:
        state: the state, with staged tensors in it.
        staged: a `Staged`, or in another process a `saving_process.ArrivedState`.
    """

    def __init__(self, state: dict[str, Any], staged: Any) -> None:
        super().__init__(state)
        self.staged = staged

    def items(self) -> dict_items[str, Any]:
        """Return the items."""
        _read.state = weakref.ref(self)
        return super().items()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        reduced: tuple[Any, ...] = self.staged.sent(dict(self))
        return reduced


def forget_reading() -> None:
    """Begin a save on the calling thread, which has read nothing for it yet."""
    _read.state = None


def staged_state_read() -> Any:
    """Return what was staged of the state that the calling thread has read since; None if it was no staged one."""
    reference = getattr(_read, "state", None)
    state = None if reference is None else reference()
    return None if state is None else state.staged
