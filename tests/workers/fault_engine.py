"""What a rank does while it is killed: saves and loads with the bare engine.

Owns the content of saves: it is a function of who saved it, when and in which life of the process, so that a
load can tell bytes of one save from those of any other. Functions here run in children of
`tests.support.forked`.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ml_flashpoint import Checkpointer, Config
from ml_flashpoint.engine.save import Save
from ml_flashpoint.ranks.strategies import ReplicationStrategy
from tests.support.forked import Report

SIZES = {"tiny": (0, 1, 7, 300), "small": (5, 4096, 70_000), "mid": (3 << 20, 17 << 20, 40_000, 12 << 20)}
"""Bytes of the tensors of a state."""


def state(size: str, rank: int, step: int, life: int) -> dict[str, torch.Tensor]:
    """The tensors that a rank saves at a step in one of its lives. No two saves share a block."""
    tensors = {}
    for index, nbytes in enumerate(SIZES[size]):
        generator = torch.Generator().manual_seed(index * 7919 + rank)
        block = torch.randint(0, 256, (min(nbytes, 1 << 16),), dtype=torch.uint8, generator=generator)
        tensor = block.repeat(-(-nbytes // max(1, block.numel())))[:nbytes].clone()
        # Every 4 KiB page says which save it is of.
        tag = torch.tensor([*step.to_bytes(4, "little"), *life.to_bytes(2, "little"), rank], dtype=torch.uint8)
        for at in range(0, max(0, nbytes - tag.numel()), 4096):
            tensor[at : at + tag.numel()] = tag
        tensors[f"t{index}"] = tensor
    return tensors


def note(step: int, life: int) -> bytes:
    """The byte item of a save; its length varies."""
    return json.dumps({"step": step, "life": life, "more": "x" * (step % 7)}).encode()


class Rank:
    """The engine as one rank uses it."""

    def __init__(self, base: Path | str, replication: ReplicationStrategy | str = "none") -> None:
        self.checkpointer = Checkpointer(base, Config(replication=replication))
        self.rank = self.checkpointer.ranks.rank

    def save(self, size: str, step: int, life: int) -> Save:
        """Save, and return when this rank's part is committed."""
        if not self.checkpointer.run:
            self.checkpointer.latest()
        tensors = state(size, self.rank, step, life)
        save = self.checkpointer.begin(step, explicit=True)
        try:
            save.fill(list(tensors.items()), [("note", note(step, life))])
        except BaseException as error:
            save.fail(error)
            raise
        save.commit()
        save.committed.result()
        return save

    def load(self, size: str) -> tuple[int, int] | None:
        """Load the latest version and compare every byte of this rank's part, or, where fewer ranks saved it than there
        are now, of one of theirs; its step and life, or None if there is none."""
        version = self.checkpointer.latest()
        if version is None:
            return None
        reader = self.checkpointer.open_version(version)
        rank = self.rank % reader.world_size
        part = reader.open(rank)
        said = json.loads(bytes(part.bytes_of("note")))
        step, life = int(said["step"]), int(said["life"])
        if step != version.step:
            raise AssertionError(f"{version} holds step {step}")
        for name, expected in state(size, rank, step, life).items():
            entry = part.entry(name)
            found = torch.frombuffer(bytearray(part.bytes_of(name)), dtype=torch.uint8) if entry.shape[0] else None
            if entry.shape != tuple(expected.shape) or (found is not None and not torch.equal(found, expected)):
                raise AssertionError(f"{name} of {version} is not what was saved at step {step} in life {life}")
        reader.release()
        return step, life

    def close(self) -> None:
        self.checkpointer.close()


# ---- dying at an exact point --------------------------------------------------------------------------------

_CHANGES = {"os.link", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}


def changes_files(event: str, arguments: tuple[Any, ...], base: str) -> bool:
    """Whether an audit event is a call about to change the names or sizes of files under ``base``."""
    if event == "open":
        path, _, flags = arguments
        if not isinstance(flags, int) or not flags & os.O_CREAT:
            return False
    elif event == "os.truncate":
        return True
    elif event not in _CHANGES:
        return False
    else:
        path = arguments[0]
    return str(path if not isinstance(path, bytes) else os.fsdecode(path)).startswith(base)


def die_at(base: str, nth: int) -> Callable[[], int]:
    """SIGKILL this process just before its ``nth`` change to the files under ``base``; 0 for never.

    Returns:
        A function that tells how many there were so far.
    """
    lock = threading.Lock()
    count = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if not changes_files(event, arguments, base):
            return
        with lock:
            count += 1
            if count == nth:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    return lambda: count


# ---- children of one rank -----------------------------------------------------------------------------------


def save_steps(report: Report, base: str, size: str, steps: list[int], life: int, die: int = 0) -> int:
    """Save these steps, reporting before each and once it is verified; the number of changes to files that it took."""
    rank = Rank(base)
    changes = die_at(base, die)
    for step in steps:
        report("begins", step)
        rank.save(size, step, life)
        if not rank.checkpointer.wait(30):
            raise AssertionError("it was not verified in time")
        report("verified", step)
    rank.close()
    return changes()


def load(report: Report, base: str, size: str) -> tuple[int, int] | None:
    """Load and check the latest version."""
    rank = Rank(base)
    found = rank.load(size)
    rank.close()
    return found


def go_on(report: Report, base: str, size: str, steps: list[int], life: int) -> list[tuple[int, int] | None]:
    """Load, save these steps, and load again: what was found before and after."""
    rank = Rank(base)
    found = rank.load(size)
    for step in steps:
        rank.save(size, step, life)
    rank.close()
    return [found, load(report, base, size)]


# ---- damage -------------------------------------------------------------------------------------------------


def flip(path: Path, at: int, mask: int) -> None:
    """Change bits of one byte of a file."""
    with open(path, "r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([byte ^ mask]))


class Snapshot:
    """The files of a base container, to be put back after each damage. Hard links are kept."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._contents: dict[int, bytes] = {}
        self._files: list[tuple[Path, int]] = []
        for path in sorted(base.rglob("*")):
            if path.is_file() and path.name != "lock":
                inode = path.stat().st_ino
                self._files.append((path, inode))
                self._contents.setdefault(inode, path.read_bytes())

    def restore(self) -> None:
        shutil.rmtree(self._base)
        first: dict[int, Path] = {}
        for path, inode in self._files:
            path.parent.mkdir(parents=True, exist_ok=True)
            if inode in first:
                os.link(first[inode], path)
            else:
                path.write_bytes(self._contents[inode])
                first[inode] = path


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def load_damaged(
    report: Report, base: str, size: str, file: str, damages: list[tuple[str, int, int]]
) -> list[tuple[str, int, Any, bool]]:
    """Damage one file in one way after the other and load each time.

    Args:
        file: its path below ``base``.
        damages: (``flip``, offset, mask) or (``cut``, length, 0).

    Returns:
        (kind, place, what was loaded, whether a warning named the file) of each damage.
    """
    snapshot = Snapshot(Path(base))
    path = Path(base, file)
    results = []
    logging.getLogger().handlers.clear()
    messages = _Messages()
    logging.getLogger().addHandler(messages)
    for kind, place, mask in damages:
        if kind == "flip":
            flip(path, place, mask)
        else:
            os.truncate(path, place)
        messages.texts.clear()
        try:
            found: Any = load(report, base, size)
        except Exception as error:
            found = repr(error)
        results.append((kind, place, found, any(str(path) in text for text in messages.texts)))
        snapshot.restore()
    return results
