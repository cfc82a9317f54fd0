"""A dictionary that is persisted, as its users have it."""

from __future__ import annotations

import logging
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from ml_flashpoint.ddict import DDict, PosixCheckpointPersister
from ml_flashpoint.ddict.errors import (
    DDictPersistError,
)
from ml_flashpoint.format.errors import SaveError
from ml_flashpoint.stores.durable import DurableVersions
from ml_flashpoint.stores.files import Directory
from tests.ddict.dictionary.support import BIG, Make, other
from tests.support.dictionaries import DEADLINE_S

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


def test_what_was_written_late_is_persisted_with_its_checkpoint(make: Make, tmp_path: Path) -> None:
    named: dict[str, Any] = {"persister_class": PosixCheckpointPersister, "persist_path": str(tmp_path)}
    dictionary = make(persist_count=-1, working_set_size=4, **named)
    dictionary["key"] = "early"
    dictionary.checkpoint()
    assert dictionary.persist() == 0
    assert dictionary.sync_to_newest_checkpoint() == 0
    dictionary["key"] = "late"
    dictionary.checkpoint()
    assert dictionary.wait_for_commit() == 0
    assert dictionary.persist() == 0
    dictionary.destroy()

    again = make(**named)
    again.restore(0)
    assert again["key"] == "late"


# ---- another number of managers ---------------------------------------------------------------------------


def persisted(make: Make, tmp_path: Path, managers: int, fill: Any) -> dict[str, Any]:
    """What to make a dictionary with that can restore what ``fill`` has written, as checkpoint 0."""
    named = {"persister_class": PosixCheckpointPersister, "persist_path": str(tmp_path), "name": "moved"}
    dictionary = make(managers, persist_count=-1, **named)
    dictionary["writes"] = True
    fill(dictionary)
    dictionary.checkpoint()
    assert dictionary.persist() == 0
    dictionary.destroy()
    return named


@pytest.mark.parametrize(("before", "after"), [(4, 2), (3, 2), (2, 1)])
def test_values_that_would_collide_are_refused_and_not_dropped(
    make: Make, tmp_path: Path, before: int, after: int
) -> None:
    keys = [f"key {number}" for number in range(20)]

    def fill(dictionary: DDict) -> None:
        for manager in range(before):
            with dictionary.manager(manager) as handle:
                handle.update(dict.fromkeys(keys, f"of {manager}"))

    named = persisted(make, tmp_path, before, fill)
    again = make(after, **named)
    again["here"] = 1
    with pytest.raises(DDictPersistError, match=r"key\(s\).*'key \d+'") as raised:
        again.restore(0)

    assert raised.value.checkpoint_id == 0
    assert f"with {before} managers" in str(raised.value)
    assert dict(again) == {"here": 1}
    again.destroy()
    whole = make(before, **named)
    whole.restore(0)
    assert [whole.manager(each)[keys[7]] for each in range(before)] == [f"of {each}" for each in range(before)]


def test_values_that_do_not_collide_are_all_there_in_another_number_of_managers(make: Make, tmp_path: Path) -> None:
    def fill(dictionary: DDict) -> None:
        for manager in range(4):
            with dictionary.manager(manager) as handle:
                handle[f"only at {manager}"] = manager
        with dictionary.manager(3) as handle:
            handle.bput("everywhere, by one", 3)
        for key in range(20):
            dictionary.bput(key, "by all")
        dictionary.bput("gone", 1)
        del dictionary["gone"]

    named = persisted(make, tmp_path, 4, fill)
    again = make(3, **named)
    again.restore(0)

    assert {key: again.manager(key % 3)[f"only at {key}"] for key in range(4)} == {key: key for key in range(4)}
    assert [again.manager(each)["everywhere, by one"] for each in range(3)] == [3] * 3
    for key in range(20):
        assert [again.manager(each)[key] for each in range(3)] == ["by all"] * 3
    assert all("gone" not in again.manager(each) for each in range(3))


@pytest.mark.parametrize(("before", "after"), [(4, 2), (3, 2), (2, 3)])
def test_what_was_put_through_a_manager_is_found_through_that_again(
    make: Make, tmp_path: Path, before: int, after: int
) -> None:
    def fill(dictionary: DDict) -> None:
        for manager in range(before):
            with dictionary.manager(manager) as handle:
                handle.update({(manager, number): number for number in range(30)})
                handle["step"] = 7  # the same everywhere
                if after > before:
                    handle["same key"] = manager

    again = make(after, **persisted(make, tmp_path, before, fill))
    again.restore(0)
    for manager in range(before):
        handle = again.manager(manager % after)
        assert [handle[manager, number] for number in range(30)] == list(range(30))
        assert handle["step"] == 7
        assert handle.get("same key") == (manager if after > before else None)


