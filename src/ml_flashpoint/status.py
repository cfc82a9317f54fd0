"""The health of a `Flashpoint`, and the last load: plain values, made on demand, safe to keep and to send."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

Source: TypeAlias = Literal["memory", "persisted", "fallback", "nothing"]


@dataclass(frozen=True, slots=True)
class Health:
    """The way saving goes on this rank, from the construction of the `Flashpoint` on.

    Attributes:
        saves: saves of which this rank has committed its part.
        skipped: saves of the schedule that found no free slot, because earlier ones are still being copied.
        failures: saves that failed.
        last_error: text of the latest failure, kept after later saves worked; None if there was none.
        replication_error: reason why copies on other nodes are missing now; None while nothing is amiss.
        agreement_error: reason why ranks cannot agree on which versions are verified now; None while they can.
        blocked_s: seconds that the latest save kept the training loop; not those in which its CUDA device was still at
            work on what it had been given before.
        blocked_total_s: the same, of all saves.
        committed_s: seconds from the begin of the latest successful save until this rank's part was committed.
        bytes: bytes of this rank's part of its newest version.
        degraded: True if something needs attention: the latest save failed, copies are missing, ranks cannot agree, or
            versions are not persisted although they should be.
        persisted: step of the newest version that is persisted, as far as this rank has heard; None if there is none.
        persist_error: reason why the latest version that was due is not persisted; None while nothing is amiss.
        persist_lag: steps from `persisted` to the newest verified version; None if either is not known.
    """

    saves: int
    skipped: int
    failures: int
    last_error: str | None
    replication_error: str | None
    agreement_error: str | None
    blocked_s: float
    blocked_total_s: float
    committed_s: float
    bytes: int
    degraded: bool
    persisted: int | None = None
    persist_error: str | None = None
    persist_lag: int | None = None

    def scalars(self, prefix: str = "flashpoint/") -> dict[str, float]:
        """Return all of it that is a number, by name: for TensorBoard, W&B and the like.

        Args:
            prefix: of the names.
        """
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {prefix + name: float(value) for name, value in values if isinstance(value, (int, float))}


@dataclass(frozen=True, slots=True)
class Recovery:
    """A `Checkpointer.load`, or `Flashpoint.resume`, on this rank. Times in seconds, over all versions that were tried.

    Attributes:
        step: the step to go on from.
        source: where the state came from.
        version: the version loaded, if it came from memory or was persisted.
        detect_s: reading and gathering inventories.
        plan_s: planning.
        fetch_s: fetching from peers, verifying, voting.
        load_s: loading into the tracked objects.
        total_s: all of it, the fallback included.
        fetched_bytes: bytes that this rank received from peers before loading.
        discarded: versions that were complete and could not be loaded, newest first.
    """

    step: int
    source: Source
    version: str | None
    detect_s: float
    plan_s: float
    fetch_s: float
    load_s: float
    total_s: float
    fetched_bytes: int
    discarded: tuple[str, ...]

    def in_words(self, base: str) -> str:
        """Return one line about it.

        Args:
            base: the base container.
        """
        left = f"; {len(self.discarded)} newer could not be loaded" if self.discarded else ""
        if self.source == "memory":
            return f"resumed at step {self.step} from memory ({base}/{self.version}) in {self.total_s:.2f} s{left}"
        if self.source == "persisted":
            return f"resumed at step {self.step} from the persisted {self.version} in {self.total_s:.2f} s{left}"
        if self.source == "fallback":
            return f"memory has no checkpoint to go on from ({base}){left}: at step {self.step}, from the fallback"
        return f"no checkpoint to go on from in {base}{left}: training starts at step {self.step}"
