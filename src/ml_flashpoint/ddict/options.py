"""Arguments of `DDict`: their names, checks and meaning, and the configuration that is made of them."""

from __future__ import annotations

import dataclasses
import pkgutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, TypeGuard

from ml_flashpoint.ddict.persister import CheckpointPersister, NullCheckpointPersister
from ml_flashpoint.format.arguments import checked_bool, checked_choice, checked_integer, checked_seconds
from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.ranks.strategies import (
    CliqueStrategy,
    NoReplicationStrategy,
    PairwiseReplicationStrategy,
    ReplicationStrategy,
    RingReplicationStrategy,
    Topology,
)

COORDINATOR = -1
"""In the place of a manager's number: the coordinator, which is in the process that made the dictionary."""
DEFAULT_TIMEOUT_S = 60.0
MAX_CHECKPOINT_ID = 2**62 - 1  # there is always a next one that is a step of the engine, too

_LONGEST_S = 1e6
_FIRST_MS = 1_577_836_800_000  # the beginning of 2020, by the clock
_LEAST = {
    **dict.fromkeys(("managers_per_node", "n_nodes", "working_set_size"), 1),
    **{"total_mem": 1 << 20, "persist_freq": 0, "persist_count": -1},
}
_STRATEGIES: dict[str, Any] = {
    "ring": lambda managers_per_node: RingReplicationStrategy(),
    "pairwise": lambda managers_per_node: PairwiseReplicationStrategy(),
    # Two of them, on neighbouring nodes.
    "clique": lambda managers_per_node: CliqueStrategy(2, managers_per_node),
}


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments of `DDict`.

    Attributes:
        managers_per_node: managers on each node.
        n_nodes: nodes. On one machine they are simulated: each has a folder of its own.
        total_mem: bytes for values, of all managers together; checkpoints that are kept count too.
        working_set_size: checkpoints that can be read and written at a time.
        wait_for_keys: a read waits for the key to be written at the checkpoint of the handle, and a checkpoint only
            leaves the working set when all of its keys are written again at a later one (but for `pput`).
        wait_for_writers: a checkpoint only leaves the working set when every writing handle has moved past it.
        persister_class: how checkpoints are persisted, or the name of that, ``module:class``; None: they are not.
        persist_freq: every so many checkpoints, the committed one is persisted in the background; 0: only when asked.
        persist_count: how many persisted ones are kept: the newest, -1 for all; 0: none are made on their own.
        persist_path: what the persister makes of it: a directory, a URL.
        name: under which persisted checkpoints are found again.
        timeout: seconds that any call may take; None: 60.
        read_only: nothing may be written by any handle; for replaying what was persisted, see `DDict.advance`.
        restore_from: persisted checkpoint to begin with.
        replication: ``"ring"``, ``"pairwise"``, ``"clique"`` or a `ReplicationStrategy`: committed checkpoints survive
            the loss of any single manager or node. None: they do not.
        runtime: ``"embedded"``: managers are processes of this machine; ``"ray"``: of Ray's nodes; None: of Ray's if it
            is initialized here.
        trace: accepted for programs that pass it, and ignored.

    Raises:
        InvalidArgumentError: one is out of range.
    """

    managers_per_node: int = 1
    n_nodes: int = 1
    total_mem: int = 1 << 30
    _: KW_ONLY
    working_set_size: int = 1
    wait_for_keys: bool = False
    wait_for_writers: bool = False
    persister_class: type[CheckpointPersister] | str | None = None
    persist_freq: int = 0
    persist_count: int = 0
    persist_path: str = ""
    name: str = ""
    timeout: float | None = None
    read_only: bool = False
    restore_from: int | None = None
    replication: ReplicationStrategy | str | None = None
    runtime: str | None = None
    trace: bool | None = None

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            checked_integer(name, getattr(self, name), least)
        for name in ("wait_for_keys", "wait_for_writers", "read_only"):
            checked_bool(name, getattr(self, name))
        checked_timeout(self.timeout)
        if self.restore_from is not None:
            check_checkpoint_id(self.restore_from, "restore_from")
        if self.runtime is not None:
            checked_choice("runtime", self.runtime, "embedded", "ray")
        persister, replication = self.persister_class, self.replication
        is_persister = persister is None or isinstance(persister, str) or _is_persister(persister)
        is_strategy = (
            replication is None or isinstance(replication, ReplicationStrategy) or replication in [*_STRATEGIES]
        )
        names = ", ".join(map(repr, _STRATEGIES))
        for argument, holds, text in (
            ("name", isinstance(self.name, str), "must be text"),
            ("persist_path", isinstance(self.persist_path, str), "must be text"),
            # Else nobody could write keys again at the next checkpoint: it begins only when that has been done.
            ("working_set_size", self.working_set_size > 1 or not self.wait_for_keys, "must be 2 with wait_for_keys"),
            ("persist_freq", self.persists or not self.persist_freq, "needs a persister_class"),
            ("persister_class", is_persister, "must be a class derived from CheckpointPersister"),
            ("replication", is_strategy, f"must be one of {names}, or a ReplicationStrategy"),
        ):
            if not holds:
                raise InvalidArgumentError(text, argument=argument, value=getattr(self, argument))

    # ---- what follows from them ---------------------------------------------------------------------------

    @property
    def nodes(self) -> tuple[int, ...]:
        """Number of each manager's node."""
        return tuple(node for node in range(self.n_nodes) for _ in range(self.managers_per_node))

    @property
    def managers(self) -> int:
        """Number of managers."""
        return self.n_nodes * self.managers_per_node

    @property
    def limit_bytes(self) -> int:
        """Most bytes of values, a manager."""
        return self.total_mem // self.managers

    @property
    def persists(self) -> bool:
        """True if checkpoints can be persisted."""
        return self.persister_class not in (None, NullCheckpointPersister)

    @property
    def replicated(self) -> bool:
        """True if commits wait for verified copies."""
        return self.replication is not None

    @property
    def snapshots(self) -> bool:
        """True if managers take snapshots at all: to replicate or to persist them."""
        return self.replicated or self.persists

    @property
    def whole_steps(self) -> bool:
        """True if nobody is left behind: a commit that is more than a number is made of whole steps only."""
        return self.wait_for_writers or self.snapshots

    def next_due(self, committed: int) -> int | None:
        """Return the first checkpoint above ``committed`` that is to be persisted on its own."""
        freq = self.persist_freq if self.persist_count else 0
        return ((committed + 1) // freq + 1) * freq - 1 if freq else None

    def make_persister(self) -> CheckpointPersister | None:
        """Return a persister for one process, if checkpoints are persisted."""
        if not self.persists:
            return None
        found = self.persister_class
        made: Any = pkgutil.resolve_name(found) if isinstance(found, str) else found
        persister: CheckpointPersister = made(self.persist_path, name=self.name, managers=self.managers)
        return persister

    def make_strategy(self) -> ReplicationStrategy:
        """Return the strategy, by which managers hold copies of others."""
        if isinstance(self.replication, str):
            strategy: ReplicationStrategy = _STRATEGIES[self.replication](self.managers_per_node)
            return strategy
        return self.replication or NoReplicationStrategy()

    def holders(self) -> tuple[tuple[int, ...], ...]:
        """Return, for each manager, those that hold copies of it."""
        topology = Topology(tuple(f"node-{node}" for node in self.nodes))
        strategy = self.make_strategy()
        return tuple(strategy.copies_of(manager, topology) for manager in range(self.managers))

    def named(self) -> Options:
        """Return the same for other processes: with the persister's class by its name, since not every process needs
        it, or can import it, and a path that does not depend on where one is. Raise `InvalidArgumentError` if the class
        cannot be imported by others, or refuses its arguments."""
        if not self.persists:
            return dataclasses.replace(self, persister_class=None)
        given = self.persister_class
        try:
            name = given if isinstance(given, str) else f"{given.__module__}:{given.__qualname__}"  # type: ignore[union-attr]
            found = pkgutil.resolve_name(name)
        except (ImportError, AttributeError, ValueError):
            found = None
        if not _is_persister(found) or given not in (name, found) or found.__module__ == "__main__":
            raise InvalidArgumentError(
                "must be a persister's class that managers can import",
                argument="persister_class",
                value=given,
                hint="put it at the top level of a module of its own, not into the script",
            )
        path = found.resolve_path(self.persist_path)
        made = dataclasses.replace(self, persister_class=name, persist_path=path)
        made.make_persister()  # so that arguments it refuses are refused here
        return made


def _is_persister(given: object) -> TypeGuard[type[CheckpointPersister]]:
    return isinstance(given, type) and issubclass(given, CheckpointPersister)


def check_checkpoint_id(checkpoint_id: Any, argument: str = "checkpoint_id") -> int:
    """Return a checkpoint id. Raise `InvalidArgumentError` if it is not an integer from 0 to `MAX_CHECKPOINT_ID`."""
    return checked_integer(argument, checkpoint_id, 0, MAX_CHECKPOINT_ID)


def next_number(newest: int) -> int:
    """Return a number for a part, or an attempt to persist one: higher than the newest so far and, by the clock, than
    those of earlier processes. `SaveId` takes it for the next 25 years."""
    return max(time.time_ns() // 10**6 - _FIRST_MS, newest + 1)


def checked_timeout(timeout: float | None) -> float:
    """Return the seconds that calls may take. Raise `InvalidArgumentError` if it is no positive number."""
    return DEFAULT_TIMEOUT_S if timeout is None else min(checked_seconds("timeout", timeout), _LONGEST_S)


@dataclass(frozen=True, slots=True)
class Configuration:
    """The options of a dictionary, and what all of its processes are told besides."""

    dictionary: str  # id, 12 hexadecimal digits
    options: Options
    base: str  # folder of the dictionary; each node has ``node-<k>`` in it, on its own machine
    coordinator: Sequence[Any] | None  # its address; None: it is in that folder, on one machine
    holders: Sequence[Sequence[int]]  # see `Options.holders`
    secret: bytes = dataclasses.field(repr=False)

    @property
    def managers(self) -> int:
        """Number of managers."""
        return self.options.managers

    def node_folder(self, manager: int) -> Path:
        """Return the base container of a manager, on its node."""
        return Path(self.base, f"node-{self.options.nodes[manager]}")

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON. Has the secret in it: not for logs, command lines or environments."""
        # A strategy of one's own is in `holders`.
        replication = self.options.replication if isinstance(self.options.replication, (str, type(None))) else "ring"
        options = dataclasses.asdict(dataclasses.replace(self.options, replication=replication))
        its = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return {**its, "options": options, "secret": self.secret.hex()}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Configuration:
        """Return what `to_json` was called on. From the creator or an authenticated peer, so trusted as code is."""
        options, secret = Options(**fields["options"]), bytes.fromhex(fields["secret"])
        return cls(**{**fields, "options": options, "secret": secret})
