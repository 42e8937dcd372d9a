"""One layer in detail: what goes in, what comes out, and how much it changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import RecordingError
from . import text
from .bars import Bars, bars_of_summary, bars_of_tensor, draw, span
from .provenance import in_a_sentence

if TYPE_CHECKING:
    from rich.console import Console

    from ..numerics.summary import Summary
    from ..recording.reader import Layer, Record, Recording
    from ..recording.schema import Port

__all__ = ["Change", "LayerView", "Section", "print_layer", "view_layer"]

QUANTILES = (0.01, 0.05, 0.25, 0.50, 0.75, 0.95, 0.99)


@dataclass(frozen=True)
class Section:
    """One record of the layer: its numbers, its quantiles, its histogram."""

    record: Record
    summary: Summary
    quantiles: tuple[float, ...] | None
    exact: bool
    bars: Bars | None
    note: str | None
    others: int

    def to_dict(self) -> dict[str, Any]:
        r = self.record
        summary = self.summary.to_dict()
        summary.pop("histogram", None)
        quantiles = self.quantiles and {
            f"{q:g}": None if math.isnan(value) else value
            for q, value in zip(QUANTILES, self.quantiles, strict=True)
        }
        return {
            "layer": r.layer,
            "type": r.type,
            "port": r.port,
            "leaf": r.leaf,
            "epoch": r.epoch,
            "batch": r.batch,
            "call": r.call,
            "shape": list(r.shape),
            "dtype": r.dtype,
            "device": r.device,
            "stored": r.stored,
            "provenance": r.provenance,
            **summary,
            "quantiles": quantiles,
            "quantiles_exact": self.exact if quantiles else None,
            "bars": self.bars.to_dict() if self.bars else None,
            "note": self.note,
            "other_records": self.others,
        }


@dataclass(frozen=True)
class Change:
    """The mean absolute change between this layer's output and a neighbour's."""

    direction: str
    neighbour: str | None
    value: float | None
    reason: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "direction": self.direction,
            "neighbour": self.neighbour,
            "mean_abs_change": self.value,
            "reason": self.reason,
        }


@dataclass(frozen=True)
class LayerView:
    """All there is to say of one layer at one moment."""

    layer: Layer
    sections: tuple[Section, ...]
    changes: tuple[Change, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        return {
            "layer": self.layer.name,
            "alias": self.layer.alias,
            "type": self.layer.type,
            "provenance": self.layer.provenance,
            "layers": [section.to_dict() for section in self.sections],
            "changes": [change.to_dict() for change in self.changes],
        }


def view_layer(
    recording: Recording,
    layer: Layer,
    records: Sequence[Record],
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> LayerView:
    """Look at a layer through these of its records: of each port and leaf the first."""
    first: dict[tuple[Port, str, int], Record] = {}
    totals: dict[tuple[Port, str, int], int] = {}
    for record in records:
        key = (record.port, record.leaf, record.rank)
        first.setdefault(key, record)
        totals[key] = totals.get(key, 0) + 1
    sections = []
    for number, (key, record) in enumerate(first.items()):
        progress(number, len(first))
        sections.append(_section(record, totals[key] - 1))
    output = next((record for record in first.values() if record.port == "output"), None)
    return LayerView(layer, tuple(sections), _changes(recording, output) if output else ())


def _section(record: Record, others: int) -> Section:
    summary = record.summary
    note = None
    quantiles: tuple[float, ...] | None = None
    exact = False
    bars = None
    if not summary.finite:
        note = "There are no finite values, so no quantiles and no histogram."
    elif record.stored:
        from ..numerics.quantiles import exact_quantiles

        try:
            tensor = record.tensor()
        except RecordingError as error:
            note = str(error)
        else:
            quantiles, exact = tuple(exact_quantiles(tensor, QUANTILES)), True
            low, high = span(summary.min, summary.max, quantiles[0], quantiles[-1])
            bars = bars_of_tensor(tensor, low, high)
    elif summary.histogram is not None:
        quantiles = tuple(summary.quantile(q) for q in QUANTILES)
        low, high = span(summary.min, summary.max, quantiles[0], quantiles[-1])
        bars = bars_of_summary(summary, low, high)
        note = "Only a summary was kept: quantiles and histogram are to within a bucket (1/16)."
    else:
        note = (
            "Only a summary was kept, without a histogram, so there are no quantiles. "
            "Record with --histograms or --keep tensors."
        )
    return Section(record, summary, quantiles, exact, bars, note, others)


def _changes(recording: Recording, output: Record) -> tuple[Change, ...]:
    names = _chain(recording, output.layer)
    at = names.index(output.layer)
    before = names[at - 1] if at > 0 else None
    after = names[at + 1] if at + 1 < len(names) else None
    return (
        _change(recording, "from the layer before", before, output),
        _change(recording, "to the next layer", after, output),
    )


def _chain(recording: Recording, layer: str) -> list[str]:
    """The row of layers that this one stands in: embedding, blocks and final norm, or all."""
    structure = recording.manifest.structure
    parts = [structure.embedding, *structure.blocks, structure.final_norm]
    chain = list(dict.fromkeys(name for name in parts if name is not None))
    if layer in chain and structure.blocks:
        ends = {structure.embedding, structure.final_norm}
        return [name for name in chain if name not in ends or name in recording.layers]
    return [name for name in recording.layers if recording[name].port("output")]


def _change(recording: Recording, direction: str, neighbour: str | None, output: Record) -> Change:
    if neighbour is None:
        return Change(direction, None, None, "there is none")
    if neighbour not in recording.layers:
        return Change(direction, neighbour, None, "it was not recorded")
    other = next(
        (
            record
            for record in recording[neighbour].port("output")
            if (record.epoch, record.batch, record.call, record.rank)
            == (output.epoch, output.batch, output.call, output.rank)
        ),
        None,
    )
    if other is None:
        return Change(direction, neighbour, None, "it has no output of this batch and call")
    if other.shape != output.shape:
        reason = f"shapes differ: {text.shape(other.shape)} and {text.shape(output.shape)}"
        return Change(direction, neighbour, None, reason)
    if not (other.stored and output.stored):
        return Change(direction, neighbour, None, "the tensors were not kept")
    from ..recording.health import mean_change

    try:
        value = mean_change(other.tensor(), output.tensor())
    except RecordingError as error:
        return Change(direction, neighbour, None, str(error))
    if math.isnan(value):
        return Change(direction, neighbour, None, "no pair of values is finite")
    return Change(direction, neighbour, value)


def print_layer(console: Console, view: LayerView) -> None:
    """The sections one below the other, in the manner of document 002."""
    from rich.text import Text

    alias = f" ({text.clean(view.layer.alias)})" if view.layer.alias else ""
    name = f"{text.layer_name(view.layer.name)}{alias}"
    console.print(Text(name, style="bold").append(f"  {text.clean(view.layer.type)}", "not bold"))
    if view.layer.provenance != "hook":
        guess = view.layer.provenance == "inferred"
        console.print(in_a_sentence(view.layer.provenance), style="yellow" if guess else "dim")
    for section in view.sections:
        console.print()
        _print_section(console, section)
    if view.changes:
        console.print()
        console.print(Text("MEAN ABSOLUTE CHANGE", style="bold"))
        for change in view.changes:
            said = text.number(change.value, 6) if change.value is not None else "-"
            where = f" ({text.layer_name(change.neighbour)})" if change.neighbour else ""
            why = f"  {text.clean(change.reason)}" if change.reason else ""
            console.print(f"  {change.direction + where + ':':<40} {said}{why}")


def _print_section(console: Console, section: Section) -> None:
    from rich.text import Text

    r, s = section.record, section.summary
    leaf = f" {text.clean(r.leaf)}" if r.leaf else ""
    rank = f", rank {r.rank}" if r.rank else ""
    title = f"{r.port.upper().replace('_', ' ')}{leaf}"
    console.print(
        Text(title, style="bold cyan").append(
            f"  shape {text.shape(r.shape)}, {r.dtype}, {text.clean(r.device)}{rank}", "not bold"
        )
    )
    if section.others:
        epoch = f"epoch {r.epoch}, " if r.epoch else ""
        others = text.plural(section.others, "other record")
        console.print(
            f"  {epoch}batch {r.batch}, call {r.call}; {others} (choose with --batch and --call)",
            style="dim",
        )
    console.print(f"  First {len(s.first)}: {', '.join(_value(v) for v in s.first)}")
    infinite = s.posinf + s.neginf
    moments = (("Mean", s.mean), ("Std", s.std), ("L2", s.l2), ("RMS", s.rms))
    console.print("  " + "   ".join(f"{name}: {text.number(v, 6)}" for name, v in moments))
    console.print(f"  Range: [{text.number(s.min, 6)}, {text.number(s.max, 6)}]")
    counts = Text(f"  Values: {text.count(s.count)}   Zeros: {text.count(s.zeros)}   NaN: ")
    counts.append(text.count(s.nan), "bold red" if s.nan else "")
    counts.append("   Inf: ").append(text.count(infinite), "bold red" if infinite else "")
    if infinite:
        counts.append(f" ({text.count(s.posinf)} +Inf, {text.count(s.neginf)} -Inf)")
    console.print(counts)
    if section.quantiles is not None:
        about = "" if section.exact else "≈"
        console.print("  Quantiles" + ("" if section.exact else " (approximate)"))
        heads = [f"{q * 100:g}%" for q in QUANTILES]
        cells = [about + text.number(value) for value in section.quantiles]
        widths = [max(len(h), len(c)) + 2 for h, c in zip(heads, cells, strict=True)]
        pairs = list(zip(heads, cells, widths, strict=True))
        console.print("  " + "".join(head.rjust(w) for head, _, w in pairs), style="dim")
        console.print("  " + "".join(cell.rjust(w) for _, cell, w in pairs))
    if section.bars is not None:
        for line in draw(section.bars):
            console.print(f"    {line}")
    if section.note is not None:
        console.print(f"  {section.note}", style="dim")


def _value(value: float) -> str:
    """A value as it stands, NaN and infinities by their names."""
    return "NaN" if math.isnan(value) else text.number(value, 6)
