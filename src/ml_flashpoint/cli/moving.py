"""The subcommands that take versions out, bring them in, and remove them: their options, and the help about them."""

from __future__ import annotations

from typing import Annotated

import typer

from ml_flashpoint.cli.app import Deadline, Json, app

_PANEL = "Move"


@app.command(rich_help_panel=_PANEL)
def copy(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE[@STEP]",
            help="A job's base container, or the URL of persisted versions; the newest version, or that STEP.",
        ),
    ],
    destination: Annotated[str, typer.Argument(metavar="DEST", help="Folder in which the version gets its own.")],
    json: Json = False,
    partial: Annotated[bool, typer.Option("--partial", help="Also a version that is not whole on this node.")] = False,
) -> None:
    """Copy a version out of a base container, which a job may be using, or a persisted one, to DEST/step-N_ckpt.

    Never copy the files of a base container with other tools while the job runs: their memory is used again for later
    steps. This has the job keep the version meanwhile, compares what was copied with its digests, and takes the newest
    version then, if the job had to let go of it. The copy appears whole or not at all.

    Exit code: 0 if it was copied, 1 if it could not be, 2 if there is no such version.
    """
    from ml_flashpoint.cli.copy import copy as copy_out

    raise typer.Exit(copy_out(source, destination, as_json=json, partial=partial))


@app.command(rich_help_panel=_PANEL)
def export(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE[@STEP]",
            help="A job's base container, or those of several nodes, or the URL of persisted versions; the newest one,"
            " or that STEP.",
        ),
    ],
    to: Annotated[str, typer.Option(metavar="DEST", help="What to make: a folder, or for torch a file.")],
    format: Annotated[str, typer.Option(help="dcp, safetensors, hf or torch.")] = "dcp",
    prefix: Annotated[str, typer.Option(help="Only names that start so, and without it: model. for a model.")] = "",
    name_map: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="JSON file of names by names: only these, each by the other one."),
    ] = None,
    json: Json = False,
) -> None:
    """Write a version as files that other tools read. A running job may be using SOURCE.

    **dcp**: a directory for `dcp.load` with torch's `FileSystemReader`.

    **safetensors**: the tensors, in files named as Hugging Face does, with an index if there are several.

    **hf**: the same, of a model only: what **--prefix** or **--name-map** selects.

    **torch**: one file, a nested dict, for `torch.load`.

    What is read is compared with its digests, and the result appears whole or not at all. A base container has to have
    the parts of all ranks: with pairs of nodes, both have, or give those of several nodes.

    Exit code: 0 if it was exported, 1 if it could not be, 2 if there is no such version or an argument is wrong.
    """
    from ml_flashpoint.cli.export import export as export_out

    raise typer.Exit(export_out(sources, to, format=format, prefix=prefix, name_map=name_map, as_json=json))


@app.command(rich_help_panel=_PANEL)
def persist(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="BASE[@STEP]",
            help="A job's base container, or those of several nodes; the newest version, or that STEP.",
        ),
    ],
    to: Annotated[str, typer.Option(metavar="URL", help="Where to, as in the job's persist=.")],
    deadline_seconds: Deadline = 600.0,
    json: Json = False,
) -> None:
    """Persist a version by hand, also when its job is dead, from what its nodes still hold on this machine.

    It is written as the job would have written it, so that **Flashpoint(..., persist=URL).resume()** takes it. All
    parts must be in the base containers given: each node has those of its own ranks, and the copies that it holds for
    others. What is read is compared with its digests; where a part is damaged, a copy in another base container is
    taken, or else an older version. Nothing at URL is removed, and nothing is written while a job persists there.

    Exit code: 0 if it is there, 1 if it could not be, or parts are missing, 2 if there is no such version.
    """
    from ml_flashpoint.cli.persist import persist as persist_now

    raise typer.Exit(persist_now(sources, to, deadline_s=deadline_seconds, as_json=json))


@app.command(rich_help_panel=_PANEL)
def rm(
    source: Annotated[
        str,
        typer.Argument(
            metavar="BASE|URL[@STEP]",
            help="A job's base container, or the URL of persisted versions: all of it, or the version of that STEP.",
        ),
    ],
    newest: Annotated[
        bool, typer.Option("--newest", help="Also the newest persisted version, which a job would resume from.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    deadline_seconds: Deadline = 600.0,
    json: Json = False,
) -> None:
    """Remove what a job has left in memory on this node, or what it has persisted, or one version; asks first.

    Of a base container: not while a process of the job runs here. Other nodes have folders of their own.

    Of a URL: not while a job persists there, and the newest version that is whole only with **--newest**.

    Only what the job has made goes: a folder that holds anything else stays.

    Exit code: 0 if it is gone, 1 if it could not be removed or a process has it, 2 if there is no such thing.
    """
    from ml_flashpoint.cli.rm import remove

    raise typer.Exit(remove(source, yes=yes, newest=newest, deadline_s=deadline_seconds, as_json=json))
