"""When a layer may be called the culprit: a false blame costs a person days."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from .levels import contains
from .results import BlamedLayer

__all__ = ["LEAST", "MOST", "against_peers", "rivals", "stands_out"]

LEAST = 0.5  # of the squared final error
_NEXT = 0.75  # of the culprit's share: a second layer above it makes neither of them the one
_PEERS = 2
_AGAINST_PEERS = 3.0
MOST = 1.2  # one layer alone makes at most all of it: with more, two of them hide each other


def rivals(row: BlamedLayer, others: Sequence[BlamedLayer]) -> list[BlamedLayer]:
    """The layers that are neither inside a layer nor around it, the largest share first."""
    apart = [
        other
        for other in others
        if not contains(row.layer, other.layer)
        and not contains(other.layer, row.layer)
        and not math.isnan(other.share)
    ]
    return sorted(apart, key=lambda other: -other.share)


def against_peers(
    rows: Sequence[BlamedLayer],
    unit: float,
    usual_here: Callable[[BlamedLayer], float] = lambda row: 0.0,
) -> list[BlamedLayer]:
    """What is to be expected of a layer, where others of its type show it better than an estimate.

    In a narrow precision they show how little rounding really makes. In a candidate that was
    quantised they all make more than rounding, and what all of them make is no one's fault: that
    the error of the first is amplified by all behind it does not make it the culprit. `unit` is the
    coarser precision's: layers that make less than it could tell nothing. `usual_here` says what a
    layer of its size makes in this candidate, as its leaves have it.
    """
    judged = []
    for row in rows:
        peers = [p.made_here for p in rows if p.type == row.type and p is not row]
        peers = [made for made in peers if math.isfinite(made)]
        if len(peers) >= _PEERS:
            most, usual = max(peers), median(peers)
            if usual > row.floor:
                row = replace(row, floor=_AGAINST_PEERS * usual)
            elif most >= unit / 4:
                row = replace(row, floor=min(row.floor, _AGAINST_PEERS * most))
        if usual_here(row) > 0:
            row = replace(row, floor=max(row.floor, _AGAINST_PEERS * usual_here(row)))
        judged.append(row)
    return judged


def stands_out(row: BlamedLayer, others: Sequence[BlamedLayer]) -> bool:
    """Whether a layer makes half of the error, and much more than any other."""
    if not LEAST <= row.share <= MOST:
        return False
    next_ones = rivals(row, others)
    return not next_ones or next_ones[0].share < _NEXT * row.share
