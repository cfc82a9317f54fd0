"""One manager's history of keys, on its own: what is read where, and what rollbacks and retirement leave."""

from __future__ import annotations

import dataclasses
import multiprocessing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ml_flashpoint.ddict.errors import DDictCheckpointRetiredError
from ml_flashpoint.ddict.manager.shard import ENTRY_BYTES, PERSISTENT, Entry, InlineValue, Shard


def value(text: str) -> InlineValue:
    return InlineValue(text.encode())


def entry(
    key: str,
    checkpoint_id: int,
    text: str | None,
    writer: str = "w",
    *,
    flags: int = 0,
) -> Entry:
    return Entry(key.encode(), checkpoint_id, writer, None if text is None else value(text), flags)


def read(shard: Shard, key: str, checkpoint_id: int) -> str | None:
    found = shard.find(key.encode(), checkpoint_id)
    if found is None:
        return None
    assert isinstance(found.value, InlineValue)
    return found.value.data.decode()


def content(shard: Shard, checkpoint_id: int) -> dict[str, str]:
    found: dict[str, str] = {}
    for each in shard.entries(checkpoint_id):
        assert isinstance(each.value, InlineValue)
        assert each.key.decode() not in found
        found[each.key.decode()] = each.value.data.decode()
    return found


def test_a_read_sees_the_newest_value_at_or_below_its_checkpoint() -> None:
    shard = Shard()
    for checkpoint_id in (0, 2, 5):
        shard.put(entry("a", checkpoint_id, f"at {checkpoint_id}"))

    seen = [read(shard, "a", checkpoint_id) for checkpoint_id in range(7)]

    assert seen == ["at 0", "at 0", "at 2", "at 2", "at 2", "at 5", "at 5"]


def test_a_late_write_below_is_not_seen_above_a_newer_one() -> None:
    shard = Shard()
    shard.put(entry("a", 3, "new"))
    shard.put(entry("a", 1, "late"))

    assert [read(shard, "a", each) for each in range(4)] == [None, "late", "late", "new"]


def test_a_deleted_key_is_there_before_and_not_from_then_on() -> None:
    shard = Shard()
    shard.put(entry("a", 0, "x"))
    shard.put(entry("a", 2, None))

    assert [read(shard, "a", each) for each in range(4)] == ["x", "x", None, None]
    assert content(shard, 1) == {"a": "x"}
    assert content(shard, 2) == {}


def test_a_key_deleted_at_the_oldest_checkpoint_leaves_nothing() -> None:
    shard = Shard()
    shard.put(entry("a", 0, "x"))
    shard.put(entry("a", 0, None))

    assert len(shard) == 0


def test_a_rollback_takes_back_what_its_writer_wrote_above_and_nothing_else() -> None:
    shard = Shard()
    shard.put(entry("mine", 1, "kept", "me"))
    shard.put(entry("mine", 2, "gone", "me"))
    shard.put(entry("other", 2, "kept", "you"))
    shard.put(entry("both", 2, "yours", "you"))
    shard.put(entry("both", 2, "mine", "me"))
    assert read(shard, "both", 2) == "mine"

    shard.rollback("me", 1)

    assert content(shard, 2) == {"mine": "kept", "other": "kept", "both": "yours"}


def test_what_was_rolled_back_does_not_come_back_at_a_later_checkpoint() -> None:
    shard = Shard()
    shard.put(entry("a", 3, "abandoned"))
    shard.rollback("w", 1)
    shard.put(entry("b", 2, "again"))

    assert content(shard, 5) == {"b": "again"}
    assert len(shard) == 1


def test_a_rolled_back_deletion_brings_the_value_back() -> None:
    shard = Shard()
    shard.put(entry("a", 0, "x"))
    shard.put(entry("a", 1, None))

    shard.rollback("w", 0)

    assert read(shard, "a", 1) == "x"


