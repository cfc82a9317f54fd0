"""Settings of a job's checkpoints, which every adapter takes: checked once, where the user hands them over."""

from __future__ import annotations

from dataclasses import dataclass, field

from ml_flashpoint.ranks.retention import Keep
from ml_flashpoint.ranks.strategies import ReplicationStrategy


@dataclass(frozen=True, slots=True)
class Persist:
    """Durable versions: where they are written to, and which.

    Attributes:
        url: URL, or absolute path, of a folder that belongs to this job alone and that all nodes see.
        every: steps. The first verified version at or after each multiple is persisted.
        keep: number of versions that stay there.
        bytes_per_s: most bytes that a rank writes in a second; None for no limit.

    Raises:
        InvalidArgumentError: one is unusable.
    """

    url: str
    every: int = 50
    keep: int = 3
    bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Config:
    """Settings of a job's checkpoints, the same on all ranks.

    Attributes:
        replication: who holds copies of whose parts; None: pairs of nodes, or nobody on a single node.
        keep: verified versions that stay in memory.
        persist: durable versions; None for none.
        sigterm_grace_s: with ``persist``, seconds at most that SIGTERM is held up; None: it is left alone.
    """

    replication: ReplicationStrategy | str | None = None
    keep: Keep = field(default_factory=Keep)
    persist: Persist | None = None
    sigterm_grace_s: float | None = None
