"""What a dictionary was made with, as it travels to its managers and in handles.

Owns the form of it, and turning names of classes back into them. Checking what users pass is `DDict`'s.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ml_flashpoint.ddict.checkpoint_persister import CheckpointPersister, NullCheckpointPersister
from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.ranks.strategies import NoReplicationStrategy, ReplicationStrategy

COORDINATOR = -1
"""In the place of a manager's number: the coordinator, which is in the process that made the dictionary."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How a dictionary treats its checkpoints; see `DDict` for what each field means to users.

    Attributes:
        managers: their number.
        replicated: whether commits wait for verified copies.
        snapshots: whether managers take snapshots at all: to replicate or to persist them.
        persist_freq: every so many checkpoints are persisted; 0: none on their own.
    """

    managers: int
    working_set_size: int
    wait_for_keys: bool
    wait_for_writers: bool
    replicated: bool
    snapshots: bool
    persist_freq: int

    @property
    def whole_steps(self) -> bool:
        """Whether nobody is left behind: a commit that is more than a number is made of whole steps only."""
        return self.wait_for_writers or self.snapshots

    def is_due(self, checkpoint_id: int) -> bool:
        """Whether a checkpoint is to be persisted on its own."""
        return self.persist_freq > 0 and (checkpoint_id + 1) % self.persist_freq == 0

    def next_due(self, committed: int) -> int | None:
        """The first checkpoint above ``committed`` that is."""
        if self.persist_freq <= 0:
            return None
        return ((committed + 1) // self.persist_freq + 1) * self.persist_freq - 1


@dataclass(frozen=True, slots=True)
class Configuration:
    """See the module. The same in every process of a dictionary.

    Attributes:
        dictionary: id, 12 hexadecimal digits.
        name: that users gave it.
        base: folder of the dictionary; each node has ``node-<k>`` in it, on its own machine.
        nodes: number of each manager's node.
        limit_bytes: of values, a manager.
        persister: module, class and path; None: nothing is persisted.
        persist_count: see `DDict`.
        replication: module, class and fields of the strategy; None: no copies.
        run_id: of this dictionary's persisted checkpoints.
        runtime: how managers run and are found: ``{"kind": "embedded"}``, or what the Ray runtime needs.
        timeout_s: of calls, where handles do not say otherwise.
        read_only: whether nothing may be written.
    """

    dictionary: str
    name: str
    base: str
    nodes: tuple[int, ...]
    limit_bytes: int
    rules: Rules
    persister: tuple[str, str, str] | None
    persist_count: int
    replication: tuple[str, str, dict[str, Any]] | None
    run_id: str
    runtime: dict[str, Any]
    timeout_s: float
    secret: bytes = dataclasses.field(repr=False)
    read_only: bool = False

    @property
    def managers(self) -> int:
        """Number of managers."""
        return len(self.nodes)

    def node_folder(self, manager: int) -> Path:
        """Base container of a manager, on its node."""
        return Path(self.base, f"node-{self.nodes[manager]}")

    def to_json(self) -> dict[str, Any]:
        """As plain JSON. Has the secret in it: not for logs, command lines or environments."""
        return {**dataclasses.asdict(self), "secret": self.secret.hex()}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Configuration:
        """What `to_json` was called on. From the creator or an authenticated peer, so trusted as code is."""
        known = {each.name for each in dataclasses.fields(cls)}
        values = {name: value for name, value in fields.items() if name in known}
        values["rules"] = Rules(**values["rules"])
        values["secret"] = bytes.fromhex(values["secret"])
        values["nodes"] = tuple(values["nodes"])
        for name in ("persister", "replication"):
            values[name] = None if values[name] is None else tuple(values[name])
        return cls(**values)

    def make_persister(self) -> CheckpointPersister:
        """A persister for one process."""
        if self.persister is None:
            return NullCheckpointPersister(name=self.name, managers=self.managers)
        module, name, path = self.persister
        found: CheckpointPersister = find_class(module, name)(path, name=self.name, managers=self.managers)
        return found

    def make_strategy(self) -> ReplicationStrategy:
        """Who holds copies of whom."""
        if self.replication is None:
            return NoReplicationStrategy()
        module, name, fields = self.replication
        strategy: ReplicationStrategy = find_class(module, name)(**fields)
        return strategy


def name_class(argument: str, found: type[Any]) -> tuple[str, str]:
    """Module and name by which another process finds a class.

    Raises:
        InvalidArgumentError: none could.
    """
    module, name = found.__module__, found.__qualname__
    try:
        if module != "__main__" and find_class(module, name) is found:
            return module, name
    except (ImportError, AttributeError):
        pass
    raise InvalidArgumentError(
        "must be a class that managers can import",
        argument=argument,
        value=found,
        hint="put it at the top level of a module of its own, not into the script",
    )


def find_class(module: str, name: str) -> Any:
    """The class of that name."""
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found
