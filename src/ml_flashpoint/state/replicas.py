"""The division of replicated state: which rank writes which of the items that several ranks have alike.

Pure functions of who has what, so that every rank divides alike and nobody has to be asked.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Replica(NamedTuple):
    """An item that other ranks may have, too, by the same name, which no other item has."""

    name: str
    nbytes: int


def written_by(rank: int, kinds: Sequence[str], lists: Mapping[str, Sequence[Replica]]) -> frozenset[str]:
    """Return the names of the replicated items that a rank writes.

    Each item goes to the rank that has least so far of those that have the item, the lowest of them where several have
    as little. So every name is written by exactly one rank, and by one that has the item.

    Args:
        kinds: for each rank, the kind of its list. Ranks of one kind have the same items.
        lists: items by kind.
    """
    ranks_of: dict[str, list[int]] = {}
    for number, kind in enumerate(kinds):
        ranks_of.setdefault(kind, []).append(number)
    holders: dict[Replica, tuple[str, ...]] = {}
    sizes: dict[str, Replica] = {}
    for kind in ranks_of:
        for replica in lists[kind]:
            first = sizes.setdefault(replica.name, replica)
            holders[first] = (*holders.get(first, ()), kind)
    loads = [0] * len(kinds)
    heaps: dict[tuple[str, ...], list[tuple[int, int]]] = {}
    names = set[str]()
    for replica, of_kinds in holders.items():
        heap = heaps.get(of_kinds)
        if heap is None:
            heap = heaps[of_kinds] = sorted((loads[n], n) for kind in of_kinds for n in ranks_of[kind])
        while heap[0][0] < loads[heap[0][1]]:  # has got an item of other holders since
            heapq.heapreplace(heap, (loads[heap[0][1]], heap[0][1]))
        _, writer = heap[0]
        loads[writer] += replica.nbytes
        heapq.heapreplace(heap, (loads[writer], writer))
        if writer == rank:
            names.add(replica.name)
    return frozenset(names)
