"""`tensortap record`: run a target and record its layers, alone or against another recording."""

from __future__ import annotations

import shlex
import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from ..errors import OptionError
from .common import (
    DONE,
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
from .compare import DIFFERS, FloorOption, MapOption, PresetOption, RuleOption, print_answer
from .running import Outcome, Settings, run_target
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
    from collections.abc import Sequence
    from pathlib import Path

    from ..comparing.streaming import Window
    from ..recording.reader import Recording
    from ..targets import Target

_KEEP = ("tensors", "sketch", "summary")


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
        str,
        typer.Option(
            "--keep",
            help="tensors, summary for statistics alone, or sketch for statistics and a thousand "
            "sampled values of each tensor.",
        ),
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
    against: Annotated[
        MaybeText,
        typer.Option(
            "--against",
            metavar="RUN",
            help="Compare with this recording while running; keep tensors only where they differ.",
        ),
    ] = None,
    stop: Annotated[
        bool, typer.Option("--stop", help="With --against: stop at the first divergence.")
    ] = False,
    coarse: Annotated[
        bool,
        typer.Option(
            "--coarse",
            help="With --against: find the suspect window from summaries and sketches in one run, "
            "and record that alone in a second.",
        ),
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="With --against: keep every tensor all the same.")
    ] = False,
    floor: FloorOption = None,
    rules: RuleOption = None,
    maps: MapOption = None,
    preset: PresetOption = None,
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
) -> int:
    """Run a model and record its layers. With --against, exit 1: something diverged."""
    if keep not in _KEEP:
        raise OptionError(f"--keep must be tensors, sketch or summary, got {keep!r}.")
    if output is None and not plan:
        raise OptionError("Where should the recording go? Give a folder with -o DIR.")
    if against is None and (stop or coarse or full or floor or rules or maps or preset):
        raise OptionError(
            "--stop, --coarse, --full, --floor, --rule, --map and --preset say how to judge a run "
            "against another. Name the other one with --against RUN."
        )
    words = _command(target, mode, seq_len, samples, device, dtype, seed, sets, prompts, input_ids)
    settings = Settings(
        layers=tuple(layers or ()),
        inputs=inputs,
        outputs=outputs,
        grads=grads,
        keep=cast("Literal['tensors', 'sketch', 'summary']", keep),
        histograms=histograms,
        budget=parse_size(budget),
        overwrite=overwrite,
        early_stop=early_stop,
        strict=strict,
        command=shlex.join(words),
        against=against,
        stop=stop,
        full=full,
        floor=floor,
        rules=tuple(rules or ()),
        maps=tuple(maps or ()),
        preset=preset,
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
        return DONE
    assert output is not None
    if coarse:
        from .coarse import record_window

        return record_window(loaded, output, settings, json)
    from ..reporting.progress import progress

    with progress("Recording") as advance, redirect_stdout(sys.stderr):
        outcome = run_target(loaded, output, settings, advance)
    if outcome.comparison is not None:
        return report_against(outcome, json)
    _report(outcome, json)
    return DONE


def _command(
    target: str,
    mode: str | None,
    seq_len: int | None,
    samples: int | None,
    device: str | None,
    dtype: str | None,
    seed: int | None,
    sets: Sequence[str] | None,
    prompts: Sequence[str] | None,
    input_ids: Path | None,
) -> list[str]:
    """What chooses this target again, ready to be run."""
    words = ["tensortap", "record", target]
    given = {
        "--mode": mode,
        "--seq-len": seq_len,
        "--samples": samples,
        "--device": device,
        "--dtype": dtype,
        "--seed": seed,
        "--input-ids": input_ids,
    }
    for name, value in given.items():
        words += [name, str(value)] if value is not None else []
    for name, values in (("--set", sets), ("--prompt", prompts)):
        for value in values or ():
            words += [name, value]
    return words


def facts(outcome: Outcome) -> dict[str, object]:
    """What `--json` says of a recording."""
    recording = outcome.recording
    return {
        "path": recording.path,
        "status": recording.status,
        "mode": recording.manifest.mode,
        "layers": len(recording),
        "records": len(recording.records),
        "nbytes": recording.nbytes,
        "seconds": outcome.seconds,
        "notes": recording.notes,
    }


def _report(outcome: Outcome, as_json: bool) -> None:
    recording = outcome.recording
    if as_json:
        print_json(facts(outcome))
    else:
        say(recorded(outcome))
    print_notes([*recording.notes, *_stopped(recording)])
    if not as_json:
        typer.echo(f"next: tensortap show {recording.path}", err=True)


def recorded(outcome: Outcome) -> str:
    """What was recorded, in a sentence."""
    from ..reporting.text import plural, size

    recording = outcome.recording
    return (
        f"Recorded {plural(len(recording), 'layer')}, {plural(len(recording.records), 'record')}, "
        f"{size(recording.nbytes)} to {recording.path} in {outcome.seconds:.1f} s"
    )


def report_against(outcome: Outcome, as_json: bool, window: Window | None = None) -> int:
    """Print how the run compares, and what was kept of it."""
    from ..reporting.text import size

    comparison = outcome.comparison
    assert comparison is not None
    if as_json:
        print_json(
            {
                **facts(outcome),
                "bytes_seen": outcome.seen,
                "bytes_kept": outcome.kept,
                "stopped_at": outcome.recording.manifest.selection.get("stopped_at"),
                **({} if window is None else {"window": window.to_dict()}),
                "comparison": comparison.to_dict(),
            }
        )
        for warning in comparison.warnings:
            typer.echo(f"warning: {' '.join(warning.split())}", err=True)
    else:
        print_answer(comparison)
    print_notes([*comparison.notes, *_stopped(outcome.recording)])
    note(f"Kept {size(outcome.kept)} of the {size(outcome.seen)} of tensors that were seen.")
    note(recorded(outcome) + ".")
    return DONE if comparison.same else DIFFERS


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
