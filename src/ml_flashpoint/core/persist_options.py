"""What a user says about persisting, and what is told about it. Owns no behaviour: that is `persisting`'s."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ml_flashpoint.format.arguments import checked_integer
from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.stores.location import checked_url, is_url


@dataclass(frozen=True)
class PersistOptions:
    """Where versions are persisted, and which.

    Attributes:
        persist: URL of a folder that belongs to this job alone and that all nodes see; or an absolute path, likewise.
        persist_every: steps. The first verified version at or after each multiple is persisted.
        persist_keep: how many stay.
        persist_bytes_per_s: most bytes that a rank writes in a second; None for no limit.

    Raises:
        InvalidArgumentError: one is unusable.
    """

    persist: str
    persist_every: int = 50
    persist_keep: int = 3
    persist_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "persist", _checked_place(self.persist))
        checked_integer("persist_every", self.persist_every, 1)
        checked_integer("persist_keep", self.persist_keep, 1)
        rate = self.persist_bytes_per_s
        if rate is not None and (isinstance(rate, bool) or not isinstance(rate, (int, float)) or not rate > 0):
            raise InvalidArgumentError(
                "must be a positive number of bytes a second, or None", argument="persist_bytes_per_s", value=rate
            )


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
class PersistHealth:
    """How persisting goes, on this rank.

    Attributes:
        persisted: step of the newest version that is complete in the store, as far as this rank has heard; None if
            there is none.
        error: why the latest one is not, or why there may be no next one; None while nothing is amiss.
        lag: steps from there to the newest verified version; None if either is not known.
        failures: versions whose part could not be written here, or that could not be completed here.
    """

    persisted: int | None
    error: str | None
    lag: int | None
    failures: int


def persist_options(
    persist: str | None, persist_every: int, persist_keep: int, persist_bytes_per_s: float | None
) -> PersistOptions | None:
    """What these arguments of a door ask for; None if nothing is to be persisted.

    Raises:
        InvalidArgumentError: one is unusable, be it needed or not.
    """
    options = PersistOptions(persist or "/", persist_every, persist_keep, persist_bytes_per_s)
    if persist is None:
        return None
    return options if persist else PersistOptions(persist)
