"""`tensortap replay`: one live layer on its recorded inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from .aside import aside
from .common import (
    DONE,
    TROUBLE,
    BatchOption,
    CallOption,
    JsonOption,
    MaybePath,
    OverwriteOption,
    PartialOption,
    note,
    print_json,
    print_notes,
)
from .compare import DIFFERS
from .targeting import (
    CalibOption,
    DeviceOption,
    DtypeOption,
    EvalOption,
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
    from pathlib import Path

__all__ = ["replay"]

_LARGE = 100 * 10**6


def replay(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="The recording, with the layer's inputs and outputs."),
    ],
    layer: Annotated[str, typer.Argument(metavar="LAYER", help="One layer of the recording.")],
    target: TargetArgument,
    batch: BatchOption = None,
    call: CallOption = None,
    script: Annotated[
        MaybePath,
        typer.Option(
            "--script",
            metavar="FILE.py",
            help="Also write a script that shows the same without tensortap, the layer's inputs "
            "and weights beside it.",
        ),
    ] = None,
    overwrite: OverwriteOption = False,
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
    partial: PartialOption = False,
    json: JsonOption = False,
) -> int:
    """Run one layer on its recorded inputs, and compare. Exit 0: same, 1: diverged, 2: trouble."""
    from ..comparing.replay import replay as replay_layer
    from ..comparing.replay.script import check_room

    if script is not None:
        check_room(script, overwrite)
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
    )
    with aside():
        found = replay_layer(run, layer, loaded, batch=batch, call=call, partial=partial)
    if not json:
        from ..reporting.console import stdout
        from ..reporting.replays import print_replay

        print_replay(stdout(), found)
    print_notes(found.notes)
    files: list[Path] = []
    try:
        if script is not None:
            with aside():
                files = found.to_script(script, overwrite=overwrite)
            _say_files(files)
    finally:  # the verdict stands, whether it could be written as a script or not
        if json:
            print_json({**found.to_dict(), "script": [str(file) for file in files]})
    if found.verdict not in ("identical", "within", "diverged"):
        return TROUBLE
    return DONE if found.same else DIFFERS


def _say_files(files: list[Path]) -> None:
    from ..reporting.text import size

    sizes = {file: file.stat().st_size for file in files}
    note(f"Wrote {', '.join(f'{file} ({size(n)})' for file, n in sizes.items())}.")
    if sum(sizes.values()) > _LARGE:
        note("The layer's weights are large: mind what you attach to a report.")
