"""Settings of a job's checkpoints, which every adapter takes: checked once, where the user hands them over."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ml_flashpoint.format.arguments import (
    checked_bool,
    checked_choice,
    checked_globals,
    checked_integer,
    checked_seconds,
)
from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.ranks.retention import Keep, checked_keep
from ml_flashpoint.ranks.strategies import ReplicationStrategy, checked_strategy
from ml_flashpoint.state.archive import SafeGlobal
from ml_flashpoint.stores.location import checked_url, is_url


@dataclass(frozen=True, slots=True)
class Persist:
    """Settings of the durable store to which versions are persisted.

    Attributes:
        url: URL or absolute path of a folder that belongs to this job only, and that all nodes see.
        every: the first verified version at or after each multiple of this number of steps is persisted.
        keep: number of complete versions that stay in the store.
        bytes_per_s: the most bytes that a rank writes in a second; None for no limit.

    Raises:
        InvalidArgumentError: an argument is invalid. Errors name the arguments as the adapters do: ``persist``,
            ``persist_every``, ``persist_keep``, ``persist_bytes_per_s``.
    """

    url: str
    every: int = 50
    keep: int = 3
    bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", _checked_place(self.url))
        checked_integer("persist_every", self.every, 1)
        checked_integer("persist_keep", self.keep, 1)
        rate = self.bytes_per_s
        if rate is not None and (isinstance(rate, bool) or not isinstance(rate, (int, float)) or not rate > 0):
            raise InvalidArgumentError(
                "must be a positive number of bytes a second, or None", argument="persist_bytes_per_s", value=rate
            )

    @staticmethod
    def of(url: str | None, every: int = 50, keep: int = 3, bytes_per_s: float | None = None) -> Persist | None:
        """Return the settings for these keywords of an adapter; None without a URL. Raise an `InvalidArgumentError` if
        one is invalid, also without a URL."""
        options = Persist("/" if url is None else url, every, keep, bytes_per_s)
        return None if url is None else options


def _checked_place(value: object) -> str:
    url = checked_url("persist", value)
    text = os.path.expanduser(os.fspath(value))  # type: ignore[call-overload]
    if not is_url(text) and not os.path.isabs(text):
        raise InvalidArgumentError(
            "must be a URL or an absolute path: the ranks of a job, and its next run, may start in other folders",
            argument="persist",
            value=value,
            hint=f"write {url}, if that is meant",
        )
    return url


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of a job's checkpoints, the same on all ranks.

    Attributes:
        replication: a strategy or its name (``"pairwise"``, ``"ring"``, ``"none"``); None: pairs of nodes, or no copies
            on a single node.
        keep: verified versions that stay in memory: the number of newest versions, or a `Keep`.
        persist: the durable store; None for none.
        sigterm_grace_s: with ``persist``, seconds for which the next save or close after SIGTERM waits until the newest
            version is persisted. Then the earlier handler, or the default action, runs. Works in the main thread only;
            `close` restores the earlier handler. None, or without ``persist``: SIGTERM is not handled.
        safe_globals: additional types that a state may contain, as for ``torch.serialization.safe_globals``. Tensors,
            plain values, containers and NumPy arrays are always allowed.
        overlap: copy the tensors that optimizers update on CUDA devices while the next forward and backward run.
            Otherwise, and on the CPU, everything is copied before a save returns.
        on_world_size_change: treatment of state that belongs to one rank, if the number of ranks has changed and there
            is no ``reshard`` function. ``"raise"``: random number generators of new ranks are seeded, state that was
            equal on all ranks is given to all, and other state is a `ReshardError`. ``"keep"``: rank r takes the state
            of rank r modulo the old number, including random numbers and the position in the data.
        deadline_s: the longest that a rank waits for the others when the structure of the state has changed, and at
            the end, in seconds; None: ``FLASHPOINT_SEAL_DEADLINE_S``, or 600.

    Raises:
        InvalidArgumentError: an argument is invalid.
    """

    replication: ReplicationStrategy | str | None = None
    keep: Keep | int = field(default_factory=Keep)
    persist: Persist | None = None
    sigterm_grace_s: float | None = 20.0
    safe_globals: Sequence[SafeGlobal] = ()
    overlap: bool = False
    on_world_size_change: str = "raise"
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "replication", checked_strategy(self.replication))
        object.__setattr__(self, "keep", checked_keep(self.keep))
        object.__setattr__(self, "safe_globals", checked_globals(self.safe_globals))
        if self.persist is not None and not isinstance(self.persist, Persist):
            raise InvalidArgumentError("must be a Persist(...), or None", argument="persist", value=self.persist)
        if self.sigterm_grace_s is not None:
            checked_seconds("sigterm_grace_s", self.sigterm_grace_s)
        if self.deadline_s is not None:
            checked_seconds("deadline_s", self.deadline_s)
        checked_bool("overlap", self.overlap)
        checked_choice("on_world_size_change", self.on_world_size_change, "raise", "keep")

    @classmethod
    def of(
        cls,
        *,
        persist: str | None = None,
        persist_every: int = 50,
        persist_keep: int = 3,
        persist_bytes_per_s: float | None = None,
        handle_sigterm: bool = True,
        grace_s: float = 20.0,
        **settings: Any,
    ) -> Config:
        """Return the settings for these keywords of an adapter.

        Args:
            persist, persist_every, persist_keep, persist_bytes_per_s: the attributes of a `Persist`.
            handle_sigterm, grace_s: `sigterm_grace_s`; False: None.
            settings: further attributes.
        """
        durable = Persist.of(persist, persist_every, persist_keep, persist_bytes_per_s)
        seconds = checked_seconds("grace_s", grace_s)
        grace = seconds if checked_bool("handle_sigterm", handle_sigterm) else None
        return cls(persist=durable, sigterm_grace_s=grace, **settings)

    @property
    def rule(self) -> Keep:
        """Return `keep` as a rule."""
        return checked_keep(self.keep)