def test_what_retired_is_refused_and_the_error_says_what_is_left() -> None:
    shard = Shard()
    shard.put(entry("a", 1, "x"))
    shard.retire(3)

    refused = [
        lambda: shard.find(b"a", 2),
        lambda: shard.put(entry("a", 2, "y")),
        lambda: list(shard.entries(2)),
    ]
    for call in refused:
        with pytest.raises(DDictCheckpointRetiredError) as raised:
            call()
        assert raised.value.checkpoint_id == 3
    assert read(shard, "a", 3) == "x"


def test_retirement_never_goes_back() -> None:
    shard = Shard()
    shard.retire(4)
    shard.retire(2)

    assert shard.oldest == 4


def test_retirement_forgets_deleted_keys_and_values_that_nobody_can_read() -> None:
    shard = Shard()
    shard.put(entry("a", 0, "old"))
    shard.put(entry("a", 1, "new"))
    shard.put(entry("b", 0, "gone"))
    shard.put(entry("b", 1, None))

    shard.retire(1)

    assert len(shard) == 1
    assert shard.used_bytes == len(b"a") + len(b"new") + ENTRY_BYTES
    shard.rollback("w", 1)
    assert read(shard, "a", 1) == "new"


def test_what_has_to_be_written_again_is_named_until_it_is() -> None:
    shard = Shard()
    shard.put(entry("a", 0, "x"))
    shard.put(entry("lasting", 0, "x", flags=PERSISTENT))
    shard.put(entry("deleted", 0, None))
    assert shard.missing_after(0) == b"a"

    shard.put(entry("a", 1, "y"))

    assert shard.missing_after(0) is None
    assert shard.missing_after(1) == b"a"


def test_only_a_write_at_the_checkpoint_itself_or_a_lasting_one_counts_as_written() -> None:
    shard = Shard()
    shard.put(entry("a", 0, "x"))
    shard.put(entry("lasting", 0, "x", flags=PERSISTENT))
    shard.put(entry("deleted", 1, None))

    assert shard.is_written(b"a", 0)
    assert not shard.is_written(b"a", 1)
    assert shard.is_written(b"lasting", 1)
    assert shard.is_written(b"deleted", 1)
    assert not shard.is_written(b"none", 1)


def test_a_late_write_by_the_same_handle_between_two_snapshots_is_not_lost_when_they_are_loaded() -> None:
    # At an id that was committed already, and so covered by the next commit only.
    shard = Shard()
    shard.put(entry("a", 3, "first"))
    third = list(shard.entries(3))
    shard.put(entry("a", 3, "second"))
    fourth = list(shard.entries(4))

    again = Shard()
    again.load([(3, third), (4, fourth)])

    assert read(again, "a", 4) == "second"


def numbers() -> set[int]:
    return {entry("a", 0, str(each)).sequence for each in range(100)}


def test_each_entry_has_a_number_of_its_own_also_in_another_process() -> None:
    # A handle compares them to tell whether an entry is still the one it read, also across the death of a manager.
    seen = numbers()

    with multiprocessing.get_context("fork").Pool(1) as pool:  # as managers are forked, with what is imported
        first = pool.apply(numbers)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        second = pool.apply(numbers)

    assert len(seen | first | second) == 300
    assert 0 not in seen, "which stands for no such key"


def test_what_is_loaded_keeps_its_number() -> None:
    shard = Shard()
    shard.put(entry("a", 0, "x"))
    (before,) = shard.entries(0)

    shard.load([(0, [before])])

    assert list(shard.entries(0)) == [before]


# ---- against a model --------------------------------------------------------------------------------------


