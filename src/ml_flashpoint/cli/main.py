"""The entry point of the `flashpoint` command. Owns in which order its subcommands are listed."""

from __future__ import annotations

import sys

import ml_flashpoint
from ml_flashpoint.cli import looking, moving, planning  # which register the subcommands
from ml_flashpoint.cli.app import app

__all__ = ["app", "looking", "main", "moving", "planning"]


def main() -> None:
    """Entry point of the `flashpoint` command."""
    if not hasattr(ml_flashpoint, "DISTRIBUTION"):
        sys.exit(
            f"flashpoint: {ml_flashpoint.__file__} is of another distribution, ml-flashpoint. Run: pip uninstall -y "
            "ml-flashpoint torch-flashpoint, then install torch-flashpoint again"
        )
    app()


if __name__ == "__main__":
    main()
