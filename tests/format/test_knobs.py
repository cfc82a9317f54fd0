"""Tests of what the knobs accept."""

from __future__ import annotations

import pytest

from ml_flashpoint.format import knobs
from ml_flashpoint.format.digest import BLOCK_SIZE
from ml_flashpoint.format.errors import InvalidArgumentError


def test_blocks_are_small_in_tests_and_16_mib_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert knobs.block_bytes() == 4096
    monkeypatch.setenv(knobs.BLOCK_BYTES_VARIABLE, "65536")
    assert knobs.block_bytes() == 65536
    monkeypatch.delenv(knobs.BLOCK_BYTES_VARIABLE)
    assert knobs.block_bytes() == BLOCK_SIZE == 16 * 2**20


@pytest.mark.parametrize("text", ["", "0", "-4096", "2048", "4096.0", "4 KiB", "٤٠٩٦", str(2**31), "9" * 5000])
def test_a_block_is_a_number_of_bytes(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(knobs.BLOCK_BYTES_VARIABLE, text)
    with pytest.raises(InvalidArgumentError, match="FLASHPOINT_TEST_BLOCK_BYTES"):
        knobs.block_bytes()
