"""Lose a machine in the middle of training, and end with the same weights, bit for bit.

    make demo

Two nodes with two ranks each train a small GPT, sharded by FSDP2, with a checkpoint in memory at every step. The first
run is undisturbed. In the second one, a rank is killed; later a node is lost: all its processes are killed, its memory
is deleted, and an empty node takes its place. torchrun restarts the ranks, and they resume from the memory of the
cluster. In the end, both runs are compared, and every claim is checked: the exit code is 0 if all claims hold.

The nodes are simulated on this machine. Each has its own torchrun, ``FLASHPOINT_NODE_ID`` and folder in /dev/shm.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import random
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ml_flashpoint import Flashpoint
from tests.support.cluster import Cluster, ClusterError
from tests.support.tmpfs import remove_folder
from tests.support.worker import base_path, leave, report

NODES, RANKS_PER_NODE = 2, 2
RANKS = range(NODES * RANKS_PER_NODE)
CONTEXT, WIDTH, BATCH = 64, 96, 8
TIMEOUT_S = 180.0


# ---- the job: an ordinary training script. The lines that Flashpoint takes have `fp` in them. ----------------------


class GPT(nn.Module):
    """Map bytes [batch, time] to the logits of each next byte [batch, time, 256]. Dropout draws random numbers, so
    training resumes bit for bit only if these are restored, too."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
            for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        x = self.bytes(text) + self.places(torch.arange(text.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits: torch.Tensor = self.head(x)
        return logits


class Text:
    """Endless batches of the source of Python's standard library: inputs and next bytes, both `int64`
    [BATCH, CONTEXT]. It knows its place, so that a run can go on from there."""

    def __init__(self, rank: int, seed: int) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
        self._text = torch.frombuffer(bytearray(b"".join(each.read_bytes() for each in files)), dtype=torch.uint8)
        self._rank, self._seed, self.place = rank, seed, 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        chance = torch.Generator().manual_seed((self._seed << 32) + self.place * len(RANKS) + self._rank)
        starts = torch.randint(len(self._text) - CONTEXT, (BATCH, 1), generator=chance)
        windows = self._text[starts + torch.arange(CONTEXT + 1)].long()
        self.place += 1
        return windows[:, :-1], windows[:, 1:]

    def state_dict(self) -> dict[str, int]:
        """Return the place."""
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a place."""
        self.place = state["place"]


class Losses:
    """The loss of each step so far, saved with the state."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def state_dict(self) -> dict[str, list[float]]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        self.values = list(state["values"])


def train(steps: int, seed: int) -> None:
    """Train up to ``steps``, from wherever the checkpoints allow. `report` tells the audience."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(seed)  # the same weights on all ranks
    model = GPT()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    text = Text(rank, seed)
    torch.manual_seed(seed + 1 + rank)  # other dropout on each rank

    losses = Losses()
    with Flashpoint(base_path(), every_n_steps=1) as fp:
        fp.track(model=model, optimizer=optimizer, scheduler=scheduler, text=text, losses=losses)
        step = fp.resume()
        found = fp.last_recovery
        assert found is not None
        report(event="begin", step=step, source=found.source, seconds=found.seconds, fetched=found.fetched_bytes)
        for inputs, targets in itertools.islice(text, steps - step):
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            losses.values.append(loss.item())
            fp.step()
            report(event="step", step=step, loss=loss.item(), copied=fp.last_replicated, held_s=fp.health.blocked_s)
        fp.wait()
        saved = {"saved": fp.last_saved, "copied": fp.last_replicated, "failures": fp.health.failures}
    tensors = {f"model.{name}": parameter for name, parameter in model.named_parameters()}
    for name, parameter in list(tensors.items()):
        tensors |= {f"optimizer.{name}.{key}": value for key, value in sorted(optimizer.state[parameter].items())}
    digests = {name: _digest(tensor) for name, tensor in tensors.items()}
    report(
        event="end",
        losses=losses.values,
        digests=digests,
        place=text.place,
        random=_digest(torch.get_rng_state()),
        **saved,
    )
    leave()


def _digest(tensor: torch.Tensor) -> str:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    content = whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(f"{whole.dtype} {tuple(whole.shape)} ".encode() + content.tobytes()).hexdigest()


# ---- the audience: plays both runs, and checks what they have shown ------------------------------------------------


@dataclass
class Fault:
    """A kill, and the recovery from it.

    Attributes:
        victim: ``rank 1`` or ``node-0``.
        copied: the newest step that all ranks knew to be copied before the kill.
        gone: True if nothing of the victim was left.
        begins: the report of each rank when it resumed.
        seconds: from the kill until all ranks had resumed.
    """

    victim: str
    copied: int
    gone: bool
    begins: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class Run:
    """All that a run has shown: the reports of each rank, the faults, and the nodes whose checkpoints verify."""

    steps: int
    reports: list[list[dict[str, Any]]]
    faults: list[Fault]
    verified: list[str]

    def losses(self) -> dict[tuple[int, int], float]:
        """Return the loss of each rank at each step. They are part of the state, for what a lost node has printed last
        may be lost with it."""
        found: dict[tuple[int, int], float] = {}
        for rank, reports in enumerate(self.reports):
            for step, loss in enumerate(reports[-1]["losses"], 1):
                found[rank, step] = loss
        return found

    def ends(self) -> list[dict[str, Any]]:
        """Return the last report of each rank."""
        return [reports[-1] for reports in self.reports]


class Show:
    """Plays a run on a cluster, and tells what happens."""

    def __init__(self, root: Path, steps: int, seed: int, *, cold: bool) -> None:
        args = ["--train", steps, "--seed", seed]
        self._cluster = Cluster(
            root, Path(__file__), nodes=NODES, ranks_per_node=RANKS_PER_NODE, args=args, torchrun=True, max_restarts=6,
            cold=cold, preload=("torch.distributed.fsdp", "ml_flashpoint.flashpoint"),
        )  # fmt: skip
        self._steps, self._began = steps, time.monotonic()

    def play(self, kill_rank_at: int = 0, lose_node_at: int = 0, victims: tuple[int, int] = (1, 0)) -> Run:
        """Play a run from empty nodes to its end. Raises a `ClusterError` with all output if it does not get there."""
        cluster, faults = self._cluster, list[Fault]()
        rank, node = victims
        with cluster:
            self.say(f"{NODES} nodes with {RANKS_PER_NODE} ranks each are starting")
            for step in range(1, self._steps + 1):
                found = cluster.wait_for_report(rank=0, event="step", step=step, timeout_s=TIMEOUT_S)
                if step % 5 == 0 or step in (kill_rank_at, lose_node_at):
                    loss, copied = found["loss"], found["copied"]
                    self.say(f"step {step}/{self._steps}, loss {loss:.4f}, copied to the other node: {copied}")
                if step == kill_rank_at:
                    faults.append(self._strike(f"rank {rank}", lambda: self._kill_rank(rank)))
                elif step == lose_node_at:
                    faults.append(self._strike(f"node-{node}", lambda: self._lose_node(node)))
            cluster.wait(TIMEOUT_S, check=not faults)
            verified = [f"node-{each}" for each in cluster.nodes if _verifies(cluster.base_of(each))]
            return Run(self._steps, [cluster.reports(rank) for rank in RANKS], faults, verified)

    def _strike(self, victim: str, kill: Any) -> Fault:
        before = [self._begins(rank) for rank in RANKS]
        copied = [
            [each["copied"] or 0 for each in self._cluster.reports(rank) if each["event"] == "step"] for rank in RANKS
        ]
        fault = Fault(victim, min(max(each, default=0) for each in copied), gone=False)
        began = time.monotonic()
        fault.gone = kill()
        for rank in RANKS:
            nth = len(before[rank]) + 1
            fault.begins.append(self._cluster.wait_for_report(rank=rank, event="begin", nth=nth, timeout_s=TIMEOUT_S))
        fault.seconds = time.monotonic() - began
        first, slowest = fault.begins[0], max(each["seconds"] for each in fault.begins)
        fetched = sum(each["fetched"] for each in fault.begins) / 2**20
        self.say(
            f"all ranks resumed at step {first['step']} from {first['source']} ({fetched:.1f} MiB from the other node),"
            f" {fault.seconds:.1f} s after the loss; the recovery took {slowest:.2f} s of it"
        )
        return fault

    def _begins(self, rank: int) -> list[dict[str, Any]]:
        return [each for each in self._cluster.reports(rank) if each["event"] == "begin"]

    def _kill_rank(self, rank: int) -> bool:
        pid = self._cluster.kill_rank(rank)
        self.say(f"SIGKILL to rank {rank}, process {pid}")
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).wait(30)
        return not psutil.pid_exists(pid)

    def _lose_node(self, node: int) -> bool:
        self._cluster.kill_node(node)
        gone = not self._cluster.node_folder(node).exists()
        self.say(f"SIGKILL to all processes of node-{node}, and its memory is deleted; an empty node takes its place")
        self._cluster.start_node(node)
        return gone

    def say(self, text: str) -> None:
        """Print a line with the time since the run began."""
        print(f"[{time.monotonic() - self._began:6.1f} s] {text}", flush=True)


def _verifies(base: Path) -> bool:
    """Return True if ``flashpoint verify`` finds all checkpoints of a node as they were saved."""
    argv = [sys.executable, "-m", "ml_flashpoint.cli.main", "verify", str(base)]
    return subprocess.run(argv, stdout=subprocess.DEVNULL, timeout=TIMEOUT_S, check=False).returncode == 0


def judge(calm: Run, faulted: Run) -> dict[str, bool]:
    """Return each claim, and whether it holds. Nothing is taken for granted: not that the victims were really gone,
    and not that the state came from memory."""
    every = {(rank, step) for rank in RANKS for step in range(1, calm.steps + 1)}
    ends, last = [*calm.ends(), *faulted.ends()], calm.steps
    claims = {
        "both runs: each rank made each step": calm.losses().keys() == faulted.losses().keys() == every,
        "both runs: no save failed, and the last one is committed and copied": all(
            (each.get("saved"), each.get("copied"), each.get("failures")) == (last, last, 0) for each in ends
        ),
        "a rank was killed, and then a node": [each.victim.split("-")[0].split()[0] for each in faulted.faults]
        == ["rank", "node"],
    }
    for fault in faulted.faults:
        steps = {each["step"] for each in fault.begins}
        claims[f"{fault.victim} was really gone"] = fault.gone
        claims[
            f"{fault.victim}: all ranks resumed from the same step in memory, at least the newest that was copied"
        ] = (
            len(steps) == 1
            and min(steps) >= max(fault.copied, 1)
            and {each["source"] for each in fault.begins} == {"memory"}
        )
    claims["the replacement node fetched its part from the other node"] = bool(faulted.faults) and any(
        each["fetched"] > 0 for each in faulted.faults[-1].begins
    )
    claims["each step had the same loss as in the undisturbed run"] = calm.losses() == faulted.losses()
    claims["random numbers and positions in the data equal those of the undisturbed run"] = [
        (each.get("random"), each.get("place")) for each in calm.ends()
    ] == [(each.get("random"), each.get("place")) for each in faulted.ends()]
    claims["flashpoint verify finds no damage on any node"] = len(calm.verified) == len(faulted.verified) == NODES
    claims["weights and optimizer state equal those of the undisturbed run, bit for bit"] = len(
        {frozenset(each.get("digests", {}).items()) for each in ends}
    ) == 1 and bool(ends[0].get("digests"))
    return claims


def show(steps: int, seed: int, *, cold: bool = True) -> Mapping[str, bool]:
    """Play both runs and return the claims. Leaves nothing behind, unless it is killed by SIGKILL itself."""
    root = Path(tempfile.mkdtemp(prefix="flashpoint-demo-", dir="/dev/shm"))
    try:
        print("An undisturbed run:")
        calm = Show(root / "undisturbed", steps, seed, cold=cold).play()
        chance = random.Random(seed)
        victims, early, late = (chance.choice(RANKS), chance.randrange(NODES)), max(3, steps // 8), max(4, steps // 2)
        print(
            f"The same run again; rank {victims[0]} is killed after step {early}, node-{victims[1]} after step {late}:"
        )
        faulted = Show(root / "faulted", steps, seed, cold=cold).play(early, late, victims)
        held = sorted(each["held_s"] for each in calm.reports[0] if each["event"] == "step")
        print(f"A save blocked the loop for {held[len(held) // 2] * 1e3:.1f} ms (median of the undisturbed run).")
        return judge(calm, faulted)
    finally:
        remove_folder(root)


def main(argv: Sequence[str] | None = None) -> int:
    """Play the show, or, with ``--train``, be one of its ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="steps of each run, at least 10")
    parser.add_argument("--seed", type=int, default=0, help="decides on weights, data and victims")
    parser.add_argument("--train", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.train:
        train(args.train, args.seed)
    if args.steps < 10:
        parser.error(f"--steps must be at least 10, got {args.steps}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        claims = show(args.steps, args.seed)
    except ClusterError as error:
        print(f"the job did not finish: {error}", file=sys.stderr)
        return 1
    for claim, holds in claims.items():
        print(f"{'ok    ' if holds else 'FAILED'} {claim}")
    return 0 if all(claims.values()) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
