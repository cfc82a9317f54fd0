"""Counts what is copied, and by whom: how long a caller is held follows from that, on a machine of any speed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ml_flashpoint.staging import copy


class CopiedBytes:
    """From now on, until the patches of ``monkeypatch`` are undone.

    Attributes:
        of_thread: bytes copied by each thread, by its number.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of_thread: dict[int, int] = {}
        copied, lock = copy._copy, threading.Lock()

        def counted(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
            copied(targets, sources)
            with lock:
                me = threading.get_ident()
                self.of_thread[me] = self.of_thread.get(me, 0) + sum(target.nbytes for target in targets)

        monkeypatch.setattr(copy, "_copy", counted)

    def here(self) -> int:
        """Bytes that the calling thread has copied since it last asked."""
        return self.of_thread.pop(threading.get_ident(), 0)


def nbytes_of(state: Any) -> int:
    """Bytes of all tensors of a nested state."""
    if isinstance(state, dict):
        return sum(map(nbytes_of, state.values()))
    if isinstance(state, (list, tuple)):
        return sum(map(nbytes_of, state))
    return state.nbytes if isinstance(state, torch.Tensor) else 0
