"""Outputs of another shape that a layer made from good inputs: a divergence, made by that layer.

Two shapes that no layout brings together are `incomparable` as long as nobody knows where the
change comes from: the layers after a moved stride all have other shapes. The layer that was given
the same and returns another shape is the one that changed it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .likeness import type_likeness
from .moments import in_words
from .results import Moment, Part
from .sites import SitePair

__all__ = ["changed_shapes", "shape_words"]


def changed_shapes(
    types: tuple[str, str], sites: Sequence[SitePair], parts: Sequence[Part], agreed: bool
) -> list[Part]:
    """The parts of a layer, with outputs of another shape as `diverged` where the layer made them.

    `parts` belong to `sites` one by one. The inputs decide; where neither side recorded any,
    `agreed` does: whether every layer so far agrees, in which case this layer is the first.
    """
    found = list(parts)
    inputs = [(site, part) for site, part in zip(sites, parts, strict=True) if site.port == "input"]
    known = [(site, part) for site, part in inputs if part.verdict != "missing"]
    first = next((site for site in sites if site.port == "output"), None)
    same_class = type_likeness(*types) == 1
    for at, (site, part) in enumerate(zip(sites, parts, strict=True)):
        moments = []
        if site.port == "output" and not site.grouped:
            moments = _uneven(site) if part.verdict == "incomparable" else _shorter(site)
        # What else a layer returns differs among implementations: caches, weights of attention.
        if not moments or not (site is first or same_class):
            continue
        padded = part.verdict != "incomparable"  # then the rest agrees, or does so roughly
        if padded and not (known and same_class):
            continue
        if _given_the_same(known, moments[0]) if known else agreed and same_class:
            found[at] = Part(
                site.port,
                site.leaf,
                "diverged",
                _why(site, part, moments),
                shape=part.shape,
                candidate_shape=part.candidate_shape,
                dtype=part.dtype,
                candidate_dtype=part.candidate_dtype,
                moments=len(site.moments),
                worst_moment=moments[0],
                diverged_at=tuple(moments),
                order=site.moments[0].reference.order,
            )
    return found


def shape_words(ours: Sequence[int], theirs: Sequence[int]) -> str:
    """Two shapes in words."""
    return f"{list(ours)} in the reference, {list(theirs)} in the candidate"


def _why(site: SitePair, part: Part, moments: Sequence[Moment]) -> str:
    at = f"at {in_words(*moments[0])} " if len(site.moments) > 1 else ""
    return f"{at}the output has another shape: {shape_words(part.shape, part.candidate_shape)}"


def _uneven(site: SitePair) -> list[Moment]:
    """The moments at which the two sides have other shapes."""
    uneven = (pair for pair in site.moments if pair.shapes[0] != pair.shapes[1])
    return sorted((pair.epoch, pair.batch, pair.call) for pair in uneven)


def _shorter(site: SitePair) -> list[Moment]:
    """The moments at which the candidate lacks what would otherwise be taken for padding.

    Of the same input a layer of the same class makes as many tokens: one that returns some fewer
    dropped them. More of them may be padding, a few what a head was asked for, and channels are
    cut only where they hold a constant.
    """
    if not site.cut or site.transform is None or site.transform.cuts_channels:
        return []
    if not all(pair.whole for pair in site.moments):
        return []
    return sorted(
        (pair.epoch, pair.batch, pair.call)
        for pair in site.moments
        if _some_fewer(*(math.prod(shape) for shape in pair.shapes))
    )


def _some_fewer(ours: int, theirs: int) -> bool:
    return theirs < ours < 2 * theirs


def _given_the_same(inputs: Sequence[tuple[SitePair, Part]], moment: Moment) -> bool:
    """Whether the inputs agree, whole and one beside the other, until a moment and at it."""
    for site, part in inputs:
        if site.cut or site.grouped or not all(pair.whole for pair in site.moments):
            return False  # other samples or tokens: the shapes follow from that
        if part.verdict == "diverged" and min(part.diverged_at, default=moment) <= moment:
            return False
        if part.verdict == "incomparable" and min(_uneven(site), default=moment) <= moment:
            return False
    return True
