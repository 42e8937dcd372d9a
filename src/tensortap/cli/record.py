"""`tensortap record`: run a target and record its layers."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import OptionError
from .common import (
    JsonOption,
    LayersOption,
    MaybeText,
    OverwriteOption,
    note,
    parse_size,
    print_json,
    print_notes,
    say,
)
from .running import Settings, record_target
from .targeting import (
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
    from ..recording.reader import Recording
    from ..targets import Target


def record(
    target: TargetArgument,
    output: Annotated[
        MaybeText,
        typer.Option("--output", "-o", metavar="DIR", help="The recording's folder or URL."),
    ] = None,
    layers: LayersOption = None,
    inputs: Annotated[bool, typer.Option("--inputs", help="Also record inputs.")] = False,
    outputs: Annotated[bool, typer.Option("--outputs/--no-outputs", help="Record outputs.")] = True,
    grads: Annotated[
        bool, typer.Option("--grads", help="Also run backward and record gradients.")
    ] = False,
    keep: Annotated[
        str, typer.Option("--keep", help="tensors, or summary for statistics alone.")
    ] = "tensors",
    histograms: Annotated[
        bool, typer.Option("--histograms", help="Keep a histogram in each summary.")
    ] = False,
    budget: Annotated[
        str, typer.Option("--budget", metavar="SIZE", help="The most extra memory.")
    ] = "1GiB",
    overwrite: OverwriteOption = False,
    early_stop: Annotated[
        bool,
        typer.Option("--early-stop/--no-early-stop", help="Stop behind the last selected layer."),
    ] = True,
    mode: ModeOption = None,
    seq_len: SeqLenOption = None,
    samples: SamplesOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    seed: SeedOption = None,
    sets: SetOption = None,
    prompts: PromptOption = None,
    input_ids: InputIdsOption = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Show what would be recorded, without running.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Stop at once when recording fails.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Run a model and record the tensors of its layers."""
    if keep not in ("tensors", "summary"):
        raise OptionError(f"--keep must be tensors or summary, got {keep!r}.")
    if output is None and not plan:
        raise OptionError("Where should the recording go? Give a folder with -o DIR.")
    settings = Settings(
        layers=tuple(layers or ()),
        inputs=inputs,
        outputs=outputs,
        grads=grads,
        keep="tensors" if keep == "tensors" else "summary",
        histograms=histograms,
        budget=parse_size(budget),
        overwrite=overwrite,
        early_stop=early_stop,
        strict=strict,
    )
    loaded = chosen_target(
        target,
        mode=mode,
        seq_len=seq_len,
        samples=samples,
        device=device,
        dtype=dtype,
        seed=seed,
        sets=sets,
        prompts=prompts,
        input_ids=input_ids,
    )
    if plan:
        _plan(loaded, settings, json)
        return
    assert output is not None
    from ..reporting.progress import progress

    with progress("Recording") as advance, redirect_stdout(sys.stderr):
        recording, seconds = record_target(loaded, output, settings, advance)
    _report(recording, seconds, json)


def _report(recording: Recording, seconds: float, as_json: bool) -> None:
    from ..reporting.text import plural, size

    if as_json:
        print_json(
            {
                "path": recording.path,
                "status": recording.status,
                "mode": recording.manifest.mode,
                "layers": len(recording),
                "records": len(recording.records),
                "nbytes": recording.nbytes,
                "seconds": seconds,
                "notes": recording.notes,
            }
        )
    else:
        layers = plural(len(recording), "layer")
        records = plural(len(recording.records), "record")
        say(
            f"Recorded {layers}, {records}, {size(recording.nbytes)} to {recording.path} "
            f"in {seconds:.1f} s"
        )
    print_notes([*recording.notes, *_stopped(recording)])
    if not as_json:
        typer.echo(f"next: tensortap show {recording.path}", err=True)


def _plan(target: Target, settings: Settings, as_json: bool) -> None:
    from ..reporting.plans import plan_table, plan_target

    with redirect_stdout(sys.stderr):
        plan = plan_target(
            target, settings.layers, inputs=settings.inputs, outputs=settings.outputs
        )
    if as_json:
        print_json(plan.to_dict(keep=settings.keep))
    else:
        from ..reporting.console import print_table, stdout

        print_table(stdout(), plan_table(plan))
        say(plan.sentence(keep=settings.keep))
        last = plan.last_layer
        if settings.early_stop and not settings.grads and target.run is None and last:
            say(f"The model would run no further than '{last}' (--no-early-stop to run on).")
    print_notes(plan.notes)
    if settings.grads:
        note("Gradients come on top: as many bytes again as the outputs, and inputs, they are of.")


def _stopped(recording: Recording) -> list[str]:
    """That the model did not run to its end, and what that may have cost."""
    behind = recording.manifest.selection.get("stopped_behind")
    if not behind:  # the root module is the last of all: nothing was left out
        return []
    return [
        f"Each forward was stopped behind '{behind}', the last call that was asked for. "
        "--no-early-stop runs on."
    ]
