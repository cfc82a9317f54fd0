"""What a dictionary is, as it travels to its managers and in handles: its options, and what was made of them.

Owns the form of it. What users pass, and what that means, is `options`'.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ml_flashpoint.ddict.options import Options

COORDINATOR = -1
"""In the place of a manager's number: the coordinator, which is in the process that made the dictionary."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """See the module. The same in every process of a dictionary.

    Attributes:
        dictionary: id, 12 hexadecimal digits.
        base: folder of the dictionary; each node has ``node-<k>`` in it, on its own machine.
        run_id: of this dictionary's persisted checkpoints.
        runtime: how managers run and are found: ``{"kind": "embedded"}``, or what the Ray runtime needs.
    """

    dictionary: str
    options: Options
    base: str
    run_id: str
    runtime: dict[str, Any]
    secret: bytes = dataclasses.field(repr=False)

    @property
    def managers(self) -> int:
        """Number of managers."""
        return self.options.managers

    def node_folder(self, manager: int) -> Path:
        """Base container of a manager, on its node."""
        return Path(self.base, f"node-{self.options.nodes[manager]}")

    def to_json(self) -> dict[str, Any]:
        """As plain JSON. Has the secret in it: not for logs, command lines or environments."""
        its = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return {**its, "options": self.options.to_fields(), "secret": self.secret.hex()}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Configuration:
        """What `to_json` was called on. From the creator or an authenticated peer, so trusted as code is."""
        values = {each.name: fields[each.name] for each in dataclasses.fields(cls)}
        values["options"] = Options.from_fields(values["options"])
        values["secret"] = bytes.fromhex(values["secret"])
        return cls(**values)
