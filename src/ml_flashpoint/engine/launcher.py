"""A warning for jobs whose ranks torchrun will start again: its agents keep one store over all lives of the ranks.
Later ranks find addresses of earlier ones there, and wait for dead processes in `init_process_group`."""

from __future__ import annotations

import logging
import os

_log = logging.getLogger(__name__)

VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def warn_of_shared_store(rank: int) -> None:
    """Warn, on rank 0, if ranks that torchrun starts again will meet what earlier ones left in their store."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if rank == 0 and shared and restarts not in ("", "0"):
        static = f"pass --rdzv-backend=c10d (or --standalone): its default, static, ignores {VARIABLE}"
        _log.warning(
            "torchrun will start ranks again that fail (--max-restarts=%s), but they may then hang in"
            " init_process_group. Where torchrun is started, on every node: %s",
            restarts,
            f"{static}=1" if os.environ.get(VARIABLE) == "1" else f"export {VARIABLE}=1, and {static}",
        )
