"""The causes of a layer's divergence, from the tensors that were recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from ..maker import is_lost
from ..place import HERE, Place
from ..results import Comparison, LayerComparison, Moment, Part
from ..shapes import shape_words
from ..sites import MomentPair, SitePair
from .arguments import argument_cause, missing_cause
from .axes import KindAt, layout_at
from .cause import Cause, say_little
from .explain import explain
from .near import near_of
from .shapes import shape_cause

__all__ = ["causes_of", "explained"]

_MOST_LOST = 4
_SOURCES = {"output": "input", "grad_input": "grad_output"}


def explained(
    comparison: Comparison, sites: Mapping[str, Sequence[SitePair]], place: Place = HERE
) -> Comparison:
    """The comparison with the causes of its first divergence; `sites` are those of each layer."""
    first = comparison.first_divergence
    if first is None:
        return comparison
    kinds = _kinds(comparison.layers)
    at = next(n for n, row in enumerate(comparison.layers) if row is first)
    causes = causes_of(first, sites.get(first.layer, ()), place, kinds, at)
    if say_little(causes):
        dropped = _of_dropped(comparison)
        lost = _of_lost(comparison, sites.get(first.layer, ())) or _handed(comparison, sites, place)
        causes = causes if lost is None else (lost, *causes[:1])
        causes = causes if dropped is None else (dropped,)
    rows = (replace(row, causes=causes) if row is first else row for row in comparison.layers)
    return replace(comparison, layers=tuple(rows))


def _of_dropped(comparison: Comparison) -> Cause | None:
    """Another shape that the maker of the first divergence hands on, and returns in the end."""
    maker = comparison.maker
    if maker is None or maker.before is None:
        return None
    if not any(part.changed_shape for part in comparison[maker.layer].parts):
        return None
    for part in comparison[maker.before].parts:
        if part.port == "input" and part.shape != part.candidate_shape:
            cause = shape_cause(part.shape, part.candidate_shape, None)
            words = shape_words(part.shape, part.candidate_shape)
            return replace(cause, text=f"{maker.before} is given another shape: {words}")
    return None


def _of_lost(comparison: Comparison, sites: Sequence[SitePair]) -> Cause | None:
    """An argument that the maker of the first divergence does not hand on."""
    maker = comparison.maker
    pair = next((pair for site in sites for pair in site.moments), None)
    if maker is None or maker.before is None or pair is None:
        return None
    row = next(row for row in comparison.layers if row.layer == maker.before)
    lost = {part.leaf for part in row.parts if is_lost(part)}
    records = pair.reference._recording[maker.before].records
    found = [r for r in records if r.port == "input" and r.leaf in lost and r.stored]
    causes = [missing_cause(record.tensor(), record.leaf) for record in found[:_MOST_LOST]]
    return next((c for c in causes if c.kind == "mask"), causes[0] if causes else None)


def _handed(
    comparison: Comparison, sites: Mapping[str, Sequence[SitePair]], place: Place
) -> Cause | None:
    """Another mask, or other ids, that the maker of the first divergence hands on."""
    maker = comparison.maker
    if maker is None or maker.before is None:
        return None
    row = next(row for row in comparison.layers if row.layer == maker.before)

    def cause(at: Place) -> Cause | None:
        for part in row.parts:
            if part.port == "input" and part.verdict == "diverged" and part.diverged_at:
                here = sites.get(row.layer, ())
                tensors = _tensors(here, part.port, part.leaf, part.diverged_at[0], at)
                found = None if tensors is None else argument_cause(*tensors, part.leaf)
                if found is not None:
                    return found
        return None

    return place.run(cause)


def _kinds(rows: Sequence[LayerComparison]) -> list[KindAt]:
    return [KindAt(row.type, tuple(part.shape for part in row.parts)) for row in rows]


def causes_of(
    row: LayerComparison,
    sites: Sequence[SitePair],
    place: Place = HERE,
    kinds: Sequence[KindAt] = (),
    index: int = 0,
) -> tuple[Cause, ...]:
    """What made a layer diverge, by its main part at the first moment that did.

    `kinds` are those of all layers, in order, and `index` is where this one stands among them: they
    tell what the axes of its tensors hold.

    Where that came in with its inputs, from what is no layer or was not recorded, the inputs are
    nearer to what happened: they are explained, and the output where they tell nothing. Nothing is
    said where no tensors are stored.
    """
    part = row.main
    if row.verdict != "diverged" or part is None or not part.diverged_at:
        return ()
    moment = part.diverged_at[0]
    if part.changed_shape:
        return _of_shape(sites, part, moment, place)
    source = _SOURCES.get(part.port)
    handed = [
        other
        for other in row.parts
        if other.port == source and moment in other.diverged_at and row.origin == "inherited"
    ]
    for other in sorted(handed, key=lambda other: other.order):
        found = _explained(sites, other, moment, place, kinds, index)
        if found and found[0].kind != "noise":
            return tuple(_of_input(cause, other) for cause in found)
    found = _explained(sites, part, moment, place, kinds, index)
    if found and found[0].kind == "noise":
        others = [p for p in row.parts if p is not part and p.port == part.port]
        for other in others:  # one of several outputs may tell more than the worst
            if moment in other.diverged_at:
                more = _explained(sites, other, moment, place, kinds, index)
                if more and more[0].kind != "noise":
                    return more
    return found


def _of_shape(
    sites: Sequence[SitePair], part: Part, moment: Moment, place: Place
) -> tuple[Cause, ...]:
    def causes(at: Place) -> tuple[Cause, ...]:
        for pair in _pairs(sites, part.port, part.leaf, moment):
            tensors = (at.tensor(pair.reference), at.tensor(pair.candidate))
            return (shape_cause(*pair.shapes, tensors),)
        return (shape_cause(part.shape, part.candidate_shape, None),)

    return place.run(causes)


def _of_input(cause: Cause, part: Part) -> Cause:
    """A cause that is of what the layer was given."""
    where = f"{part.port.replace('_', ' ')}{part.leaf and f' {part.leaf}'}"
    details = {**cause.details, "port": part.port, "leaf": part.leaf}
    return replace(cause, text=f"of its {where}: {cause.text}", details=details)


def _explained(
    sites: Sequence[SitePair],
    part: Part,
    moment: Moment,
    place: Place,
    kinds: Sequence[KindAt],
    index: int,
) -> tuple[Cause, ...]:
    def causes(at: Place) -> tuple[Cause, ...]:
        pair = _pair(sites, part.port, part.leaf, moment)
        if pair is None:
            return ()
        reference, candidate = pair[1].tensors(pair[0].transform, at)
        if part.port == "input":
            other = argument_cause(reference, candidate, part.leaf)
            if other is not None:
                return (other,)
        near = near_of(pair[1].reference)
        given = _given(sites, part, moment, reference, at)
        axes = layout_at(kinds, index, reference.shape) if kinds else ()
        floor = part.floor or 0.0
        return explain(reference, candidate, floor=floor, input=given, axes=axes, near=near)

    return place.run(causes)


def _given(
    sites: Sequence[SitePair], part: Part, moment: Moment, reference: Tensor, place: Place
) -> Tensor | None:
    """What the reference's layer was given, where it has the shape of what it made."""
    source = _SOURCES.get(part.port)
    for site in sites:
        if site.port == source:
            found = _tensors(sites, site.port, site.leaf, moment, place)
            if found is not None and found[0].shape == reference.shape:
                return found[0]
    return None


def _tensors(
    sites: Sequence[SitePair], port: str, leaf: str, moment: Moment, place: Place
) -> tuple[Tensor, Tensor] | None:
    found = _pair(sites, port, leaf, moment)
    return None if found is None else found[1].tensors(found[0].transform, place)


def _pair(
    sites: Sequence[SitePair], port: str, leaf: str, moment: Moment
) -> tuple[SitePair, MomentPair] | None:
    """The tensors of a part at a moment, where both sides have kept them."""
    for site in sites:
        if not site.problem:
            for pair in _pairs([site], port, leaf, moment):
                return site, pair
    return None


def _pairs(sites: Sequence[SitePair], port: str, leaf: str, moment: Moment) -> Iterator[MomentPair]:
    """The stored tensors of a port and leaf at a moment."""
    for site in sites:
        if (site.port, site.leaf) == (port, leaf):
            for pair in site.moments:
                if (pair.epoch, pair.batch, pair.call) == moment and _stored(pair):
                    yield pair


def _stored(pair: MomentPair) -> bool:
    return pair.reference.stored and pair.candidate.stored
