"""Objects for tests of their format: files with any content, and what holds for every layout."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

from ml_flashpoint.format.dtypes import ITEMSIZES
from ml_flashpoint.format.object_format import Layout, encode_header


def filled(layout: Layout, file_size: int, metadata: Mapping[str, str] | None = None) -> bytes:
    """A file of this layout, with noise for data."""
    header = encode_header(layout, file_size, metadata)
    assert len(header) == layout.data_start
    return header + random.Random(file_size).randbytes(file_size - len(header))


def check_consistent(layout: Layout, file_size: int) -> None:
    """Entries and gaps follow each other without overlap from the data's start to the layout's size."""
    entries = sorted((*layout.tensors, *layout.byte_items), key=lambda entry: (entry.begin, entry.end))
    spans = sorted([(entry.begin, entry.end) for entry in entries] + list(layout.gaps))
    assert [begin for begin, _ in spans] == [layout.data_start, *(end for _, end in spans)][: len(spans)]
    assert layout.size == (entries[-1].end if entries else layout.data_start) <= file_size
    for entry in entries:
        assert entry.nbytes == math.prod(entry.shape) * ITEMSIZES[entry.dtype]
    assert len({entry.key for entry in entries} | layout.aliases.keys()) == len(entries) + len(layout.aliases)
