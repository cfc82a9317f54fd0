"""As many processes as may write to a dictionary do; the next one is refused, and told why."""

from __future__ import annotations

import contextlib
import resource
import time

import pytest

from ml_flashpoint.ddict import DDict, DDictManagerLostError
from ml_flashpoint.ddict.client.session import Session, Standing
from ml_flashpoint.ddict.links import Links, locator
from ml_flashpoint.ddict.options import COORDINATOR
from ml_flashpoint.ddict.wire.requests import Join, Move, Request
from ml_flashpoint.net.server import MAX_CONNECTIONS
from tests.support.dictionaries import DEADLINE_S, await_that

pytestmark = pytest.mark.slow

MOST = MAX_CONNECTIONS // 2


class Process:
    """All that the coordinator sees of a process that writes: its two connections, and a handle."""

    def __init__(self, dictionary: DDict, number: int, timeout_s: float) -> None:
        configuration = dictionary._configuration
        self.links = Links(locator(configuration), configuration.secret)
        self._session = Session(self.links)
        try:
            self._session.begin(time.monotonic() + timeout_s)
        except BaseException:
            self.close()
            raise
        self.standing = Standing(f"{number:016x}", self._session.id, 0, 0)
        self.ask(Join(self.standing.account()))

    def ask(self, request: Request) -> None:
        self.links.call(COORDINATOR, request, deadline=time.monotonic() + DEADLINE_S)

    def close(self) -> None:
        self._session.close()


def test_as_many_processes_as_may_write() -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 5 * MAX_CONNECTIONS:
        pytest.skip("a process here may not have both ends of so many connections open")
    with (
        DDict(1, 2, 64 << 20, replication="ring", working_set_size=2, timeout=DEADLINE_S) as d,
        contextlib.ExitStack() as ends,
    ):
        d["a"] = 0
        others = []
        for number in range(1, MOST):
            others.append(Process(d, number, DEADLINE_S))
            ends.callback(others[-1].close)
        assert d._access.state()["writers"] == MOST

        for _ in range(2):
            with pytest.raises(
                DDictManagerLostError, match=f"as many connections as it may, {MAX_CONNECTIONS}"
            ) as told:
                Process(d, MOST, timeout_s=0.5)
            assert told.value.retryable
            assert "detach()" in str(told.value)

        for each in others:
            each.ask(Move(each.standing.account(), 1, onwards=False))
        d.checkpoint()
        assert d.wait_for_commit() == 0, "those that are attached go on"
        others[0].close()
        await_that(lambda: d._access.state()["writers"] == MOST - 1)
        ends.callback(Process(d, MOST, DEADLINE_S).close)
