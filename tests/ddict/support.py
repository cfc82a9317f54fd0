"""What tests of the dictionary, as its users have it, share."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest

from ml_flashpoint.ddict import DDict
from ml_flashpoint.ddict.errors import DDictError, DDictTimeoutError
from tests.support.dictionaries import await_that

BIG = 300_000  # elements of a float32 tensor that does not fit into a message
WORKING_SET = 4

Make = Callable[..., DDict]


def waits_in_vain(
    dictionary: DDict,
    call: Callable[[], object],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    error: type[DDictError] = DDictTimeoutError,
) -> None:
    """Has a call end with the error of a manager that waits in vain. One that is late with that is asked again."""

    def says_why() -> bool:
        with pytest.raises((error, DDictTimeoutError)) as raised:
            call()
        return isinstance(raised.value, error) and why in str(raised.value)

    with monkeypatch.context() as impatient:
        impatient.setattr(dictionary._access, "timeout_s", 0.5)
        await_that(says_why)


def other(dictionary: DDict) -> DDict:
    """Another handle of this process, at the same checkpoint."""
    return copy.copy(dictionary)


def key_of(dictionary: DDict, manager: int = 0) -> str:
    """Return a key of a manager."""
    return next(key for key in map(str, range(100)) if dictionary.which_manager(key) == manager)


def keys_of_all(dictionary: DDict) -> list[str]:
    """Return a key of each manager."""
    return [key_of(dictionary, manager) for manager in range(dictionary._configuration.managers)]
