"""Managers that are not where they were: found again, and never mistaken for each other."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from ml_flashpoint.ddict.errors import REQUESTS, DDictDestroyedError
from ml_flashpoint.ddict.links import Links, locator
from ml_flashpoint.ddict.options import COORDINATOR, Configuration, Options
from ml_flashpoint.ddict.wire.requests import State
from ml_flashpoint.net.client import Address
from ml_flashpoint.net.server import Peer, RequestServer

SECRET = b"a secret of the test"
TIMEOUT_S = 20.0


class Player:
    """A manager that knows who it is, and no more."""

    def __init__(self, number: int) -> None:
        self.number = number

    def open(self, peer: Peer) -> None:
        return None

    def handle(
        self, session: None, operation: str, fields: dict[str, Any], blobs: list[bytes]
    ) -> tuple[dict[str, Any], Sequence[Any]]:
        return {"manager": self.number, "incarnation": f"of {self.number}"}, ()

    def closed(self, session: None) -> None:
        return None


class Place:
    """Says where managers are: first what is wrong, and after a failure what is right."""

    def __init__(self, wrong: Address | None, right: Address | None) -> None:
        self.wrong, self.right = wrong, right
        self.asked: list[bool] = []

    def is_local(self, manager: int) -> bool:
        return False

    def find(self, manager: int, timeout_s: float, *, anew: bool) -> Address | None:
        assert 0 < timeout_s <= TIMEOUT_S
        self.asked.append(anew)
        return self.right if anew else self.wrong


@contextlib.contextmanager
def served(number: int, secret: bytes = SECRET) -> Iterator[Address]:
    server = RequestServer(secret, Player(number), REQUESTS, tcp_host="127.0.0.1")
    try:
        yield server.addresses[0]
    finally:
        server.close()


@contextlib.contextmanager
def links_to(place: Place) -> Iterator[Links]:
    links = Links(place, SECRET)
    try:
        yield links
    finally:
        links.close()


def ask(links: Links, manager: int, timeout_s: float = TIMEOUT_S) -> int:
    return int(links.call(manager, State(), deadline=time.monotonic() + timeout_s).fields["manager"])


@pytest.mark.parametrize("what", ["another manager", "another dictionary", "nobody"])
def test_a_manager_that_moved_is_asked_after_anew(what: str) -> None:
    with contextlib.ExitStack() as stack:
        wrong = stack.enter_context(served(1, b"another secret of ours" if what == "another dictionary" else SECRET))
        if what == "nobody":
            stack.close()
        with served(0) as right, links_to(place := Place(wrong, right)) as links:
            assert ask(links, 0) == 0
            assert place.asked == [False, True]


class Knowing(Player):
    """A coordinator that knows where managers are."""

    def __init__(self) -> None:
        super().__init__(COORDINATOR)
        self.places: dict[int, tuple[Any, ...]] = {}
        self.asked = 0

    def handle(
        self, session: None, operation: str, fields: dict[str, Any], blobs: list[bytes]
    ) -> tuple[dict[str, Any], Sequence[Any]]:
        if operation != "places":
            return super().handle(session, operation, fields, blobs)
        self.asked += 1
        return {"places": list(self.places.items())}, ()


def configuration_of(address: Address) -> Configuration:
    return Configuration("0" * 12, Options(1, 2), "", address, ((), ()), SECRET)


def test_the_coordinator_says_where_managers_are_and_where_they_are_now() -> None:
    knowing = Knowing()
    with contextlib.ExitStack() as stack:
        server = RequestServer(SECRET, knowing, REQUESTS, tcp_host="127.0.0.1")
        stack.callback(server.close)
        found = locator(configuration_of(server.addresses[0]), "here")
        links = Links(found, SECRET)
        stack.callback(links.close)
        moves = contextlib.ExitStack()
        knowing.places = {
            0: ("there", "/nowhere", *moves.enter_context(served(0))[1:]),
            1: ("here", "/of-here", "127.0.0.1", 1),
        }

        assert [ask(links, 0), ask(links, 0)] == [0, 0]
        assert [found.is_local(0), found.is_local(1), found.is_local(2)] == [False, True, False]
        assert found.find(1, TIMEOUT_S, anew=False) == ("unix", "/of-here")
        asked = knowing.asked
        moves.close()
        knowing.places[0] = ("elsewhere", "/nowhere", *stack.enter_context(served(0))[1:])
        assert ask(links, 0) == 0
        assert knowing.asked == asked + 1


@pytest.mark.parametrize("who", [0, COORDINATOR])
def test_without_its_coordinator_a_dictionary_is_gone(who: int) -> None:
    server = RequestServer(SECRET, Knowing(), REQUESTS, tcp_host="127.0.0.1")
    links = Links(locator(configuration_of(server.addresses[0]), "here"), SECRET)
    server.close()
    began = time.monotonic()
    with pytest.raises(DDictDestroyedError, match="its creator ended"):
        ask(links, who)
    assert time.monotonic() - began < TIMEOUT_S / 2
    links.close()
