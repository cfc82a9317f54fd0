"""A process without a file descriptor to spare."""

from __future__ import annotations

import os
import resource


class NoDescriptors:
    """While entered, this process cannot open anything."""

    def __enter__(self) -> NoDescriptors:
        self._before = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.open("/dev/null", os.O_RDONLY)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, self._before[1]))
        return self

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, self._before)
