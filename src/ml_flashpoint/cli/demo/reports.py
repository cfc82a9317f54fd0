"""What the demo's ranks tell the process that runs them: lines of JSON on standard output.

Owns the form of a line. What is reported is the job's choice, what it means is `record`'s.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

PREFIX = "@flashpoint-demo "


def report(event: str, **values: Any) -> None:
    """Tell the parent something.

    In one write of less than a pipe takes whole, so that no other rank's output cuts it in two. The line break
    in front keeps it apart from what was printed without one.
    """
    fields = {"event": event, "rank": int(os.environ["RANK"]), "pid": os.getpid(), "at": time.monotonic(), **values}
    sys.stdout.flush()
    os.write(sys.stdout.fileno(), f"\n{PREFIX}{json.dumps(fields)}\n".encode())


def parse(line: str) -> dict[str, Any] | None:
    """What a line reports, or ``None`` if it is other output."""
    if not line.startswith(PREFIX):
        return None
    try:
        fields = json.loads(line[len(PREFIX) :])
    except ValueError:
        return None
    return fields if isinstance(fields, dict) else None
