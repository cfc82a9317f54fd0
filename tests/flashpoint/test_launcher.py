"""The warning that ranks under torchrun will hang when they are started again."""

from __future__ import annotations

import logging

import pytest

from ml_flashpoint.checkpointer import STORE_VARIABLE, warn_of_shared_store


@pytest.mark.parametrize(
    ("shared", "restarts", "rank", "warns"),
    [
        ("True", "3", 0, True),
        ("True", "0", 0, False),
        ("False", "3", 0, False),
        (None, None, 0, False),
        ("True", "3", 1, False),
    ],
)
def test_warns_where_ranks_may_hang(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    shared: str | None,
    restarts: str | None,
    rank: int,
    warns: bool,
) -> None:
    monkeypatch.delenv(STORE_VARIABLE, raising=False)
    for name, value in (("TORCHELASTIC_USE_AGENT_STORE", shared), ("TORCHELASTIC_MAX_RESTARTS", restarts)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    with caplog.at_level(logging.WARNING):
        warn_of_shared_store(rank)
    assert (f"export {STORE_VARIABLE}=1" in caplog.text) == warns


def test_says_what_to_do_where_the_variable_is_set_and_ignored(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # as agents with static rendezvous say in any case
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv(STORE_VARIABLE, "1")
    warn_of_shared_store(0)
    assert "pass --rdzv-backend=c10d" in caplog.text
    assert "export" not in caplog.text
