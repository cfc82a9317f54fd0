"""Reads back what was just committed: whether the bytes in memory have the digests in their manifest.

Owns which blocks of a part are looked at. It finds what went wrong between a copy and its digest, be it a mistake in
this package or a memory that forgets; what a mismatch means for the version is the commit queue's.
"""

from __future__ import annotations

from ml_flashpoint.checkpoint_object_manager.held_part import HeldPart
from ml_flashpoint.core.arguments import checked_choice
from ml_flashpoint.format.digest import digest_block
from ml_flashpoint.format.errors import DigestMismatchError


def checked_mode(mode: str) -> str:
    """A mode of :func:`read_back`. Raises an `InvalidArgumentError` if it is none."""
    return checked_choice("verify_saves", mode, "sample", "all", "none")


def read_back(part: HeldPart, mode: str, turn: int) -> None:
    """Compare blocks of a part with its manifest. Takes the time of a digest; lets other threads run meanwhile.

    Args:
        mode: ``all`` blocks, a ``sample`` of one, or ``none``.
        turn: with consecutive numbers, a sample is of another block each time, and of all in the end.

    Raises:
        DigestMismatchError: a block is not what was committed.
    """
    if mode == "none" or part.manifest is None:
        return
    records = part.manifest.objects
    blocks = [(index, block) for index, record in enumerate(records) for block in range(len(record.digests))]
    if mode == "sample" and blocks:
        blocks = [blocks[turn % len(blocks)]]
    for index, block in blocks:
        record = records[index]
        begin = block * record.block_size
        end = min(begin + record.block_size, record.size)
        if digest_block(part.arenas[index].buffer[begin:end]) != record.digests[block]:
            raise DigestMismatchError(
                f"block {block} of {record.name} is not what was saved (bytes {begin} to {end})",
                step=part.manifest.step,
                rank=part.rank,
                node=part.manifest.node,
                hint="please report this: it is a mistake in ml_flashpoint, or this machine's memory is failing",
            )
