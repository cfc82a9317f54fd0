"""Replicated state is divided so that every name is written once, by a rank that has it, and in fair shares."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ml_flashpoint.state.replicas import Replica, written_by

_items = st.dictionaries(st.sampled_from("abcdefgh"), st.just(1), max_size=8)
_kinds = st.dictionaries(st.sampled_from(["x", "y", "z"]), _items, min_size=1)


@given(_kinds, st.data())
def test_every_name_is_written_by_one_rank_that_has_it(kinds: dict[str, dict[str, int]], data: st.DataObject) -> None:
    sizes = data.draw(st.fixed_dictionaries({name: st.integers(1, 100) for name in "abcdefgh"}))
    of_ranks = data.draw(st.lists(st.sampled_from(sorted(kinds)), min_size=1, max_size=7))
    lists = {kind: [Replica(name, sizes[name]) for name in names] for kind, names in kinds.items()}
    written = [written_by(rank, of_ranks, lists) for rank in range(len(of_ranks))]
    every = sorted(name for names in written for name in names)
    assert every == sorted({name for kind in of_ranks for name in kinds[kind]})
    assert all(written[rank] <= kinds[kind].keys() for rank, kind in enumerate(of_ranks))


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=200), st.integers(1, 9))
def test_ranks_that_have_the_same_write_as_much(sizes: list[int], ranks: int) -> None:
    items = [Replica(str(number), size) for number, size in enumerate(sizes)]
    loads = [sum(sizes[int(name)] for name in written_by(rank, ["x"] * ranks, {"x": items})) for rank in range(ranks)]
    assert max(loads) - min(loads) <= max(sizes)
