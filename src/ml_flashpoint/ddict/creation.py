"""Checking what a dictionary is made with, and making it.

Owns the arguments of `DDict`, and which runtime is used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from ml_flashpoint.core.arguments import checked_bool, checked_integer
from ml_flashpoint.ddict.checkpoint_persister import CheckpointPersister, NullCheckpointPersister, new_run_id
from ml_flashpoint.ddict.configuration import Configuration, Rules, name_class
from ml_flashpoint.ddict.coordinator_server import CoordinatorServer
from ml_flashpoint.ddict.embedded import EmbeddedRuntime
from ml_flashpoint.ddict.runtime_folder import runtime_root
from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.ranks.strategies import (
    CliqueStrategy,
    PairwiseReplicationStrategy,
    ReplicationStrategy,
    RingReplicationStrategy,
)

_log = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 60.0
_LEAST_MEMORY = 1 << 20
_STRATEGIES: dict[str, Any] = {
    "ring": lambda managers_per_node: RingReplicationStrategy(),
    "pairwise": lambda managers_per_node: PairwiseReplicationStrategy(),
    # Two of them, on neighbouring nodes.
    "clique": lambda managers_per_node: CliqueStrategy(2, managers_per_node),
}


class Runtime(Protocol):
    """What runs the managers of a dictionary."""

    def stop(self, timeout_s: float = ...) -> None:
        """End them, orderly if they do in time."""


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments of `DDict`, by the names they have there."""

    managers_per_node: int
    n_nodes: int
    total_mem: int
    working_set_size: int
    wait_for_keys: bool
    wait_for_writers: bool
    persister_class: type[CheckpointPersister] | None
    persist_freq: int
    persist_count: int
    persist_path: str
    name: str
    timeout: float | None
    read_only: bool
    replication: ReplicationStrategy | str | None
    runtime: str | None

    def __post_init__(self) -> None:
        for name in ("managers_per_node", "n_nodes", "working_set_size"):
            checked_integer(name, getattr(self, name), 1)
        checked_integer("total_mem", self.total_mem, _LEAST_MEMORY)
        for name in ("wait_for_keys", "wait_for_writers", "read_only"):
            checked_bool(name, getattr(self, name))
        if self.wait_for_keys and self.working_set_size == 1:
            # Nobody could write keys again at the next checkpoint: it begins only when that has been done.
            raise InvalidArgumentError(
                "must be at least 2 with wait_for_keys",
                argument="working_set_size",
                value=1,
                hint="keys are written again at the checkpoint after the one that retires",
            )
        checked_integer("persist_freq", self.persist_freq, 0)
        checked_integer("persist_count", self.persist_count, -1)
        for name in ("name", "persist_path"):
            if not isinstance(getattr(self, name), str):
                raise InvalidArgumentError("must be text", argument=name, value=getattr(self, name))
        checked_timeout(self.timeout)
        if self.persister_class is not None and not (
            isinstance(self.persister_class, type) and issubclass(self.persister_class, CheckpointPersister)
        ):
            raise InvalidArgumentError(
                "must be a class derived from CheckpointPersister",
                argument="persister_class",
                value=self.persister_class,
            )
        if self.runtime not in (None, "embedded", "ray"):
            raise InvalidArgumentError("must be 'embedded', 'ray' or None", argument="runtime", value=self.runtime)
        if self.persist_freq and self.persister is None:
            raise InvalidArgumentError("needs a persister_class", argument="persist_freq", value=self.persist_freq)

    @property
    def persister(self) -> type[CheckpointPersister] | None:
        """The class, unless nothing is to be persisted."""
        return None if self.persister_class is NullCheckpointPersister else self.persister_class

    def strategy(self) -> ReplicationStrategy | None:
        """Who holds copies of whom.

        Raises:
            InvalidArgumentError: it is none that managers can make, or does not fit the nodes.
        """
        if self.replication is None:
            return None
        strategy: object = self.replication
        if isinstance(strategy, str) and strategy in _STRATEGIES:
            strategy = _STRATEGIES[strategy](self.managers_per_node)
        if not isinstance(strategy, ReplicationStrategy) or not hasattr(strategy, "__dataclass_fields__"):
            raise InvalidArgumentError(
                f"must be one of {', '.join(map(repr, _STRATEGIES))}, or a ReplicationStrategy that is a dataclass",
                argument="replication",
                value=self.replication,
            )
        return strategy


