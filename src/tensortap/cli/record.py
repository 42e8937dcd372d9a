"""`tensortap record`: run a target and record its layers, alone or against another recording."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from ..errors import OptionError, RecordingExistsError
from ..sizes import parse_size
from .aside import aside
from .common import (
    DONE,
    JsonOption,
    LayersOption,
    MaybeText,
    OverwriteOption,
    print_notes,
)
from .compare import FloorOption, MapOption, PresetOption, RuleOption
from .plans import plan_of
from .recorded import report, report_against
from .targeting import (
    AcceptInferredOption,
    AnyTargetArgument,
    CalibOption,
    Compiled,
    CustomOpsOption,
    DeviceOption,
    DtypeOption,
    EvalOption,
    GenerateOption,
    InputIdsOption,
    InputsFromOption,
    ManifestOption,
    ManyModesOption,
    ModeGroupsOption,
    NamesFromOption,
    PromptOption,
    RuntimeOption,
    SamplesOption,
    SeedOption,
    SelfCheckOption,
    SeqLenOption,
    SetOption,
    WeightsOption,
)

if TYPE_CHECKING:
    from ..targets import Target
    from ..targets.modes.request import Request
    from .running import Outcome, Settings

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
    evaluate: EvalOption = False,
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
    mode: ManyModesOption = None,
    modes: ModeGroupsOption = None,
    jobs: Annotated[int, typer.Option("--jobs", metavar="N", help="Record N modes at a time.")] = 1,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Keep recordings that are complete and the same; make the others."
        ),
    ] = False,
    calib: CalibOption = None,
    seq_len: SeqLenOption = None,
    samples: SamplesOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    seed: SeedOption = None,
    sets: SetOption = None,
    prompts: PromptOption = None,
    generate: GenerateOption = None,
    input_ids: InputIdsOption = None,
    inputs_from: InputsFromOption = None,
    runtime: RuntimeOption = None,
    manifest: ManifestOption = None,
    weights: WeightsOption = None,
    names_from: NamesFromOption = None,
    accept_inferred: AcceptInferredOption = False,
    self_check: SelfCheckOption = True,
    custom_ops: CustomOpsOption = None,
    perturb: Annotated[
        bool,
        typer.Option(
            "--perturb",
            help="Move what every layer is given by single roundings, at random: a floor for "
            "--floor.",
        ),
    ] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Show what would be recorded, without running.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Stop at once when recording fails.")
    ] = False,
    json: JsonOption = False,
) -> int:
    """Run a model and record its layers, in one mode or in several. Exit 1: with --against \
something diverged, or a self-check of a compiled model failed. Exit 2: a mode failed."""
    from ..targets.modes.request import Request
    from ..targets.modes.surroundings import begin_from
    from .running import Settings

    if keep not in _KEEP:
        raise OptionError(f"--keep must be tensors, sketch or summary, got {keep!r}.")
    if output is None and not plan:
        raise OptionError("Where should the recording go? Give a folder with -o DIR.")
    if against is None and (stop or coarse or full or floor or rules or maps or preset):
        raise OptionError(
            "--stop, --coarse, --full, --floor, --rule, --map and --preset say how to judge a run "
            "against another. Name the other one with --against RUN."
        )
    if perturb and against is not None:
        raise OptionError(
            "--perturb makes a run to measure others by, and --against judges this one. Record the "
            "perturbed run first, and give it as --floor."
        )
    if generate is not None and (against is not None or grads):
        raise OptionError(
            "--generate goes with neither --against nor --grads: after the first token that "
            "differs two runs have different inputs. Record both, then: tensortap compare A B."
        )
    if jobs < 1:
        raise OptionError(f"--jobs must be a whole number from 1, got {jobs}.")
    if resume and overwrite:
        raise OptionError(
            "--overwrite makes every recording anew, and --resume keeps those that are there. Give "
            "one of them."
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
        perturb=perturb,
        eval=evaluate,
        against=against,
        stop=stop,
        full=full,
        floor=floor,
        rules=tuple(rules or ()),
        maps=tuple(maps or ()),
        preset=preset,
        compiled=compiled.options(),
    )
    request = Request(
        target,
        settings,
        options={
            key: value
            for key, value in (
                ("seq_len", seq_len),
                ("samples", samples),
                ("device", device),
                ("dtype", dtype),
                ("seed", seed),
                ("generate", generate),
            )
            if value is not None
        },
        sets=tuple(sets or ()),
        prompts=tuple(prompts or ()),
        input_ids=input_ids,
        inputs_from=tuple(inputs_from or ()),
        calib=calib,
    )
    begin_from(seed)
    wanted = [*(mode or ()), *(modes or ())]
    if modes or len(wanted) > 1:
        from . import record_modes as many

        if coarse:
            raise OptionError(
                "--coarse looks for the window of one mode. Give one --mode, or record every mode "
                "against the reference with --against RUN alone."
            )
        if plan:
            return many.plan(request, wanted, json)
        assert output is not None
        return many.record(request, output, wanted, jobs=jobs, resume=resume, as_json=json)
    return _record_one(request, wanted[0] if wanted else None, output, plan, coarse, resume, json)


def _record_one(
    request: Request,
    mode: str | None,
    output: str | None,
    plan: bool,
    coarse: bool,
    resume: bool,
    as_json: bool,
) -> int:
    """One recording, at the folder itself."""
    from ..reporting.progress import progress
    from ..targets.modes.places import whole
    from .running import run_target

    with aside():  # looking for the code of a package imports it
        settings = request.settled(mode)
    if plan:
        plan_of(_load(request, mode, plan=True), settings).show(as_json)
        return DONE
    assert output is not None
    if resume:
        kept = _earlier(output, settings)
        if kept is not None:
            return report(kept, as_json, kept=True)
        settings = replace(settings, overwrite=True)
    place = whole(output)
    loaded = _load(request, mode)
    if whole(output) != place:  # the target went to another folder
        output = place
    if coarse:
        from .coarse import record_window

        return record_window(loaded, output, settings, as_json)
    with progress("Recording") as advance, aside():
        outcome = run_target(loaded, output, settings, advance)
    if outcome.comparison is not None:
        return report_against(outcome, as_json)
    return report(outcome, as_json)


def _load(request: Request, mode: str | None, *, plan: bool = False) -> Target:
    """The target; what it prints goes to stderr, as its notes."""
    import torch

    seed = request.seed(mode)
    if seed is not None:
        torch.manual_seed(seed)
    with aside():  # what the target prints is no data of ours
        target = request.load(mode, plan=plan)
    print_notes([*target.notes, *request.unused([mode])])
    return target


def _earlier(output: str, settings: Settings) -> Outcome | None:
    """The recording that is there already, if it is the one that was asked for."""
    from ..targets.modes.resume import look
    from .running import Outcome

    found = look(output, settings.made_with or {})
    if found.problem is not None:
        raise RecordingExistsError(found.problem)
    print_notes(found.notes)
    return None if found.recording is None else Outcome(found.recording, 0.0)
