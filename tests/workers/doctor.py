"""`flashpoint doctor` on a node of a job. Its arguments: the ranks' hosts, as they tell others, then options."""

from __future__ import annotations

import os
import sys

from ml_flashpoint.cli.main import app

if __name__ == "__main__":
    os.environ["FLASHPOINT_HOST"] = sys.argv[1].split(",")[int(os.environ["RANK"])]
    app(["doctor", os.environ["FLASHPOINT_TEST_BASE"], "--megabytes", "4", *sys.argv[2:]])
