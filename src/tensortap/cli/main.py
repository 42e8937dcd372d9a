"""The `tensortap` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from .. import __version__
from .blame import blame
from .check import check
from .common import guarded
from .compare import compare
from .demo import demo
from .doctor import doctor
from .export import export
from .import_ import import_
from .instrument import instrument
from .plot import plot
from .record import record
from .replay import replay
from .show import show
from .summary import summary

__all__ = ["app", "main"]

app = typer.Typer(
    name="tensortap",
    help="Record, look at and compare the tensors inside a neural network, layer by layer.",
    epilog="Start with: tensortap demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for _name, _verb in (
    ("record", record),
    ("show", show),
    ("check", check),
    ("compare", compare),
    ("blame", blame),
    ("replay", replay),
    ("summary", summary),
    ("plot", plot),
    ("export", export),
    ("import", import_),
    ("instrument", instrument),
    ("doctor", doctor),
    ("demo", demo),
):
    app.command(_name)(guarded(_verb))


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tensortap {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Record, look at and compare the tensors inside a neural network, layer by layer."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; leaves through SystemExit with the exit code."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:  # a terminal that cannot show a letter gets an escape for it
            reconfigure(errors="backslashreplace")
    app(args=None if arguments is None else list(arguments), prog_name="tensortap")
