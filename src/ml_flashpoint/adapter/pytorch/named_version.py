"""A version read from outside of the job by the names that its state had, whichever ranks have saved it.

Owns `open_version`. Holding parts and reading them by rank is `core.open_version`'s; putting tensors together from the
parts of several ranks is `version_items`'.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

from ml_flashpoint.adapter.pytorch.version_items import VersionItems
from ml_flashpoint.copy.cpu import cpu_clone
from ml_flashpoint.copy.tensors import is_plain_strided
from ml_flashpoint.core.open_version import OpenVersion, opened
from ml_flashpoint.format.errors import ObjectNotFoundError


class NamedVersion(OpenVersion):
    """An `OpenVersion` that was saved through DCP, `Flashpoint` or Lightning, and also knows its state's own names."""

    def tensor(self, rank: int | str, key: str | None = None) -> Any:
        """A tensor, as a ``torch.Tensor``: ``version.tensor("model.layer.weight")``, whichever ranks have saved it.

        Args:
            rank: the name. A tensor of which several ranks have a part is put together in memory of its own; one that
                has one part is a view of the job's memory.
            key: with a rank before it, the name of an item of that rank's part: ``version.tensor(0, key)``.

        Raises:
            ObjectNotFoundError: there is no such tensor, or this node lacks a part of it.
            LoadError: the version was not saved through DCP, so that only items of parts have names.
        """
        if not isinstance(rank, str):
            return super().tensor(rank, key or "")
        if rank not in self._all.tensors:
            raise ObjectNotFoundError(f"the version has no tensor {rank!r}", step=self.step, path=self.path)
        return self._all.tensor(rank)

    def numpy(self, rank: int | str, key: str | None = None) -> Any:
        """The same as an array. Raises TypeError for dtypes that NumPy does not have."""
        return self.tensor(rank, key).numpy()

    def state_dict(self, prefix: str = "") -> dict[str, Any]:
        """The state, or what lies below a name, in memory of its own: ``version.state_dict("model.")`` has the weights
        of a model that was tracked as ``model``, for its ``load_state_dict``.

        Tensors are whole, and on the CPU. What was nested is nested again, such as the extra state of a module.

        Args:
            prefix: only names that start so, without it.

        Raises:
            InvalidArgumentError: no name starts so.
            ObjectNotFoundError: this node lacks a part.
            LoadError: the version was not saved through DCP.
            UnsafeContentError: there is something that is not loaded without trusting it.
            PrunedError: the version went meanwhile.
        """
        items = self._items(prefix)
        flat: dict[str, Any] = {}
        for name in items.names:
            if name not in items.tensors:
                flat[name] = items.value(name)
                continue
            tensor = items.tensor(name)
            flat[name] = cpu_clone(tensor) if is_plain_strided(tensor) else tensor
        self.check()
        return unflatten_state_dict(flat, {name: items.path_of(name) for name in flat})

    @property
    def _all(self) -> VersionItems:
        if self._known is None:
            self._known = self._items("")
        return self._known

    def _items(self, prefix: str) -> VersionItems:
        return VersionItems(dict.fromkeys(self.manifests, self), prefix)

    _known: VersionItems | None = None

    def close(self) -> None:
        """Let go of all parts. Views that are left are of no use any more."""
        self._known = None
        super().close()

    def __enter__(self) -> NamedVersion:
        return self


def open_version(base: str | os.PathLike[str], step: int | None = None, *, partial: bool = False) -> NamedVersion:
    """Open a version of a base container, for reading it while the job runs.

    ::

        with open_version("/dev/shm/me/job-145") as version:
            weight = version.tensor("model.layer.weight").clone()
            weights = version.state_dict("model.")

    The job keeps it for that long, which takes one more arena: where its memory is full, saves fail meanwhile.
    If it went before it was held, `PrunedError` is raised on leaving, and by ``check()``.

    Args:
        base: of a job, on this node.
        step: which version; by default the newest.
        partial: also one that is not whole on this node.

    Raises:
        ObjectNotFoundError: there is none, or none that is whole on this node.
        PrunedError: they went as fast as they were looked for.
        UnreadableError: that cannot be known just now: one that cannot be read may be the one that is meant.
        DamagedError: there is nothing but what cannot be read for good.
    """
    return opened(NamedVersion, Path(os.path.abspath(base)), step, partial)
