"""`tensortap import`: a tree of tensor files as a recording."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .common import JsonOption, MaybeText, OverwriteOption, print_json, say


def import_(
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="A folder of .pt or .npy files, or an .npz file.")
    ],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="DIR", help="The recording's folder or URL.")
    ],
    layout: Annotated[str, typer.Option("--layout", help="auto, pt, npy or npz.")] = "auto",
    mode: Annotated[
        MaybeText,
        typer.Option("--mode", help="Which mode of the tree; for pt, the mode's name."),
    ] = None,
    overwrite: OverwriteOption = False,
    json: JsonOption = False,
) -> None:
    """Turn a tree of .pt, .npy or .npz files into a recording. Runs no code from a file."""
    from ..recording.layouts import import_tree
    from ..reporting.progress import progress
    from ..reporting.text import plural

    with progress("Importing") as advance:
        results = import_tree(
            source, output, layout=layout, mode=mode, overwrite=overwrite, progress=advance
        )
    if json:
        print_json({"recordings": [result.to_dict() for result in results]})
        return
    for result in results:
        layers, records = plural(result.layers, "layer"), plural(result.records, "record")
        of_mode = f" of mode {result.mode}" if result.mode else ""
        say(f"Imported {layers}, {records}{of_mode} to {result.path}")
