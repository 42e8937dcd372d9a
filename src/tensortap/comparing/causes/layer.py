"""The causes of a layer's divergence, from the tensors that were recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from ..place import HERE, Place
from ..results import Comparison, LayerComparison, Moment, Part
from ..sites import MomentPair, SitePair
from .cause import Cause
from .explain import explain

__all__ = ["causes_of", "explained"]

_SOURCES = {"output": "input", "grad_input": "grad_output"}


def explained(
    comparison: Comparison, sites: Mapping[str, Sequence[SitePair]], place: Place = HERE
) -> Comparison:
    """The comparison with the causes of its first divergence; `sites` are those of each layer."""
    first = comparison.first_divergence
    if first is None:
        return comparison
    causes = causes_of(first, sites.get(first.layer, ()), place)
    rows = (replace(row, causes=causes) if row is first else row for row in comparison.layers)
    return replace(comparison, layers=tuple(rows))


def causes_of(
    row: LayerComparison, sites: Sequence[SitePair], place: Place = HERE
) -> tuple[Cause, ...]:
    """What made a layer diverge, by its main part at the first moment that did.

    Where that came in with its inputs, from what is no layer or was not recorded, the inputs are
    nearer to what happened: they are explained, and the output where they tell nothing. Nothing is
    said where no tensors are stored.
    """
    part = row.main
    if row.verdict != "diverged" or part is None or not part.diverged_at:
        return ()
    moment = part.diverged_at[0]
    source = _SOURCES.get(part.port)
    handed = [
        other
        for other in row.parts
        if other.port == source and moment in other.diverged_at and row.origin == "inherited"
    ]
    for other in sorted(handed, key=lambda other: other.order):
        found = _explained(sites, other, moment, place)
        if found and found[0].kind != "noise":
            return tuple(_of_input(cause, other) for cause in found)
    return _explained(sites, part, moment, place)


def _of_input(cause: Cause, part: Part) -> Cause:
    """A cause that is of what the layer was given."""
    where = f"{part.port.replace('_', ' ')}{part.leaf and f' {part.leaf}'}"
    details = {**cause.details, "port": part.port, "leaf": part.leaf}
    return replace(cause, text=f"of its {where}: {cause.text}", details=details)


def _explained(
    sites: Sequence[SitePair], part: Part, moment: Moment, place: Place
) -> tuple[Cause, ...]:
    def causes(at: Place) -> tuple[Cause, ...]:
        found = _tensors(sites, part.port, part.leaf, moment, at)
        if found is None:
            return ()
        reference, candidate = found
        given = _given(sites, part, moment, reference, at)
        return explain(reference, candidate, floor=part.floor or 0.0, input=given)

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
    for site in sites:
        if (site.port, site.leaf) != (port, leaf) or site.problem:
            continue
        for pair in site.moments:
            if (pair.epoch, pair.batch, pair.call) == moment and _stored(pair):
                return pair.tensors(site.transform, place)
    return None


def _stored(pair: MomentPair) -> bool:
    return pair.reference.stored and pair.candidate.stored
