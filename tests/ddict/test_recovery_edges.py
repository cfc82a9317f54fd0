"""Real managers that die, or hang, in the middle of a restore or a rollback."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ml_flashpoint.ddict import DDict
from ml_flashpoint.ddict.errors import DDictTimeoutError, DDictWritesLostError
from tests.support.dictionaries import DEADLINE_S, await_that, kill_manager, pid_of, stopped
from tests.workers.ddict_persisters import FLAG, KilledWhileRestoring

pytestmark = pytest.mark.slow


def keys_of(dictionary: DDict, manager: int) -> list[int]:
    return [key for key in range(40) if dictionary.which_manager(key) == manager]


def test_a_manager_that_dies_while_it_takes_up_what_is_restored_takes_it_up_after_all(
    tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = tmpfs / "flag"
    monkeypatch.setenv(FLAG, str(flag))
    named: dict[str, Any] = {
        "replication": "ring",
        "persister_class": KilledWhileRestoring,
        "persist_path": str(tmpfs / "persisted"),
        "name": "restored",
        "timeout": DEADLINE_S,
    }
    with DDict(1, 3, 64 << 20, **named) as earlier:
        for number in range(4):
            for key in range(40):
                earlier[key] = number
            earlier.checkpoint()
        earlier.sync_to_newest_checkpoint()
        assert earlier.persist() == 3
    with DDict(1, 3, 64 << 20, **named) as dictionary:
        for key in range(40):
            dictionary[key] = "fresh"
        dictionary.checkpoint()
        dictionary.sync_to_newest_checkpoint()
        assert dictionary.committed_checkpoint_id == 0
        flag.write_text(dictionary._configuration.run_id)

        dictionary.restore(3)

        assert not flag.exists(), "no manager was killed"
        assert dictionary.committed_checkpoint_id == 3
        assert {key: dictionary[key] for key in range(40)} == dict.fromkeys(range(40), 3)


def test_the_loss_of_what_anothers_rollback_made_uncommitted_is_told_although_the_main_manager_died() -> None:
    with DDict(1, 3, 64 << 20, working_set_size=4, replication="ring", timeout=DEADLINE_S) as one:
        other = copy.copy(one)
        for number in range(6):
            for key in range(40):
                other[key] = number
            one["one", number] = number
            for handle in (other, one):
                handle.checkpoint()
            await_that(lambda number=number: one.committed_checkpoint_id == number)  # type: ignore[misc]
        other.checkpoint()
        assert not other._handle._unsure, "it does not know that all is committed"
        one.rollback(to=4)
        kill_manager(one, 0)

        told = set()
        for _ in range(8):
            for name, handle in (("one", one), ("other", other)):
                try:
                    handle.checkpoint()
                except DDictWritesLostError as error:
                    told.add(name)
                    handle.rollback(to=error.checkpoint_id)
        try:
            reader = copy.copy(one)
            reader.sync_to_newest_checkpoint()
        except DDictWritesLostError:
            reader.sync_to_newest_checkpoint()
        found = {reader[key] for key in range(40)}

        assert "other" in told or len(found) == 1, f"told {told or 'nobody'}, and a mix is committed: {found}"


Call = Callable[[DDict], object]


@pytest.mark.parametrize("then", [DDict.checkpoint, lambda handle: handle.put("key", 1), DDict.detach])
def test_a_rollback_that_does_not_reach_a_manager_is_finished_before_anything_else(
    then: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DDict(3, 1, 64 << 20, working_set_size=8, timeout=DEADLINE_S) as dictionary:
        keys = [keys_of(dictionary, manager)[0] for manager in range(3)]
        dictionary["key"] = 0  # and stays at 0, so that nothing is committed
        handle = copy.copy(dictionary)
        for number in range(4):
            for key in keys:
                handle[key] = number
            handle.checkpoint()
        with stopped(pid_of(dictionary, 1)), monkeypatch.context() as impatient:
            impatient.setattr(handle._handle, "timeout_s", 3.0)
            with pytest.raises(DDictTimeoutError):
                handle.rollback(to=1)
        assert handle.checkpoint_id == 1

        then(handle)

        dictionary.checkpoint_id = 3
        assert [dictionary[key] for key in keys] == [1, 1, 1]
