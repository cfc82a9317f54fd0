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
            help="A job's base container, on the node whose memory it is in; or the URL of persisted versions.",
        ),
    ] = None,
    json: Json = False,
) -> int:
    """List the versions in BASE, or persisted ones, newest first: steps, ranks, sizes, states.

    Without BASE, list the base containers on this node, of jobs that run and of dead ones, as far as this user may
    look. **flashpoint rm** removes one.

    Only BASE is looked at, so this is what one node holds. Nothing is locked or changed, and the job may be
    running. Bytes are not read: for that, see **flashpoint verify**.

    A version's state is the first of these that fits:

    **damaged**: a manifest cannot be read, or an object is missing or does not have the size that was
    committed.

    **writing**: not every rank of this node has committed its part.

    **partial**: a rank of this node that has ended has no part of it: the save was cut short, and is never used.

    **replicated**: every rank of this node has committed, and the node also holds the copies that it
    should: of every rank of which it holds a copy in any version. Whether other nodes hold copies of this
    node's own parts cannot be seen from here.

    **local**: every rank of this node has committed, and copies of other nodes' parts are not (yet) here.

    A version is **whole** if the parts of all its ranks are on this node, which could then restore it alone.

    Persisted versions are **complete**, **incomplete** (being written, or cut short) or **damaged**: a marker
    or a manifest is not what was written, or a part is missing or has another size.

    Exit code: 0 if nothing is damaged, 1 if something is, 2 if BASE is not a base container and no store.
    """
    from ml_flashpoint.cli import listing

    return listing.list_bases(as_json=json) if base is None else listing.list_versions(base, as_json=json)


@app.command(rich_help_panel=_PANEL)
def status(
    base: Annotated[
        str,
        typer.Argument(metavar="BASE|JOB", help="A job's base container on this node, or the name of its last folder."),
    ],
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Look again and again, until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option(min=0.1, max=3600.0, help="Seconds between looks, with --watch.")] = 1.0,
    json: Json = False,
) -> int:
    """Show how saving goes on the ranks of this node: newest steps committed, copied and verified; times, failures.

    What is **verified** all ranks have, with all copies: **since** is the training that would be lost now, in
    seconds. The job may be running; nothing is locked or changed.

    A rank is **ok**, **degraded** (copies are missing, ranks do not agree, or what is due is not persisted),
    **silent** (it has saved nothing yet) or **ended**.

    And what the loss of a node would cost now: of this one, and of those whose copies it holds. Steps are those from
    the version that survives up to the newest save; times are estimates, from the newest copies.

    Exit code: 0, 1 if a rank is degraded (not with **--watch**), 2 if BASE is not a base container.
    """
    from ml_flashpoint.cli.status import show_status

    return show_status(base, every_s=every if watch else None, as_json=json)


@app.command(rich_help_panel=_PANEL)
def verify(
    source: Annotated[
        str,
        typer.Argument(
            metavar="BASE|URL[@STEP]",
            help="A job's base container, or the URL of persisted versions; or one STEP of it.",
        ),
    ],
    json: Json = False,
    threads: Annotated[int, typer.Option(min=1, max=64, help="Parts to read at the same time.")] = 2,
) -> int:
    """Read every object in BASE, or of persisted versions, and compare it with its digests; name the files that differ.

    Nothing is locked or changed, and the job may be running: what it removes meanwhile is shown as removed.

    Exit code: 0 if all is as it was saved, 1 if something is not, 2 if there is no such base container, store or step.
    """
    from ml_flashpoint.cli.listing import verify_versions

    return verify_versions(source, as_json=json, threads=threads)


@app.command(rich_help_panel=_PANEL)
def inspect(source: Source, prefix: Prefix = "", json: Json = False) -> None:
    """List what is in a version: names, dtypes, shapes, bytes, and the ranks that have saved it.

    The parts of all ranks must be on this node. The job may be running.

    Exit code: 0 if it could be read, 1 if it is damaged or went meanwhile, 2 if there is no such version.
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
    """Tell which tensors of two versions differ, in how many elements, and by how much at most.

    Compared are bits: a NaN is the same as itself, and 0.0 is not -0.0. The parts of all ranks must be on this node.

    Exit code: 0 if nothing differs, 1 if something does or could not be read, 2 if there is no such version.
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
    events: Annotated[list[str], typer.Argument(metavar="EVENTS", help="Files that FLASHPOINT_EVENTS named.")],
    output: Annotated[str, typer.Option("--output", "-o", help="The page to write.")] = "report.html",
    json: Json = False,
) -> None:
    """Make one page of a job's events: steps, time held, lag, recoveries, failures; for any browser.

    The page is one file and loads nothing. Give the files of all ranks, also of several lives of the job. Lines that
    are no events are left out and counted. Needs plotly (the extra `report`), but not with --json.

    Exit code: 0, 2 if there is no event to read or the page cannot be written.
    """
    from ml_flashpoint.cli.report import make_report

    make_report(events, to=output, as_json=json)


@app.command(rich_help_panel=_PANEL)
def metrics(
    base: Base,
    port: Annotated[int, typer.Option(min=0, max=65535, envvar="FLASHPOINT_METRICS_PORT", help="0: any.")] = 9478,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 for all.")] = "127.0.0.1",
) -> None:
    """Serve what **flashpoint status** shows to Prometheus, at /metrics, until SIGTERM or Ctrl-C.

    Run one on each node, beside the job, which may end and be started again meanwhile. Needs `prometheus-client`.

    Exit code: 0, 2 if BASE is not a base container, or if it cannot listen there.
    """
    from ml_flashpoint.cli.metrics import serve

    serve(base, host=host, port=port)
