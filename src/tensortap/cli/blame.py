"""`tensortap blame`: which layer makes the error at a model's output."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from .aside import aside
from .common import (
    DONE,
    INTERRUPTED,
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
    EvalOption,
    InputIdsOption,
    InputsFromOption,
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
    from ..comparing.blame.plan import Plan
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
        Optional[bool],  # noqa: UP045
        typer.Option(
            "--bisect/--no-bisect",
            help="Halve the chain of layers: few runs, fewer numbers. By default where all would "
            "take more than ten minutes.",
        ),
    ] = None,
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
    evaluate: EvalOption = False,
    sets: SetOption = None,
    prompts: PromptOption = None,
    input_ids: InputIdsOption = None,
    inputs_from: InputsFromOption = None,
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
    from ..comparing.blame.results import BlameInterrupted
    from ..reporting.progress import progress

    given = bool(prompts or inputs_from) or input_ids is not None
    with TemporaryDirectory(prefix="tensortap-") as folder:
        if target.startswith("hf:") and not given:
            inputs_from = _recorded(reference, Path(folder))
        loaded = chosen_target(
            target,
            mode=mode,
            calib=calib,
            evaluate=evaluate,
            seq_len=seq_len,
            samples=samples,
            device=device,
            dtype=dtype,
            seed=seed,
            sets=sets,
            prompts=prompts,
            input_ids=input_ids,
            inputs_from=inputs_from,
        )
    code: int | None = None
    told: list[str] = []

    def say_plan(plan: Plan) -> None:
        if plan.worth_saying:
            told.append(str(plan))
            print_notes(told)

    try:
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
                plan=say_plan,
            )
    except BlameInterrupted as stopped:
        found, code = stopped.blame, INTERRUPTED
    if html is not None:
        found.to_html(html)
    _print(found, full=full, as_json=json)
    print_notes(text for text in found.notes if text not in told)
    if html is not None:
        note(f"The page is at {html}.")
    if code is not None:
        typer.echo("tensortap: interrupted. What was known by then is above.", err=True)
        return code
    return DONE if found.same else DIFFERS


def _recorded(reference: str, folder: Path) -> list[Path]:
    """The inputs of the reference as files, one for each batch."""
    from safetensors.torch import save_file

    from ..comparing.blame.inputs import missing_inputs, recorded_inputs
    from ..comparing.checks import opened

    run = opened(reference, False)
    batches = recorded_inputs(run)
    files: list[Path] = []
    for number, batch in enumerate(batches or ()):
        if not isinstance(batch, dict):
            batches = None
            break
        files.append(folder / f"{number}.safetensors")
        save_file({name: tensor.contiguous() for name, tensor in batch.items()}, files[-1])
    if batches is None:
        raise missing_inputs(run, "give --prompt, --input-ids or --inputs-from")
    return files


def _print(found: Blame, *, full: bool, as_json: bool) -> None:
    if as_json:
        for warning in found.warnings:
            typer.echo(f"warning: {' '.join(warning.split())}", err=True)
        print_json(found.to_dict())
        return
    from ..reporting.blame import print_blame
    from ..reporting.console import stdout

    print_blame(stdout(), found, full=full)
