"""What a launcher does to ranks that it starts again, as far as it concerns checkpoints: a warning, if that will hang.

Owns the check of torchrun's shared store. Its agents keep one store over all lives of the ranks. Ranks of a later life
find the addresses that those of an earlier one have left there, under the same keys, and wait for processes that are
dead. Nothing in a rank can help it: that is where `init_process_group` waits, before any of our code runs.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os

import torch

_log = logging.getLogger(__name__)

VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def warn_of_shared_store(rank: int) -> None:
    """Warn, on rank 0, if ranks that torchrun starts again will meet what earlier ones left in their store."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if rank != 0 or not shared or restarts in ("", "0") or _keeps_lives_apart():
        return
    # Told of in two parts: the variable does nothing where agents meet without a backend that keeps track of them.
    static = f"--rdzv-backend=c10d (or --standalone): its default, static, ignores {VARIABLE}"
    _log.warning(
        "torchrun will start ranks again that fail (--max-restarts=%s), but with torch %s they may then hang or fail "
        "in init_process_group, since its agents keep the addresses of dead ranks in a store that all ranks use. Where "
        "torchrun is started, on every node: %s",
        restarts,
        torch.__version__,
        f"pass {static}=1" if os.environ.get(VARIABLE) == "1" else f"export {VARIABLE}=1, and pass {static}",
    )


def _keeps_lives_apart() -> bool:
    """Whether each life of the ranks has keys of its own in the store."""
    try:
        rendezvous = importlib.import_module("torch.distributed.rendezvous")  # hidden by a function of this name
        source = inspect.getsource(rendezvous._create_c10d_store)
    except (AttributeError, OSError, TypeError):
        return False
    return "RESTART_COUNT" in source
