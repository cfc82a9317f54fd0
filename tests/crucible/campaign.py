"""Plays scenarios with real processes, and says what they break of what was promised.

Owns a pool of warm rank processes, the order of a round, and what must hold after each life. Ranks are
`tests.crucible.ranks`'.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import tempfile
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from ml_flashpoint.ranks.strategies import PairwiseReplicationStrategy, Topology
from tests.crucible.ranks import DEADLINE_S, Order, serve
from tests.crucible.scenarios import BLOCK, HAS_MEGATRON, Life, Scenario
from tests.crucible.states import MOMENTS, Spec
from tests.support.forked import Child, preload
from tests.support.injector import Fault
from tests.support.part_checker import PartChecker

preload("tests.crucible.ranks")
if HAS_MEGATRON:
    preload("tests.crucible.megatron_door")
preload("torch._dynamo")  # imported by what is done with DTensors, for seconds

_LIFE_S = 300.0
_NO_ROOM = ("emfile", "enospc")
_SLACK = 1 << 17  # what the slot of a small state is rounded up to
_ENV = {
    "FLASHPOINT_TEST_BLOCK_BYTES": str(BLOCK),
    "FLASHPOINT_SEAL_DEADLINE_S": str(DEADLINE_S),
    "FLASHPOINT_COLLECTIVE_DEADLINE_S": str(DEADLINE_S),
    "FLASHPOINT_TRANSFER_DEADLINE_S": str(DEADLINE_S / 2),
    "FLASHPOINT_LOCK_DEADLINE_S": str(DEADLINE_S),
}


_CHANGED_ALONE = "has changed on some rank alone"
_NOTHING_LEFT = ("NothingLoadableError", "NoReplicasAvailableError")  # as `local` calls it


class Finding(AssertionError):
    """A round has broken a promise."""


@dataclass
class _Begun:
    """A save that began.

    Attributes:
        verified: some rank has told so, or all ranks have loaded it: it must be found, or a newer one.
        copied: it is safe from the loss of a node, too.
        listed: it is one of the verified versions that stay.
    """

    life: int
    step: int
    variant: int
    world_size: int
    verified: bool = False
    copied: bool = False
    listed: bool = False


@dataclass
class _History:
    """What the job must still have, and what it may have."""

    saves: list[_Begun] = field(default_factory=list)

    def begins(self, life: int, step: int, variant: int, world_size: int) -> None:
        if not any((s.life, s.step) == (life, step) for s in self.saves):
            self.saves.append(_Begun(life, step, variant, world_size))

    def tell(self, life: int, verified: int | None) -> None:
        for save in self.saves:
            if (save.life, save.step) == (life, verified):
                save.verified = save.copied = save.listed = True

    def floor(self, lost_nodes: int) -> int:
        """Index of the oldest save that may be found; -1 if finding nothing is right too."""
        sure = [i for i, save in enumerate(self.saves) if (save.copied if lost_nodes else save.verified)]
        return max(sure, default=-1) if lost_nodes < 2 else -1

    def moves(self, lost: int) -> None:
        """Nodes are lost, or ranks run elsewhere: what was saved before is safe from another loss when the next save
        is, and what is kept beside the newest version may be gone."""
        for save in self.saves:
            if lost:
                save.verified = save.copied and lost < 2
            save.copied = save.listed = False

    def goes_back(self, life: int, step: int) -> None:
        """What is newer than this may be found, or not, until all ranks have gone back: then it may not."""
        at = max((i for i, save in enumerate(self.saves) if save.life < life and save.step == step), default=0)
        for save in self.saves[at + 1 :]:
            if save.life < life:
                save.verified = save.copied = save.listed = False

    def dropped(self, kept: list[int], keep: int) -> list[_Begun]:
        """What should still be kept, and is not."""
        gone = [save for save in self.saves if save.listed and save.step not in kept]
        for save in gone:
            save.listed = False
        return [save for save in gone if sum(step > save.step for step in kept) < keep]

    def variants(self) -> tuple[int, ...]:
        known = list(dict.fromkeys(save.variant for save in reversed(self.saves)))
        return (*known, *({0} - set(known)))


class Campaign:
    """Rounds in a folder, from any number of threads. A context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._idle: dict[int, list[Child]] = {}
        self._checker = PartChecker()
        self._meeting = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._lock = threading.Lock()
        self.lives = 0

    def __enter__(self) -> Campaign:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in (child for idle in self._idle.values() for child in idle):
            child.__exit__(None, None, None)

    def play(self, scenario: Scenario) -> set[Fault]:
        """Return the faults that came. Raise `Finding` if something does not hold."""
        root = Path(tempfile.mkdtemp(prefix="round-", dir=self._folder))
        try:
            played = _Round(self, scenario, root)
            played.play()
            return played.came
        finally:
            shutil.rmtree(root, ignore_errors=True)

    def take(self, rank: int) -> Child:
        """A process that was never another rank: torch keeps what it knows of DTensors by their mesh, which does not
        say whose place in it that was."""
        with self._lock:
            idle = self._idle.get(rank, [])
            while idle:
                if (child := idle.pop()).alive:
                    return child
        return Child(serve, env=_ENV)

    def give_back(self, rank: int, child: Child) -> None:
        child.reports.clear()
        with self._lock:
            self._idle.setdefault(rank, []).append(child)

    def meeting(self) -> tuple[int, str]:
        """Port of the store at which the ranks of the next life meet, and what their keys there begin with."""
        with self._lock:
            self.lives += 1
            return self._meeting.port, f"life-{self.lives}"

    def problems(self, root: Path) -> list[str]:
        with self._lock:
            return self._checker.problems(root)


