"""Tensors that live in an arena and travel to another process by name instead of by copy.

Owns the tensor type, and what the other process maps. Needed because torch copies a tensor's storage to fresh shared
memory when it pickles it, which would be a second copy of the state for every save in another process.
"""

from __future__ import annotations

import logging
import mmap
import os
import weakref
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch

from ml_flashpoint.copy.cpu import copy_all, cpu_clone

_log = logging.getLogger(__name__)

_ALIGNMENT = 64


class SharedArena:
    """What another process sees of an arena, or of copies in memory of this process. Travels by pickle as a path, and
    is mapped where it arrives, once a pickle.

    The mapping is private: what the other process writes to the tensors stays there. Such pages are no longer what the
    trainer has, so its tensors must not be told by their places any more once there are any.

    Args:
        path: of the arena; None for copies, which are put into a file once they travel.
        mapping: of the file.
    """

    def __init__(self, path: Path | None, mapping: mmap.mmap | None = None) -> None:
        self._path = path
        self._mapping = mapping
        self._copies: Sequence[tuple[int, torch.Tensor]] = ()
        self._begin = self._end = 0

    def __reduce__(self) -> tuple[Any, ...]:
        if self._path is None:
            self._path = self._put_down()
        return _map, (str(self._path),)

    def _put_down(self) -> Path:
        """Put the copies into a file without a name. By torch, each would travel as a file of its own."""
        descriptor = os.memfd_create("flashpoint-staged")
        weakref.finalize(self, os.close, descriptor)
        size = max([mmap.PAGESIZE, *(begin + copy.nbytes for begin, copy in self._copies)])
        os.posix_fallocate(descriptor, 0, size)
        self._mapping = mmap.mmap(descriptor, size)
        views = [self.view(begin, begin + copy.nbytes, copy.dtype, copy.shape) for begin, copy in self._copies]
        copy_all(views, [copy for _, copy in self._copies])
        return Path(f"/proc/{os.getpid()}/fd/{descriptor}")

    def map(self, path: str) -> None:
        """Map the file, in the process that it was sent to."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._mapping = mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(descriptor)
        self._begin = torch.frombuffer(self._mapping, dtype=torch.uint8, count=1).data_ptr()
        self._end = self._begin + len(self._mapping)

    def view(self, begin: int, end: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """Bytes ``begin:end`` as a tensor; one without data if the file could not be mapped."""
        with torch.inference_mode(False):
            if self._mapping is None:
                return torch.empty(tuple(shape), dtype=dtype, device="meta")
            if begin == end:
                return torch.empty(tuple(shape), dtype=dtype, device="cpu")
            piece = torch.frombuffer(self._mapping, dtype=torch.uint8, count=end - begin, offset=begin)
            return piece.view(dtype).view(tuple(shape))

    def place_of(self, tensor: torch.Tensor) -> int | None:
        """Where a tensor's memory begins in the file; None if it is elsewhere, or is not all of its memory."""
        begin = tensor.data_ptr() - self._begin
        plain = tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()
        return begin if plain and begin >= 0 and tensor.data_ptr() + tensor.nbytes <= self._end else None

    @property
    def changed(self) -> bool:
        """Whether this process has written to the mapping, or may have."""
        inside, pages = False, 0
        try:
            with open("/proc/self/smaps") as maps:
                for line in maps:
                    name, _, rest = line.partition(" ")
                    if not name.endswith(":"):
                        begin, _, end = name.partition("-")
                        inside = int(begin, 16) < self._end and int(end, 16) > self._begin
                    elif inside and name == "Anonymous:":
                        pages += int(rest.split()[0])
        except OSError:
            return True
        return pages > 0


def _map(path: str) -> SharedArena:
    arena = SharedArena(Path(path))
    try:
        arena.map(path)
    except (OSError, ValueError) as error:
        # Torch's saving process would end with it, for good. So only this save fails: the write refuses the tensors.
        _log.error("the staged state cannot be read: %s", error)
    return arena


class ArenaTensor(torch.Tensor):
    """A view of an arena. Results of operations on it are plain tensors.

    Sent to another process through `multiprocessing`, it travels as arena, place, dtype and shape; pickled in any
    other way, for example by ``torch.save``, it is a plain tensor with content of its own.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    place: tuple[SharedArena, int, int]

    @staticmethod
    def wrap(view: torch.Tensor, arena: SharedArena, begin: int, end: int) -> ArenaTensor:
        """``view`` of bytes ``begin:end`` of an arena, as an :class:`ArenaTensor`; no copy."""
        tensor = view.as_subclass(ArenaTensor)
        tensor.place = (arena, begin, end)
        return tensor

    @classmethod
    def of_copies(cls, copies: Sequence[torch.Tensor]) -> list[ArenaTensor]:
        """Copies in memory of this process, as tensors that travel together."""
        shared, end, wrapped = SharedArena(None), 0, list[ArenaTensor]()
        for copy in copies:
            wrapped.append(cls.wrap(copy, shared, end, end + copy.nbytes))
            end += -(-copy.nbytes // _ALIGNMENT) * _ALIGNMENT
        # Not those above, which have it themselves: in a circle, their memory would only be freed with the garbage.
        shared._copies = [(each.place[1], copy) for each, copy in zip(wrapped, copies, strict=True)]
        return wrapped

    def __reduce_ex__(self, protocol: Any) -> Any:
        return cpu_clone(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return cpu_clone(self)


def _by_place(tensor: ArenaTensor) -> tuple[Any, ...]:
    return _rebuild, (*tensor.place, tensor.dtype, tuple(tensor.shape))


ForkingPickler.register(ArenaTensor, _by_place)


def _rebuild(arena: SharedArena, begin: int, end: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return ArenaTensor.wrap(arena.view(begin, end, dtype, shape), arena, begin, end)
