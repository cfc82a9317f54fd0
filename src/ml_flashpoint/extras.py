"""Packages that only some adapters need, and the extras of this distribution that bring them."""

from __future__ import annotations

import importlib.util
from typing import Final

DISTRIBUTION: Final = "torch-flashpoint"
"""The name under which this package is installed."""


def require(extra: str, *packages: str) -> None:
    """Raise a `ModuleNotFoundError`, which names the extra, if a package is not installed. Import none of them."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(
                f"this part of ml_flashpoint needs {package}, which is not installed. "
                f'Run: pip install "{DISTRIBUTION}[{extra}]"',
                name=package,
            )
