"""`flashpoint demo` with another job in place of its own: the first argument is the module to run."""

from __future__ import annotations

import sys

from ml_flashpoint.cli.demo import story
from ml_flashpoint.cli.main import app

if __name__ == "__main__":
    story.JOB = sys.argv.pop(1)
    app(["demo", *sys.argv[1:]])
