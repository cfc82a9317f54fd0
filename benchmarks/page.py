"""``python -m benchmarks.page``: writes the tables of docs/benchmarks.md from the rows in docs/benchmarks.json.

``--take results.json`` first puts the rows of a run into it, in place of older ones of the same state and case. Owns
those two files' form; what the tables are is in `benchmarks.tables`. Needs nothing but the standard library.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks.tables import TABLES, Found, Table

DOCS = Path(__file__).resolve().parents[1] / "docs"
_MARKED = re.compile(r"(<!-- table: ([\w-]+)[^>]* -->\n).*?(<!-- end -->)", re.DOTALL)


def main(arguments: list[str] | None = None) -> int:
    """Take rows, if asked to, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--take", type=Path, nargs="*", default=[], help="what `--json` of a benchmark has written")
    parser.add_argument("--command", default="", help="how these rows were taken, for the line below a table")
    parser.add_argument("--docs", type=Path, default=DOCS, help="the folder of both files")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if the page is not what the rows give"
    )
    options = parser.parse_args(arguments)
    data, page = options.docs / "benchmarks.json", options.docs / "benchmarks.md"
    runs: list[dict[str, Any]] = json.loads(data.read_text(encoding="utf-8"))["runs"]
    for path in options.take:
        runs = with_run(runs, json.loads(path.read_text(encoding="utf-8")), options.command)
    before = page.read_text(encoding="utf-8")
    after = rendered(before, runs)
    if options.check:
        return int(after != before)
    if options.take:
        data.write_text(as_text(runs), encoding="utf-8")
    page.write_text(after, encoding="utf-8")
    return 0


def as_text(runs: list[dict[str, Any]]) -> str:
    """A row is a line, so that differences can be read."""
    parts = []
    for run in runs:
        head = json.dumps({key: value for key, value in run.items() if key != "rows"}, ensure_ascii=False)
        rows = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in run["rows"])
        parts.append(f' {head[:-1]}, "rows": [\n{rows}\n ]}}')
    return '{"runs": [\n' + ",\n".join(parts) + "\n]}\n"


def with_run(runs: list[dict[str, Any]], taken: dict[str, Any], command: str) -> list[dict[str, Any]]:
    """The runs and another one, whose rows take the place of those of the same state and case."""
    rows = [_like_the_others(row) for row in taken["rows"]]
    new = {(row["state"], row["case"]) for row in rows}
    kept = []
    for run in runs:
        left = [row for row in run["rows"] if (row["state"], row["case"]) not in new]
        if left:
            kept.append({**run, "rows": left})
    return [*kept, {"command": command or taken.get("command", ""), "machine": taken["machine"], "rows": rows}]


def _like_the_others(row: dict[str, Any]) -> dict[str, Any]:
    """Rows of ``make bench-cuda`` have sections, and a part of a floor."""
    if "section" not in row:
        return row
    return {"state": f"GPU, {row['section']}", **{key: value for key, value in row.items() if key != "section"}}


def rendered(page: str, runs: list[dict[str, Any]]) -> str:
    """The page with its tables written anew: what stands between ``<!-- table: NAME -->`` and ``<!-- end -->``.

    Raises:
        KeyError: a table is not known, or a row that it needs is not there.
    """
    found = Found(runs)
    return _MARKED.sub(lambda match: match[1] + _written(TABLES[match[2]], found) + match[3], page)


def _written(table: Table, found: Found) -> str:
    used: list[int] = []
    lines = table.lines(found, used)
    head = f"| {' | '.join(table.head)} |\n|{'---|' * len(table.head)}\n"
    body = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    taken = "".join(f"\n*{_told(found.runs[number])}*\n" for number in sorted(set(used)))
    return head + body + taken


def _told(run: dict[str, Any]) -> str:
    """When, on what, and by which command a run was taken."""
    machine = run["machine"]
    what = [machine.get("taken", ""), _of_hardware(machine)]
    what += [f"{name} {machine[name]}" for name in ("torch", "cuda") if machine.get(name)]
    if machine.get("load") is not None:
        load = machine["load"]
        end = machine.get("load_at_the_end")
        what.append(f"load {load}" + (f" to {end}" if end is not None else ""))
    told = ", ".join(part for part in [*what, machine.get("note", "")] if part)
    return told + (f": `{run['command']}`" if run.get("command") else "")


def _of_hardware(machine: dict[str, Any]) -> str:
    if "name" in machine:
        return str(machine["name"])
    return f"{machine['cores']} cores of {machine['processor']}"


if __name__ == "__main__":
    sys.exit(main())
