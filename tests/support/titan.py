"""torchtitan as it runs on a CPU, and the job of examples/torchtitan. Imported only by processes that train with it."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from tests.support.processes import REPOSITORY

_EXAMPLE = REPOSITORY / "examples" / "torchtitan"


def _imported(name: str, file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, _EXAMPLE / file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


on_cpu = _imported("on_cpu", "on_cpu.py")
example = _imported("torchtitan_example", "train.py")
