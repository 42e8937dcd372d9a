"""From what was measured and judged to the parts of a row."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import reduce

import numpy as np

from ..recording.reader import Layer
from .absent import Absences
from .align import LayerPair
from .epochs import per_epoch
from .flips import Flips
from .judge import Judgement
from .measure import MomentMeasurement, SiteMeasurement
from .moments import in_words
from .results import LayerComparison, Moment, Origin, Part, Verdict, severity, worst
from .sites import SitePair
from .summaries import JudgedRows

__all__ = [
    "compared_part",
    "incomparable_part",
    "is_identical",
    "layer_row",
    "missing_part",
    "missing_row",
    "origin_of",
    "overall",
    "summary_part",
    "unpaired_part",
]


_MANY = 12  # moments of one side alone: more are said from the first to the last


def missing_row(pair: LayerPair, absences: Absences | None = None) -> LayerComparison:
    """A layer that one side lacks, and why, where that side's recording tells."""
    layer = pair.reference or pair.candidate
    assert layer is not None
    side = "candidate" if pair.candidate is None else "reference"
    reason = "" if absences is None else absences.reason(layer.name, side)
    return LayerComparison(
        layer=layer.name,
        candidate_layer=None if pair.candidate is None else layer.name,
        matched_by="",
        verdict="missing",
        order=layer.order,
        type="" if pair.reference is None else layer.type,
        candidate_type="" if pair.candidate is None else layer.type,
        note=f"missing in the {side}{': ' + reason if reason else ''}",
        provenance=None if pair.reference is None else layer.provenance,
        candidate_provenance=None if pair.candidate is None else layer.provenance,
    )


def layer_row(
    left: Layer, right: Layer, matched_by: str, parts: tuple[Part, ...], note: str = ""
) -> LayerComparison:
    """A layer that both sides have, from what was found of its ports and leaves."""
    inputs = [part for part in parts if part.port == "input"]
    others = [part for part in parts if part.port != "input"]
    verdict = overall(others) or overall(inputs) or "incomparable"
    origin = origin_of(verdict, parts)
    into = overall(inputs)
    if origin == "made here" and into == "diverged":
        into = "within"  # they went bad later, by what this layer did
    gaps = [part for part in parts if part.verdict == "missing"]
    return LayerComparison(
        layer=left.name,
        candidate_layer=right.name,
        matched_by=matched_by,
        verdict=verdict,
        parts=parts,
        input_verdict=into,
        origin=origin,
        order=left.order,
        type=left.type,
        candidate_type=right.type,
        note="; ".join([*([note] if note else []), *_gaps(gaps)]),
        provenance=left.provenance,
        candidate_provenance=right.provenance,
    )


def _gaps(parts: Sequence[Part]) -> list[str]:
    """What one side lacks; what lacks the same moments, or for one reason, is said together."""
    places: dict[str, list[str]] = {}
    for part in parts:
        head, at, moments = part.why.partition(" at ")
        if head != part.port:
            head, at, moments = part.why.partition(": ")
        places.setdefault(f"{at}{moments}", []).append(head)
    return [
        f"{_listed(heads)}{tail}" if tail else "; ".join(heads) for tail, heads in places.items()
    ]


def _listed(heads: Sequence[str]) -> str:
    """`the candidate has no output [1], output [2]`: what begins alike is begun once."""
    first, *rest = dict.fromkeys(heads)
    start = re.match(r"the \w+ has no ", first)
    if start is None:
        return ", ".join((first, *rest))
    return ", ".join((first, *(head.removeprefix(start[0]) for head in rest)))


def missing_part(site: SitePair) -> Part:
    """A port or leaf that one side lacks."""
    where = f"{site.port}{' ' + site.leaf if site.leaf else ''}"
    reason = f": {site.reason}" if site.reason else ""
    why = f"the {site.missing} has no {where}{reason}"
    return Part(site.port, site.leaf, "missing", why, missing=site.missing)


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


def origin_of(verdict: Verdict, parts: Sequence[Part]) -> Origin | None:
    """Who made a divergence, the layer or one before it, at the first moment that shows it.

    What goes into a forward pass are the inputs; into a backward pass, the gradient of the output.
    """
    if verdict != "diverged":
        return None
    bad = [part for part in parts if part.verdict == "diverged"]
    for port, source in (("output", "input"), ("grad_input", "grad_output")):
        moments = [min(part.diverged_at) for part in bad if part.port == port and part.diverged_at]
        if moments:
            sources = [part for part in parts if part.port == source]
            return _origin_at(min(moments), sources)
    came_in = any(part.port in ("input", "grad_output") for part in bad)
    return "inherited" if came_in else "unknown"  # a parameter is changed between two passes


def _origin_at(moment: Moment, sources: Sequence[Part]) -> Origin:
    known = [part for part in sources if part.verdict not in ("missing", "incomparable")]
    if any(moment in part.diverged_at for part in known):
        return "inherited"
    if not known and any(part.shape != part.candidate_shape for part in sources):
        return "inherited"  # what came in has another shape
    return "made here" if known else "unknown"


