"""The actor in which a manager runs on Ray.

Owns the folder that the managers of one dictionary share on a Ray node, and a manager's life inside an actor. Data
never goes through Ray: clients ask the actor where the manager listens, and talk to that.
"""

from __future__ import annotations

import atexit
import dataclasses
import hashlib
import logging
import os
import secrets
import threading
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray

from ml_flashpoint.ddict.manager.served import ServedManager
from ml_flashpoint.ddict.runtime.folder import join_folder, remove_unused, runtime_root, sweep
from ml_flashpoint.ddict.runtime.ray_locations import Place
from ml_flashpoint.ddict.runtime.reaper import Reaper
from ml_flashpoint.format.errors import FlashpointError
from ml_flashpoint.format.knobs import ddict_keep_folder_s

_log = logging.getLogger(__name__)

_BEGIN_AGAIN_S = 1.0


def node_base(root: Path, dictionary: str, ray_node: str) -> Path:
    """Folder of a dictionary on one Ray node: several may be on one machine, and must not share it."""
    return root / hashlib.sha256(f"{dictionary}/{ray_node}".encode()).hexdigest()[:12]


class RayManager:
    """An actor with one manager, which serves from construction on.

    When the actor's process dies, Ray makes it anew, here or on another node; then this is constructed again, with the
    same arguments. ``environment``: variables that the creator has set.
    """

    def __init__(self, configuration: Mapping[str, Any], number: int, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray's own use of what it deprecates
            restarted = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        try:
            self._begin(configuration, number, restarted)
        except Exception as error:
            if not restarted:
                raise
            # An error here would be the end of the actor; the end of the process is not.
            _log.error("manager %d cannot start, and begins again: %s", number, error)
            time.sleep(_BEGIN_AGAIN_S)
            os._exit(1)

    def _begin(self, configuration: Mapping[str, Any], number: int, restarted: bool) -> None:
        node = str(ray.get_runtime_context().get_node_id())
        host = str(ray.util.get_node_ip_address())
        root = runtime_root()
        self._lock = threading.Lock()
        self._stopped = False
        self._reaper: Reaper | None = None
        self._hold = join_folder(node_base(root, str(configuration["dictionary"]), node))
        try:
            sweep(root)  # not before: the folder to come back to may be held by nobody
            self._reaper = Reaper(self._hold.folder, ddict_keep_folder_s(), str(number))
            self._served = ServedManager(
                {
                    "configuration": {**configuration, "base": str(self._hold.folder)},
                    "manager": number,
                    "incarnation": secrets.token_hex(8),
                    "restarted": restarted,
                    "host": host,
                    "place": node,
                }
            )
        except BaseException:
            # What is in the folder is for the next one that comes back. The reaper sees to its end: this one's or, if
            # there is none yet, that of the process before, or else a sweep does.
            if not restarted:
                self._leave_folder()
            raise
        unix, tcp = self._served.server.addresses
        assert len(tcp) == 3
        self._place = Place(node, unix[1], tcp[1], tcp[2])
        atexit.register(self.stop)

    def place(self) -> dict[str, Any]:
        """Where the manager listens, a `Place` as plain JSON."""
        return dataclasses.asdict(self._place)

    def stop(self) -> None:
        """End the manager, and remove its node's folder with the last one there. Idempotent."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            try:
                self._served.close()
            except FlashpointError as error:
                _log.error("a manager did not end orderly: %s", error)
            finally:
                self._leave_folder()

    def _leave_folder(self) -> None:
        self._hold.close()
        if self._reaper is not None:
            self._reaper.dismiss()
        remove_unused(self._hold.folder)
