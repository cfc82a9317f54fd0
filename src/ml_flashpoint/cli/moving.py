"""The subcommands that copy, export, persist and remove versions."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ml_flashpoint.cli.app import Deadline, Json, Source, Sources, app

_PANEL = "Move"


@app.command(rich_help_panel=_PANEL)
def copy(
    source: Source,
    destination: Annotated[
        str, typer.Argument(metavar="DEST", help="Folder. The version is copied to DEST/step-N_ckpt.")
    ],
    json: Json = False,
    partial: Annotated[
        bool, typer.Option("--partial", help="Also copy a version that lacks parts on this node.")
    ] = False,
) -> None:
    """Copy a version from memory or a durable store to DEST/step-N_ckpt. The job may be running.

    While a job runs, never copy its files with other tools: the job overwrites them with later steps. This command
    locks the version, compares the copy with its digests, and starts again with the newest version if the job had
    already removed this one. The copy appears once it is complete.

    Exit code: 0 if it was copied, 1 if it could not be, 2 if there is no such version.
    """
    from ml_flashpoint.cli import output
    from ml_flashpoint.cli.view import split_all
    from ml_flashpoint.tools.copy import copy_version

    (base,), step = split_all([source])
    with output.progress("copying") as progress:
        copied = copy_version(base, destination, step, partial=partial, progress=progress)
    output.show({"base": base, "copy": str(copied)}, json, f"copied to {copied}")


@app.command(rich_help_panel=_PANEL)
def export(
    sources: Sources,
    to: Annotated[str, typer.Option(metavar="DEST", help="Folder to write; a file for the format torch.")],
    format: Annotated[str, typer.Option(help="dcp, safetensors, hf or torch.")] = "dcp",
    prefix: Annotated[
        str, typer.Option(help="Export only names that start with this, and remove it: model. for a model.")
    ] = "",
    name_map: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="JSON file {name in the version: new name}: export only these names, renamed."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Write a version as files that other tools read. The job may be running.

    **dcp**: a directory for `dcp.load` with torch's `FileSystemReader`.

    **safetensors**: the tensors, in files with Hugging Face's names, with an index if there are several.

    **hf**: the same for a model only: the names that **--prefix** or **--name-map** selects.

    **torch**: one file with a nested dict, for `torch.load`.

    Every block is compared with its digest, and the output appears once it is complete. The parts of all ranks are
    needed: each node of a pair has them; otherwise give the base containers of several nodes.

    Exit code: 0 if it was exported, 1 if it could not be, 2 if there is no such version or an argument is wrong.
    """
    import sys

    from ml_flashpoint.cli import output
    from ml_flashpoint.cli.view import split_all
    from ml_flashpoint.tools.export import export_version

    bases, step = split_all(sources)
    names = None if name_map is None else _names_in(name_map)
    with output.progress("exporting") as progress:
        made = export_version(bases, to, step, format=format, prefix=prefix, names=names, progress=progress)
    told = {"base": ", ".join(sources), "export": str(made.path), "format": format, "step": made.step}
    told |= {"tensors": made.tensors, "bytes": made.nbytes, "left_out": made.left_out}
    output.show(told, json, f"exported step {made.step} to {made.path}: {output.plural(made.tensors, 'tensor')}")
    if made.left_out:
        print(f"left out, because the format cannot hold it: {', '.join(made.left_out)}", file=sys.stderr)


def _names_in(path: str) -> dict[str, str]:
    """Return the new names, by name, from a file with one JSON object."""
    import json

    from ml_flashpoint.format.errors import InvalidArgumentError

    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
            raise ValueError("not a JSON object of new names by name")
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"cannot be read: {error}", argument="--name-map", value=path) from error
    return found


@app.command(rich_help_panel=_PANEL)
def persist(
    sources: Sources,
    to: Annotated[str, typer.Option(metavar="URL", help="URL or absolute path, as in the job's persist=.")],
    deadline_seconds: Deadline = 600.0,
    json: Json = False,
) -> None:
    """Write a version from memory to a durable store, also if its job is dead.

    A job with **Flashpoint(..., persist=URL).resume()** then resumes from it. The base containers must have the parts
    of all ranks: each node has the parts of its ranks, and the copies that it holds for others. Every block is
    compared with its digest. If a part is damaged, a copy in another base container is used, or an older version.
    Nothing at URL is removed, and nothing is written while a job persists there.

    Exit code: 0 if it is persisted, 1 if it could not be or parts are missing, 2 if there is no such version.
    """
    from ml_flashpoint.cli import output
    from ml_flashpoint.cli.view import split_all
    from ml_flashpoint.tools.copy import persist_version

    bases, step = split_all(sources)
    with output.progress("persisting") as progress:
        made = persist_version(bases, to, step, progress=progress, deadline_s=deadline_seconds)
    version = made.version
    told: dict[str, Any] = {"base": ", ".join(sources), "url": made.url, "step": version.step}
    told |= {"save_id": version.save_id, "world_size": version.world_size, "bytes": made.nbytes}
    told |= {"was_there": made.was_there, "newer": made.newer}
    what = "was there already, whole" if made.was_there else f"is persisted, {output.bytes_text(made.nbytes)}"
    lines = [f"step {version.step} of {output.plural(version.world_size, 'rank')} {what}: {made.url}"]
    if made.newer is not None:
        lines.append(f"a job that resumes from there takes step {made.newer}, which was saved later")
    output.show(told, json, *lines)


