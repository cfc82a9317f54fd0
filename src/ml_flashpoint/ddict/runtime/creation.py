"""Making a dictionary: the choice of a runtime, and the start of its coordinator and its managers."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
from pathlib import Path

import psutil

from ml_flashpoint.ddict.coordinator import Coordinator
from ml_flashpoint.ddict.native.ray import is_on_ray
from ml_flashpoint.ddict.options import Configuration, Options
from ml_flashpoint.ddict.runtime.embedded import EmbeddedRuntime, Runtime
from ml_flashpoint.ddict.runtime.folder import runtime_root
from ml_flashpoint.format.errors import InvalidArgumentError

_log = logging.getLogger(__name__)


def create(options: Options) -> tuple[Configuration, Coordinator | None, Runtime]:
    """Start the coordinator and the managers of a new dictionary. The coordinator is None where its runtime has it.
    Raises `InvalidArgumentError`: the options do not go together; `DDictError`: a manager did not start."""
    if options.replicated and options.n_nodes == 1:
        _log.warning("replication has no other node to copy to: with n_nodes=1 it survives managers, not the machine")
    kind = options.runtime or ("ray" if is_on_ray() else "embedded")
    dictionary, secret = secrets.token_hex(6), secrets.token_bytes(32)
    configuration = Configuration(dictionary, options.named(), "", None, options.holders(), secret)
    if kind == "ray":
        from ml_flashpoint.ddict.runtime.ray_runtime import RayRuntime  # which imports Ray

        on_ray = RayRuntime(configuration)
        return on_ray.configuration, None, on_ray
    _check_memory(options.total_mem, runtime_root())
    runtime = EmbeddedRuntime()
    configuration = dataclasses.replace(
        configuration, base=str(runtime.base), dictionary=os.path.basename(runtime.base)
    )
    with contextlib.ExitStack() as undo:
        undo.callback(runtime.stop)
        coordinator = Coordinator(configuration)
        undo.callback(coordinator.close)
        its = configuration.to_json()
        runtime.start([{"configuration": its, "manager": number} for number in range(options.managers)])
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