def checked_timeout(timeout: float | None) -> float:
    """Seconds that calls may take.

    Raises:
        InvalidArgumentError: it is no positive number.
    """
    if timeout is None:
        return DEFAULT_TIMEOUT_S
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout <= 1e6:
        raise InvalidArgumentError("must be a positive number of seconds, or None", argument="timeout", value=timeout)
    return float(timeout)


def create(options: Options) -> tuple[Configuration, CoordinatorServer | None, Runtime]:
    """Start the coordinator and the managers of a new dictionary. The coordinator is None where its runtime has it.

    Raises:
        InvalidArgumentError: the options do not go together.
        DDictError: a manager did not start.
    """
    strategy = options.strategy()
    if strategy is not None and options.n_nodes == 1:
        _log.warning("replication has no other node to copy to: with n_nodes=1 it survives managers, not the machine")
    persister = options.persister
    nodes = tuple(node for node in range(options.n_nodes) for _ in range(options.managers_per_node))
    configuration = Configuration(
        dictionary=secrets.token_hex(6),
        name=options.name,
        base="",
        nodes=nodes,
        limit_bytes=options.total_mem // len(nodes),
        rules=Rules(
            managers=len(nodes),
            working_set_size=options.working_set_size,
            wait_for_keys=options.wait_for_keys,
            wait_for_writers=options.wait_for_writers,
            replicated=strategy is not None,
            snapshots=strategy is not None or persister is not None,
            persist_freq=options.persist_freq if options.persist_count else 0,
        ),
        persister=None
        if persister is None
        else (*name_class("persister_class", persister), persister.resolve_path(options.persist_path)),
        persist_count=options.persist_count,
        replication=None
        if strategy is None
        else (*name_class("replication", type(strategy)), dataclasses.asdict(strategy)),  # type: ignore[call-overload]
        run_id=new_run_id(),
        runtime={"kind": options.runtime or _default_runtime()},
        timeout_s=checked_timeout(options.timeout),
        secret=secrets.token_bytes(32),
        read_only=options.read_only,
    )
    configuration.make_persister()  # so that arguments it refuses are refused here
    if configuration.runtime["kind"] == "ray":
        from ml_flashpoint.ddict.ray_runtime import start_on_ray

        configuration, ray_runtime = start_on_ray(configuration)
        return configuration, None, ray_runtime
    _check_memory(options.total_mem, runtime_root())
    runtime = EmbeddedRuntime()
    configuration = dataclasses.replace(
        configuration, base=str(runtime.base), dictionary=os.path.basename(runtime.base)
    )
    with contextlib.ExitStack() as undo:
        undo.callback(runtime.stop)
        coordinator = CoordinatorServer(configuration)
        undo.callback(coordinator.close)
        runtime.start([{"configuration": configuration.to_json(), "manager": number} for number in range(len(nodes))])
        undo.pop_all()
    return configuration, coordinator, runtime


def _check_memory(total_mem: int, folder: Path) -> None:
    """Refuse what this machine cannot have; how much of it is free is seen when values come."""
    filesystem = os.statvfs(folder)
    most = max(psutil.virtual_memory().total, filesystem.f_blocks * filesystem.f_frsize)
    if total_mem > most:
        raise InvalidArgumentError(
            f"must not be more than this machine has, {most:,} bytes", argument="total_mem", value=total_mem
        )


def _default_runtime() -> str:
    ray = sys.modules.get("ray")  # not imported for this: where it is not, it is not initialized
    return "ray" if ray is not None and ray.is_initialized() else "embedded"
