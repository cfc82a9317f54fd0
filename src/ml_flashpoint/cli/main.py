"""The `flashpoint` command: its subcommands and their options.

Owns the parsing of the command line and the help. What a subcommand does is in the module of its name, which
is imported when it runs, so that help and `ls` need no torch.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import ml_flashpoint

app = typer.Typer(
    name="flashpoint",
    help="Memory-first checkpoints for PyTorch: look at them, verify them, see them save a job.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_Base = Annotated[
    str, typer.Argument(metavar="BASE", help="A job's base container, on the node whose memory it is in.")
]
_Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE[@STEP]",
        help="A job's base container, or the URL of persisted versions; the newest one, or that STEP.",
    ),
]
_Deadline = Annotated[
    float, typer.Option("--deadline-seconds", min=1, help="Give the store up if nothing happens for so long.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]


def main() -> None:
    """Entry point of the `flashpoint` command."""
    if not hasattr(ml_flashpoint, "DISTRIBUTION"):
        sys.exit(
            f"flashpoint: {ml_flashpoint.__file__} is of another distribution, ml-flashpoint. Run: pip uninstall -y "
            "ml-flashpoint torch-flashpoint, then install torch-flashpoint again"
        )
    app()


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"flashpoint {ml_flashpoint.__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def ls(
    base: Annotated[
        str,
        typer.Argument(
            metavar="BASE|URL",
            help="A job's base container, on the node whose memory it is in; or the URL of persisted versions.",
        ),
    ],
    json: _Json = False,
) -> None:
    """List the versions in BASE, or persisted ones, newest first: steps, ranks, sizes, states.

    Only BASE is looked at, so this is what one node holds. Nothing is locked or changed, and the job may be
    running. Bytes are not read: for that, see **flashpoint verify**.

    A version's state is the first of these that fits:

    **damaged**: a manifest cannot be read, or an object is missing or does not have the size that was
    committed.

    **writing**: not every rank of this node has committed its part. If no rank is running here, the save
    was cut short and will never be used.

    **replicated**: every rank of this node has committed, and the node also holds the copies that it
    should: of every rank of which it holds a copy in any version. Whether other nodes hold copies of this
    node's own parts cannot be seen from here.

    **local**: every rank of this node has committed, and copies of other nodes' parts are not (yet) here.

    A version is **complete** if the parts of all its ranks are on this node, which could then restore it
    alone.

    Persisted versions are **complete**, **incomplete** (being written, or cut short) or **damaged**: a marker
    or a receipt is not what was written, or a part is missing or has another size.

    Exit code: 0 if nothing is damaged, 1 if something is, 2 if BASE is not a base container and no store.
    """
    from ml_flashpoint.cli.ls import list_versions

    raise typer.Exit(list_versions(base, as_json=json))


@app.command()
def status(base: _Base, json: _Json = False) -> None:
    """Show how saving goes on the ranks of this node: newest steps committed, copied and verified; times, failures.

    What is **verified** all ranks have, with all copies: **since** is the training that would be lost now, in
    seconds. The job may be running; nothing is locked or changed.

    A rank is **ok**, **degraded** (copies are missing, ranks do not agree, or what is due is not persisted),
    **silent** (it has saved nothing yet) or **ended**.

    And what the loss of a node would cost now: of this one, and of those whose copies it holds. Steps are those from
    the version that survives up to the newest save; times are estimates, from the newest copies.

    Exit code: 0, 1 if a rank is degraded, 2 if BASE is not a base container.
    """
    from ml_flashpoint.cli.status import show_status

    raise typer.Exit(show_status(base, as_json=json))


@app.command()
def top(
    base: _Base, every: Annotated[float, typer.Option(min=0.1, max=3600.0, help="Seconds between looks.")] = 1.0
) -> None:
    """Show the same again and again, until Ctrl-C."""
    from ml_flashpoint.cli.status import show_top

    raise typer.Exit(show_top(base, every_s=every))


@app.command()
def metrics(
    base: _Base,
    port: Annotated[int, typer.Option(min=0, max=65535, envvar="FLASHPOINT_METRICS_PORT", help="0: any.")] = 9478,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 for all.")] = "127.0.0.1",
) -> None:
    """Serve what **flashpoint status** shows to Prometheus, at /metrics, until SIGTERM or Ctrl-C.

    Run one on each node, beside the job, which may end and be started again meanwhile. Needs `prometheus-client`.

    Exit code: 0, 2 if BASE is not a base container, or if it cannot listen there.
    """
    from ml_flashpoint.cli.metrics import serve

    raise typer.Exit(serve(base, host=host, port=port))


@app.command()
def plan(
    params: Annotated[float, typer.Option(help="Parameters of the model: 70e9.")],
    nodes: Annotated[int, typer.Option(min=1, max=65536, help="Nodes of the job.")],
    ranks: Annotated[int, typer.Option(min=1, max=1024, help="Ranks on each node.")] = 8,
    optimizer: Annotated[str, typer.Option(help="adam, adamw, lion, momentum, muon or sgd.")] = "adam",
    dtype: Annotated[str, typer.Option(help="Of the parameters: bf16, fp16 or fp32.")] = "bf16",
    main_copy: Annotated[bool, typer.Option(help="Mixed precision, with a main copy and an optimizer of fp32.")] = True,
    mtbf_hours: Annotated[float, typer.Option(help="Mean hours between failures of the whole job.")] = 24.0,
    replication: Annotated[str, typer.Option(help="pairwise, ring or none.")] = "pairwise",
    keep: Annotated[int, typer.Option(min=1, max=10_000, help="Newest versions that stay in memory.")] = 1,
    step_seconds: Annotated[float, typer.Option(help="Of a step.")] = 10.0,
    restart_seconds: Annotated[float, typer.Option(help="From a failure until ranks run again.")] = 120.0,
    copy_gbs: Annotated[float, typer.Option(help="GB/s of a rank from its device into memory.")] = 10.0,
    network_gbs: Annotated[float, typer.Option(help="GB/s of a node to its peers.")] = 10.0,
    storage_gbs: Annotated[float, typer.Option(help="GB/s of durable storage, for the whole job.")] = 20.0,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write goodput over the interval as an SVG file.")
    ] = None,
    json: _Json = False,
) -> None:
    """Tell what a job will need and gain: memory of each node, the mount, how often to save, goodput with and without.

    The memory is what the job itself asks for before it trains, with state and copies spread evenly over ranks. With
    mixed precision, Adam and bf16, a parameter is 14 bytes of a version: 2 of its own, 4 of the main copy, 8 of the
    optimizer.

    Speeds are assumed and not measured: give your own. A running job tells with
    **flashpoint status** for how long a save holds the loop.

    The interval is the one that costs least (Young 1974, Daly 2006), goodput the share of time that is training which
    no failure undoes (Daly's complete model).

    Exit code: 0, 2 if an argument is unusable.
    """
    from ml_flashpoint.cli.plan import Job
    from ml_flashpoint.cli.plan import plan as show_plan

    job = Job(
        params=params,
        optimizer=optimizer,
        dtype=dtype,
        main_copy=main_copy,
        nodes=nodes,
        ranks=ranks,
        mtbf_hours=mtbf_hours,
        replication=replication,
        keep=keep,
        step_seconds=step_seconds,
        restart_seconds=restart_seconds,
        copy_gbs=copy_gbs,
        network_gbs=network_gbs,
        storage_gbs=storage_gbs,
    )
    raise typer.Exit(show_plan(job, plot=plot, as_json=json))


@app.command()
def doctor(
    base: Annotated[str, typer.Argument(metavar="BASE", help="The base container that a job has, or will have.")],
    megabytes: Annotated[int, typer.Option(min=1, max=100_000, help="That each rank copies to its peer.")] = 256,
    deadline_seconds: Annotated[float, typer.Option(min=1, max=3600, help="For which ranks wait for others.")] = 60.0,
    json: _Json = False,
) -> None:
    """Examine a node before a job runs: memory, limits, network, clock, versions; and say how to mend what is amiss.

    Launched on every node as the job is, it also has the nodes reach each other, and measures how fast copies are:

        torchrun --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=node0:29400
        --no-python flashpoint doctor BASE

    BASE is left alone: what is measured lies in BASE-doctor meanwhile.

    Exit code: 0, 1 if there is something that must be mended, 2 if BASE is no absolute path.
    """
    from ml_flashpoint.cli.doctor.command import doctor as examine

    raise typer.Exit(examine(base, megabytes=megabytes, deadline_s=deadline_seconds, as_json=json))


@app.command()
def report(
    events: Annotated[list[str], typer.Argument(metavar="EVENTS...", help="Files that FLASHPOINT_EVENTS named.")],
    output: Annotated[str, typer.Option("--output", "-o", help="The page to write.")] = "report.html",
    json: _Json = False,
) -> None:
    """Make one page of a job's events: time held, lag, recoveries, failures; for any browser, and to send around.

    The page loads nothing and runs nothing. Give the files of all ranks, also of several lives of the job. Lines that
    are no events are left out and counted.

    Exit code: 0, 2 if there is no event to read or the page cannot be written.
    """
    from ml_flashpoint.cli.report.command import report as make_report

    raise typer.Exit(make_report(events, to=output, as_json=json))


@app.command()
def verify(
    source: Annotated[
        str,
        typer.Argument(
            metavar="BASE|URL[@STEP]",
            help="A job's base container, or the URL of persisted versions; or one STEP of it.",
        ),
    ],
    json: _Json = False,
    threads: Annotated[int, typer.Option(min=1, max=64, help="Blocks to read at the same time.")] = 2,
) -> None:
    """Read every object in BASE, or of persisted versions, and compare it with its digests; name the files that differ.

    Nothing is locked or changed, and the job may be running: what it prunes meanwhile is shown as pruned, or removed.

    Exit code: 0 if all is as it was saved, 1 if something is not, 2 if there is no such base container, store or step.
    """
    from ml_flashpoint.cli.verify import verify_base

    raise typer.Exit(verify_base(source, as_json=json, threads=threads))


@app.command()
def copy(
    source: Annotated[
        str, typer.Argument(metavar="BASE[@STEP]", help="A job's base container; the newest version, or that STEP.")
    ],
    destination: Annotated[str, typer.Argument(metavar="DEST", help="Folder in which the version gets its own.")],
    json: _Json = False,
    partial: Annotated[bool, typer.Option("--partial", help="Also a version that is not whole on this node.")] = False,
) -> None:
    """Copy a version out of BASE, which a running job may be using, to DEST/step-N_ckpt.

    Never copy these files with other tools while the job runs: their memory is used again for later steps. This
    has the job keep the version meanwhile, compares what was copied with its digests, and takes the newest version
    then, if the job had to let go of it. The copy appears whole or not at all.

    Exit code: 0 if it was copied, 1 if it could not be, 2 if there is no such version.
    """
    from ml_flashpoint.cli.copy import copy as copy_out

    raise typer.Exit(copy_out(source, destination, as_json=json, partial=partial))


@app.command()
def export(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE[@STEP]...",
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
    json: _Json = False,
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


@app.command()
def persist(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="BASE[@STEP]...",
            help="A job's base container, or those of several nodes; the newest version, or that STEP.",
        ),
    ],
    to: Annotated[str, typer.Option(metavar="URL", help="Where to, as in the job's persist=.")],
    deadline_seconds: _Deadline = 600.0,
    json: _Json = False,
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


@app.command("import")
def import_(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="A DCP directory, a safetensors file, or a folder of those.")
    ],
    to: Annotated[str, typer.Option(metavar="URL", help="Where to, as in the job's persist=.")],
    step: Annotated[int, typer.Option(min=0, help="The step that the job goes on from.")],
    prefix: Annotated[
        str, typer.Option(help="Put before the names of safetensors: model. for a model that is tracked as model.")
    ] = "",
    deadline_seconds: _Deadline = 600.0,
    json: _Json = False,
) -> None:
    """Make what other tools wrote a persisted version that a job starts from, on any number of ranks.

    The job starts with **persist=URL** and an empty base container. The version counts as newer than all there are.
    Nothing of SOURCE is trusted: no types are loaded but those of DCP's metadata and plain values.

    Exit code: 0 if it was imported, 1 if it could not be, 2 if there is no such thing or an argument is wrong.
    """
    from ml_flashpoint.cli.importing import import_ as import_now

    raise typer.Exit(import_now(source, to, step, prefix=prefix, deadline_s=deadline_seconds, as_json=json))


@app.command()
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
    deadline_seconds: _Deadline = 600.0,
    json: _Json = False,
) -> None:
    """Remove what a job has left in memory on this node, or what it has persisted, or one version; asks first.

    Of a base container: not while a process of the job runs here. Other nodes have folders of their own.

    Of a URL: not while a job persists there, and the newest version that is whole only with **--newest**.

    Only what the job has made goes: a folder that holds anything else stays.

    Exit code: 0 if it is gone, 1 if it could not be removed or a process has it, 2 if there is no such thing.
    """
    from ml_flashpoint.cli.rm import remove

    raise typer.Exit(remove(source, yes=yes, newest=newest, deadline_s=deadline_seconds, as_json=json))


_Prefix = Annotated[str, typer.Option(help="Only names that start so.")]


@app.command()
def inspect(source: _Source, prefix: _Prefix = "", json: _Json = False) -> None:
    """List what is in a version: names, dtypes, shapes, bytes, and the ranks that have saved it.

    The parts of all ranks must be on this node. The job may be running.

    Exit code: 0 if it could be read, 1 if it is damaged or went meanwhile, 2 if there is no such version.
    """
    from ml_flashpoint.cli.inspect import inspect as list_items

    raise typer.Exit(list_items(source, prefix=prefix, as_json=json))


@app.command()
def diff(one: _Source, other: _Source, prefix: _Prefix = "", json: _Json = False) -> None:
    """Tell which tensors of two versions differ, in how many elements, and by how much at most.

    Compared are bits: a NaN is the same as itself, and 0.0 is not -0.0. The parts of all ranks must be on this node.

    Exit code: 0 if nothing differs, 1 if something does or could not be read, 2 if there is no such version.
    """
    from ml_flashpoint.cli.inspect import diff as compare

    raise typer.Exit(compare(one, other, prefix=prefix, as_json=json))


@app.command()
def demo(
    json: _Json = False,
    steps: Annotated[int, typer.Option(min=10, max=10_000, help="Steps of each of the two runs.")] = 30,
    seed: Annotated[int, typer.Option(min=0, help="Decides on weights, data, victims and moments.")] = 0,
    keep: Annotated[bool, typer.Option("--keep", help="Leave checkpoints and output behind, and say where.")] = False,
) -> None:
    """Train a small GPT on two nodes, kill a rank and then a whole node, and compare the weights in the end.

    This machine plays both nodes, each with two ranks, an elastic agent and a folder in memory of its own. The
    job (FSDP2, gloo) makes a checkpoint at every step. It runs once without faults and once with: SIGKILL to one
    rank, then SIGKILL to every process of one node, whose memory is deleted and whose place a new node takes.

    Exit code: 0 if the faults were real, each recovery came from memory, and weights and optimizer are in the end
    those of the fault-free run, bit for bit; 1 if anything of it does not hold; 2 if torch is missing; 130 if
    interrupted.
    """
    from ml_flashpoint.cli.demo.command import run_demo

    raise typer.Exit(run_demo(steps=steps, seed=seed, as_json=json, keep=keep))


if __name__ == "__main__":
    main()
