"""The few lines that a user sees without having asked for any: where training goes on, and that saving works.

Owns when they are printed. They are records of `logging`, level INFO, like all others of this package. Where a program
has set logging up in any way, they are left to that. Where it has not, INFO would be seen by nobody: then rank 0
writes them to stderr. A level for the logger ``ml_flashpoint`` silences them.
"""

from __future__ import annotations

import logging
import sys

_PACKAGE = "ml_flashpoint"


def tell(logger: logging.Logger, rank: int, text: str, *values: object) -> None:
    """Log a line at INFO, and show it if nobody has said what is to be done with log lines.

    Args:
        logger: of the module that has something to tell.
        rank: of this process; only rank 0 shows anything.
        text: with placeholders for the values, as for `logging`.
        values: of the placeholders.
    """
    logger.info(text, *values)
    if rank == 0 and not _is_set_up(logger):
        print(f"{_PACKAGE}: {text % values}", file=sys.stderr, flush=True)


def _is_set_up(logger: logging.Logger) -> bool:
    root = logging.getLogger()
    if logger.hasHandlers() or root.level != logging.WARNING or root.manager.disable >= logging.INFO:
        return True
    step: logging.Logger | None = logger
    while step is not None and step is not root:
        if step.level != logging.NOTSET or step.disabled:
            return True
        step = step.parent
    return False
