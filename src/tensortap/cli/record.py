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
from .compare import FloorOption, MapOption, PresetOption, RuleOption
from .recorded import report, report_against
from .running import Settings, run_target
from .targeting import (
    AcceptInferredOption,
    AnyTargetArgument,
    Compiled,
    CustomOpsOption,
    DeviceOption,
    DtypeOption,
    InputIdsOption,
    InputsFromOption,
    ManifestOption,
    ModeOption,
    NamesFromOption,
    PromptOption,
    RuntimeOption,
    SamplesOption,
    SeedOption,
    SelfCheckOption,
    SeqLenOption,
    SetOption,
    WeightsOption,
    chosen_target,
    command_of,
)

if TYPE_CHECKING:
    from ..targets import Target

_KEEP = ("tensors", "sketch", "summary")


def record(
    target: AnyTargetArgument,
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
    inputs_from: InputsFromOption = None,
    runtime: RuntimeOption = None,
    manifest: ManifestOption = None,
    weights: WeightsOption = None,
    names_from: NamesFromOption = None,
    accept_inferred: AcceptInferredOption = False,
    self_check: SelfCheckOption = True,
    custom_ops: CustomOpsOption = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Show what would be recorded, without running.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Stop at once when recording fails.")
    ] = False,
    json: JsonOption = False,
) -> int:
    """Run a model and record its layers. Exit 1: with --against something diverged, or a \
self-check of a compiled model failed."""
    if keep not in _KEEP:
        raise OptionError(f"--keep must be tensors, sketch or summary, got {keep!r}.")
    if output is None and not plan:
        raise OptionError("Where should the recording go? Give a folder with -o DIR.")
    if against is None and (stop or coarse or full or floor or rules or maps or preset):
        raise OptionError(
            "--stop, --coarse, --full, --floor, --rule, --map and --preset say how to judge a run "
            "against another. Name the other one with --against RUN."
        )
    compiled = Compiled(
        runtime=runtime,
        manifest=manifest,
        weights=weights,
        names_from=names_from,
        accept_inferred=accept_inferred,
        self_check=self_check,
        custom_ops=tuple(custom_ops or ()),
    )
    words = command_of(
        target,
        {
            "--mode": mode,
            "--seq-len": seq_len,
            "--samples": samples,
            "--device": device,
            "--dtype": dtype,
            "--seed": seed,
            "--input-ids": input_ids,
            "--set": sets,
            "--prompt": prompts,
            "--inputs-from": inputs_from,
            "--runtime": runtime,
            "--manifest": manifest,
            "--weights": weights,
            "--names-from": names_from,
            "--accept-inferred": accept_inferred,
            "--no-self-check": not self_check,
            "--custom-ops": custom_ops,
        },
    )
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
        compiled=compiled,
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
        inputs_from=inputs_from,
        compiled=compiled,
        plan=plan,
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
    return report(outcome, json)


def _plan(target: Target, settings: Settings, as_json: bool) -> None:
    from ..reporting.plans import plan_table, plan_target

    with redirect_stdout(sys.stderr):
        plan = plan_target(
            target,
            settings.layers,
            inputs=settings.inputs,
            outputs=settings.outputs,
            grads=settings.grads,
            options=settings.compiled.options(),
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
