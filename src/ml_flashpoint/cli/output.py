"""What the subcommands share: exit codes, and where and how they print.

Owns nothing else; in particular no text of a subcommand.
"""

from __future__ import annotations

import json
import sys

from rich.console import Console

from ml_flashpoint.format.errors import FlashpointError

OK = 0
DAMAGE = 1
USAGE = 2


def console(*, stderr: bool = False) -> Console:
    """A console on standard output, or on standard error, as it is now."""
    return Console(file=sys.stderr if stderr else sys.stdout)


def is_terminal(*, stderr: bool = False) -> bool:
    """Whether people watch: else lines are printed that other programs can read."""
    return (sys.stderr if stderr else sys.stdout).isatty()


def fail(error: FlashpointError, *, base: str, as_json: bool) -> int:
    """Report that there is nothing to look at, and returns the exit code for it."""
    if as_json:
        print(json.dumps({"base": base, "error": str(error)}, indent=2))
    print(f"flashpoint: {error}", file=sys.stderr)
    return USAGE
