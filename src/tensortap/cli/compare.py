"""`tensortap compare`: where two recordings part, and by how much."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from .common import (
    DONE,
    TROUBLE,
    JsonOption,
    LayersOption,
    MaybeList,
    MaybePath,
    MaybeText,
    PartialOption,
    note,
    open_recording,
    print_json,
    print_notes,
)
from .comparing_modes import (
    DIFFERS,
    Options,
    Pair,
    Shown,
    compare_all,
    listed,
    one_mode,
    worth_listing,
)

if TYPE_CHECKING:
    from ..comparing.results import Comparison, LayerComparison

__all__ = [
    "DIFFERS",
    "FloorOption",
    "MapOption",
    "OnDeviceOption",
    "PresetOption",
    "RuleOption",
    "compare",
    "print_answer",
]

FloorOption = Annotated[
    MaybeText,
    typer.Option(
        "--floor",
        metavar="RUN",
        help="A recording whose error is to be expected anyway: a repeat run, or the reference in "
        "the candidate's precision; or auto, to make one of the reference's target. Without one "
        "it is estimated.",
    ),
]
RuleOption = Annotated[
    MaybeList,
    typer.Option(
        "--rule",
        metavar="RULE",
        help="Judge layers by a rule: 'REGEX: max_abs < 1e-2 and cosine > 0.99'. The first that "
        "matches counts. Repeatable.",
    ),
]
MapOption = Annotated[
    MaybeList,
    typer.Option(
        "--map",
        metavar="REGEX=>TEMPLATE",
        help="Pair the reference's layers with the candidate's by name, as "
        r"'h\.(\d+)=>layers.\1'. Repeatable.",
    ),
]
PresetOption = Annotated[
    MaybeText,
    typer.Option(
        "--preset",
        help="Judge by fixed limits: documents (MSE and correlation grades), or device (max abs "
        "0.01, mean abs 0.001, cosine 0.99).",
    ),
]
OnDeviceOption = Annotated[
    MaybeText,
    typer.Option(
        "--device",
        metavar="DEVICE",
        help="Compare the tensors there: cuda, cuda:1. Without it on the CPU.",
    ),
]


def compare(
    reference: Annotated[
        str,
        typer.Argument(
            metavar="REFERENCE",
            help="The recording to trust; or a folder of modes, as record --modes writes it.",
        ),
    ],
    candidate: Annotated[
        MaybeText,
        typer.Argument(
            metavar="CANDIDATE",
            help="The recording to judge; in a folder of modes, one of them: all without it.",
        ),
    ] = None,
    layer: Annotated[
        MaybeText, typer.Argument(metavar="LAYER", help="One layer of the reference, in full.")
    ] = None,
    mode: Annotated[
        MaybeText,
        typer.Option(
            "--reference",
            "-r",
            metavar="MODE",
            help="In a folder of modes, the one to trust: fp32.",
        ),
    ] = None,
    layers: LayersOption = None,
    floor: FloorOption = None,
    rules: RuleOption = None,
    maps: MapOption = None,
    preset: PresetOption = None,
    truth: Annotated[
        MaybeText,
        typer.Option(
            "--truth",
            metavar="RUN",
            help="A recording in higher precision: says which side is nearer to it.",
        ),
    ] = None,
    metrics: Annotated[
        MaybeList,
        typer.Option(
            "--metric",
            metavar="NAME",
            help="Add a metric that a package offers (entry points tensortap.metrics). Repeatable.",
        ),
    ] = None,
    html: Annotated[
        MaybePath,
        typer.Option(
            "--html",
            metavar="FILE",
            help="Also write a page to look at; of several modes, a folder for a page a mode.",
        ),
    ] = None,
    no_save: Annotated[
        bool,
        typer.Option(
            "--no-save", help="In a folder of modes: write no JSON to its folder comparisons/."
        ),
    ] = False,
    only_bad: Annotated[
        bool, typer.Option("--only-bad", help="List only layers that are not identical or within.")
    ] = False,
    partial: PartialOption = False,
    device: OnDeviceOption = None,
    json: JsonOption = False,
) -> int:
    """Compare two recordings, layer by layer, or every mode in a folder with one of them; or the \
