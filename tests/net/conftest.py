"""Fixtures of the tests of requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ml_flashpoint.ddict.errors import REQUESTS
from ml_flashpoint.net.client import Address
from ml_flashpoint.net.server import RequestServer
from tests.net.support import SECRET, Echo
from tests.support import forked

forked.preload("tests.net.support")


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def server(echo: Echo, tmpfs: Path) -> Iterator[RequestServer]:
    with RequestServer(SECRET, echo, REQUESTS, unix_path=str(tmpfs / "s"), tcp_host="127.0.0.1") as server:
        yield server


@pytest.fixture(params=["unix", "tcp"])
def address(request: pytest.FixtureRequest, server: RequestServer) -> Address:
    return next(each for each in server.addresses if each[0] == request.param)
