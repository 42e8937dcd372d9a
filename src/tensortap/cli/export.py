"""`tensortap export`: a recording's tensors as plain files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .common import (
    Folder,
    JsonOption,
    MaybeText,
    OverwriteOption,
    PartialOption,
    note,
    open_recording,
    print_json,
    print_notes,
    say,
)


def export(
    folder: Folder,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="OUT", help="The folder, or for npz the file."),
    ],
    layout: Annotated[str, typer.Option("--layout", help="pt, npy or npz.")] = "pt",
    layer: Annotated[
        MaybeText,
        typer.Option("--layer", help="npz: which layer (default the first block). pt: it alone."),
    ] = None,
    mode: Annotated[
        MaybeText,
        typer.Option("--mode", help="npy, npz: the mode's name (default as recorded)."),
    ] = None,
    overwrite: OverwriteOption = False,
    partial: PartialOption = False,
    json: JsonOption = False,
) -> None:
    """Write tensors as .pt, .npy or .npz files, and say what these cannot hold."""
    from ..recording import layouts
    from ..reporting.progress import progress
    from ..reporting.text import layer_name, plural

    chosen = layouts.get(layout)
    recording = open_recording(folder, partial=partial)
    with progress("Exporting") as advance:
        options = layouts.ExportOptions(mode, layer, overwrite, progress=advance)
        exported = chosen.export(recording, output, options)
    if json:
        print_json(exported.to_dict())
    else:
        say(f"Wrote {plural(len(exported.files), 'file')} to {exported.path}")
    for item in exported.skipped:
        note(f"Skipped '{layer_name(item.layer)}': {item.reason}")
    if exported.left_out:
        note(f"The layout {layout} cannot hold: {'; '.join(map(str, exported.left_out))}.")
    print_notes(exported.notes)
