"""From what was measured and judged to the parts of a row."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .align import LayerPair
from .judge import Judgement
from .measure import MomentMeasurement, SiteMeasurement
from .results import LayerComparison, Origin, Part, Verdict, severity, worst
from .sites import SitePair

__all__ = [
    "compared_part",
    "incomparable_part",
    "is_identical",
    "missing_part",
    "missing_row",
    "origin_of",
    "overall",
]


def missing_row(pair: LayerPair) -> LayerComparison:
    """A layer that one side lacks."""
    layer = pair.reference or pair.candidate
    assert layer is not None
    side = "candidate" if pair.candidate is None else "reference"
    return LayerComparison(
        layer=layer.name,
        candidate_layer=None if pair.candidate is None else layer.name,
        matched_by="",
        verdict="missing",
        order=layer.order,
        type="" if pair.reference is None else layer.type,
        candidate_type="" if pair.candidate is None else layer.type,
        note=f"missing in the {side}",
    )


def missing_part(site: SitePair) -> Part:
    """A port or leaf that one side lacks."""
    where = f"{site.port}{' ' + site.leaf if site.leaf else ''}"
    return Part(site.port, site.leaf, "missing", f"the {site.missing} has no {where}")


def incomparable_part(site: SitePair) -> Part:
    """Tensors that cannot be set side by side."""
    first = site.moments[0] if site.moments else None
    return Part(
        site.port,
        site.leaf,
        "incomparable",
        site.problem or "the two sides have no moment in common",
        shape=() if first is None else first.reference.shape,
        candidate_shape=() if first is None else first.candidate.shape,
        dtype="" if first is None else first.reference.dtype,
        candidate_dtype="" if first is None else first.candidate.dtype,
    )


def is_identical(measured: SiteMeasurement) -> bool:
    """Whether all bits are the same, so that nothing more need be asked."""
    return measured.difference is not None and measured.difference.identical


def overall(parts: Sequence[Part]) -> Verdict | None:
    """The worst verdict of what was compared; of what was not, if nothing was."""
    compared = [part.verdict for part in parts if part.verdict != "missing"]
    return worst(compared or [part.verdict for part in parts])


def origin_of(verdict: Verdict, into: Verdict | None) -> Origin | None:
    """Who made a divergence: the layer, or one before it."""
    if verdict != "diverged":
        return None
    if into in ("identical", "within"):
        return "made here"
    return "inherited" if into == "diverged" else "unknown"


def compared_part(
    measured: SiteMeasurement,
    judged: Sequence[Judgement],
    nearer: str | None,
    metrics: Sequence[str] = (),
) -> Part:
    """A site in one: the worst moment speaks for all."""
    site = measured.site
    at = max(
        range(len(judged)), key=lambda k: (severity(judged[k].verdict), judged[k].ratio or 0.0)
    )
    said, moment = judged[at], measured.moments[at]
    first = site.moments[0]
    why = said.why
    if len(judged) > 1 and said.verdict == "diverged":
        why = f"at {_moment_words(moment)} {why}"
    found = measured.difference
    left, right = measured.summaries()
    hints = list(said.hints)
    if nearer is not None and said.verdict == "diverged":
        hints.append(f"the {nearer} is nearer to the truth")
    if site.unpaired:
        hints.append(f"not compared: {', '.join(site.unpaired[:3])}")
    return Part(
        port=site.port,
        leaf=site.leaf,
        verdict=said.verdict,
        why=why,
        difference=found,
        reference_summary=left,
        candidate_summary=right,
        shape=first.reference.shape,
        candidate_shape=first.candidate.shape,
        dtype=first.reference.dtype,
        candidate_dtype=first.candidate.dtype,
        transform="" if site.transform is None else site.transform.name,
        error=math.nan if found is None else found.error,
        floor=said.floor,
        floor_ratio=said.ratio,
        hints=tuple(hints),
        moments=len(judged),
        worst_moment=moment.moment,
        max_abs_moment=measured.max_abs_moment,
        order=first.reference.order,
        nearer=nearer,
        added=tuple((name, moment.added(name)) for name in metrics),
    )


def _moment_words(moment: MomentMeasurement) -> str:
    epoch, batch, call = moment.moment
    words = [f"epoch {epoch}"] if epoch else []
    words.append(f"batch {batch}")
    if call:
        words.append(f"call {call}")
    return ", ".join(words)
