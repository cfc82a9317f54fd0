"""How many files may be open for large values."""

from __future__ import annotations

import resource

from ml_flashpoint.ddict.manager.slots import allow_many_files


def test_as_many_files_as_allowed() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[1]), before[1]))
        assert allow_many_files() == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
