"""Tensors that live in an arena and travel to another process by name instead of by copy.

Owns the tensor type and this process's mappings of arenas that another process made. Needed because torch
copies a tensor's storage to fresh shared memory when it pickles it, which would be a second copy of the
state for every save in another process.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import torch

from ml_flashpoint.checkpoint_object_manager.arena import Arena
from ml_flashpoint.staging.copy import typed_view

_mapped: dict[Path, Arena] = {}
_lock = threading.Lock()


def mapped_arena(path: Path) -> Arena:
    """This process's mapping of another process's arena: made once, made anew if the file was replaced or grew."""
    with _lock:
        arena = _mapped.get(path)
        if arena is not None:
            found = os.stat(path)
            if found.st_ino == arena.inode and found.st_size == arena.size:
                return arena
        arena = _mapped[path] = Arena.open(path)
        return arena


class ArenaTensor(torch.Tensor):
    """A view of an arena that pickles as (path, place, dtype, shape). Results of operations are plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _place: tuple[Path, int, int]

    @staticmethod
    def wrap(view: torch.Tensor, path: Path, begin: int, end: int) -> ArenaTensor:
        """``view`` of bytes ``begin:end`` of the arena at ``path``, as an :class:`ArenaTensor`; no copy."""
        tensor = view.as_subclass(ArenaTensor)
        tensor._place = (path, begin, end)
        return tensor

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        path, begin, end = self._place
        return _rebuild, (str(path), begin, end, self.dtype, tuple(self.shape))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.clone()


def _rebuild(path: str, begin: int, end: int, dtype: torch.dtype, shape: tuple[int, ...]) -> ArenaTensor:
    arena = mapped_arena(Path(path))
    return ArenaTensor.wrap(typed_view(arena.tensor, begin, end, dtype, shape), arena.path, begin, end)
