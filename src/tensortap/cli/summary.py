"""`tensortap summary`: every mode in a folder against one of them."""

from __future__ import annotations

from typing import Annotated

import typer

from .common import (
    DONE,
    TROUBLE,
    JsonOption,
    LayersOption,
    MaybeText,
    PartialOption,
    note,
    print_json,
)
from .compare import FloorOption, MapOption, OnDeviceOption, PresetOption, RuleOption


def summary(
    folder: Annotated[
        str, typer.Argument(metavar="FOLDER", help="The folder that holds a recording a mode.")
    ],
    reference: Annotated[
        str, typer.Option("--reference", "-r", metavar="MODE", help="The mode to trust.")
    ] = "fp32",
    sort: Annotated[
        MaybeText,
        typer.Option(
            "--sort",
            metavar="METRIC",
            help="Sort by a column (mode, first_layer_mse, first_layer_mae, last_layer_mse, "
            "last_layer_mae, mean_correlation, grade, same, same_input, first_divergence) or by "
            "any metric of the last layer, as cosine.",
        ),
    ] = None,
    descending: Annotated[
        bool, typer.Option("--descending", help="Sort from large to small.")
    ] = False,
    save: Annotated[
        bool,
        typer.Option(
            "--save",
            help="Write each comparison and the table to FOLDER/comparisons/ as JSON.",
        ),
    ] = False,
    layers: LayersOption = None,
    floor: FloorOption = None,
    rules: RuleOption = None,
    maps: MapOption = None,
    preset: PresetOption = None,
    partial: PartialOption = False,
    device: OnDeviceOption = None,
    json: JsonOption = False,
) -> int:
    """Compare every mode in a folder with the reference, in a table. Exit 0 when it is made."""
    from ..comparing.mode_folders import COMPARISONS
    from ..comparing.modes import compare_modes
    from ..errors import OptionError
    from ..reporting.progress import progress

    if descending and sort is None:
        raise OptionError("--descending needs --sort METRIC: it says by what to sort.")
    with progress("Comparing") as advance:
        modes = compare_modes(
            folder,
            reference,
            layers=layers or None,
            floor=floor,
            rules=rules or (),
            map=maps or (),
            preset=preset,
            partial=partial,
            device=device,
            progress=advance,
        )
    if sort is not None:
        modes = modes.sorted_by(sort, descending=descending)
    place = f"{modes.folder}/{COMPARISONS}"
    saved = modes.save(place) if save else []
    if json:
        for warning in modes.warnings:
            typer.echo(f"warning: {' '.join(warning.split())}", err=True)
        print_json(modes.to_dict())
    else:
        from ..reporting.comparisons import print_modes
        from ..reporting.console import stdout

        print_modes(stdout(), modes)
    for path in saved:
        note(f"Wrote {place}/{path.name}")
    return DONE if any(not row.problem for row in modes.modes) else TROUBLE
