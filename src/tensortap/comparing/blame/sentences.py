"""The answer of blame in a sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..sentences import name_of
from .verdict import LEAST, MOST

if TYPE_CHECKING:
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
    """Who made the final error, or why nobody did."""
    if blame.culprit is not None:
        return f"{name_of(blame.culprit)} makes {percent(blame.share)} of the final error"
    if blame.final_error == 0:
        return "nothing to blame: the final output is the reference's"
    if blame.final_error <= blame.final_floor:
        return (
            f"nobody's fault: rounding explains the final error of {blame.final_error:.2g} "
            f"(up to {blame.final_floor:.2g} is expected)"
        )
    return f"no single culprit: {_spread(blame)}"


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
        return (
            f"{name_of(top[0].layer)} makes {percent(top[0].share)} of the final error, but no "
            f"more than rounding and layers like it make ({top[0].made_here:.2g} of up to "
            f"{top[0].floor:.2g})"
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
