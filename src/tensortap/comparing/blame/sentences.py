"""The answer of blame in a sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..sentences import bits_words, name_of, place_of
from .verdict import LEAST, MOST

if TYPE_CHECKING:
    from .beside_floor import AgainstFloor
    from .results import Blame, BlamedLayer

__all__ = ["answer", "percent"]

_SECOND = 0.25  # a share that makes a layer worth naming where there is no culprit


def percent(share: float) -> str:
    """A share of the error in words."""
    value = 100 * share
    if math.isnan(value):
        return "an unknown part"
    if 99.5 <= value <= 100.5:
        return "100 %"
    return f"{value:.0f} %" if abs(value) >= 1 else f"{value:.1g} %"


def answer(blame: Blame) -> str:
    """Who made the final error, or why nobody did; and whose weights are others."""
    said = _so_far(blame) if blame.interrupted else _answer(blame)
    if not blame.weights or blame.final_error == 0:
        return said
    culprit = blame.culprit
    own = [
        n
        for n in blame.weights
        if culprit is not None and (n == culprit or not culprit or n.startswith(f"{culprit}."))
    ]
    if own:
        what = "its weights are" if own == [culprit] else f"the weights of {_few(own)} inside are"
        return f"{said}; {what} not the reference's"
    return f"{said}; the weights of {_few(blame.weights)} are not the reference's"


def _few(layers: Sequence[str]) -> str:
    named = ", ".join(name_of(name) for name in layers[:3])
    return f"{len(layers)} layers ({named}, …)" if len(layers) > 3 else named


def _answer(blame: Blame) -> str:
    if blame.culprit is not None:
        text = f"{name_of(blame.culprit)} makes {percent(blame.share)} of the final error"
        if blame.against_floor is not None:
            text = _beside_floor(blame.culprit, blame.against_floor)
        return text if blame.made_in is None else f"{text}, in {place_of(blame.made_in)}"
    if not blame.same:
        return f"no single culprit: {_spread(blame)}; {_final(blame)}{_bits(blame, '; ')}"
    if blame.final_error == 0:
        said = "nothing to blame: the final output is the reference's"
        return f"{said}{_on_the_way(blame, ', though ')}"
    if blame.weights:
        said = (
            f"no single culprit: other weights make the final error of {blame.final_error:.2g}, "
            f"which is no larger than rounding can make{_up_to(blame)}"
        )
        return f"{said}{_bits(blame, '; ') or _on_the_way(blame, '; ')}"
    said = f"rounding explains the final error of {blame.final_error:.2g}{_up_to(blame)}"
    doubts = _bits(blame, ", but ") or _on_the_way(blame, ", but ")
    return f"{said}{doubts}" if doubts else f"nobody's fault: {said}"


def _beside_floor(culprit: str, found: AgainstFloor) -> str:
    """What the culprit makes, and the same layer of the floor run."""
    if found.by == "recording":
        return (
            f"{name_of(culprit)} is {found.made_here:.2g} off from the floor run on the same "
            "inputs, where every other layer has the floor's bits"
        )
    return (
        f"{name_of(culprit)} makes more than rounding: alone on the reference's inputs an error of "
        f"{found.made_here:.2g}, where the floor run's makes {found.floor:.2g}"
    )


def _so_far(blame: Blame) -> str:
    """What is known of an answer that nobody waited for."""
    said = (
        f"interrupted after {blame.forwards} of at most {blame.limit} runs, so this is partial: "
        f"the final error is {blame.final_error:.2g} ({blame.final_verdict})"
    )
    rows = [row for row in blame.first_level if not math.isnan(row.share)]
    top = max(rows, key=lambda row: row.share, default=None)
    if top is not None and LEAST <= top.share <= MOST:
        text = f"{name_of(top.layer)} makes {percent(top.share)} of it, and was not looked into"
    elif blame.halved is not None:
        text = f"it is halved between {name_of(blame.halved[0])} and {name_of(blame.halved[1])}"
    elif top is not None:
        of = len(blame.first_level)
        text = (
            f"of {len(rows)} layers of {of} that were looked at, {name_of(top.layer)} makes the "
            f"largest share, {percent(top.share)}"
        )
    else:
        text = "no share is known yet"
    return f"{said}; {text}{_bits(blame, '; ') or _on_the_way(blame, '; ')}"


def _up_to(blame: Blame) -> str:
    """How large an error is expected, where the verdict rests on that."""
    if not blame.final_error <= blame.final_floor:
        return ""
    return f" (up to {blame.final_floor:.2g} is expected)"


def _final(blame: Blame) -> str:
    """Why the final output is not good, in the words of compare."""
    why = f": {blame.final_why}" if blame.final_why else ""
    return f"the output{blame.final_leaf} of {name_of(blame.final)} diverged{why}"


def _bits(blame: Blame, before: str) -> str:
    """Where the bits part, in the words of compare."""
    found = blame.first_bit_difference
    return "" if found is None else f"{before}{bits_words(found.layer, found.maker)}"


def _on_the_way(blame: Blame, before: str) -> str:
    """That a layer diverged, of which nothing is left at the end."""
    if blame.first_divergence is None:
        return ""
    return f"{before}{name_of(blame.first_divergence)} diverged before it"


def _spread(blame: Blame) -> str:
    outside = _outside(blame)
    if outside:
        return outside
    rows = [row for row in blame.first_level if not math.isnan(row.share)]
    top = sorted(rows, key=lambda row: -row.share)
    if blame.bisect:
        return _bisected(top)
    if not top:
        return "no layer could be looked at"
    if top[0].share > MOST:
        return (
            f"the errors of several layers hide each other ({name_of(top[0].layer)} "
            f"{percent(top[0].share)}, {name_of(top[-1].layer)} {percent(top[-1].share)})"
        )
    if top[0].share >= LEAST and not top[0].clear:
        usual = "layers" if blame.weights else "rounding and layers"
        return (
            f"{name_of(top[0].layer)} makes {percent(top[0].share)} of the final error, but no "
            f"more than {usual} like it make ({top[0].made_here:.2g} of up to {top[0].floor:.2g})"
        )
    if len(top) > 1 and top[1].share >= _SECOND:
        named = " and ".join(
            f"{name_of(row.layer)} {'makes ' if row is top[0] else ''}{percent(row.share)}"
            for row in top[:2]
        )
        return f"{named} of the final error"
    if top[0].share >= _SECOND:
        return (
            f"{name_of(top[0].layer)} makes {percent(top[0].share)} of the final error, the other "
            f"{len(top) - 1} layers the rest"
        )
    return (
        f"the error builds up evenly over {len(top)} layers (largest share {percent(top[0].share)})"
    )


def _bisected(top: Sequence[BlamedLayer]) -> str:
    if not top:
        return "no layer could be looked at"
    return (
        f"the error is halved at {name_of(top[0].layer)}, which makes {percent(top[0].share)} of it"
    )


def _outside(blame: Blame) -> str:
    """Where the error is not made by any layer that was looked at."""
    if blame.ends is None:
        return ""
    first, last = blame.ends
    for share, where in (
        (blame.before, f"before {name_of(first)}"),
        (blame.behind, f"behind {name_of(last)}"),
        (
            blame.beside,
            "beside the layers, by what the model itself does or hands them (masks, positions)",
        ),
    ):
        if share >= LEAST:
            return f"{percent(share)} of the final error comes in {where}"
    return ""
