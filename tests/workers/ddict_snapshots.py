"""A manager in a process of its own, to be killed: seals checkpoint after checkpoint, or holds copies of another.

What checkpoint ``c`` holds is a function of ``c``, see :func:`content_at`: so the test can tell what must come back.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Collection
from pathlib import Path

from ml_flashpoint.ddict.manager.part_ref import PartRef
from ml_flashpoint.format.errors import FlashpointError
from ml_flashpoint.net.transfers import Address
from ml_flashpoint.ranks.strategies import PairwiseReplicationStrategy
from tests.support.forked import Report
from tests.support.managers import Content, Member

NODES = ("node-0", "node-1")

_SMALL_KEYS, _BIG_KEYS = 40, 4


def changes_at(checkpoint_id: int) -> tuple[dict[bytes, bytes | None], Content]:
    """Small and large values that checkpoint ``c`` writes; None: it deletes the key."""
    dice = random.Random(checkpoint_id)
    small: dict[bytes, bytes | None] = {
        b"small-%d" % dice.randrange(_SMALL_KEYS): dice.randbytes(dice.randrange(1, 3000)) for _ in range(10)
    }
    big: Content = {b"big-%d" % dice.randrange(_BIG_KEYS): dice.randbytes(dice.randrange(262_144, 600_000))}
    small[b"small-%d" % dice.randrange(_SMALL_KEYS)] = None
    return small, big


def content_at(checkpoint_id: int) -> Content:
    """What checkpoint ``c`` holds."""
    content: Content = {}
    for earlier in range(checkpoint_id + 1):
        small, big = changes_at(earlier)
        content.update({key: data for key, data in small.items() if data is not None})
        for key in [key for key, data in small.items() if data is None]:
            content.pop(key, None)
        content.update(big)
    return content


def digest(content: Content) -> str:
    """Stands for a content."""
    return hashlib.sha256(repr(sorted(content.items())).encode()).hexdigest()


class _Others:
    """The other manager, in another process: its address is in a file, and the test carries messages to it."""

    def __init__(self, report: Report, base: Path) -> None:
        self.base = base
        self.nodes = NODES
        self.strategy = PairwiseReplicationStrategy()
        self.report = report

    def address_of(self, number: int) -> Address | None:
        try:
            host, port = json.loads((self.base / f"address-{number}").read_text())
        except FileNotFoundError:
            return None
        return host, port

    def reach(self, number: int) -> _Others:
        return self

    def drop_copies(self, of: int, keep: Collection[str], before: int) -> None:
        self.report("tell", of, list(keep), before)


def manager(report: Report, base: str, number: int) -> None:
    """Do what the test says, one thing after the other."""
    others = _Others(report, Path(base))
    member = Member(others, number)
    address = others.base / f"address-{number}"
    address.with_suffix(".new").write_text(json.dumps(member.snapshots.address))
    os.replace(address.with_suffix(".new"), address)
    report("up")
    while True:
        match report.listen():
            case ("recover", saves):
                member.saves = {step: PartRef(name, step) for name, step in saves}
                found = member.recover()
                report("recovered", {c: digest(content) for c, content in found.items()})
            case ("run", first):
                _run(report, member, first)
            case ("seal", checkpoint_id, deadline_s):
                _write(member, checkpoint_id)
                try:
                    member.seal(checkpoint_id, deadline_s)
                    report("sealed", checkpoint_id, member.saves[checkpoint_id].name)
                except FlashpointError as error:
                    report("failed", checkpoint_id, error)
            case ("replicate",):
                member.snapshots.replicate(30)
                report("replicated")
            case ("drop", of, keep, before):
                member.snapshots.drop_copies(of, keep, before)
            case ("end",):
                member.down()
                return


def _write(member: Member, checkpoint_id: int) -> None:
    small, big = changes_at(checkpoint_id)
    member.put(checkpoint_id, small)
    member.put(checkpoint_id, big, stored=True)


def _run(report: Report, member: Member, first: int) -> None:
    """Seal until killed."""
    checkpoint_id = first
    while True:
        _write(member, checkpoint_id)
        while True:
            try:
                member.seal(checkpoint_id, 10)
                break
            except FlashpointError as error:
                report("failed", checkpoint_id, error)
        report("sealed", checkpoint_id, member.saves[checkpoint_id].name)
        member.snapshots.retain([checkpoint_id - 1, checkpoint_id] if checkpoint_id else [0])
        checkpoint_id += 1
