"""Other tensors of the memory that tensors have while a save begins.

A program that gives a tensor of its own other data, by ``tensor.data = other``, changes neither its version counter nor
the memory that it had, which an alias keeps. Owns the aliases of the save under way, and keeps those of tensors that
are known to stay what they are for the save after: to make thousands takes longer than all else that a save does.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from ml_flashpoint.core.picking import NamedTensors, tensors_of

Items = Sequence[tuple[str, torch.Tensor]]

_address = torch.Tensor.data_ptr


class Aliases:
    """See the module. To be used by one thread, but for :meth:`moved`.

    Attributes:
        places: for others to keep what they know of the memory of the aliases that were given last, by number after
            ``begin``: address and number of bytes.
    """

    def __init__(self) -> None:
        self._of: weakref.ref[NamedTensors] | None = None
        self._begin = 0
        self._kept: tuple[NamedTensors, NamedTensors] | None = None
        self._addresses: list[int] = []
        self.places: dict[int, tuple[int, int]] = {}

    def of(self, items: Items, begin: int) -> tuple[NamedTensors, NamedTensors]:
        """The same names, and from number ``begin`` on aliases in the place of the tensors: all, and the latter alone.

        Args:
            items: the very object that was given before only if the tensors are what they were then, but for their
                content: where that is, too. Then the aliases are kept, and with them that memory.
        """
        again = self._of is not None and self._of() is items and self._begin == begin
        if again and self._kept is not None:
            return self._kept
        names = items.names if isinstance(items, NamedTensors) else [name for name, _ in items]
        tensors = tensors_of(items)
        aliases = [*map(torch.Tensor.detach, tensors[begin:])]
        given = NamedTensors(names, [*tensors[:begin], *aliases]), NamedTensors(names[begin:], aliases)
        self._of, self._begin, self._kept, self.places = None, begin, None, {}
        if isinstance(items, NamedTensors):  # others are made anew for each save
            self._of = weakref.ref(items)
        if again:
            self._kept, self._addresses = given, list(map(_address, aliases))
        return given

    def forget(self) -> None:
        """Let go of what is kept."""
        self._of = self._kept = None

    def moved(self) -> int | None:
        """Which of the kept aliases that were given last has other memory by now, if one has; by number after
        ``begin``. One whose memory is gone does not count: nothing can be copied of that."""
        if self._kept is None:
            return None
        now = list(map(_address, self._kept[1].tensors))
        if now == self._addresses:
            return None
        pairs = enumerate(zip(now, self._addresses, strict=True))
        return next((number for number, (one, before) in pairs if one not in (before, 0)), None)
