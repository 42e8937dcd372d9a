"""`tensortap demo`: record the built-in model in four modes and compare them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import OptionError, RecordingExistsError, TapError
from .common import (
    JsonOption,
    MaybeInt,
    MaybeText,
    OverwriteOption,
    print_json,
    print_notes,
    say,
)

if TYPE_CHECKING:
    from ..comparing.modes import Modes
    from ..comparing.results import Comparison
    from ..recording.reader import Recording

_SPEC = "tensortap.demo:build"
_REFERENCE, _BUG = "fp32", "bug"
_MODES = (_REFERENCE, "bf16", "int8", _BUG)
_REPORT = "report.html"
_OUTPUT = "runs/demo"
_STEPS = 40


def demo(
    output: Annotated[
        MaybeText,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="The folder, a recording a mode in it: runs/demo; runs/train with --train, models "
            "with --export.",
        ),
    ] = None,
    train: Annotated[
        bool, typer.Option("--train", help="Train the model for a moment instead, and watch it.")
    ] = False,
    steps: Annotated[int, typer.Option("--steps", help="How long to train.")] = _STEPS,
    break_at: Annotated[
        MaybeInt,
        typer.Option("--break-at", metavar="STEP", help="Make a weight infinite at this step."),
    ] = None,
    export: Annotated[
        bool,
        typer.Option(
            "--export",
            help="Write the model as compiled files instead: TorchScript, an exported program, "
            "ONNX, OpenVINO; and its inputs.",
        ),
    ] = False,
    overwrite: OverwriteOption = False,
    json: JsonOption = False,
) -> None:
    """Record the built-in model in four modes, one with a bug, and compare. Downloads nothing."""
    from ..comparing.modes import compare_modes
    from ..recording.store import open_store

    if train and export:
        raise OptionError("--train and --export are two demos. Leave one of them out.")
    if export:
        from .demo_export import demo_export

        demo_export(output, overwrite, json)
        return
    if train:
        from .demo_train import demo_train

        demo_train(output, steps, break_at, overwrite, json)
        return
    if break_at is not None or steps != _STEPS:
        raise OptionError("--steps and --break-at say how to train. Add --train.")
    output = (output or _OUTPUT).rstrip("/") or "/"
    _make_room(output, overwrite)
    start = time.monotonic()
    runs = _record(output)
    modes = compare_modes(output, _REFERENCE)
    compared = {row.mode: row.comparison for row in modes.modes if row.comparison is not None}
    report = f"{output}/{_REPORT}"
    open_store(output).write_text(_REPORT, compared[_BUG].to_html())
    seconds = time.monotonic() - start
    if json:
        print_json(_data(output, runs, modes, compared, report, seconds))
    else:
        _print(output, runs, modes, compared, report, seconds)
    print_notes(dict.fromkeys(text for run in runs.values() for text in run.notes))


def _make_room(output: str, overwrite: bool) -> None:
    """Refuse, before anything runs, to write over what is no earlier demo."""
    from ..recording.schema import MANIFEST
    from ..recording.store import open_store
    from ..recording.writer import prepare

    folders = {place: open_store(place) for place in (output, *_places(output).values())}
    ours = {place for place in folders if _is_ours(place)}
    taken = [p for p, store in folders.items() if MANIFEST in store.names() and p not in ours]
    store = folders[output]
    if _REPORT in store.names() and not ours:
        taken.append(f"{output}/{_REPORT}")
    if taken and not overwrite:
        raise RecordingExistsError(
            f"{taken[0]} is there already and is no earlier demo. Choose another folder with "
            "-o DIR, or replace it with --overwrite."
        )
    if MANIFEST in store.names():  # modes lie in folders of their own, not in a recording
        prepare(store, overwrite=True)


def _is_ours(path: str) -> bool:
    """Whether the folder holds an earlier demo, which may be replaced unasked."""
    from ..recording import reader

    try:
        return reader.open(path, partial=True).manifest.target.get("spec") == _SPEC
    except TapError:
        return False


def _places(output: str) -> dict[str, str]:
    return {mode: f"{output}/{mode}" for mode in _MODES}


def _record(output: str) -> dict[str, Recording]:
    from ..reporting.progress import progress
    from ..targets import load_target
    from .running import Settings, record_target

    settings = Settings(
        layers=("embedding", "blocks", "final_norm"), inputs=True, overwrite=True, early_stop=False
    )
    runs = {}
    with progress("Recording") as advance:
        for number, (mode, place) in enumerate(_places(output).items()):
            advance(number, len(_MODES))
            target = load_target(_SPEC, {"mode": mode})
            runs[mode], _ = record_target(target, place, settings, lambda done, total: None)
    return runs


def _data(
    output: str,
    runs: dict[str, Recording],
    modes: Modes,
    compared: dict[str, Comparison],
    report: str,
    seconds: float,
) -> dict[str, Any]:
    from ..reporting.tables import layer_rows

    found = [
        {"mode": mode, **finding.to_dict()} for mode, run in runs.items() for finding in run.check()
    ]
    return {
        "path": output,
        "seconds": seconds,
        "recordings": {mode: run.path for mode, run in runs.items()},
        "layers": [row.to_dict() for row in layer_rows(runs[_REFERENCE].records)],
        "findings": found,
        "summary": modes.to_dict(),
        "comparisons": {mode: result.to_dict() for mode, result in compared.items()},
        "report": report,
    }


def _print(
    output: str,
    runs: dict[str, Recording],
    modes: Modes,
    compared: dict[str, Comparison],
    report: str,
    seconds: float,
) -> None:
    from ..demo import BUG_GAIN, BUG_LAYER
    from ..reporting.comparisons import print_modes
    from ..reporting.console import print_table, stdout
    from ..reporting.tables import findings_table, header, layer_rows, layers_table
    from ..reporting.text import size

    console = stdout()
    taken = size(sum(run.nbytes for run in runs.values()))
    say(f"Recorded the built-in model in {len(runs)} modes and compared them, {seconds:.1f} s.")
    say(f"They are in {output}, {taken} on disk.\n")
    reference = runs[_REFERENCE]
    console.print(header(reference), style="dim")
    rows = layer_rows([record for record in reference.records if record.port == "output"])
    print_table(console, layers_table(rows))
    for mode, run in runs.items():
        findings = run.check()
        if findings:
            print_table(console, findings_table(findings))
        said = "healthy" if not findings else f"{len(findings)} findings"
        say(f"Checked {mode}: {said}")
    say(f"\nEach mode against {_REFERENCE}:")
    for mode in runs:
        if mode in compared:
            say(f"  {mode}: {_in_words(compared[mode])}")
    say("")
    print_modes(console, modes)
    planted = f"{BUG_LAYER} returns {BUG_GAIN} times what it should"
    say(f"\nThe mode '{_BUG}' has a planted bug: {planted}. The page about it is {report}")
    first = compared[_BUG].first_divergence
    layer = first.layer if first is not None else reference.layers[0]
    say("\nTry next:")
    for line in (
        f"tensortap compare {output}/{_REFERENCE} {output}/{_BUG} {layer}",
        f"tensortap blame {reference.path} {_SPEC} --mode {_BUG}",
        f"tensortap show {reference.path} {layer}",
        f"tensortap plot {reference.path} {output}/int8 --layer {layer} -o difference.png",
        f"tensortap export {reference.path} --layout pt -o out",
    ):
        say(f"  {line}")


def _in_words(result: Comparison) -> str:
    """The sentence of a comparison; where nothing diverged, also how near it came to the floor."""
    measured = [row for row in result.layers if row.floor_ratio is not None]
    if not result.same or not measured:
        return result.sentence
    worst = max(measured, key=lambda row: row.floor_ratio or 0.0)
    return f"{result.sentence} Nearest to its floor is {worst.layer}: {worst.why}."
