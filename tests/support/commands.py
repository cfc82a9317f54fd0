"""The `flashpoint` command in this process: words in, exit code out; output goes where `capsys` reads it."""

from __future__ import annotations

from ml_flashpoint.cli.main import app


def flashpoint(*words: object) -> int:
    """Run a subcommand, and return its exit code."""
    code = app(list(map(str, words)), standalone_mode=False)
    assert isinstance(code, int), words
    return code
