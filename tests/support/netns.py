"""Two network namespaces joined by a cable that tests can pull out. Needs root; mark tests with `netns`.

Owns the namespaces and the link between them; what runs in them is the test's.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_TIMEOUT_S = 20
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two namespaces: its name, and its end of the cable with its address."""

    namespace: str
    interface: str
    address: str

    def command(self, argv: Sequence[str]) -> list[str]:
        """The command line that runs `argv` in this namespace."""
        return ["ip", "netns", "exec", self.namespace, *argv]

    def pull_cable(self) -> None:
        """Take the link down, as if the machine had vanished: no packet comes or goes, no connection is
        closed."""
        _ip("-n", self.namespace, "link", "set", self.interface, "down")

    def throttle(self, rate: str | None) -> None:
        """Let so much a second leave by this end, as ``300kbit``; None for all. Needs `tc`."""
        how = ["replace", "dev", self.interface, "root", "tbf", "rate", str(rate), "burst", "16kb", "latency", "1s"]
        command = ["tc", "qdisc", *(["del", "dev", self.interface, "root"] if rate is None else how)]
        subprocess.run(self.command(command), check=True, capture_output=True, timeout=_TIMEOUT_S)


@contextlib.contextmanager
def two_namespaces() -> Iterator[tuple[Side, Side]]:
    """Make two joined namespaces, and remove them with all that is in them."""
    stem = f"mlf{os.getpid() % 100_000}x{next(_numbers)}"
    sides = (Side(f"{stem}a", f"{stem}a", "10.77.0.1"), Side(f"{stem}b", f"{stem}b", "10.77.0.2"))
    try:
        for side in sides:
            _ip("netns", "add", side.namespace)
        first, second = sides
        _ip(
            *("link", "add", first.interface, "netns", first.namespace, "type", "veth"),
            *("peer", "name", second.interface, "netns", second.namespace),
        )
        for side in sides:
            _ip("-n", side.namespace, "address", "add", f"{side.address}/24", "dev", side.interface)
            _ip("-n", side.namespace, "link", "set", "lo", "up")
            _ip("-n", side.namespace, "link", "set", side.interface, "up")
        yield sides
    finally:
        for side in sides:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", side.namespace)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=_TIMEOUT_S)


def enter(namespace: str) -> None:
    """Have this thread, and those that it starts, in a namespace."""
    with open(f"/var/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), "cannot enter the namespace")
