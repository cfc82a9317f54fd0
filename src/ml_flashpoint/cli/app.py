"""The `flashpoint` command itself, and the arguments that its subcommands share.

A subcommand is one function of `looking`, `moving` or `planning`. It prints, returns an exit code or None, and raises
`FlashpointError`. It imports as it runs, so that help needs nothing, and `ls` no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

import ml_flashpoint


class Command(TyperCommand):
    """A subcommand. Typer prints its help and errors of usage before it runs."""

    def invoke(self, ctx: Any) -> Any:
        """Run it: clean its text, and turn errors and results into exit codes."""
        from ml_flashpoint.cli import output
        from ml_flashpoint.format.errors import FlashpointError

        with output.cleaned():
            try:
                code = super().invoke(ctx)
            except FlashpointError as error:
                code = output.fail(error, as_json=ctx.params.get("json", False))
        raise typer.Exit(code or 0)


class _App(typer.Typer):
    def command(self, *args: Any, **options: Any) -> Callable[[Any], Any]:
        return super().command(*args, cls=Command, **options)


app = _App(
    name="flashpoint",
    help="Memory-first checkpoints for PyTorch: look at them, check, copy, export, persist and remove them; plan a job,"
    " and check its nodes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Base = Annotated[str, typer.Argument(metavar="BASE", help="Base container (folder) of a job on this node.")]
Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE[@STEP]",
        help="Base container of a job, or URL of persisted versions. Without @STEP, the newest version.",
    ),
]
Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE[@STEP]",
        help="Base container of a job, or base containers of several nodes, or URL of persisted versions. Without"
        " @STEP, the newest version.",
    ),
]
Deadline = Annotated[
    float, typer.Option("--deadline-seconds", min=1, help="Give up if the store makes no progress for this time.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
Prefix = Annotated[str, typer.Option(help="Only items whose names start with this.")]


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
