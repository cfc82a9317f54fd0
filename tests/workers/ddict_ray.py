"""What Ray tasks of tests/e2e/test_ddict_ray.py do with a dictionary."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ml_flashpoint.ddict import DDict, DDictError, DDictWritesLostError

LARGE = 100_000
"""Elements of a tensor that does not fit into a message of its own: 400 kB."""


def value_of(rank: int, epoch: int) -> torch.Tensor:
    return torch.arange(LARGE, dtype=torch.float32) + rank * 1000 + epoch


def look(d: DDict, keys: list[Any]) -> tuple[list[int], list[Any], dict[Any, float]]:
    """Managers of this node, those keys whose values are mapped from memory of this node, and the values' sums."""
    mapped, sums = [], {}
    for key in keys:
        before = _mappings()
        value = d[key]
        if _mappings() > before:
            mapped.append(key)
        sums[key] = float(value.double().sum())
        del value
    return d.local_managers, mapped, sums


def _mappings() -> int:
    return sum("/slots/" in line or ".safetensors" in line for line in Path("/proc/self/maps").read_text().splitlines())


def put_from(d: DDict, rank: int) -> None:
    for number in range(6):
        d[f"{rank}-{number}"] = value_of(rank, number)
    d.detach()


@dataclass
class Report:
    """Of one writer.

    Attributes:
        written: epochs, from 0, all of which it has moved past.
        errors: types of the errors that calls raised.
        longest_s: of all calls.
    """

    written: int = 0
    errors: list[str] = field(default_factory=list)
    longest_s: float = 0.0


def write_epochs(d: DDict, rank: int, writers: int, in_parts: bool = False) -> Report:
    """Write a value an epoch, or one of several large values in turn, until there is a key ``stop``."""
    return _Writer(d, rank, in_parts).run(writers)


class _Writer:
    def __init__(self, d: DDict, rank: int, in_parts: bool) -> None:
        self._d, self._rank, self._in_parts = d, rank, in_parts
        self._report = Report()

    def run(self, writers: int) -> Report:
        d, report = self._d, self._report
        d[self._rank, 0] = value_of(self._rank, 0)
        d.pput(("ready", self._rank), True)
        for rank in range(writers):
            d.wait_for(("ready", rank))  # then all are attached, and none is left behind
        while True:
            epoch = report.written
            try:
                if self._done(lambda: "stop" in d):
                    break
                self._done(lambda epoch=epoch: self._write(epoch))
                report.written = self._done(d.checkpoint)
            except DDictWritesLostError as lost:
                self._go_back(lost)
        d.detach()
        return report

    def _go_back(self, lost: DDictWritesLostError) -> None:
        """Go on after the checkpoint that came back, as the error says."""
        again: DDictWritesLostError | None = lost
        while again is not None:
            to = again.checkpoint_id
            assert to is not None
            try:
                self._done(lambda to=to: self._d.rollback(to=to))
                self._report.written = self._done(self._d.checkpoint)
                again = None
            except DDictWritesLostError as error:  # another loss, or that of a writer that is gone
                again = error

    def _write(self, epoch: int) -> None:
        if self._in_parts:
            self._d[self._rank, "part", epoch % PARTS] = part_of(self._rank, epoch)
            self._d.update({(self._rank, "small", number): epoch for number in range(100)})
        else:
            self._d[self._rank, epoch] = value_of(self._rank, epoch)
        self._d["last", self._rank] = epoch

    def _done(self, call: Callable[[], Any]) -> Any:
        """Make a call, and again as long as its error says that this may help."""
        while True:
            began = time.monotonic()
            try:
                return call()
            except DDictError as error:
                self._report.errors.append(type(error).__name__)
                print(f"writer {self._rank}: {error}", file=sys.stderr)
                if not error.retryable:
                    raise
            finally:
                self._report.longest_s = max(self._report.longest_s, time.monotonic() - began)


PARTS = 4
PART_BYTES = 16 << 20


def part_of(rank: int, epoch: int) -> torch.Tensor:
    return torch.arange(PART_BYTES // 4, dtype=torch.float32) + (rank * 1000 + epoch)


def create_and_wait(address: str) -> None:
    """A driver that makes a dictionary and is killed. Prints the process ids of the actors' nodes' folders."""
    import ray

    ray.init(address=address, log_to_driver=False)
    d = DDict(1, 2, 64 << 20, timeout=60)
    d["x"] = torch.ones(LARGE)
    print("serialized", d.serialize(), flush=True)
    time.sleep(600)


if __name__ == "__main__":
    create_and_wait(sys.argv[1])
