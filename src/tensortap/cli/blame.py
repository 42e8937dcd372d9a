"""`tensortap blame`: which layer makes the error at a model's output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from .aside import aside
from .common import (
    DONE,
    JsonOption,
    LayersOption,
    MaybePath,
    MaybeText,
    note,
    print_json,
    print_notes,
)
from .compare import DIFFERS, FloorOption, MapOption
from .targeting import (
    CalibOption,
    DeviceOption,
    DtypeOption,
    InputIdsOption,
    ModeOption,
    PromptOption,
    SamplesOption,
    SeedOption,
    SeqLenOption,
    SetOption,
    TargetArgument,
    chosen_target,
)

if TYPE_CHECKING:
    from ..comparing.blame.results import Blame

__all__ = ["blame"]


def blame(
    reference: Annotated[
        str,
        typer.Argument(
            metavar="REFERENCE", help="The recording to trust, with inputs (record --inputs)."
        ),
    ],
    target: TargetArgument,
    layers: LayersOption = None,
    bisect: Annotated[
        bool,
        typer.Option("--bisect", help="Halve the chain of layers: few runs, fewer numbers."),
    ] = False,
    final: Annotated[
        MaybeText,
        typer.Option(
            "--final", metavar="LAYER", help="The layer whose output counts. Default: the model's."
        ),
    ] = None,
    floor: FloorOption = None,
    maps: MapOption = None,
    mode: ModeOption = None,
    calib: CalibOption = None,
    seq_len: SeqLenOption = None,
    samples: SamplesOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    seed: SeedOption = None,
    sets: SetOption = None,
    prompts: PromptOption = None,
    input_ids: InputIdsOption = None,
    full: Annotated[
        bool, typer.Option("--all", help="List every layer, also of a long model.")
    ] = False,
    html: Annotated[
        MaybePath, typer.Option("--html", metavar="FILE", help="Also write a page to look at.")
    ] = None,
    json: JsonOption = False,
) -> int:
    """Say which layer makes the final error. Exit 0: no error to speak of, 1: there is one, 2: \
trouble."""
    from ..comparing.blame.engine import blame as blame_layers
    from ..reporting.progress import progress

    loaded = chosen_target(
        target,
        mode=mode,
        calib=calib,
        seq_len=seq_len,
        samples=samples,
        device=device,
        dtype=dtype,
        seed=seed,
        sets=sets,
        prompts=prompts,
        input_ids=input_ids,
    )
    with progress("Running the model") as advance, aside():
        found = blame_layers(
            reference,
            loaded,
            layers=list(layers) if layers else "blocks",
            bisect=bisect,
            final=final,
            floor=floor,
            map=maps or (),
            progress=advance,
        )
    if html is not None:
        found.to_html(html)
    _print(found, full=full, as_json=json)
    print_notes(found.notes)
    if html is not None:
        note(f"The page is at {html}.")
    return DONE if found.same else DIFFERS


def _print(found: Blame, *, full: bool, as_json: bool) -> None:
    if as_json:
        for warning in found.warnings:
            typer.echo(f"warning: {' '.join(warning.split())}", err=True)
        print_json(found.to_dict())
        return
    from ..reporting.blame import print_blame
    from ..reporting.console import stdout

    print_blame(stdout(), found, full=full)
