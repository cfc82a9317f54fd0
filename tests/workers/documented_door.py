"""A rank that uses the strategy and the adapter of docs/how-it-works.md."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from tests.support.processes import REPOSITORY


def _blocks() -> Any:
    """What the page's Python blocks define."""
    text = (REPOSITORY / "docs/how-it-works.md").read_text(encoding="utf-8")
    module = sys.modules["how_it_works"] = ModuleType("how_it_works")  # dataclasses look their module up
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(block, module.__dict__)
    return module


def save_and_load(report: Callable[..., None], rank: int) -> tuple[int, dict[str, Any]]:
    """Save three times through the adapter, the second time in vain. Returns whose copy is here, and what is loaded."""
    page = _blocks()
    door = page.Arrays(os.environ["FLASHPOINT_TEST_BASE"], page.SkipOneStrategy())
    assert door.load() is None
    shared = np.arange(5.0) + rank
    door.save(1, {"weight": shared})
    try:
        door.save(2, {"weight": shared if rank else np.array(["of", "no", "dtype"])})
    except TypeError:
        assert rank == 0
    else:
        assert rank
    door.save(3, {"weight": shared + 1, "bias": np.ones((2, 3), np.int16), "tied": shared, "too": shared})
    checkpointer = door.checkpointer
    assert checkpointer.wait()
    assert checkpointer.status.verified == 3
    (ranks,) = (ranks for save, ranks in checkpointer.container.list_versions().items() if save.step == 3)
    (copy,) = ranks - {rank}
    loaded = door.load()
    checkpointer.close()
    return copy, loaded
