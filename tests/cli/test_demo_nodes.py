"""What `flashpoint demo` plays nodes with: when an agent counts as dead, and what is shown of one that has ended."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters, dynamic_rendezvous
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from ml_flashpoint.cli.demo.nodes import _RENDEZVOUS
from ml_flashpoint.cli.demo.story import shown_of

_STARVED_S = 2.5


@pytest.mark.slow
def test_an_agent_that_has_no_core_for_a_moment_does_not_end_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each node's agent has a connection of its own, and fails after 5 s without what the other should have said.
    patience = timedelta(seconds=5)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    waiting, completed = threading.Event(), threading.Event()
    starved: list[str] = []
    delay, complete = (
        dynamic_rendezvous._delay,
        dynamic_rendezvous._DistributedRendezvousOpExecutor._mark_rendezvous_complete,
    )

    def delays(seconds: float | tuple[float, float]) -> None:
        if threading.current_thread().name.startswith("first") and seconds == 1 and not starved:
            waiting.set()
            assert completed.wait(20)
            starved.append("first")
            time.sleep(_STARVED_S)
        else:
            delay(seconds)

    def completes(executor: dynamic_rendezvous._DistributedRendezvousOpExecutor) -> None:
        complete(executor)
        completed.set()

    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    monkeypatch.setattr(dynamic_rendezvous, "_delay", delays)
    monkeypatch.setattr(dynamic_rendezvous._DistributedRendezvousOpExecutor, "_mark_rendezvous_complete", completes)

    def join() -> int:
        own = dist.TCPStore("127.0.0.1", store.port, timeout=patience)
        parameters = RendezvousParameters("c10d", "127.0.0.1", "a-job", 2, 2, "127.0.0.1", **_RENDEZVOUS)
        agent: RendezvousHandler = dynamic_rendezvous.create_handler(
            own, C10dRendezvousBackend(own, "a-job"), parameters
        )
        try:
            return agent.next_rendezvous().world_size
        except BaseException:
            agent.shutdown()  # as torchrun does, which closes the rendezvous for all
            raise

    with ThreadPoolExecutor(1, "first") as first, ThreadPoolExecutor(1, "second") as second:
        sizes = [first.submit(join)]
        assert waiting.wait(20)
        sizes.append(second.submit(join))
        assert [size.result(30) for size in sizes] == [2, 2]
    assert starved == ["first"]


def test_what_the_node_that_ended_said_last_is_shown() -> None:
    output = [f"node-0: {line}" for line in range(100)] + ["node-2: why"] + [f"node-1: {line}" for line in range(100)]
    shown = shown_of(output, "node-2")
    assert shown[:2] == ["node-0: 0", "node-0: 1"]
    assert shown[-2:] == ["...", "node-2: why"]
    assert shown_of(output, None)[-1] == shown_of(output, "node-3")[-1] == "node-1: 99"
    assert shown_of(output[:3], "node-2") == output[:3]
