"""A manager that comes back checks every byte that it had, and takes what is damaged from those who hold copies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ml_flashpoint.ddict import DDict
from ml_flashpoint.ddict.errors import DDictManagerLostError
from tests.support.dictionaries import DEADLINE_S, await_copies, kill_manager, pid_of, stopped

pytestmark = [pytest.mark.slow, pytest.mark.damages_on_purpose]

BIG = 300_000  # elements that do not fit into a message


def fill(dictionary: DDict) -> dict[int, object]:
    """Commit small and large values at every manager."""
    values: dict[int, object] = {key: f"value {key}" for key in range(20)}
    values |= {key: torch.full((BIG,), float(key)) for key in range(20, 28)}
    dictionary.update(values)
    dictionary.checkpoint()
    assert dictionary.wait_for_commit() == 0
    await_copies(dictionary, 0)
    return values


def damage(dictionary: DDict, node: int, of: int, *, large: bool | None = None) -> int:
    """Alter a byte of each part of a manager on a node; of its values, or of its snapshots only. Returns how many."""
    found = 0
    for part in Path(dictionary._configuration.base, f"node-{node}").glob(f"step-*_ckpt/rank-{of:05d}-*.safetensors"):
        content = bytearray(part.read_bytes()[:8192])
        if large is None or large == (b'{"format"' not in content):
            with part.open("r+b") as file:
                file.seek(100)
                byte = file.read(1)
                file.seek(100)
                file.write(bytes([byte[0] ^ 1]))
            found += 1
    return found


def check(dictionary: DDict, values: dict[int, object]) -> None:
    for key, value in values.items():
        found = dictionary[key]
        assert torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value


@pytest.mark.parametrize("large", [True, False])
def test_what_is_damaged_in_memory_comes_from_a_copy(large: bool) -> None:
    with DDict(1, 3, 256 << 20, replication="ring", timeout=DEADLINE_S) as dictionary:
        values = fill(dictionary)
        with stopped(pid_of(dictionary, 0)):
            assert damage(dictionary, node=0, of=0, large=large)
            kill_manager(dictionary, 0)
        check(dictionary, values)


def test_what_is_damaged_everywhere_is_lost_and_told() -> None:
    with DDict(1, 2, 256 << 20, replication="ring", timeout=DEADLINE_S) as dictionary:
        values = fill(dictionary)
        key = next(key for key in values if dictionary.which_manager(key) == 0)
        with stopped(pid_of(dictionary, 0)):
            assert damage(dictionary, node=0, of=0)
            assert damage(dictionary, node=1, of=0)
            kill_manager(dictionary, 0)
        with pytest.raises(DDictManagerLostError, match="no whole copy") as raised:
            dictionary[key]
        assert not raised.value.retryable
