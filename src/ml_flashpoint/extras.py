"""What is not installed by itself: packages that some doors need, and the extras that bring them.

Owns the error that names the extra. Packages call :func:`require` before they import what may be missing.
"""

from __future__ import annotations

import importlib.util
from typing import Final

DISTRIBUTION: Final = "torch-flashpoint"
"""What this package is installed as."""


def require(extra: str, *packages: str) -> None:
    """Check that packages are installed, without importing them.

    Args:
        extra: of this distribution, that brings them.

    Raises:
        ModuleNotFoundError: one is not; says what to install.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(
                f"this part of ml_flashpoint needs {package}, which is not installed. "
                f'Run: pip install "{DISTRIBUTION}[{extra}]"',
                name=package,
            )
