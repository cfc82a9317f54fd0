"""Making a dictionary: its coordinator, and its managers by the runtime that it is to have."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import sys
from pathlib import Path
from typing import Protocol

import psutil

from ml_flashpoint.ddict.checkpoints.server import CoordinatorServer
from ml_flashpoint.ddict.options import Configuration, Options
from ml_flashpoint.ddict.persistence.persister import new_run_id
from ml_flashpoint.ddict.runtime.embedded import EmbeddedRuntime
from ml_flashpoint.ddict.runtime.folder import runtime_root
from ml_flashpoint.format.errors import InvalidArgumentError

_log = logging.getLogger(__name__)


class Runtime(Protocol):
    """What runs the managers of a dictionary."""

    def stop(self, timeout_s: float = ...) -> None:
        """End them, orderly if they do in time."""


def create(options: Options) -> tuple[Configuration, CoordinatorServer | None, Runtime]:
    """Start the coordinator and the managers of a new dictionary. The coordinator is None where its runtime has it.

    Raises:
        InvalidArgumentError: the options do not go together.
        DDictError: a manager did not start.
    """
    if options.replicated and options.n_nodes == 1:
        _log.warning("replication has no other node to copy to: with n_nodes=1 it survives managers, not the machine")
    kind = options.runtime or _default_runtime()
    configuration = Configuration(
        secrets.token_hex(6), options.named(), "", new_run_id(), {"kind": kind}, secrets.token_bytes(32)
    )
    if kind == "ray":
        from ml_flashpoint.ddict.runtime.ray_runtime import RayRuntime

        on_ray = RayRuntime(configuration)
        return on_ray.configuration, None, on_ray
    _check_memory(options.total_mem, runtime_root())
    runtime = EmbeddedRuntime()
    configuration = dataclasses.replace(
        configuration, base=str(runtime.base), dictionary=os.path.basename(runtime.base)
    )
    with contextlib.ExitStack() as undo:
        undo.callback(runtime.stop)
        coordinator = CoordinatorServer(configuration)
        undo.callback(coordinator.close)
        its = configuration.to_json()
        configs = [{"configuration": its, "manager": number} for number in range(options.managers)]
        runtime.start(configs, spare=options.replicated)
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
