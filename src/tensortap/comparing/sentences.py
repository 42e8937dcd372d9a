"""The answer in words."""

from __future__ import annotations

import math

from .epochs import parted
from .flips import Flips, about_flips
from .generation import about_generations
from .maker import Maker, within
from .results import Comparison, LayerComparison

__all__ = ["answer", "bits_words", "name_of", "place_of"]

_ORIGINS = {
    "made here": "made here, for its inputs agree",
    "inherited": "inherited, for its inputs are off already",
    "unknown": "unknown whether made here, for its inputs were not recorded",
}

_OF_TRAINING = {
    "param": "a parameter: the optimizer's step before made it",
    "grad_param": "the gradient of a parameter",
    "update": "what a step did to a parameter",
    "scalar": "a number that was logged",
}

_SIDES = ("reference", "candidate")


def name_of(layer: str) -> str:
    """A layer's name; the root module has none."""
    return layer or "(root)"


def answer(comparison: Comparison) -> str:
    """Where two runs part, or that they do not, and what was left out."""
    rows = comparison.layers
    compared = comparison.compared
    first = comparison.first_divergence
    if first is not None:
        before = sum(row.verdict in ("identical", "within") for row in _before(rows, first))
        agree = f"{_plural(before, 'layer')} before it {'agrees' if before == 1 else 'agree'}; "
        diverged = sum(row.verdict == "diverged" for row in rows)
        text = (
            f"First divergence at {name_of(first.layer)} "
            f"({_origin(first, comparison.maker)}): {_why(first)}. {agree if before else ''}"
            f"{diverged} of {_plural(len(compared), 'compared layer')} diverged."
            f"{parted(comparison)}"
        )
    elif all(row.verdict == "identical" for row in compared) and compared:
        many = len(compared) > 1
        subject = f"all {len(compared)} compared layers have" if many else "1 layer has"
        text = f"Identical: {subject} the same bits."
    else:
        identical = sum(row.verdict == "identical" for row in compared)
        text = (
            f"No divergence: {_plural(len(compared), 'compared layer')}, "
            f"{identical} identical, {len(compared) - identical} within."
        )
    return (
        about_generations(comparison.generations)
        + text
        + about_flips(_flips(comparison))
        + _bits(comparison)
        + _left_out(rows)
        + _against_truth(comparison)
    )


def _flips(comparison: Comparison) -> list[tuple[str, Flips]]:
    """Where tokens chose other experts; after a divergence that may be what follows from it."""
    first = comparison.first_divergence
    rows = comparison.layers if first is None else _before(comparison.layers, first)
    return [(name_of(row.layer), row.flips) for row in rows if row.flips is not None]


def _bits(comparison: Comparison) -> str:
    """Where the bits part, unless it is known who made the first divergence."""
    found, first = comparison.first_bit_difference, comparison.first_divergence
    if found is None or found.row is first or comparison.maker is not None:
        return ""
    return f" The {bits_words(found.layer, found.maker).removeprefix('the ')}."


def bits_words(layer: str, maker: Maker | None) -> str:
    """Where the bits of two runs part, and how far that may be trusted."""
    where = f" (made in {place_of(maker)})" if maker is not None and maker.beside_layers else ""
    return f"the bits first differ at {name_of(layer)}{where}; that alone does not prove a bug"


def place_of(maker: Maker) -> str:
    """Where a module made an error, in words: in its forward, after and before which layers."""
    forward = f"the forward of {maker.layer}" if maker.layer else "the model's own forward"
    if maker.after is not None:
        forward += f", after {within(maker.layer, maker.after)}"
    if maker.before is not None:
        forward += f", before {within(maker.layer, maker.before)}"
    if maker.source:
        forward += f" ({maker.source})"
    return forward


