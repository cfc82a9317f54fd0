"""What NeMo's wrapper refuses of `keep=` and `persist=`. What it does with them is in tests/e2e/test_nemo_resume.py."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from ml_flashpoint.format.errors import InvalidArgumentError
from tests.support.persisting import REFUSED, refusal

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nemo") is None, reason="NeMo is not installed")


def wrap(tmpfs: Path, **options: Any) -> None:
    from ml_flashpoint.adapter.nemo.wrapper_util import wrap_trainer_and_auto_resume_with_mlflashpoint

    wrap_trainer_and_auto_resume_with_mlflashpoint(None, tmpfs / "job", True, **options)


@pytest.mark.parametrize(("argument", "value"), REFUSED)
def test_refuses_what_the_facade_refuses_in_its_words(tmpfs: Path, argument: str, value: Any) -> None:
    options: dict[str, Any] = {"persist": "memory://any", argument: value}
    with pytest.raises(InvalidArgumentError) as refused:
        wrap(tmpfs, **options)
    assert str(refused.value) == refusal(argument, value)


def test_refuses_to_keep_nothing(tmpfs: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="keep must be"):
        wrap(tmpfs, keep=0)


def test_refuses_a_grace_of_no_time(tmpfs: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="grace_s must be"):
        wrap(tmpfs, grace_s=0)