weights of two checkpoints (hf:DIR, .safetensors, .pt). \
Exit 0: same, 1: something diverged, 2: trouble."""
    from ..errors import OptionError

    if layer is not None and layers:
        raise OptionError("LAYER shows one layer and --layers chooses some. Give one of them.")
    options = Options(
        layers=tuple(layers or ()),
        floor=floor,
        rules=tuple(rules or ()),
        map=tuple(maps or ()),
        preset=preset,
        truth=truth,
        metrics=tuple(metrics or ()),
        partial=partial,
        device=device,
    )
    shown = Shown(html=html, only_bad=only_bad, json=json)
    if candidate is not None and _checkpoints(reference, candidate):
        if (options, html, layer, mode, no_save) != (Options(), None, None, None, False):
            raise OptionError(
                f"{reference} and {candidate} are checkpoints: their weights are compared, with no "
                "option but --json and --only-bad."
            )
        return _compare_weights(reference, candidate, shown)
    if _is_folder_of_modes(reference, candidate):
        trusted = mode or "fp32"
        if candidate is None:
            return compare_all(reference, trusted, options, shown, save=not no_save)
        pair = one_mode(reference, candidate, trusted, partial)
        return _compare_two(
            pair.reference, pair.candidate, layer, options, shown, pair, not no_save
        )
    if mode is not None or no_save:
        raise OptionError(
            f"{'--no-save' if mode is None else '--reference'} is for a folder of modes, and "
            f"{reference} is none: two recordings are compared as they are named, the reference "
            "first."
        )
    if candidate is None:
        raise OptionError(
            f"With what should {reference} be compared? Name the candidate too: tensortap compare "
            f"{reference} CANDIDATE. Or name a folder of modes alone."
        )
    return _compare_two(reference, candidate, layer, options, shown)


def _checkpoints(reference: str, candidate: str) -> bool:
    """Whether both are checkpoints; one alone cannot be compared."""
    from ..comparing.weights.files import is_checkpoint
    from ..errors import OptionError

    found = [is_checkpoint(path) for path in (reference, candidate)]
    if any(found) and not all(found):
        one, other = (reference, candidate) if found[0] else (candidate, reference)
        raise OptionError(
            f"{one} is a checkpoint and {other} is not: compare two checkpoints, whose weights "
            f"are compared, or two recordings (tensortap record {one} -o RUN makes one)."
        )
    return all(found)


def _compare_weights(reference: str, candidate: str, shown: Shown) -> int:
    from ..comparing.weights import compare_weights
    from ..reporting.progress import progress

    with progress("Comparing") as advance:
        comparison = compare_weights(reference, candidate, progress=advance)
    if shown.json:
        print_json(comparison.to_dict())
    else:
        comparison.print(only_bad=shown.only_bad)
    return DONE if comparison.same else DIFFERS


def _is_folder_of_modes(path: str, candidate: str | None) -> bool:
    from ..comparing.mode_folders import holds_modes, holds_recording

    # a folder in which nothing lies is one of modes, so that it is told what to record there
    return holds_modes(path) or (candidate is None and not holds_recording(path))


def _compare_two(
    reference: str,
    candidate: str,
    layer: str | None,
    options: Options,
    shown: Shown,
    pair: Pair | None = None,
    save: bool = False,
) -> int:
    from ..comparing.compare import compare as compare_recordings
    from ..reporting.progress import progress

    patterns = options.layers
    if layer is not None:
        patterns = (_resolved(reference, layer, options.partial),)
    with progress("Comparing") as advance:
        comparison = compare_recordings(
            reference,
            candidate,
            **options.to_dict(patterns),
            progress=advance,
        )
    if shown.html is not None:
        comparison.to_html(shown.html)
    rows = [r for r in comparison.layers if not shown.only_bad or worth_listing(r)]
    if shown.json:
        for warning in comparison.warnings:
            typer.echo(f"warning: {' '.join(warning.split())}", err=True)
        print_json(listed(comparison, rows))
    else:
        _print(comparison, rows, alone=layer is not None)
    print_notes(comparison.notes)
    if shown.html is not None:
        note(f"The page is at {shown.html}.")
    if pair is not None and save:
        note(f"Wrote {pair.save(comparison, None if layer is None else patterns[0])}")
    if not comparison.compared:
        return TROUBLE
    return DONE if comparison.same else DIFFERS


def _resolved(reference: str, name: str, partial: bool) -> str:
    """The layer's name in the reference; an unknown one is said with its near names."""
    from ..selection.recorded import find_layer

    return find_layer(open_recording(reference, partial=partial), name).name


def print_answer(comparison: Comparison) -> None:
    """A table and the answer in a sentence."""
    _print(comparison, list(comparison.layers), alone=False)


def _print(comparison: Comparison, rows: list[LayerComparison], *, alone: bool) -> None:
    from ..reporting.comparisons import (
        layer_screen,
        print_comparison,
        print_head,
        print_sentence,
    )
    from ..reporting.console import stdout

    console = stdout()
    if not alone:
        print_comparison(console, comparison, rows=rows)
        return
    print_head(console, comparison)
    for row in comparison.layers:
        console.print(layer_screen(comparison, row, width=console.width))
    print_sentence(console, comparison)
