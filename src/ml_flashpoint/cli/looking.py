"""The subcommands that look at what there is."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ml_flashpoint.cli.app import Base, Json, Prefix, Source, app

_PANEL = "Look"


@app.command(rich_help_panel=_PANEL)
def ls(
    base: Annotated[
        str | None,
        typer.Argument(
            metavar="BASE|URL",
            help="Base container of a job on this node, or URL of persisted versions.",
        ),
    ] = None,
    json: Json = False,
) -> int:
    """List the versions in a base container or a durable store, newest first: steps, ranks, sizes, states.

    Without BASE, list the base containers on this node that this user may read, of running and of dead jobs.
    **flashpoint rm** removes one.

    The command shows what one node holds. It locks and changes nothing, and the job may be running. It does not
    read the bytes of objects: **flashpoint verify** does.

    The state of a version in memory is the first of these that applies:

    **damaged**: a manifest cannot be read, or an object is missing or has another size than its manifest says.

    **writing**: a running rank of this node has not committed its part yet.

    **partial**: a rank of this node has no part of it. The save was interrupted or skipped, and is never used.

    **replicated**: every rank of this node has committed, and all copies that this node should hold for other
    ranks are here. Copies of this node's parts on other nodes cannot be seen from here.

    **local**: every rank of this node has committed, and copies for other ranks are missing or not expected.

    **gone back from**: the job has gone back to an older version, and ignores this one.

    A version is **whole** if the parts of all ranks are on this node, so that this node alone could restore it.

    Persisted versions are **complete**, **incomplete** (being written, or interrupted) or **damaged** (a marker, a
    manifest or the size of a part is wrong, or a part is missing).

    Exit code: 0 if nothing is damaged, 1 if something is, 2 if no job has saved at BASE.
    """
    from ml_flashpoint.cli import listing

    return listing.list_bases(as_json=json) if base is None else listing.list_versions(base, as_json=json)


@app.command(rich_help_panel=_PANEL)
def status(
    base: Annotated[
        str,
        typer.Argument(
            metavar="BASE|JOB", help="Base container of a job on this node, or the name of its last folder."
        ),
    ],
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until Ctrl-C.")] = False,
    every: Annotated[
        float, typer.Option(min=0.1, max=3600.0, help="Seconds between two refreshes, with --watch.")
    ] = 1.0,
    json: Json = False,
) -> int:
    """Show the saves of the ranks on this node: newest steps committed, copied and verified; times, failures.

    **committed**: this rank's part is complete on its node. **copied**: all copies of the part are complete.
    **verified**: the parts and copies of all ranks are complete. **since**: seconds since then, which is the
    training that would be lost now. **held**: the time that the newest save blocked the training loop. **ready
    after**: the time from the start of a save until it was verified.

    A rank is **ok**, **degraded** (copies are missing, nothing can be verified, or a version that is due is not
    persisted), **silent** (it has saved nothing yet) or **ended**.

    Below the table: the steps that the loss of a node would cost now, for this node and for nodes whose copies it
    holds. Times are estimates from the newest copies.

    The command locks and changes nothing, and the job may be running.

    Exit code: 0, or 1 if a rank is degraded (not with **--watch**), or 2 if no job has saved at BASE.
    """
    from ml_flashpoint.cli.status import show_status

    return show_status(base, every_s=every if watch else None, as_json=json)


@app.command(rich_help_panel=_PANEL)
def verify(
    source: Annotated[
        str,
        typer.Argument(
            metavar="BASE|URL[@STEP]",
            help="Base container of a job, or URL of persisted versions. Without @STEP, all versions.",
        ),
    ],
    json: Json = False,
    threads: Annotated[int, typer.Option(min=1, max=64, help="Parts to read at the same time.")] = 2,
) -> int:
    """Read every object, and compare every block with its digest. Name the files that are damaged.

    The command locks and changes nothing, and the job may be running. A version that the job removes meanwhile is
    shown as **removed**.

    Exit code: 0 if all bytes are as saved, 1 if a file is damaged, 2 if no job has saved at BASE, or not that STEP.
    """
    from ml_flashpoint.cli.listing import verify_versions

    return verify_versions(source, as_json=json, threads=threads)


@app.command(rich_help_panel=_PANEL)
def inspect(source: Source, prefix: Prefix = "", json: Json = False) -> None:
    """List the items of a version: names, dtypes, shapes, bytes, and the ranks that saved them.

    The parts of all ranks must be on this node. The job may be running.

    Exit code: 0, or 1 if the version is damaged or was removed meanwhile, or 2 if there is no such version.
    """
    import contextlib

    from ml_flashpoint.cli import items, output

    with contextlib.ExitStack() as stack:
        version = items.opened(stack, source, prefix)
        found = [items.described(version, fqn) for fqn in version.names]
        step = version.step
    rows = [
        {
            "name": each["name"],
            "dtype": each["dtype"],
            "shape": each["shape"],
            "size": output.bytes_text(each["bytes"]),
            "of ranks": output.ranks_text(each["ranks"]),
        }
        for each in found
    ]
    document = {"source": source, "step": step, "items": found}
    output.show(document, json, output.table(rows), f"step {step}: {output.plural(len(found), 'item')}")


@app.command(rich_help_panel=_PANEL)
def diff(one: Source, other: Source, prefix: Prefix = "", json: Json = False) -> int:
    """List the tensors in which two versions differ, with the share of elements and the largest difference.

    Bits are compared: a NaN equals itself, and 0.0 differs from -0.0. The parts of all ranks must be on this node.

    Exit code: 0 if nothing differs, 1 if something differs or could not be read, 2 if there is no such version.
    """
    import contextlib
    import tempfile
    from pathlib import Path

    from ml_flashpoint.cli import items, output

    with contextlib.ExitStack() as stack:
        first, second = items.opened(stack, one, prefix), items.opened(stack, other, prefix)
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flashpoint-diff-")))
        found: list[dict[str, Any]] = [
            {"name": fqn, **told}
            for fqn in dict.fromkeys([*first.names, *second.names])
            if (told := items.difference(first, second, fqn, scratch)) is not None
        ]
        same = f"the same: {output.plural(len(first.names), 'item')}"
    lines = [f"{each['name']}: {each['what']}" for each in found] or [same]
    output.show({"one": one, "other": other, "differences": found}, json, *lines)
    return output.DAMAGE if found else output.OK


@app.command(rich_help_panel=_PANEL)
def report(
    events: Annotated[
        list[str], typer.Argument(metavar="EVENTS", help="Files that the job wrote to FLASHPOINT_EVENTS.")
    ],
    output: Annotated[str, typer.Option("--output", "-o", help="HTML file to write.")] = "report.html",
    json: Json = False,
) -> None:
    """Make one HTML page about a job, from its events: steps, times, recoveries, failures.

    The page is one file that loads nothing. Give the files of all ranks, and of all restarts of the job. Lines that
    are not events are skipped and counted. Needs plotly (the extra `report`), except with --json.

    Exit code: 0, or 2 if there is no event to read or the page cannot be written.
    """
    from ml_flashpoint.cli.report import make_report

    make_report(events, to=output, as_json=json)


@app.command(rich_help_panel=_PANEL)
def metrics(
    base: Base,
    port: Annotated[
        int, typer.Option(min=0, max=65535, envvar="FLASHPOINT_METRICS_PORT", help="Port; 0 for any free port.")
    ] = 9478,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 for all interfaces.")] = "127.0.0.1",
) -> None:
    """Serve the numbers of **flashpoint status** to Prometheus, at /metrics, until SIGTERM or Ctrl-C.

    Run one on each node. The job may end and be started again meanwhile. Needs `prometheus-client` (the extra
    `metrics`).

    Exit code: 0, 2 if BASE is not a base container, or if it cannot listen there.
    """
    from ml_flashpoint.cli.metrics import serve

    serve(base, host=host, port=port)
