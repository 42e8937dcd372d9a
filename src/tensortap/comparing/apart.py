"""Tokens that follow another choice of expert, judged apart from the others.

The tokens that no other choice has touched say what a layer does. Those that one has touched came
in with an error of their own: of them the usual one may not err by much more than what came in.
What a choice brings along is unknown at the experts themselves; it is another answer of the usual
size, so that only what is far larger is somebody's fault.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..numerics.difference import Difference
from .judge import AGAINST_ESTIMATE, Expectation, Judgement, judge, scatter
from .measure import MomentMeasurement
from .outliers import token_errors
from .touched import Apart

__all__ = ["judge_apart"]

_MOST = 4.0  # times the usual size of a token: another expert's answer is no larger


def judge_apart(
    measured: MomentMeasurement, expected: Expectation, apart: Apart, following: float
) -> Judgement:
    """The verdict on one moment of which some tokens follow another choice of expert.

    `following` is the relative error to be expected of those that came in touched.
    """
    whole = measured.difference
    assert whole is not None
    decided = expected.rule is not None or expected.preset is not None
    if whole.identical or whole.disagreeing or not whole.max_abs or decided:
        return judge(measured, expected)
    if not apart.axes:
        return _undivided(measured, expected, apart, following)
    floor = expected.floor if isinstance(expected.floor, MomentMeasurement) else None
    if floor is not None:
        same = floor.difference is not None and floor.shape == measured.shape
        floor = floor.only(apart.axes, apart.clean) if same and len(apart.clean) else None
    said = f"{apart.count} of {apart.total} tokens follow another choice of expert"
    own: Judgement | None = None
    error = math.nan
    if len(apart.clean):
        clean = measured.only(apart.axes, apart.clean)
        own = judge(clean, replace(expected, floor=floor))
        error = _error(clean.difference, own)
        said = f"{own.why}; {said} and are judged apart"
    errors = (error, _usual(measured, apart, apart.touched))
    why = _beyond(measured, apart, following)
    if own is not None and own.verdict == "diverged":
        return replace(own, why=said, apart=apart.count, errors=errors)
    known = own or Judgement("within", said)
    known = replace(known, apart=apart.count, errors=errors, hints=(why,) if why else ())
    if why:
        return replace(known, verdict="diverged", why=f"{said}: {why}", spread=0.0)
    return replace(known, verdict="within", why=said)


def _undivided(
    measured: MomentMeasurement, expected: Expectation, apart: Apart, following: float
) -> Judgement:
    """The verdict where nothing tells which of the tokens follow another choice.

    Where they are the fewer, the usual token is none of them.
    """
    judged = judge(measured, expected)
    table = measured.profile()
    if judged.verdict != "diverged" or table is None:
        return judged
    said = "some tokens follow another choice of expert, and nothing tells which"
    few = apart.share < 0.5 and len(table.tokens) > 2
    errors = token_errors(table)
    error = float(np.median(errors) if few else np.sqrt(np.square(errors).mean()))
    limit = AGAINST_ESTIMATE * scatter(len(errors) * len(table.channels))
    floor = judged.floor if few and judged.floor is not None else following
    if error > limit * floor:
        return replace(judged, why=f"{judged.why}; {said}, but most err")
    return replace(judged, verdict="within", why=said, hints=(), errors=(error, error))


def _error(found: Difference | None, judged: Judgement) -> float:
    return math.nan if found is None else max(found.error, judged.spread)


def _usual(measured: MomentMeasurement, apart: Apart, places: NDArray[np.int64]) -> float:
    """The error of some tokens together, each beside its own size and the usual one."""
    some = measured.only(apart.axes, places).profile()
    if some is None:
        return math.nan
    return float(np.sqrt(np.square(token_errors(some)).mean()))


def _beyond(measured: MomentMeasurement, apart: Apart, following: float) -> str:
    """What is wrong with the tokens that are apart; empty where another choice explains it."""
    whole = measured.difference
    touched = measured.only(apart.axes, apart.touched).difference
    if whole is None or touched is None:
        return ""
    size = whole.row.ref_l2 * math.sqrt(apart.count / apart.total)
    if touched.row.d_l2 > _MOST * math.hypot(size, touched.row.ref_l2):
        return f"they err by more than {_MOST:.0f} times the size of as many tokens"
    if not len(apart.following) or not following > 0:
        return ""
    usual = _usual(measured, apart, apart.following)
    limit = AGAINST_ESTIMATE * scatter(len(apart.following) * touched.count // apart.count)
    if not usual > limit * following:
        return ""
    return (
        f"they err by {usual:.3g}, {usual / following:.3g} times what they were given (up to "
        f"{limit:.2g} times is allowed)"
    )
