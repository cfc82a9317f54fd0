"""What `flashpoint doctor` finds, as plain values. Owns nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

OK, NOTE, BAD = "ok", "note", "bad"
"""As it should be; could be better, or cannot be told; a job will fail, or not be what it is for."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        check: what it is about, in a word or two.
        level: `OK`, `NOTE` or `BAD`.
        text: what was found.
        mend: what to do about it; empty where nothing is to be done.
    """

    check: str
    level: str
    text: str
    mend: str = ""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Finding:
        """What another node told."""
        return cls(*(str(told[field.name]) for field in dataclasses.fields(cls)))


@dataclass(frozen=True, slots=True)
class Examined:
    """A node and what was found on it, or what was found between nodes.

    Attributes:
        name: of the node.
        findings: in the order in which they are shown.
    """

    name: str
    findings: tuple[Finding, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {"name": self.name, "findings": [each.to_json() for each in self.findings]}
