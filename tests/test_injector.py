"""Faults by name: they come where they are told to, once, and nowhere else."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from ml_flashpoint.net.channel import Channel
from tests.support.injector import POINTS, Fault, Injector, Interrupted


def test_the_nth_call_from_a_step_on_fails_once(tmp_path: Path) -> None:
    fault = Fault(rank=1, step=3, point="mkdir", action="enospc", nth=2)
    with Injector(1, [fault], base=str(tmp_path)) as injector:
        os.mkdir(tmp_path / "before")
        injector.at(3)
        os.mkdir(tmp_path / "first")
        with pytest.raises(OSError, match="injected at mkdir") as caught:
            os.mkdir(tmp_path / "second")
        assert caught.value.errno == errno.ENOSPC
        os.mkdir(tmp_path / "third")
        assert injector.fired == [(fault, 3)]
    assert not (tmp_path / "second").exists()


def test_other_ranks_and_other_folders_are_left_alone(tmp_path: Path) -> None:
    fault = Fault(rank=1, step=0, point="open", action="emfile")
    with Injector(0, [fault], base=str(tmp_path)) as injector:
        os.close(os.open(tmp_path, os.O_RDONLY))
    with Injector(1, [fault], base=str(tmp_path / "other")) as injector:
        os.close(os.open(tmp_path, os.O_RDONLY))
    assert not injector.fired


def test_every_point_is_there_and_is_put_back() -> None:
    send, opens = Channel.send_payload, open
    with Injector(0, [Fault(rank=0, step=9, point=point, action="slow") for point in POINTS]):
        assert Channel.send_payload is not send
        assert open is not opens
    assert Channel.send_payload is send
    assert open is opens


def test_a_clock_that_is_off_and_signals_that_interrupt() -> None:
    with Injector(0, clock_s=-3600.0), Interrupted():
        off = time.time()
        time.sleep(0.05)
    assert 3500 < time.time() - off < 3700
