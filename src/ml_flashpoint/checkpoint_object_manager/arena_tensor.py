"""Tensors that live in an arena and travel to another process by name instead of by copy.

Owns the tensor type and this process's mappings of arenas that another process made. Needed because torch
copies a tensor's storage to fresh shared memory when it pickles it, which would be a second copy of the
state for every save in another process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch

from ml_flashpoint.checkpoint_object_manager.arena import Arena
from ml_flashpoint.format.errors import FlashpointError
from ml_flashpoint.staging.copy import cpu_clone

_log = logging.getLogger(__name__)

_mapped: dict[Path, Arena] = {}
_lock = threading.Lock()


def mapped_arena(path: Path) -> Arena:
    """This process's mapping of another process's arena: made once, made anew if the file was replaced or grew."""
    with _lock:
        arena = _mapped.get(path)
        if arena is not None and _is_current(arena):
            return arena
        # Now and not later: memory of files that are gone is only freed with their mappings.
        for stale in [each for each in _mapped.values() if not _is_current(each)]:
            del _mapped[stale.path]
            with contextlib.suppress(BufferError):
                stale.close()
        arena = _mapped[path] = Arena.open(path)
        return arena


def _is_current(arena: Arena) -> bool:
    try:
        found = os.stat(arena.path)
    except FileNotFoundError:
        return False
    return found.st_ino == arena.inode and found.st_size == arena.size


class ArenaTensor(torch.Tensor):
    """A view of an arena. Results of operations on it are plain tensors.

    Sent to another process through `multiprocessing`, it travels as path, place, dtype and shape; pickled in any
    other way, for example by ``torch.save``, it is a plain tensor with content of its own.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _place: tuple[Path, int, int]

    @staticmethod
    def wrap(view: torch.Tensor, path: Path, begin: int, end: int) -> ArenaTensor:
        """``view`` of bytes ``begin:end`` of the arena at ``path``, as an :class:`ArenaTensor`; no copy."""
        tensor = view.as_subclass(ArenaTensor)
        tensor._place = (path, begin, end)
        return tensor

    def __reduce_ex__(self, protocol: Any) -> Any:
        return cpu_clone(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return cpu_clone(self)


def _by_place(tensor: ArenaTensor) -> tuple[Any, ...]:
    path, begin, end = tensor._place
    return _rebuild, (str(path), begin, end, tensor.dtype, tuple(tensor.shape))


ForkingPickler.register(ArenaTensor, _by_place)


def _rebuild(path: str, begin: int, end: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    try:
        arena = mapped_arena(Path(path))
    except (FlashpointError, OSError) as error:
        # Torch's saving process would end with it, for good. So only this save fails: the write refuses the tensor.
        _log.error("the staged state cannot be read: %s", error)
        return torch.empty(shape, dtype=dtype, device="meta")
    return ArenaTensor.wrap(arena.view(begin, end, dtype, shape), arena.path, begin, end)
