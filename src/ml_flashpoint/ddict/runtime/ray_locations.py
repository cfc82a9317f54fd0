"""Where the managers of a dictionary are that runs on Ray.

Owns asking the actors for their addresses, remembering them, and whether a manager is on the same Ray node. A handle
knows the addresses that managers had at first, so that Ray is only asked for those that have moved since.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any, Final

import ray
from ray.exceptions import RayError

from ml_flashpoint.ddict.errors import DDictDestroyedError, DDictError
from ml_flashpoint.ddict.options import COORDINATOR, Configuration
from ml_flashpoint.net.client import Address, check_address

NAMESPACE: Final = "ml_flashpoint.ddict"  # of the actors' names

_ASK_S: Final = 10.0
_IS_LOCAL_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a manager listens: its Ray node, the Unix socket for processes there, host and port for all others."""

    node: str
    unix: str
    host: str
    port: int


def actor_name(dictionary: str, manager: int) -> str:
    """Name of a manager's actor in `NAMESPACE`."""
    return f"{dictionary}-{manager}"


def own_node() -> str:
    """Id of the Ray node that this process is on; empty if it is on none, or may not ask Ray."""
    if not _may_ask() or ray.util.client.ray.is_connected():
        return ""
    return str(ray.get_runtime_context().get_node_id())


class RayLocations:
    """See the module. Thread-safe. A forked child, where Ray does not work, is left with what its parent knew.
    ``configuration``: of the dictionary; its ``runtime`` has ``places``, None for those that are not known."""

    def __init__(self, configuration: Configuration) -> None:
        self._dictionary = configuration.dictionary
        self._known: dict[int, Place] = {}
        self._coordinator: Address | None = None
        self.learn(configuration)
        self._node = own_node()
        self._changed = threading.Condition()
        self._asking: set[int] = set()
        self._actors: dict[int, Any] = {}
        self._failure: DDictError | None = None

    def learn(self, configuration: Configuration) -> None:
        """Take note of what a configuration says; that which the coordinator was started with knows nothing yet."""
        found = configuration.runtime.get("coordinator")
        if self._coordinator is None and found is not None:
            self._coordinator = check_address(found)
            for manager, fields in enumerate(configuration.runtime.get("places", ())):
                self._known.setdefault(manager, Place(**fields))

    def find(self, manager: int, timeout_s: float, *, anew: bool) -> Address | None:
        """See `Locate`. Raises `DDictDestroyedError`: Ray knows no such actor."""
        if manager == COORDINATOR:
            if anew:
                self._ask(0, timeout_s)  # it has ended with the actors, or is only slow to answer
            return self._coordinator
        place = None if anew else self._known.get(manager)
        if place is None:
            place = self._ask(manager, timeout_s)
        if place is None:
            return None
        return ("unix", place.unix) if self._is_here(place) else ("tcp", place.host, place.port)

    def is_local(self, manager: int) -> bool:
        """Whether a manager is, or was when it was last heard of, on the node of this process."""
        place = self._known.get(manager) or self._ask(manager, _IS_LOCAL_S)
        return place is not None and self._is_here(place)

    def _is_here(self, place: Place) -> bool:
        return bool(self._node) and place.node == self._node

    def _ask(self, manager: int, timeout_s: float) -> Place | None:
        """Have a thread ask Ray, whose own calls have no deadline, or not ours."""
        if not _may_ask():
            return None
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._known.pop(manager, None)
            if manager not in self._asking:
                self._asking.add(manager)
                threading.Thread(target=self._run, args=(manager,), name="ddict-locate", daemon=True).start()
            self._changed.wait_for(lambda: manager not in self._asking, max(0.0, deadline - time.monotonic()))
            if self._failure is not None:
                raise self._failure
            return self._known.get(manager)

    def _run(self, manager: int) -> None:
        place: Place | None = None
        failure: DDictError | None = None
        try:
            place = self._ask_ray(manager)
        except DDictDestroyedError as error:
            failure = error
        except Exception:  # Ray's own are many; the manager is not found, and is looked for again
            self._actors.pop(manager, None)
        with self._changed:
            if place is not None:
                self._known[manager] = place
            self._failure = failure
            self._asking.discard(manager)
            self._changed.notify_all()

    def _ask_ray(self, manager: int) -> Place | None:
        actor = self._actors.get(manager)
        if actor is None:
            try:
                actor = ray.get_actor(actor_name(self._dictionary, manager), namespace=NAMESPACE)
            except ValueError:
                raise DDictDestroyedError(
                    "there is no such dictionary in this Ray cluster: it was destroyed, or its creator ended"
                ) from None
        try:
            # While Ray restarts the actor, this waits for it.
            place = Place(**ray.get(actor.place.remote(), timeout=_ASK_S))
        except RayError:
            self._actors.pop(manager, None)
            return None
        self._actors[manager] = actor
        return place

    def _after_fork(self) -> None:
        self._changed = threading.Condition()
        self._asking = set()


def _may_ask() -> bool:
    return not _forked and bool(ray.is_initialized())


_forked = False
_all: weakref.WeakValueDictionary[str, RayLocations] = weakref.WeakValueDictionary()
_all_lock = threading.Lock()


def locations_of(configuration: Configuration) -> RayLocations:
    """This process's, made if there are none."""
    with _all_lock:
        found = _all.get(configuration.dictionary)
        if found is None:
            found = _all[configuration.dictionary] = RayLocations(configuration)
        found.learn(configuration)
        return found


def _after_fork() -> None:
    global _forked, _all_lock
    _forked = bool(ray.is_initialized())
    _all_lock = threading.Lock()
    for locations in list(_all.values()):
        locations._after_fork()


os.register_at_fork(after_in_child=_after_fork)