@dataclasses.dataclass
class Model:
    """Every write there ever was, in order; slow, and plainly right."""

    oldest: int = 0
    writes: list[tuple[str, int, str, str | None]] = dataclasses.field(default_factory=list)

    def put(self, key: str, checkpoint_id: int, writer: str, text: str | None) -> None:
        # A handle's second write at an id takes the place of its first.
        self.writes = [w for w in self.writes if w[:3] != (key, checkpoint_id, writer) or checkpoint_id <= self.oldest]
        self.writes.append((key, checkpoint_id, writer, text))
        self._fix()

    def rollback(self, writer: str, to: int) -> None:
        self.writes = [w for w in self.writes if w[1] <= to or w[2] != writer]

    def retire(self, oldest: int) -> None:
        self.oldest = max(self.oldest, oldest)
        self._fix()

    def _fix(self) -> None:
        """What is at or below the oldest checkpoint is nobody's any more: it is never rolled back."""
        fixed = self.content(self.oldest)
        above = [w for w in self.writes if w[1] > self.oldest]
        self.writes = [(key, self.oldest, "", text) for key, text in fixed.items()] + above

    def content(self, checkpoint_id: int) -> dict[str, str]:
        # Sorting is stable: at one id, the last write to arrive counts.
        seen: dict[str, str | None] = {}
        for key, _, _, text in sorted((w for w in self.writes if w[1] <= checkpoint_id), key=lambda write: write[1]):
            seen[key] = text
        return {key: text for key, text in seen.items() if text is not None}


_ids = st.integers(0, 6)
_keys = st.sampled_from("abc")
_writers = st.sampled_from(["one", "two", "three"])
_steps = st.one_of(
    st.tuples(st.just("put"), _keys, _ids, _writers),
    st.tuples(st.just("put"), _keys, _ids, _writers),
    st.tuples(st.just("delete"), _keys, _ids, _writers),
    st.tuples(st.just("rollback"), _writers, _ids),
    st.tuples(st.just("retire"), _ids),
    st.tuples(st.just("reload"), _ids),
    st.tuples(st.just("cut"), _ids),
)


@settings(max_examples=200)
@given(st.lists(_steps, max_size=40))
def test_a_shard_is_what_a_plain_list_of_writes_says(steps: list[tuple]) -> None:
    shard, model = Shard(), Model()
    for number, step in enumerate(steps):
        if step[0] in ("put", "delete"):
            _, key, checkpoint_id, writer = step
            text = f"{number}" if step[0] == "put" else None
            if checkpoint_id < model.oldest:
                continue
            added = entry(key, checkpoint_id, text, writer)
            expected = shard.used_bytes + _bytes_of(added) - shard.replaced_bytes(added.key, checkpoint_id, writer)
            shard.put(added)
            assert shard.used_bytes == expected or text is None
            model.put(key, checkpoint_id, writer, text)
        elif step[0] == "rollback":
            if step[2] >= model.oldest:
                shard.rollback(step[1], step[2])
                model.rollback(step[1], step[2])
        elif step[0] == "retire":
            shard.retire(step[1])
            model.retire(step[1])
        elif step[0] == "cut":
            if step[1] >= model.oldest:
                found = {each.key.decode(): each.value.data.decode() for each in shard.cut(step[1])}
                assert found == model.content(step[1])
        else:
            _check(shard, model)
            _check_reload(shard, model, step[1])
    _check(shard, model)
    held = [each for history in shard._history.values() for each in history]
    assert shard.used_bytes == sum(map(_bytes_of, held))


def _bytes_of(held: Entry) -> int:
    return ENTRY_BYTES + len(held.key) + (0 if held.value is None else held.value.nbytes)


def _check(shard: Shard, model: Model) -> None:
    assert shard.oldest == model.oldest
    for checkpoint_id in range(model.oldest, 9):
        expected = model.content(checkpoint_id)
        assert content(shard, checkpoint_id) == expected
        assert {key: read(shard, key, checkpoint_id) for key in "abc"} == {key: expected.get(key) for key in "abc"}
    # Nothing is kept that nobody can read any more.
    assert len(shard) <= len({w[0] for w in model.writes})


def _check_reload(shard: Shard, model: Model, newest: int) -> None:
    """Snapshots of a shard give a shard that reads the same at each of them."""
    ids = list(range(model.oldest, max(model.oldest, newest) + 1))
    again = Shard()
    again.load([(each, list(shard.entries(each))) for each in reversed(ids)])
    assert again.oldest == model.oldest
    for each in ids:
        assert content(again, each) == content(shard, each)
    assert content(again, ids[-1] + 5) == content(shard, ids[-1])
