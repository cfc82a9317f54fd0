"""A dictionary that is persisted, as its users have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ml_flashpoint.ddict import DDict, PosixCheckpointPersister
from ml_flashpoint.ddict.errors import (
    DDictPersistError,
)
from tests.ddict.dictionary.support import BIG, Make, other

# ---- persistence ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("managers", [1, 2, 3])
def test_what_was_persisted_comes_back_into_any_number_of_managers(make: Make, tmp_path: Path, managers: int) -> None:
    named = {"persister_class": PosixCheckpointPersister, "persist_path": str(tmp_path), "name": "moved"}
    dictionary = make(2, persist_count=-1, working_set_size=2, **named)
    expected: dict[Any, Any] = {number: f"value {number}" for number in range(30)}
    dictionary.update(expected)
    dictionary["tensor"] = torch.arange(BIG)
    dictionary.bput("everywhere", 1)
    dictionary.pput("lasting", 2)
    dictionary["deleted"] = 3
    del dictionary["deleted"]
    dictionary.checkpoint()
    assert dictionary.persist() == 0
    dictionary["after"] = 4
    dictionary.destroy()

    again = make(managers, **named)
    again["before"] = 5
    assert again.persisted_ids() == [0]
    again.restore(0)

    assert again.checkpoint_id == 0
    tensor = again.pop("tensor")
    assert torch.equal(tensor, torch.arange(BIG))
    assert dict(again) == {**expected, "everywhere": 1, "lasting": 2}
    assert [again.manager(manager)["everywhere"] for manager in range(managers)] == [1] * managers
    reader = other(again)
    assert reader.sync_to_newest_checkpoint() == 0
    assert reader[7] == "value 7"


@pytest.mark.parametrize("reused", ["by the value that is persisted", "by the value that is restored"])
def test_values_come_back_whatever_size_the_memory_has_that_they_lay_in(
    make: Make, tmp_path: Path, reused: str
) -> None:
    """Memory that was another value's may be larger than a value needs, and its object says how large it is."""
    value = {"tensor": torch.arange(float(BIG)), "more": [torch.ones(3, 5, dtype=torch.bfloat16), torch.zeros(0)]}
    named = {"persister_class": PosixCheckpointPersister, "persist_path": str(tmp_path), "name": "reused"}

    def made(is_reused: bool) -> DDict:
        dictionary = make(1, **named)
        if is_reused:
            dictionary["key"] = torch.zeros(BIG + BIG // 5)
            dictionary["key"] = 1
        return dictionary

    dictionary = made(reused == "by the value that is persisted")
    dictionary["key"] = value
    dictionary.checkpoint()
    assert dictionary.persist() == 0
    dictionary.destroy()

    again = made(reused == "by the value that is restored")
    again.restore(0)
    found = again["key"]
    assert torch.equal(found["tensor"], value["tensor"])
    assert all(
        torch.equal(*pair) and pair[0].dtype == pair[1].dtype for pair in zip(found["more"], value["more"], strict=True)
    )


def test_restoring_what_is_not_there_leaves_all_as_it_was(make: Make, tmp_path: Path) -> None:
    dictionary = make(persister_class=PosixCheckpointPersister, persist_path=str(tmp_path))
    dictionary["key"] = 1
    with pytest.raises(DDictPersistError):
        dictionary.restore(3)

    assert dictionary["key"] == 1
    dictionary.destroy()
    with pytest.raises(DDictPersistError):
        DDict(persister_class=PosixCheckpointPersister, persist_path=str(tmp_path), restore_from=3)


def test_rolled_back_checkpoints_are_not_offered(make: Make, tmp_path: Path) -> None:
    dictionary = make(
        persister_class=PosixCheckpointPersister,
        persist_path=str(tmp_path),
        persist_freq=1,
        persist_count=-1,
        working_set_size=4,
    )
    for number in range(3):
        dictionary["key"] = number
        dictionary.checkpoint()
    assert dictionary.persist() == 2
    dictionary.rollback(to=1)
    assert dictionary.persisted_ids() == [0, 1]
    dictionary["key"] = "again"
    dictionary.checkpoint_id = 3
    assert dictionary.persist() == 2
    dictionary.restore(2)

    assert dictionary["key"] == "again"