@app.command(rich_help_panel=_PANEL)
def rm(
    source: Annotated[
        str,
        typer.Argument(
            metavar="BASE|URL[@STEP]",
            help="Base container of a job, or URL of persisted versions. Without @STEP, all versions.",
        ),
    ],
    newest: Annotated[
        bool,
        typer.Option(
            "--newest", help="Also remove the newest complete persisted version, from which a job would resume."
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    deadline_seconds: Deadline = 600.0,
    json: Json = False,
) -> None:
    """Free the memory of a job on this node, or remove persisted versions, or one version. Ask first.

    A base container is not removed while a process of the job runs on this node. Other nodes have their own.

    Persisted versions are not removed while a job persists there, and the newest complete one only with **--newest**.

    Only files that the job created are removed: a folder with other files stays.

    Exit code: 0 if it is removed, 1 if it could not be or a process uses it, 2 if there is no such thing.
    """
    import os
    import sys
    from pathlib import Path

    from ml_flashpoint.cli import output
    from ml_flashpoint.cli.view import existing, memory_of, split
    from ml_flashpoint.format.errors import InvalidArgumentError
    from ml_flashpoint.tools.removal import remove_versions

    path, step = split(source)
    store = existing(path)
    if newest and not store.durable:
        raise InvalidArgumentError("is only for persisted versions", argument="--newest", value=newest)
    lines = _persisted(path, step, newest, deadline_seconds) if store.durable else _in_memory(path, step)
    if not yes:
        if json or not sys.stdin.isatty():
            hint = "stdin is not a terminal, or --json is given: pass --yes"
            raise InvalidArgumentError(
                "the command cannot ask for confirmation", argument="SOURCE", value=source, hint=hint
            )
        print("\n".join([store.path + ":", *lines]))
        typer.confirm("Remove this? It cannot be undone", abort=True, err=True)
    base, told = Path(store.path), dict[str, Any](base=store.path)
    before = 0 if store.durable else memory_of(base)
    told["versions"] = removed = remove_versions(path, step, newest=newest, deadline_s=deadline_seconds)
    freed, left = "", list[str]()
    if not store.durable:
        left = sorted(os.listdir(base)) if step is None and base.exists() else []
        told |= {"freed_bytes": before - memory_of(base), "left": left}
        freed = f", {output.bytes_text(told['freed_bytes'])}"
    output.show(told, json, f"removed {', '.join(removed) or 'no versions'}{freed}: {store.path}")
    if left:
        print(f"not removed, because the job did not create it: {', '.join(left)}", file=sys.stderr)


def _persisted(url: str, step: int | None, newest: bool, deadline_s: float) -> list[str]:
    """Describe what would be removed of a durable store."""
    from ml_flashpoint.tools.removal import removable

    lines = []
    chosen, resumed = removable(url, step, newest=newest, deadline_s=deadline_s)
    for version in chosen:
        mark = ", the newest that is complete" if version.folder == resumed else ""
        lines.append(f"  {version.folder}{mark}{'' if version.counts or version.problem else ', not complete'}")
    return lines


def _in_memory(base: str, step: int | None) -> list[str]:
    """Describe what would be removed of a base container. Raise a `JobInUseError` if its job runs."""
    from ml_flashpoint.cli import output
    from ml_flashpoint.cli.view import read
    from ml_flashpoint.format.errors import JobInUseError

    view = read(base)
    if view.live:
        raise JobInUseError(output.running_text(view.live), path=view.path, hint="end the job first")
    size = output.bytes_text(view.resident_bytes)
    lines = [f"  all files of the job, {size} of memory"] if step is None else []
    for version in view.versions:
        if step in (None, version.step):
            whole = "whole" if version.complete else "lacks parts on this node"
            lines.append(f"  {version.name}: {output.bytes_text(version.bytes)}, {whole}")
    return lines
