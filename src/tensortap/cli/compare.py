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

if TYPE_CHECKING:
    from ..comparing.results import Comparison, LayerComparison

__all__ = [
    "DIFFERS",
    "FloorOption",
    "MapOption",
    "PresetOption",
    "RuleOption",
    "compare",
    "print_answer",
]

DIFFERS = 1

FloorOption = Annotated[
    MaybeText,
    typer.Option(
        "--floor",
        metavar="RUN",
        help="A recording whose error is to be expected anyway: a repeat run, or the reference in "
        "the candidate's precision. Without one it is estimated.",
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


def compare(
    reference: Annotated[str, typer.Argument(metavar="REFERENCE", help="The recording to trust.")],
    candidate: Annotated[str, typer.Argument(metavar="CANDIDATE", help="The recording to judge.")],
    layer: Annotated[
        MaybeText, typer.Argument(metavar="LAYER", help="One layer of the reference, in full.")
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
        MaybePath, typer.Option("--html", metavar="FILE", help="Also write a page to look at.")
    ] = None,
    only_bad: Annotated[
        bool, typer.Option("--only-bad", help="List only layers that are not identical or within.")
    ] = False,
    partial: PartialOption = False,
    json: JsonOption = False,
) -> int:
    """Compare two recordings, layer by layer. Exit 0: same, 1: something diverged, 2: trouble."""
    from ..comparing.compare import compare as compare_recordings
    from ..errors import OptionError
    from ..reporting.progress import progress

    patterns = list(layers or [])
    if layer is not None:
        if patterns:
            raise OptionError("LAYER shows one layer and --layers chooses some. Give one of them.")
        patterns = [_resolved(reference, layer, partial)]
    with progress("Comparing") as advance:
        comparison = compare_recordings(
            reference,
            candidate,
            layers=patterns or None,
            floor=floor,
            rules=rules or (),
            map=maps or (),
            preset=preset,
            truth=truth,
            metrics=metrics or (),
            partial=partial,
            progress=advance,
        )
    if html is not None:
        comparison.to_html(html)
    rows = [r for r in comparison.layers if not only_bad or _worth_listing(r)]
    if json:
        for warning in comparison.warnings:
            typer.echo(f"warning: {' '.join(warning.split())}", err=True)
        listed = {(row.layer, row.candidate_layer) for row in rows}
        data = comparison.to_dict()
        data["layers"] = [
            row for row in data["layers"] if (row["layer"], row["candidate_layer"]) in listed
        ]
        print_json(data)
    else:
        _print(comparison, rows, alone=layer is not None)
    print_notes(comparison.notes)
    if html is not None:
        note(f"The page is at {html}.")
    if not comparison.compared:
        return TROUBLE
    return DONE if comparison.same else DIFFERS


def _worth_listing(row: LayerComparison) -> bool:
    return row.verdict not in ("identical", "within")


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