class _Round:
    def __init__(self, campaign: Campaign, scenario: Scenario, root: Path) -> None:
        self._campaign, self._scenario, self._root = campaign, scenario, root
        self._history = _History()
        self._over = False
        self._number, self._placement = 0, ()
        self.came: set[Fault] = set()
        self._floor = -1
        self._ranks: list[Child] = []
        self._said: list[list[tuple[Any, ...]]] = []

    def play(self) -> None:
        lives = self._scenario.lives
        for number, life in enumerate(lives):
            self._placement = life.placement
            self._live(number, life)
            if self._over:
                return
            if problems := self._campaign.problems(self._root):
                raise self._finding(number, "damaged parts: " + "; ".join(problems))
            self._check_memory(number)
            gone = set() if life.loses is None else {life.loses}
            following = lives[number + 1].placement if number + 1 < len(lives) else life.placement
            away = set(life.placement) - set(following)
            # A node that nobody runs on any more is as good as lost. With a wrong clock it must not come back, either:
            # what others save meanwhile may look older.
            for node in gone | (away if any(each.clock_s for each in lives) else set()):
                shutil.rmtree(self._root / f"node-{node}", ignore_errors=True)
            gone |= away
            self._floor = self._history.floor(len(gone))
            if gone or following != life.placement:
                self._history.moves(len(gone))

    # ---- one life -----------------------------------------------------------------------------------------

    def _live(self, number: int, life: Life) -> None:
        self._number, placement = number, life.placement
        self._ranks = [self._campaign.take(rank) for rank in range(len(placement))]
        self._said = [[] for _ in placement]
        meeting = self._campaign.meeting()
        for rank, node in enumerate(placement):
            base = self._root / f"node-{node}" / "job"
            base.parent.mkdir(exist_ok=True)
            order = Order(
                self._scenario,
                number,
                rank,
                base=str(base),
                meeting=meeting,
                variants=self._history.variants(),
                saved_by={(save.step, save.life): save.world_size for save in self._history.saves},
                on_this_node=tuple(c.pid for c, n in zip(self._ranks, placement, strict=True) if n == node),
            )
            self._ranks[rank].say(order)
        try:
            killed = self._watch(number, life)
            self.came |= self._came(life, killed)
            self._judge(number, life, killed)
        finally:
            for rank, child in enumerate(self._ranks):
                lived = any(said[0] == "lived" for said in self._said[rank])
                # Only who has lived well is warm; one that a fault has hurt may have threads that still wait, and one
                # that saves in a process keeps that for ever.
                alone = not any(save.mode == "process" for save in life.saves)
                if lived and child.alive and alone and not life.faults:
                    self._campaign.give_back(rank, child)
                else:
                    child.__exit__(None, None, None)

    def _watch(self, number: int, life: Life) -> bool:
        """Hear what ranks say until all have ended; as soon as one is dead, so are the others. Once one has raised, the
        others are awaited for a moment, as a launcher does. Return True if one was dead, or killed."""
        ended: set[int] = set()
        give_up, raised, dead = time.monotonic() + _LIFE_S, False, False
        pipes: dict[Any, int] = {child._pipe: rank for rank, child in enumerate(self._ranks)}
        while len(ended) < len(self._ranks):
            left = max(0.0, give_up - time.monotonic())
            ready = wait([pipe for pipe, rank in pipes.items() if rank not in ended], left)
            if not ready and not raised:
                raise self._finding(number, "it hangs", stacks=True)
            if not ready:
                break
            for pipe in ready:
                rank = pipes[pipe]
                try:
                    said = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    dead = True
                    ended.add(rank)
                    if not raised:
                        self._kill_all()
                        return True
                    continue
                self._hear(number, rank, said)
                if said[0] in ("lived", "raised"):
                    ended.add(rank)
                if said[0] == "raised" and not raised:
                    give_up, raised = time.monotonic() + 1.0, True
                if not raised and self._strikes(life, rank):
                    assert life.strike is not None
                    time.sleep(life.strike[2])
                    self._kill_all()
                    return True
        if raised:
            self._kill_all()
        return dead

    def _hear(self, number: int, rank: int, said: tuple[Any, ...]) -> None:
        self._said[rank].append(said)
        if said[0] == "begins":
            self._history.begins(number, said[1], said[2], len(self._placement))
        elif said[0] == "state":
            self._history.tell(number, *said[1:])
        elif said[0] == "goes back":
            self._history.goes_back(number, said[1])
        elif said[0] == "kept":
            dropped = self._history.dropped(said[1], self._scenario.keep)
            # Where memory cannot be made, or files not be opened, what is kept is not fetched again.
            if not dropped or any(fault.action in _NO_ROOM for fault in self._scenario.lives[number].faults):
                return
            raise self._finding(number, f"rank {rank} can go back to {said[1]} only, and there was {dropped}")

    def _strikes(self, life: Life, rank: int) -> bool:
        if life.strike is None or rank != life.strike[0]:
            return False
        return sum(said[0] == "begins" for said in self._said[rank]) >= life.strike[1]

    def _kill_all(self) -> None:
        for child in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        for rank, child in enumerate(self._ranks):
            child.kill()
            for said in (said for said in child.reports if said[0] != "raised"):  # in its last moments
                self._hear(self._number, rank, said)
            child.reports.clear()

    def _came(self, life: Life, killed: bool) -> set[Fault]:
        if killed or any(said[0] == "raised" for each in self._said for said in each):
            return set(life.faults)
        return {fault for each in self._said for said in each if said[0] == "lived" for fault, _ in said[1]["fired"]}

    # ---- what must hold -----------------------------------------------------------------------------------

    def _judge(self, number: int, life: Life, killed: bool) -> None:
        for rank, said in enumerate(self._said):
            for each in said:
                rightly = each[0] != "raised" or (each[1] and (life.faults or each[2] in _NOTHING_LEFT))
                if not rightly and not killed:
                    raise self._finding(number, f"rank {rank} raised {each[2]}: {each[3]}")
        if any(each[2] in _NOTHING_LEFT for said in self._said for each in said if each[0] == "raised"):
            if self._floor >= 0:
                raise self._finding(
                    number, f"nothing could be loaded, and there was {self._history.saves[self._floor]}"
                )
            self._over = True  # rightly refused: parts of a version are left, and nobody was promised that one
        loaded = {said[1] for each in self._said for said in each if said[0] == "loaded"}
        if len(loaded) > 1:
            raise self._finding(number, f"ranks have loaded a mix: {loaded}")
        for found in loaded:
            self._judge_found(number, found, self._floor)
        for step in {said[1] for each in self._said for said in each if said[0] == "goes back"}:
            self._history.goes_back(number, step)  # after what was loaded before
        back = [said[1] for each in self._said for said in each if said[0] == "back"]
        if len(set(back)) > 1:
            raise self._finding(number, f"ranks have gone back to a mix: {back}")
        if len(back) == len(self._said):
            self._judge_found(number, back[0], -1)
        if killed and not life.strike and not any(fault.action.startswith("kill") for fault in life.faults):
            raise self._finding(number, "a rank has ended by itself")
        if not killed and not any(said[0] == "raised" for each in self._said for said in each):
            self._judge_end(number, life)

    def _judge_found(self, number: int, found: tuple[int, int, int] | None, floor: int) -> None:
        saves = self._history.saves
        least = saves[floor] if floor >= 0 else None
        if found is None:
            if least is not None:
                raise self._finding(number, f"nothing was found, and there was {least}")
            return
        step, life, variant = found
        at = [i for i, save in enumerate(saves) if (save.step, save.life) == (step, life)]
        if not at:
            raise self._finding(number, f"found step {step} of life {life}, which was never begun")
        if at[0] < floor:
            raise self._finding(number, f"found step {step} of life {life}, and there was {least}")
        if variant != saves[at[0]].variant:
            raise self._finding(number, f"found structure {variant}, not that of {saves[at[0]]}")
        # What was found must be in the next life, too. What came after it is not any more.
        saves[at[0]].verified = True
        del saves[at[0] + 1 : len(saves) - sum(save.life == number for save in saves)]

    def _judge_end(self, number: int, life: Life) -> None:
        results = [said[1] for each in self._said for said in each if said[0] == "lived"]
        fired = [fault for result in results for fault in result["fired"]]
        failures = sorted({text for result in results for text in result["failures"] if _CHANGED_ALONE not in text})
        if failures and all(fault.action == "slow" for fault, _ in fired):
            raise self._finding(number, f"saves failed for no reason: {failures}")
        if not all(result["settled"] for result in results):
            raise self._finding(number, "saves never settled")
        if not life.saves or any(step >= len(life.saves) - 1 for fault, step in fired if fault.action != "slow"):
            return
        mine = [save for save in self._history.saves if save.life == number]
        if not mine[-1].verified:
            raise self._finding(number, f"what went wrong was over, and the last save is not verified: {failures}")

    def _check_memory(self, number: int) -> None:
        """No node has more in memory than docs/operations.md says."""
        state, keep = _bytes_of(self._scenario.spec), self._scenario.keep
        for node in set(self._placement):
            # Of a rank, with room: keep + 1 slots of its own, two more, and keep + 1 for each rank whose copies it has.
            # What ran here in an earlier life is there until something newer is verified.
            most = 0.0
            for placement in {life.placement for life in self._scenario.lives[: number + 1]}:
                nodes = Topology(tuple(map(str, placement)))
                ranks = [rank for rank, where in enumerate(placement) if where == node]
                held = sum(len(PairwiseReplicationStrategy().held_by(rank, nodes)) for rank in ranks)
                slots = (3 + keep) * len(ranks) + (1 + keep) * held
                most += slots * (state * 1.02 + _SLACK)
            if self._scenario.door == "megatron":  # each version has files with the common state on each node
                most += (1 + keep) * (self._scenario.spec.payload + _SLACK)
            folder = self._root / f"node-{node}"
            files = {path.lstat().st_ino: path for path in folder.rglob("*") if not path.is_dir()}
            there = {str(path.relative_to(folder)): path.lstat().st_blocks * 512 for path in files.values()}
            if sum(there.values()) > most:
                raise self._finding(
                    number,
                    f"node {node} holds {sum(there.values())} bytes, more than {most:.0f} ({state} a rank): {there}",
                )

    def _finding(self, number: int, text: str, *, stacks: bool = False) -> Finding:
        if stacks:
            for child in self._ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGABRT)
            time.sleep(1.0)
        logs = []
        for rank, child in enumerate(self._ranks):
            with contextlib.suppress(OSError):
                logs.append(f"--- rank {rank}, said {self._said[rank]}\n{child.log[-5000:]}")
        return Finding("\n".join([f"life {number}: {text}", repr(self._scenario), *logs]))


def _bytes_of(spec: Spec) -> int:
    total = 2 * spec.payload
    for leaf in (*spec.leaves, *spec.grown):
        copies = 1 + (len(MOMENTS[spec.optimizer]) if leaf.role == "parameter" else 0)
        total += (math.prod(leaf.shape) * getattr(torch, leaf.dtype).itemsize + 64) * copies
    return total