def compared_part(
    measured: SiteMeasurement,
    judged: Sequence[Judgement],
    nearer: str | None,
    metrics: Sequence[str] = (),
) -> Part:
    """A site in one. The first moment that diverged speaks for all; if none did, the worst."""
    site = measured.site
    bad = [k for k, one in enumerate(judged) if one.verdict == "diverged"]
    worst_at = max(
        range(len(judged)), key=lambda k: (severity(judged[k].verdict), judged[k].ratio or 0.0)
    )
    at = bad[0] if bad else worst_at
    said, moment = judged[at], measured.moments[at]
    first = site.moments[at]
    why = said.why
    if len(judged) > 1 and bad:
        why = f"at {_moment_words(moment)} {why}"
    found = measured.difference
    left, right = measured.summaries()
    flips = [one.flips for one in judged if one.flips is not None]
    hints = list(said.hints)
    if flips and not bad:
        hints.append(reduce(Flips.merge, flips).words)
    if nearer is not None and said.verdict == "diverged":
        hints.append(f"the {nearer} is nearer to the truth")
    if site.hint and bad:
        hints.append(site.hint)
    return Part(
        port=site.port,
        leaf=site.leaf,
        verdict=_verdict(said.verdict, site),
        why=why if not site.cut else f"{why}; {site.cut}",
        difference=found,
        reference_summary=left,
        candidate_summary=right,
        shape=first.reference.shape,
        candidate_shape=first.candidate.shape,
        dtype=first.reference.dtype,
        candidate_dtype=first.candidate.dtype,
        transform="" if site.transform is None else site.transform.name,
        error=math.nan if found is None else found.error,
        floor=judged[worst_at].floor,
        floor_ratio=judged[worst_at].ratio,
        floor_measured=judged[worst_at].floor_measured,
        hints=tuple(hints),
        moments=len(judged),
        worst_moment=measured.moments[worst_at].moment,
        diverged_at=tuple(measured.moments[k].moment for k in bad),
        bits_differ_at=min(
            (
                moment.moment
                for moment, one in zip(measured.moments, judged, strict=True)
                if one.verdict != "identical"
            ),
            default=None,
        ),
        max_abs_moment=measured.max_abs_moment,
        order=first.reference.order,
        nearer=nearer,
        added=tuple((name, moment.added(name)) for name in metrics),
        epochs=per_epoch(
            [one.moment for one in measured.moments],
            [one.verdict == "diverged" for one in judged],
            [math.nan if m.difference is None else m.difference.error for m in measured.moments],
            [pair.reference.order for pair in site.moments],
        ),
        flips=reduce(Flips.merge, flips) if flips else None,
        apart=max(one.apart for one in judged),
    )


def summary_part(
    site: SitePair, judged: JudgedRows, nearer: str | None, metrics: Sequence[str] = ()
) -> Part:
    """The same where there are summaries alone, of many moments at once."""
    first = site.moments[judged.at]
    bad = np.flatnonzero(judged.diverged).tolist()
    moments = [(pair.epoch, pair.batch, pair.call) for pair in site.moments]
    why = f"at {in_words(*moments[judged.at])} {judged.why}" if bad else judged.why
    hints = [f"the {nearer} is nearer to the truth"] if nearer is not None and bad else []
    return Part(
        port=site.port,
        leaf=site.leaf,
        verdict="diverged" if bad else "within",
        why=why if len(moments) > 1 else judged.why,
        reference_summary=judged.reference,
        candidate_summary=judged.candidate,
        shape=first.reference.shape,
        candidate_shape=first.candidate.shape,
        dtype=first.reference.dtype,
        candidate_dtype=first.candidate.dtype,
        transform="" if site.transform is None else site.transform.name,
        hints=tuple(hints),
        moments=len(moments),
        worst_moment=moments[judged.at],
        diverged_at=tuple(moments[at] for at in bad),
        order=first.reference.order,
        nearer=nearer,
        added=tuple((name, math.nan) for name in metrics),
        epochs=per_epoch(
            moments,
            judged.diverged.tolist(),
            judged.changes.tolist(),
            [pair.reference.order for pair in site.moments],
        ),
    )


def _verdict(verdict: Verdict, site: SitePair) -> Verdict:
    """What was cut off was not compared, so the rest cannot make two tensors identical."""
    return "within" if site.cut and verdict == "identical" else verdict


def unpaired_part(site: SitePair) -> Part:
    """The moments of a site that one side alone has."""
    if len(site.unpaired) <= _MANY:
        shown = ", ".join(site.unpaired[:3])
        more = f" and {len(site.unpaired) - 3} more" if len(site.unpaired) > 3 else ""
        return Part(site.port, site.leaf, "missing", f"{site.port} at {shown}{more}")
    said = []
    for side in ("reference", "candidate"):
        tail = f" only in the {side}"
        here = [words.removesuffix(tail) for words in site.unpaired if words.endswith(tail)]
        if len(here) > 1:
            said.append(f"{len(here)} moments, {here[0]} to {here[-1]},{tail}")
        elif here:
            said.append(f"{here[0]}{tail}")
    return Part(site.port, site.leaf, "missing", f"{site.port} at {', '.join(said)}")


def _moment_words(moment: MomentMeasurement) -> str:
    return in_words(*moment.moment)