def _origin(row: LayerComparison, maker: Maker | None) -> str:
    part = row.first_part
    if part is not None and part.port in _OF_TRAINING:
        return _OF_TRAINING[part.port]
    if maker is not None and maker.layer != row.layer:
        return f"made in {place_of(maker)}; the inputs of {maker.layer or 'the model'} agree"
    if maker is not None and maker.after is not None:
        return f"made in {place_of(maker)}, for its inputs agree"
    words = _ORIGINS[row.origin or "unknown"]
    if row.main is not None and row.main.port.startswith("grad"):
        return words.replace("its inputs", "the gradients that came in")
    return words


def _why(row: LayerComparison) -> str:
    """The reason of the part that diverged first; a layer's row has that of its worst output."""
    part, main = row.first_part, row.main
    if part is None or main is None or not part.diverged_at or not main.diverged_at:
        return row.why
    if min(part.diverged_at) >= min(main.diverged_at):
        return row.why
    return part.why if part.port == "output" else f"{part.port}: {part.why}"


def _before(rows: tuple[LayerComparison, ...], row: LayerComparison) -> list[LayerComparison]:
    return list(rows[: rows.index(row)])


def _left_out(rows: tuple[LayerComparison, ...]) -> str:
    parts = []
    for verdict, words in (
        ("incomparable", "cannot be compared"),
        ("missing", "missing on one side"),
    ):
        count = sum(row.verdict == verdict for row in rows)
        if count:
            verb = "is " if verdict == "missing" and count == 1 else ""
            verb = verb or ("are " if verdict == "missing" else "")
            parts.append(f"{_plural(count, 'layer')} {verb}{words}")
    lacking = sum(
        row.verdict != "missing" and any(part.verdict == "missing" for part in row.parts)
        for row in rows
    )
    if lacking:
        parts.append(
            f"{_plural(lacking, 'layer')} {'has' if lacking == 1 else 'have'} tensors or moments "
            "that only one side has"
        )
    slim = sum(row.by_summaries for row in rows)
    if slim:
        parts.append(
            f"{_plural(slim, 'layer')} {'is' if slim == 1 else 'are'} judged by summaries alone, "
            "so which elements differ is unknown"
        )
    return f" {'; '.join(parts)}." if parts else ""


def _against_truth(comparison: Comparison) -> str:
    """Which side the truth speaks for: the reference may be the worse one."""
    if comparison.truth is None:
        return ""
    known = [row for row in comparison.compared if not math.isnan(row.reference_error)]
    unknown = len(comparison.compared) - len(known)
    where = f" Against the truth {comparison.truth}"
    if not known:
        return f"{where} nothing can be said: no layer has its tensors on all three sides."
    sides = {side: [row for row in known if row.nearer == side] for side in _SIDES}
    ours, theirs = sides["reference"], sides["candidate"]
    of = f"of {_plural(len(known), 'layer')}"
    if len(theirs) > 2 * len(ours):
        text = (
            f"{where} the candidate is nearer at {len(theirs)} {of}{_but('reference', ours)}: the "
            f"reference may be the worse side (first at {_distances(theirs[0])})"
        )
    elif len(ours) > 2 * len(theirs):
        text = (
            f"{where} the reference is nearer at {len(ours)} {of}{_but('candidate', theirs)} "
            f"(first at {_distances(ours[0])})"
        )
    elif ours or theirs:
        text = (
            f"{where} the reference is nearer at {len(ours)}, the candidate at {len(theirs)} {of}: "
            "neither is clearly the better side"
        )
    else:
        text = f"{where} both sides are equally near at {_plural(len(known), 'layer')}"
    if unknown:
        text += f"; unknown at {_plural(unknown, 'layer')}, whose tensors are not on all three"
    return f"{text}."


def _but(side: str, rows: list[LayerComparison]) -> str:
    return f", the {side} at {len(rows)}" if rows else ""


def _distances(row: LayerComparison) -> str:
    ours, theirs = row.reference_error, row.candidate_error
    return f"{name_of(row.layer)}, reference {ours:.3g} off, candidate {theirs:.3g}"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
