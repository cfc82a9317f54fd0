"""The distributed dictionary: single values, several clients, and checkpoints of data that did not change.

Beside `multiprocessing.Manager().dict()`, plain objects of Ray, and dragonhpc's dictionary. The last one needs its own
launcher and interpreter: it is run where `FLASHPOINT_BENCH_DRAGON` or the path has a ``dragon``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks import ddict_dragon
from benchmarks.timing import RUNS, WARMUPS, Memcpy, Result, measure, of_peer
from ml_flashpoint.ddict import DDict

SMALL = "1 KB"
SMALL_OPS = 300
DRAGON_OPS = 30
VIEWS = 30
CHECKPOINTS = 10
CLIENTS = 4
CLIENT_S = 0.4
DRAGON_VARIABLE = "FLASHPOINT_BENCH_DRAGON"
_TIMEOUT_S = 120.0


def results(scale: float) -> Iterator[Result]:
    """All rows. Notes give times of small operations in microseconds."""
    large = max(1 << 20, int((64 << 20) * scale))
    yield from _ours(large)
    yield from _several_clients(max(1 << 20, large // 4))
    yield from _unchanged(large)
    yield from of_peer(SMALL, "multiprocessing.Manager().dict()", _manager_dict(large))
    yield from of_peer(SMALL, "Ray objects", _ray(large))
    yield from of_peer(SMALL, "dragonhpc", _dragon(large))


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB"


def _small(case: str, run: Callable[[], object], note: str = "", state: str = SMALL, many: int = SMALL_OPS) -> Result:
    """One operation that takes microseconds: the median of many, five times."""

    def median_of_many(_: int) -> float:
        times = []
        for _ in range(many):
            began = time.perf_counter()
            result = run()
            times.append(time.perf_counter() - began)
            del result
        return statistics.median(times)

    return measure(state, case, median_of_many, None, note=note)


def _large(case: str, nbytes: int, run: Callable[[], object], memcpy: Memcpy | None, note: str = "") -> Result:
    def once(_: int) -> float:
        began = time.perf_counter()
        result = run()
        taken = time.perf_counter() - began
        del result
        return taken

    return measure(_size(nbytes), case, once, memcpy, note=note)


def _ours(nbytes: int) -> Iterator[Result]:
    data, tensor = os.urandom(1024), torch.rand(nbytes // 4)
    memcpy = Memcpy({"": tensor})
    with DDict(1, 1, 16 * nbytes, timeout=_TIMEOUT_S, runtime="embedded") as d:
        yield _small("ours: put", lambda: d.put("small", data))
        yield _small("ours: get", lambda: d["small"])
        yield _large("ours: put of a tensor", nbytes, lambda: d.put("large", tensor), memcpy)
        yield _small("ours: get, a view", lambda: d["large"], state=_size(nbytes), many=VIEWS)
        yield _large("ours: get, copy=True", nbytes, lambda: d.get("large", copy=True), memcpy, "into a new tensor")


# ---- several clients --------------------------------------------------------------------------------------


def _several_clients(nbytes: int) -> Iterator[Result]:
    with contextlib.ExitStack() as stack:
        d = stack.enter_context(DDict(CLIENTS, 1, 32 * CLIENTS * nbytes, timeout=_TIMEOUT_S, runtime="embedded"))
        clients = [stack.enter_context(_client(d)) for _ in range(CLIENTS)]
        for size, name in ((1024, SMALL), (nbytes, _size(nbytes))):
            alone: list[float] = []
            together: list[float] = []
            for turn in range(WARMUPS + RUNS):
                for chosen, rates in ((clients[:1], alone), (clients, together)):
                    rate = _operations_a_second(chosen, size)
                    if turn >= WARMUPS:
                        rates.append(rate)
            note = f"time for one of all operations; {os.cpu_count()} cores, {CLIENTS} managers"
            yield _of_rates(name, "ours: put and get, 1 client", alone, None, note)
            speedup = statistics.median(b / a for a, b in zip(alone, together, strict=True))
            yield _of_rates(name, f"ours: put and get, {CLIENTS} clients", together, speedup, "× is to the row above")


def _of_rates(state: str, case: str, rates: list[float], ratio: float | None, note: str) -> Result:
    times = [1 / rate for rate in rates]
    return Result(state, case, statistics.median(times), min(times), max(times), ratio, len(times), note)


@contextlib.contextmanager
def _client(d: DDict) -> Iterator[subprocess.Popen[str]]:
    client = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.ddict"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    try:
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdin.write(d.serialize() + "\n")  # it has the secret in it, so it is not for the command line
        client.stdout.readline()
        yield client
    finally:
        client.kill()
        client.communicate()


def _operations_a_second(clients: list[subprocess.Popen[str]], size: int) -> float:
    for client in clients:
        assert client.stdin is not None
        client.stdin.write(f"{size}\n")
    return sum(float(client.stdout.readline()) for client in clients if client.stdout is not None)


def _be_client() -> None:
    torch.set_num_threads(1)
    d = DDict.attach(sys.stdin.readline().strip())
    print("ready", flush=True)
    key = f"of {os.getpid()}"
    for line in sys.stdin:
        size = int(line)
        value: Any = os.urandom(size) if size <= 1024 else torch.rand(size // 4)
        done, began = 0, time.perf_counter()
        while (taken := time.perf_counter() - began) < CLIENT_S:
            d[key] = value
            d[key]
            done += 2
        print(done / taken, flush=True)


# ---- checkpoints ------------------------------------------------------------------------------------------


def _unchanged(nbytes: int) -> Iterator[Result]:
    """Checkpoints of values that stay as they are, with copies on a second node."""
    count = 4
    state = f"{count} × {_size(nbytes)}, unchanged"
    with DDict(1, 2, 8 * count * nbytes, replication="ring", timeout=_TIMEOUT_S, runtime="embedded") as d:
        for number in range(count):
            d[number] = torch.rand(nbytes // 4)
        memcpy = Memcpy({str(number): torch.empty(nbytes // 4) for number in range(count)})
        sent: list[int] = []
        to_commit: list[float] = []

        def checkpoints(_: int) -> float:
            called, committed = [], []
            for _ in range(CHECKPOINTS):
                before, began = _loopback_bytes(), time.perf_counter()
                now = d.checkpoint()
                called.append(time.perf_counter() - began)
                while d.committed_checkpoint_id < now - 1:
                    time.sleep(0.0005)
                committed.append(time.perf_counter() - began)
                sent.append(_loopback_bytes() - before)
            to_commit.append(statistics.median(committed))
            return statistics.median(called)

        called = measure(state, "ours: checkpoint(), caller blocked", checkpoints, None, note="replicated")
        yield called
        # Others' traffic only adds to what is counted, so the least is an upper bound.
        note = f"at most {min(sent[1:]) / 1024:.0f} KiB sent to the other node; the first time {sent[0] >> 20} MiB"
        replay = iter(to_commit)
        yield measure(state, "ours: checkpoint(), until committed", lambda _: next(replay), memcpy, note=note)


def _loopback_bytes() -> int:
    return int(psutil.net_io_counters(pernic=True)["lo"].bytes_sent)


# ---- others -----------------------------------------------------------------------------------------------


def _manager_dict(nbytes: int) -> Iterator[Result]:
    name = "multiprocessing.Manager().dict()"
    data, tensor = os.urandom(1024), torch.rand(nbytes // 4)
    array = tensor.numpy()  # torch has a way of its own to send tensors, which is not that dictionary's
    memcpy = Memcpy({"": tensor})
    with multiprocessing.get_context("fork").Manager() as manager:
        d = manager.dict()
        yield _small(f"{name}: put", lambda: d.__setitem__("small", data))
        yield _small(f"{name}: get", lambda: d["small"])
        yield _large(f"{name}: put of an array", nbytes, lambda: d.__setitem__("large", array), memcpy)
        yield _large(f"{name}: get", nbytes, lambda: d["large"], memcpy)


def _ray(nbytes: int) -> Iterator[Result]:
    if importlib.util.find_spec("ray") is None:
        yield Result(SMALL, "Ray objects", 0, 0, 0, None, 0, note="skipped: ray is not installed")
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    note = f"ray {version('ray')}; without names, and objects cannot change"
    data, tensor = os.urandom(1024), torch.rand(nbytes // 4)
    array = tensor.numpy()
    memcpy = Memcpy({"": tensor})
    ray.init(
        address="local",  # not one that somebody else runs here
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=max(256 << 20, 8 * nbytes),
    )
    try:
        reference = ray.put(data)
        yield _small("Ray: put", lambda: ray.put(data), note)
        yield _small("Ray: get", lambda: ray.get(reference), note)
        yield _large("Ray: put of an array", nbytes, lambda: ray.put(array), memcpy)
        reference = ray.put(array)
        yield _small("Ray: get, a view", lambda: ray.get(reference), state=_size(nbytes), many=VIEWS)
    finally:
        ray.shutdown()


def _dragon(nbytes: int) -> Iterator[Result]:
    launcher = os.environ.get(DRAGON_VARIABLE) or shutil.which("dragon")
    if launcher is None:
        yield Result(SMALL, "dragonhpc", 0, 0, 0, None, 0, note=f"skipped: no dragon; see {DRAGON_VARIABLE}")
        return
    # Its launcher finds its other programs, and its interpreter, by the path.
    path = f"{Path(launcher).parent}{os.pathsep}{os.environ['PATH']}"
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    with tempfile.TemporaryFile("w+") as output:  # the launcher does not end while its output is a pipe
        run = subprocess.Popen(
            [launcher, ddict_dragon.__file__, str(nbytes), str(DRAGON_OPS), str(WARMUPS), str(RUNS)],
            env={**env, "PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=output,
        )
        try:
            run.wait(_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            for process in [*psutil.Process(run.pid).children(recursive=True), run]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            run.wait()
        output.seek(0)
        lines = output.read().splitlines()
    rows = [line for line in lines if line.startswith("[")]
    if run.returncode or not rows:
        yield Result(SMALL, "dragonhpc", 0, 0, 0, None, 0, note=f"skipped: it ended with {run.returncode}")
        return
    for row in json.loads(rows[-1]):
        state = SMALL if row["nbytes"] == 1024 else _size(row["nbytes"])
        made = _of_times(state, row["case"], row["times"], row["ratios"])
        yield dataclasses.replace(made, note=row["note"])


def _of_times(state: str, case: str, times: list[float], ratios: list[float]) -> Result:
    ratio = statistics.median(ratios) if ratios else None
    return Result(state, case, statistics.median(times), min(times), max(times), ratio, len(times))


if __name__ == "__main__":
    _be_client()
