"""Errors say what they know, and lose nothing on the way between processes."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest

from ml_flashpoint.format import errors
from ml_flashpoint.format.errors import (
    AuthenticationError,
    CapacityError,
    DamagedError,
    DeadlineError,
    DigestMismatchError,
    FlashpointError,
    InvalidArgumentError,
    InvalidNameError,
    ManifestError,
    NotStagedError,
    ObjectFormatError,
    ProtocolError,
    ReplicationError,
    SaveError,
)

ALL = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, FlashpointError) and kind.__module__ == errors.__name__
]


def test_all_that_is_given_is_shown_and_kept() -> None:
    error = FlashpointError("no answer", step=5, rank=3, node="n1", path=Path("/a/b"), hint="look there")
    assert str(error) == "no answer [step 5, rank 3, node n1, path /a/b]; look there"
    assert (error.message, error.step, error.rank) == ("no answer", 5, 3)
    assert (error.node, error.path, error.hint) == ("n1", "/a/b", "look there")
    assert str(FlashpointError("bad", step=0, rank=0)) == "bad [step 0, rank 0]"
    assert str(FlashpointError("no room")) == "no room"
    full = CapacityError("too little room", needed_bytes=3_000_000, available_bytes=0, path="/dev/shm")
    assert str(full) == "too little room [needed 3,000,000 bytes, available 0 bytes, path /dev/shm]"


def test_invalid_argument_names_argument_and_value() -> None:
    error = InvalidArgumentError("must be positive", argument="every_n_steps", value=-1, rank=2)
    assert str(error) == "every_n_steps must be positive, got -1 [rank 2]"
    error = InvalidArgumentError("the sources name different steps", argument="SOURCE", value="a@1, a@2")
    assert str(error) == "the sources name different steps [SOURCE='a@1, a@2']"
    error = InvalidArgumentError("bad", argument="value", value=[lambda: None] * 10_000)
    assert len(str(error)) < 500


@pytest.mark.parametrize("kind", ALL)
def test_pickling_keeps_everything(kind: type[FlashpointError]) -> None:
    more: dict[str, Any] = {}
    if issubclass(kind, InvalidArgumentError):
        more = {"argument": "step", "value": [lambda: None]}
    elif issubclass(kind, CapacityError):
        more = {"needed_bytes": 2, "available_bytes": 1}
    error = kind("message", step=1, rank=2, node="n", path="/p", hint="hint", **more)
    protocols = range(pickle.HIGHEST_PROTOCOL + 1)
    for again in (copy.deepcopy(error), *(pickle.loads(pickle.dumps(error, protocol)) for protocol in protocols)):
        assert type(again) is kind
        assert vars(again) == vars(error)
        assert (str(again), again.args) == (str(error), error.args)


@pytest.mark.parametrize(
    ("kind", "caught_as"),
    [
        (InvalidNameError, ValueError),
        (InvalidArgumentError, ValueError),
        (DeadlineError, TimeoutError),
        (ObjectFormatError, DamagedError),
        (ManifestError, DamagedError),
        (DigestMismatchError, DamagedError),
        (NotStagedError, SaveError),
        (AuthenticationError, ReplicationError),
        (ProtocolError, ReplicationError),
    ],
)
def test_errors_are_caught_as_what_they_are(kind: type[FlashpointError], caught_as: type[Exception]) -> None:
    assert issubclass(kind, caught_as)
    assert issubclass(kind, FlashpointError)
