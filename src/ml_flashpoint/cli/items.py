"""Items of versions for `flashpoint inspect` and `flashpoint diff`: descriptions, and differences bit for bit."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch

from ml_flashpoint.cli.view import existing, split
from ml_flashpoint.copy.dtypes import bytes_of
from ml_flashpoint.tools.items import VersionItems, open_version


def opened(stack: contextlib.ExitStack, source: str, prefix: str) -> VersionItems:
    """Return the items of ``SOURCE@STEP`` whose names have a prefix, held until the stack is closed."""
    base, step = split(source)
    existing(base)
    return VersionItems(stack.enter_context(open_version(base, step)), prefix)


def described(version: VersionItems, fqn: str) -> dict[str, Any]:
    """Return name, dtype, shape, bytes and ranks of an item."""
    ranks = sorted({version.items[index].rank for index in version.places[fqn]})
    of = version.tensors.get(fqn)
    if of is None:
        nbytes = len(version.octets(version.places[fqn][0]).getbuffer())
        return {"name": fqn, "dtype": "bytes", "shape": "-", "bytes": nbytes, "ranks": ranks}
    dtype = of.properties.dtype
    shape, nbytes = "x".join(map(str, of.size)) or "scalar", of.size.numel() * dtype.itemsize
    name = str(dtype).removeprefix("torch.")
    return {"name": fqn, "dtype": name, "shape": shape, "bytes": nbytes, "ranks": ranks}


def difference(first: VersionItems, second: VersionItems, fqn: str, scratch: Path) -> dict[str, Any] | None:
    """Describe how an item differs in two versions; None if it is the same, bit for bit.

    Args:
        first, second: the versions.
        fqn: name of the item.
        scratch: folder for tensors that are put together from several parts.
    """
    both = (first, second)
    missing = [fqn not in version.places for version in both]
    if any(missing):
        return {"what": f"only in {'the second' if missing[0] else 'the first'}"}
    one, other = (version.tensors.get(fqn) for version in both)
    if one is None or other is None:
        if one is not other:
            return {"what": "a tensor in one of them only"}
        contents = {version.octets(version.places[fqn][0]).getvalue() for version in both}
        return {"what": "other bytes"} if len(contents) > 1 else None
    kinds = [f"{of.properties.dtype} {tuple(of.size)}" for of in (one, other)]
    if kinds[0] != kinds[1]:
        return {"what": f"{kinds[0]} and {kinds[1]}"}
    return _compared(*(version.tensor(fqn, scratch) for version in both))


def _compared(one: Any, other: Any) -> dict[str, Any] | None:
    if one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    one, other = one.contiguous(), other.contiguous()
    octets = bytes_of(one) != bytes_of(other)
    if not octets.any():
        return None
    share = octets.view(-1, one.element_size()).any(1).float().mean().item()
    told: dict[str, Any] = {"what": f"{100 * share:.3g} % of the elements differ", "share": share}
    with contextlib.suppress(RuntimeError, TypeError):  # dtypes that torch does not count with
        wide = torch.complex128 if one.is_complex() else torch.float64
        most = (one.to(wide) - other.to(wide)).abs().max().item()
        told |= {"what": f"{told['what']}, by {most:.6g} at most", "most": most}
    return told
