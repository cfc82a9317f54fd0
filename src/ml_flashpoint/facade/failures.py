"""What went wrong in a save or load that several ranks took part in, in words and by kind."""

from __future__ import annotations

from torch.distributed.checkpoint.api import CheckpointException

from ml_flashpoint.format.errors import FlashpointError, SaveError
from ml_flashpoint.format.failure_kinds import text_of as text_of_one


def causes_of(error: BaseException) -> dict[int, BaseException]:
    """What an error consists of, by rank where DCP collected it from several; by -1 where it is this rank's own."""
    if isinstance(error, CheckpointException):
        return {rank: wrapped[0] for rank, wrapped in sorted(error.failures.items())}
    return {-1: error}


def text_of(causes: dict[int, BaseException]) -> str:
    """The lowest rank's cause, in one line."""
    rank, cause = next(iter(causes.items()), (-1, SaveError("unknown")))
    text = text_of_one(cause)
    return text if rank < 0 else f"rank {rank}: {text}"


def as_flashpoint_error(causes: dict[int, BaseException], *, step: int, rank: int) -> FlashpointError:
    """The first cause that this package raised, or a `SaveError` about the first of all."""
    typed = (cause for cause in causes.values() if isinstance(cause, FlashpointError))
    return next(typed, None) or SaveError(text_of(causes), step=step, rank=rank)
