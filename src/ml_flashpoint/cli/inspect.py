"""`flashpoint inspect` and `flashpoint diff`: what is in a version, and what differs between two.

Owns the comparison, and what the commands print; reading is `tools.items`'.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from ml_flashpoint.cli import output
from ml_flashpoint.cli.base_view import format_bytes, format_ranks

if TYPE_CHECKING:
    from ml_flashpoint.tools.items import VersionItems


@output.command
def inspect(source: str, *, prefix: str, as_json: bool = False) -> None:
    """List the items of a version."""
    with contextlib.ExitStack() as stack:
        version = _opened(stack, source, prefix)
        items = [_described(version, fqn) for fqn in version.names]
        step = version.step
    if as_json:
        print(json.dumps({"source": source, "step": step, "items": items}, indent=2))
        return
    rows = [
        (escape(each["name"]), each["dtype"], each["shape"], format_bytes(each["bytes"]), format_ranks(each["ranks"]))
        for each in items
    ]
    if output.is_terminal():
        table = Table("name", "dtype", "shape", "size", "of ranks", title=f"step {step}: {len(items)} items")
        for row in rows:
            table.add_row(*row)
        output.console().print(table)
    else:
        for each, row in zip(items, rows, strict=True):
            print(each["name"], each["dtype"], each["shape"], each["bytes"], row[-1])


def _opened(stack: contextlib.ExitStack, source: str, prefix: str) -> VersionItems:
    from ml_flashpoint.tools.items import VersionItems, open_version

    base, step = output.split_source(source)
    return VersionItems(stack.enter_context(open_version(base, step)), prefix)


def _described(version: VersionItems, fqn: str) -> dict[str, Any]:
    ranks = sorted({version.items[index].rank for index in version.places[fqn]})
    of = version.tensors.get(fqn)
    if of is None:
        nbytes = len(version.octets(version.places[fqn][0]).getbuffer())
        return {"name": fqn, "dtype": "bytes", "shape": "-", "bytes": nbytes, "ranks": ranks}
    dtype = of.properties.dtype
    shape = "x".join(map(str, of.size)) or "scalar"
    nbytes = of.size.numel() * dtype.itemsize
    return {
        "name": fqn, "dtype": str(dtype).removeprefix("torch."), "shape": shape, "bytes": nbytes, "ranks": ranks
    }  # fmt: skip


@output.command
def diff(one: str, other: str, *, prefix: str, as_json: bool = False) -> int:
    """Compare two versions."""
    with contextlib.ExitStack() as stack:
        first, second = _opened(stack, one, prefix), _opened(stack, other, prefix)
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flashpoint-diff-")))
        found = [
            {"name": fqn, **told}
            for fqn in dict.fromkeys([*first.names, *second.names])
            if (told := _difference(first, second, fqn, scratch)) is not None
        ]
        count = len(first.names)
    if as_json:
        print(json.dumps({"one": one, "other": other, "differences": found}, indent=2))
    else:
        print("\n".join(f"{each['name']}: {each['what']}" for each in found) or f"the same: {count} items")
    return output.DAMAGE if found else output.OK


def _difference(first: VersionItems, second: VersionItems, fqn: str, scratch: Path) -> dict[str, Any] | None:
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
    """Describe how two tensors of one dtype and shape differ; None if they are the same, bit for bit."""
    import torch

    from ml_flashpoint.copy.dtypes import bytes_of

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
