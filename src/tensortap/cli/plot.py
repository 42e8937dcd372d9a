"""`tensortap plot`: a recorded tensor, a run over its steps, or how recordings differ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import OptionError
from .common import (
    BatchOption,
    CallOption,
    EpochOption,
    JsonOption,
    LeafOption,
    MaybeText,
    PartialOption,
    PortOption,
    open_recording,
    print_json,
    print_notes,
    say,
)

if TYPE_CHECKING:
    from ..recording.reader import Record, Recording
    from ..reporting.difference_plots import Candidate


def plot(
    places: Annotated[
        list[str],
        typer.Argument(
            metavar="DIR… (LAYER)",
            help="A recording and the layer's name or alias; a watched run alone: all of it over "
            "its steps; with --layer, recordings alone: the reference, then the candidates.",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The picture, as l3.png.")
    ],
    layer: Annotated[
        MaybeText,
        typer.Option(
            "--layer",
            metavar="LAYER",
            help="The layer. With several recordings: histograms of each one's difference from "
            "the first, beside error by layer.",
        ),
    ] = None,
    port: PortOption = None,
    epoch: EpochOption = None,
    batch: BatchOption = None,
    call: CallOption = None,
    leaf: LeafOption = None,
    partial: PartialOption = False,
    json: JsonOption = False,
) -> None:
    """Draw a layer, a training run over its steps, or the differences between recordings."""
    from ..recording.schema import MANIFEST

    wishes = {"port": port, "leaf": leaf, "epoch": epoch, "batch": batch, "call": call}
    if layer is None and len(places) == 1:
        _run(places[0], output, wishes, partial, json)
        return
    if layer is None:
        if len(places) != 2:
            raise OptionError(
                f"Got {len(places)} arguments and no --layer. Write 'plot DIR LAYER -o FILE', or "
                "'plot REFERENCE CANDIDATE --layer LAYER -o FILE'."
            )
        layer = places.pop()
        if (Path(layer) / MANIFEST).exists():
            raise OptionError(
                f"{layer} is a recording, and no layer was named. To draw how it differs: "
                f"tensortap plot {places[0]} {layer} --layer LAYER -o {output}"
            )
    if len(places) == 1:
        _one(places[0], layer, output, wishes, partial, json)
    else:
        _several(places, layer, output, wishes, partial, json)


def _one(
    folder: str, layer: str, output: Path, wishes: dict[str, Any], partial: bool, as_json: bool
) -> None:
    """Distribution, first 1000 values, heat map of the first 100 features."""
    from ..reporting.plots import plot_record
    from ..reporting.progress import progress
    from ..selection.recorded import find_layer

    recording = open_recording(folder, partial=partial)
    records = _records(recording, layer, wishes)
    record = records[0]
    if wishes["batch"] is None and _went_on(records):
        _steps(recording, find_layer(recording, layer).name, output, wishes, as_json)
        return
    with progress("Drawing"):
        plotted = plot_record(record, output)
    if as_json:
        print_json(
            {
                "path": plotted.path,
                "layer": record.layer,
                "port": record.port,
                "leaf": record.leaf,
                "epoch": record.epoch,
                "batch": record.batch,
                "call": record.call,
                "notes": list(plotted.notes),
            }
        )
    else:
        say(plotted.path)
    print_notes(plotted.notes)


def _run(folder: str, output: Path, wishes: dict[str, Any], partial: bool, as_json: bool) -> None:
    """A watched run: all of its places over the steps."""
    from ..recording.series import is_watched

    recording = open_recording(folder, partial=partial)
    if not is_watched(recording):
        raise OptionError(
            f"Got no layer and no --layer, and {folder} is no watched run, which could be drawn as "
            "a whole. Write 'plot DIR LAYER -o FILE', or 'plot REFERENCE CANDIDATE --layer LAYER "
            "-o FILE'."
        )
    _steps(recording, None, output, wishes, as_json)


def _went_on(records: Sequence[Record]) -> bool:
    """Whether these are summaries of several steps, of which there are no tensors to draw."""
    steps = {(record.epoch, record.batch) for record in records}
    return len(steps) > 1 and not records[0].stored


def _steps(
    recording: Recording, layer: str | None, output: Path, wishes: dict[str, Any], as_json: bool
) -> None:
    """How the numbers went over the steps: of all layers, or of one and what is inside it."""
    from ..monitoring.follow import alarms_of
    from ..reporting.progress import progress
    from ..reporting.step_plots import plot_steps
    from ..reporting.text import clean, layer_name, plural
    from ..reporting.watched import ways
    from ..selection.recorded import choose_port, choose_records

    records = choose_records(
        (r for r in recording.records if layer is None or _inside(r.layer, layer)),
        **{**wishes, "port": choose_port(wishes["port"])},
    )
    found = ways(records)
    steps = max(len(way.values) for way in found)
    what = recording.path if layer is None else f"{layer_name(layer)} of {recording.path}"
    with progress("Drawing"):
        plotted = plot_steps(
            found,
            recording.layers,
            output,
            title=f"{clean(what)}   {plural(steps, 'step')}",
            alarms=alarms_of(recording.manifest),
        )
    if as_json:
        data = {"path": plotted.path, "layer": layer, "steps": steps, "places": len(found)}
        print_json({**data, "notes": list(plotted.notes)})
    else:
        say(plotted.path)
    print_notes(plotted.notes)


def _inside(name: str, layer: str) -> bool:
    return name == layer or not layer or name.startswith(f"{layer}.")


def _records(recording: Any, layer: str, wishes: dict[str, Any]) -> list[Record]:
    """The records of the layer's first port and leaf that fit, an output before all others."""
    from ..selection.recorded import choose_port, choose_records, find_layer

    wishes = {**wishes, "port": choose_port(wishes["port"])}
    records = choose_records(find_layer(recording, layer).records, **wishes)
    first = next((r for r in records if r.port == "output"), records[0])
    return [r for r in records if (r.port, r.leaf) == (first.port, first.leaf)]


