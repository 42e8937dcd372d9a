"""`tensortap plot`: one recorded tensor as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .common import (
    BatchOption,
    CallOption,
    Folder,
    JsonOption,
    LeafOption,
    PartialOption,
    PortOption,
    open_recording,
    print_json,
    print_notes,
    say,
)


def plot(
    folder: Folder,
    layer: Annotated[str, typer.Argument(metavar="LAYER", help="The layer's name or alias.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The picture, as l3.png.")
    ],
    port: PortOption = None,
    batch: BatchOption = None,
    call: CallOption = None,
    leaf: LeafOption = None,
    partial: PartialOption = False,
    json: JsonOption = False,
) -> None:
    """Draw a layer: distribution, first 1000 values, heat map of the first 100 features."""
    from ..selection.recorded import choose_port, choose_records, find_layer
    from ..reporting.plots import plot_record
    from ..reporting.progress import progress

    recording = open_recording(folder, partial=partial)
    records = choose_records(
        find_layer(recording, layer).records,
        port=choose_port(port),
        leaf=leaf,
        batch=batch,
        call=call,
    )
    record = next((r for r in records if r.port == "output"), records[0])
    with progress("Drawing"):
        plotted = plot_record(record, output)
    if json:
        print_json(
            {
                "path": plotted.path,
                "layer": record.layer,
                "port": record.port,
                "leaf": record.leaf,
                "batch": record.batch,
                "call": record.call,
                "notes": list(plotted.notes),
            }
        )
    else:
        say(plotted.path)
    print_notes(plotted.notes)
