"""The subcommands for before a job runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from ml_flashpoint.cli.app import Json, app

if TYPE_CHECKING:
    from pathlib import Path

    from rich.text import Text

    from ml_flashpoint.cli.examination import Examined, Finding

_PANEL = "Before a job runs"
_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def _count(text: str) -> float:
    """Return a number that may end with a unit, as in 70B."""
    unit = _UNITS.get(text[-1:].upper())
    try:
        return float(text) if unit is None else float(text[:-1]) * unit
    except ValueError:
        raise typer.BadParameter(f"must be a number such as 70B or 70e9, got {text!r}") from None


@app.command(rich_help_panel=_PANEL)
def plan(
    context: typer.Context,
    params: Annotated[
        float, typer.Option(parser=_count, metavar="COUNT", help="Parameters of the model: 70B, or 70e9.")
    ],
    nodes: Annotated[int, typer.Option(min=1, max=65536, help="Nodes of the job.")],
    ranks: Annotated[int, typer.Option(min=1, max=1024, help="Ranks on each node.")] = 8,
    optimizer: Annotated[str, typer.Option(help="adam, adamw, lion, momentum, muon or sgd.")] = "adam",
    dtype: Annotated[str, typer.Option(help="Dtype of the parameters: bf16, fp16 or fp32.")] = "bf16",
    main_copy: Annotated[
        bool, typer.Option(help="Mixed precision: an fp32 main copy of the parameters, and an fp32 optimizer.")
    ] = True,
    mtbf_hours: Annotated[float, typer.Option(help="Mean hours between failures of the whole job.")] = 24.0,
    replication: Annotated[str, typer.Option(help="pairwise, ring or none.")] = "pairwise",
    keep: Annotated[int, typer.Option(min=1, max=10_000, help="Number of newest versions that stay in memory.")] = 1,
    step_seconds: Annotated[float, typer.Option(help="Seconds of a training step.")] = 10.0,
    restart_seconds: Annotated[float, typer.Option(help="Seconds from a failure until ranks run again.")] = 120.0,
    copy_gbs: Annotated[float, typer.Option(help="GB/s from the device of a rank into memory.")] = 10.0,
    network_gbs: Annotated[float, typer.Option(help="GB/s from a node to its peers.")] = 10.0,
    storage_gbs: Annotated[float, typer.Option(help="GB/s of durable storage, for the whole job.")] = 20.0,
    json: Json = False,
) -> None:
    """Compute the memory that each node of a job needs, the interval between saves, and the goodput.

    The memory is what the job itself requires before it trains, with state and copies spread evenly over ranks. With
    mixed precision, Adam and bf16, a version has 14 bytes for each parameter: 2 of its own, 4 of the main copy, 8 of
    the optimizer.

    Speeds are assumptions: pass your own. **flashpoint status** of a running job shows how long a save blocks the
    loop, and **flashpoint doctor** measures copies between nodes.

    The interval is the one with the lowest cost (Young 1974, Daly 2006). Goodput is the share of time spent on
    training that no failure undoes (Daly's complete model).

    Exit code: 0, or 2 if an argument is invalid.
    """
    from ml_flashpoint.cli.plan import Job, show_plan

    given = {name: value for name, value in context.params.items() if name != "json"}
    show_plan(Job(**given), as_json=json)


@app.command(rich_help_panel=_PANEL)
def doctor(
    base: Annotated[str, typer.Argument(metavar="BASE", help="Base container that the job has, or will have.")],
    megabytes: Annotated[
        int, typer.Option(min=1, max=100_000, help="Megabytes that each rank copies to its peer.")
    ] = 256,
    deadline_seconds: Annotated[
        float, typer.Option(min=1, max=3600, help="The longest that ranks wait for each other.")
    ] = 60.0,
    json: Json = False,
) -> int:
    """Check a node before a job runs: memory, limits, network, clock, versions. Say how to fix each problem.

    If you start it on every node like the job, it also checks the connections, and measures copies between nodes:

        torchrun --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=node0:29400
        --no-python flashpoint doctor BASE

    BASE is not touched, and need not exist. The measured copies are in BASE-doctor, which is removed afterwards.

    Exit code: 0, or 1 if something must be fixed (FAIL), or 2 if BASE is not an absolute path.
    """
    import dataclasses
    import os
    from pathlib import Path

    from ml_flashpoint.cli import output
    from ml_flashpoint.cli.examination import BAD, Examined, examine
    from ml_flashpoint.format.errors import InvalidArgumentError, InvalidNameError
    from ml_flashpoint.format.names import CheckpointContainerId

    try:
        path = Path(str(CheckpointContainerId(base)))
    except InvalidNameError as error:
        raise InvalidArgumentError(error.message, argument="BASE", value=base) from error
    mine = examine(path)
    examined, shows = [Examined("this node", mine)], True
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1") and "RANK" in os.environ:  # a launcher has started others
        examined = _examined_together(path, mine, megabytes, deadline_seconds)
        shows = os.environ["RANK"] == "0" or len(examined) == 1  # rank 0 has the same to show
    bad = any(finding.level == BAD for each in examined for finding in each.findings)
    if shows:
        document = {"base": str(path), "ok": not bad, "examined": [dataclasses.asdict(each) for each in examined]}
        output.show(document, json, *_lines_of(examined))
    return output.DAMAGE if bad else output.OK


def _examined_together(base: Path, mine: tuple[Finding, ...], megabytes: int, deadline_s: float) -> list[Examined]:
    import os

    from ml_flashpoint.cli.examination import BAD, Examined, Finding
    from ml_flashpoint.extras import require
    from ml_flashpoint.format.errors import FlashpointError

    require("pytorch", "torch")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # pages of stacks, of what is a finding here
    from ml_flashpoint.cli.doctor_peers import examine_all

    try:
        return examine_all(base, mine, megabytes=megabytes, deadline_s=deadline_s)
    except FlashpointError as error:
        return [Examined("this node", (*mine, Finding("peers", BAD, error.message, error.hint or "")))]


def _lines_of(examined: list[Examined]) -> Iterator[Text]:
    """Yield the findings. Nodes that have the same ones are shown once."""
    from ml_flashpoint.cli.output import STYLES, line

    shown: dict[tuple[Finding, ...], str] = {}
    for each in examined:
        if (same := shown.setdefault(each.findings, each.name)) != each.name:
            yield line(f"{each.name}: as {same}")
            continue
        yield line(f"{each.name}:")
        for finding in each.findings:
            mark = {"bad": "FAIL"}.get(finding.level, finding.level)
            yield line("  ", (f"{mark:<4}", STYLES[mark]), f" {finding.check}: {finding.text}")
            if finding.mend:
                yield line(f"         -> {finding.mend}")