def _several(
    places: Sequence[str],
    layer: str,
    output: Path,
    wishes: dict[str, Any],
    partial: bool,
    as_json: bool,
) -> None:
    """Histograms of candidate - reference, beside error by layer."""
    from ..comparing.compare import compare
    from ..reporting.difference_plots import plot_differences
    from ..reporting.progress import progress

    recordings = [open_recording(place, partial=partial) for place in places]
    records = _records(recordings[0], layer, wishes)
    names = _names(places)
    candidates: list[Candidate] = []
    with progress("Comparing") as advance:
        for name, recording in zip(names[1:], recordings[1:], strict=True):
            comparison = compare(recordings[0], recording, partial=partial, progress=advance)
            candidates.append(_candidate(name, recordings[0], recording, records, comparison))
    first = records[0]
    what = f"{first.port} {first.leaf}".strip()
    with progress("Drawing"):
        plotted, spreads = plot_differences(
            candidates, reference=names[0], layer=first.layer, what=what, path=output
        )
    warnings = [w for candidate in candidates for w in candidate.comparison.warnings]
    notes = [*dict.fromkeys(warnings), *plotted.notes]
    if as_json:
        data = {
            "path": plotted.path,
            "reference": places[0],
            "layer": first.layer,
            "port": first.port,
            "leaf": first.leaf,
            "candidates": [
                {
                    "candidate": place,
                    "difference": None if found is None else found.to_dict(),
                    "errors": [
                        {"layer": row.layer, "verdict": row.verdict, "error": row.error}
                        for row in candidate.comparison.layers
                    ],
                }
                for place, candidate, found in zip(places[1:], candidates, spreads, strict=True)
            ],
            "notes": notes,
        }
        print_json(data)
    else:
        say(plotted.path)
    print_notes(notes)


def _candidate(
    name: str, reference: Any, recording: Any, records: Sequence[Record], comparison: Any
) -> Candidate:
    """The pairs of tensors of the chosen records, laid out alike; a reason when there are none."""
    from ..comparing.align import align
    from ..comparing.sites import SitePairer
    from ..reporting.difference_plots import Candidate

    first = records[0]
    chosen = {(r.epoch, r.batch, r.call, r.rank) for r in records}
    pairer = SitePairer(reference, recording)
    sites = [
        site
        for pair in align(reference, recording, names=[first.layer])
        for site in pairer.pair(pair)
        if (site.port, site.leaf) == (first.port, first.leaf)
    ]
    site = next(iter(sites), None)
    if site is None or site.missing:
        raise OptionError(f"{recording.path} has nothing to set beside the {first.where()}.")
    if site.problem:
        raise OptionError(f"The {first.where()} cannot be compared with {name}: {site.problem}")
    moments = [
        moment
        for moment in site.moments
        if (m := moment.reference) and (m.epoch, m.batch, m.call, m.rank) in chosen
    ]
    if not moments:
        raise OptionError(f"{recording.path} has no such moment of the {first.where()}.")
    if not all(m.reference.stored and m.candidate.stored for m in moments):
        raise OptionError(
            f"The tensors of '{first.layer}' were not kept on both sides, only their summaries, so "
            "there are no differences to draw. Record with --keep tensors."
        )
    return Candidate(name, comparison, lambda: (m.tensors(site.transform) for m in moments))


def _names(places: Sequence[str]) -> list[str]:
    """Short names for the runs: their folders', unless two are called the same."""
    short = [Path(place.rstrip("/")).name or place for place in places]
    return short if len(set(short)) == len(short) else list(places)
