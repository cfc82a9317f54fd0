"""How a request waits for a save that is made in another process."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from ml_flashpoint.core.checkpoint_saver import DefaultMLFlashpointCheckpointSaver
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.local.async_request import BackgroundSave
from tests.support.forked import Child


def _await(report: Any, request: bytes) -> None:
    wait = pickle.loads(request)
    report("waits")
    wait()


def _begin(report: Any, base: Path) -> None:
    saver = DefaultMLFlashpointCheckpointSaver()
    save = saver.begin()
    report("begun", pickle.dumps(BackgroundSave(save, saver.ticket(save))))
    report.listen()
    name = CheckpointContainerId.format_version_container(1)
    saver.write(save, CheckpointContainerId.create_child(base, name), [("w", torch.ones(3))])
    saver.commit(save)
    report("saved")
    report.listen()


def test_waiting_elsewhere_ends_with_the_save(tmpfs: Path) -> None:
    with Child(_begin, tmpfs / "job") as trainer:
        (_, request) = trainer.next_report("begun")
        with Child(_await, request) as child:
            child.next_report("waits")
            assert child.alive
            trainer.say("go on")
            child.join()


def test_waiting_elsewhere_ends_with_the_trainer(tmpfs: Path) -> None:
    with Child(_begin, tmpfs / "job") as trainer:
        (_, request) = trainer.next_report("begun")
        with Child(_await, request) as child:
            child.next_report("waits")
            trainer.kill()
            child.join()
