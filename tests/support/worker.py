"""What the scripts in tests/workers use to talk to the test that runs them: lines of JSON on stdout.

The other end is `tests.support.cluster.Cluster.reports`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

REPORT_PREFIX = "@report "


def report(**values: Any) -> None:
    """Tells the test something, as one line that no other output can cut in two."""
    sys.stdout.flush()
    # The leading line end keeps the report whole when something else was printed without one.
    os.write(sys.stdout.fileno(), f"\n{REPORT_PREFIX}{json.dumps(values)}\n".encode())


def base_path() -> Path:
    """The folder that plays the base container on this rank's node. It may not exist yet."""
    return Path(os.environ["FLASHPOINT_TEST_BASE"])


def node_id() -> str:
    """The node that this rank plays to be on."""
    return os.environ["FLASHPOINT_NODE_ID"]


def rank() -> int:
    """This process's global rank."""
    return int(os.environ["RANK"])


def world_size() -> int:
    """How many ranks there are."""
    return int(os.environ["WORLD_SIZE"])


def leave() -> NoReturn:
    """Ends a rank that has made collectives.

    Gloo's threads free the tensors of the last collective some time after it, for which they need the interpreter:
    one that is being finalized by then makes torch abort the process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
