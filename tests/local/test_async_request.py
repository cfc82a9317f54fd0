"""How a request waits for a save that another process makes."""

from __future__ import annotations

import pickle
from concurrent.futures import Future
from typing import Any

from ml_flashpoint.local.async_queue import BackgroundSave
from tests.support.forked import Child


def _await(report: Any, request: bytes) -> None:
    wait = pickle.loads(request)
    report("waits")
    wait()


def _begin(report: Any) -> None:
    committed: Future[None] = Future()
    save = BackgroundSave(committed)
    report("begun", pickle.dumps(save))
    report.listen()
    committed.set_result(None)
    report("saved")
    report.listen()


def test_waiting_elsewhere_ends_with_the_save() -> None:
    with Child(_begin) as trainer:
        (_, request) = trainer.next_report("begun")
        with Child(_await, request) as child:
            child.next_report("waits")
            assert child.alive
            trainer.say("go on")
            child.join()


def test_waiting_elsewhere_ends_with_the_trainer() -> None:
    with Child(_begin) as trainer:
        (_, request) = trainer.next_report("begun")
        with Child(_await, request) as child:
            child.next_report("waits")
            trainer.kill()
            child.join()


def test_waiting_after_the_end_returns_at_once() -> None:
    ended: Future[None] = Future()
    save = BackgroundSave(ended)
    request = pickle.dumps(save)
    ended.set_result(None)
    save()
    with Child(_await, request) as child:
        child.join()
    del save
    with Child(_await, request) as child:
        child.join()
