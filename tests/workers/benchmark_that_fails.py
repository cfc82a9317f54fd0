"""Stands in for the benchmarks: fills the folder, starts a process, and ends in the way that it is told.

Its process says that it runs, and goes on for ever. Needs nothing but the standard library.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import NoReturn

from benchmarks import supervised


def main(how: str) -> NoReturn:
    folder = supervised.folder()
    assert folder is not None
    (folder / "deep").mkdir()
    (folder / "deep" / "state").write_bytes(bytes(1 << 20))
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(left.pid, flush=True)
    if how == "descriptors":
        try:
            held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1 << 20)]
        except OSError as error:
            raise RuntimeError("no descriptor is left") from error
        raise AssertionError(held)
    if how == "exit":
        sys.exit(7)
    time.sleep(600)
    raise AssertionError("not killed")


if __name__ == "__main__":
    main(sys.argv[1])