@pytest.mark.parametrize("is_large", [False, True])
def test_what_several_handles_have_put_everywhere_is_one_value_only_where_it_is_the_same(
    make: Make, tmp_path: Path, is_large: bool
) -> None:
    value: Any = torch.zeros(BIG) if is_large else "the same"

    def fill(dictionary: DDict) -> None:
        for manager in range(2):
            with dictionary.manager(manager) as handle:
                handle.bput("same", "the same")
                handle.bput("other", value if is_large else manager)

    with pytest.raises(DDictPersistError, match=r"1 key.*'other'"):
        make(3, **persisted(make, tmp_path, 2, fill)).restore(0)


# ---- what a rollback takes back ---------------------------------------------------------------------------


def refuse(*_: object, **__: object) -> None:
    """What a store does that nothing may be removed from."""
    raise SaveError("the storage is read-only")


def persisting(make: Make, tmp_path: Path) -> DDict:
    """A dictionary at 3 that has persisted 0 to 2."""
    named: dict[str, Any] = {"persister_class": PosixCheckpointPersister, "persist_path": str(tmp_path)}
    dictionary = make(persist_count=-1, working_set_size=4, **named)
    for number in range(3):
        dictionary["key"] = number
        dictionary.checkpoint()
        assert dictionary.persist() == number
    return dictionary


def offered(make: Make, tmp_path: Path) -> list[int]:
    """What the next program can restore."""
    return make(persister_class=PosixCheckpointPersister, persist_path=str(tmp_path)).persisted_ids()


def test_what_was_rolled_back_does_not_return_though_the_store_keeps_it(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dictionary = persisting(make, tmp_path)
    with monkeypatch.context() as refusing:
        refusing.setattr(Directory, "remove_folder", refuse)
        assert dictionary.rollback(to=1) == 1
    assert dictionary.persisted_ids() == [0, 1]
    dictionary["key"] = "again"
    dictionary.checkpoint()
    assert (dictionary.persist(), dictionary.persisted_ids()) == (1, [0, 1])
    dictionary["key"] = "more"
    dictionary.checkpoint()
    assert (dictionary.persist(), dictionary.persisted_ids()) == (2, [0, 1, 2])
    assert dictionary.rollback(to=0) == 0
    dictionary.destroy()

    assert offered(make, tmp_path) == [0]


def test_a_rollback_says_that_the_store_does_not_know_of_it(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dictionary = persisting(make, tmp_path)
    with monkeypatch.context() as refusing:
        refusing.setattr(Directory, "remove_folder", refuse)
        refusing.setattr(Directory, "write", refuse)
        with pytest.raises(DDictPersistError, match="read-only") as raised:
            dictionary.rollback(to=1)
        assert raised.value.checkpoint_id == 1
        assert (dictionary.checkpoint_id, dictionary["key"]) == (1, 1), "all has gone back"
        with pytest.raises(DDictPersistError):
            dictionary.rollback()

    assert dictionary.rollback() == 0  # or whatever persists next does that
    assert dictionary.persisted_ids() == [0]
    dictionary.destroy()
    assert offered(make, tmp_path) == [0]


def test_what_is_completed_after_it_was_rolled_back_does_not_count(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dictionary = persisting(make, tmp_path)
    complete, has_begun, may_end = DurableVersions.complete, threading.Event(), threading.Event()

    def complete_late(*args: Any) -> Any:
        has_begun.set()
        assert may_end.wait(DEADLINE_S)
        return complete(*args)

    dictionary["key"] = 3
    dictionary.checkpoint()
    colleague = other(dictionary)
    with ThreadPoolExecutor(1) as pool, monkeypatch.context() as slow:
        slow.setattr(DurableVersions, "complete", complete_late)
        persisting_it = pool.submit(colleague.persist)
        assert has_begun.wait(DEADLINE_S)
        assert dictionary.rollback(to=2) == 2
        may_end.set()
        assert isinstance(persisting_it.exception(DEADLINE_S), DDictPersistError)
    assert dictionary.persisted_ids() == [0, 1, 2]
    dictionary.destroy()
    assert offered(make, tmp_path) == [0, 1, 2]


# ---- who is told, and who may lock ------------------------------------------------------------------------


def test_nobody_else_can_lock_a_name(make: Make, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    make(persister_class=PosixCheckpointPersister, persist_path=str(tmp_path), name="mine", persist_count=-1)

    assert stat.S_IMODE((folder / "lock").stat().st_mode) == 0o600


def test_a_dictionary_says_that_it_persists_nothing_by_itself(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    named: dict[str, Any] = {"persister_class": PosixCheckpointPersister, "persist_path": str(tmp_path)}
    with caplog.at_level(logging.WARNING, "ml_flashpoint.ddict"):
        make(**named, persist_count=1).destroy()
        assert "persist_count" not in caplog.text
        make(**named).destroy()
    assert "persist_count is 0" in caplog.text
