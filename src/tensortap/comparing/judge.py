"""What a difference means: from numbers to a verdict, with the reason in words.

In this order: equal bits are `identical`; a disagreement about NaN or infinities is `diverged`;
a rule of the user decides; else the error is set against the floor, given or estimated, and then
the tokens and channels are looked at one by one, since one of them can be wholly wrong in a layer
that is good as a whole. Every error is relative to the reference's own size, of the tensor or of
the place: no verdict changes when both runs are multiplied by a power of two. Subnormal numbers
are the exception, for their rounding is absolute: it counts as part of the floor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..numerics.difference import METRICS, Difference
from ..numerics.profile import Profile
from .carried import Carried
from .flips import Flips
from .measure import MomentMeasurement
from .outliers import find_outliers, non_finite_places, typical_ratio, usual_error
from .precision import roundoff, smallest_step
from .results import Verdict
from .rules import Rule
from .summaries import judge_summaries

__all__ = ["AGAINST_ESTIMATE", "AGAINST_FLOOR", "Expectation", "Judgement", "judge", "scatter"]

# How far above the floor an error may be: a floor run is a sample of noise, an estimate a guess.
AGAINST_FLOOR = 2.0
AGAINST_ESTIMATE = 4.0
_PERCENTILES = ("p50", "p90", "p95", "p99")
QUIET = 0.4  # of the whole floor: what a single place of a floor run errs at least


@dataclass(frozen=True)
class Expectation:
    """What is to be expected at a site: a measured floor, or else an estimate, and who decides.

    In the place of a floor run may stand what the errors of good inputs become there.
    """

    estimate: float
    basis: str
    floor: MomentMeasurement | Carried | None = None
    rule: Rule | None = None
    preset: Rule | None = None

    @property
    def measured(self) -> Difference | None:
        """The floor run's difference; a repeat run that is equal to the last bit tells nothing."""
        found = None if self.floor is None else self.floor.difference
        return found if found is not None and found.rmse > 0 else None


@dataclass(frozen=True)
class Judgement:
    """A verdict on one moment, and what it rests on."""

    verdict: Verdict
    why: str
    floor: float | None = None
    ratio: float | None = None
    hints: tuple[str, ...] = ()
    floor_measured: bool = False
    spread: float = 0.0  # the error of the usual token or channel; 0 where it was not looked at
    flips: Flips | None = None  # the tokens that chose other experts, in a router's choice
    apart: int = 0  # the tokens that were judged apart, since they follow another choice
    errors: tuple[float, float] | None = None  # then: of the others, and of those apart


def judge(measured: MomentMeasurement, expected: Expectation) -> Judgement:
    """The verdict on one moment of a site."""
    judged = _judged(measured, expected)
    run = not isinstance(expected.floor, Carried)
    given = judged.floor is not None and expected.measured is not None and run
    return replace(judged, floor_measured=given)


def _judged(measured: MomentMeasurement, expected: Expectation) -> Judgement:
    found = measured.difference
    if found is None:
        assert measured.reference is not None
        assert measured.candidate is not None
        return _from_summaries(measured, expected)
    floor, ratio = against_floor(found, expected)
    if found.identical:
        return Judgement("identical", "the same bits", floor, ratio)
    if found.count == 0:
        return Judgement("within", "there are no elements to compare", floor, ratio)
    if found.disagreeing:
        return _disagreeing(measured, found, floor, ratio)
    if found.max_abs == 0:  # and so under any rule: a cast, or zeros of two signs
        return Judgement("within", "the same values", floor, ratio)
    if expected.rule is not None:
        return _by_rule(expected.rule, measured, floor, ratio)
    if expected.preset is not None:
        judged = _by_rule(expected.preset, measured, floor, ratio)
    elif _is_mask(measured, found):
        return Judgement("within", "a mask: zeros, and each dtype's own limit", None, None)
    else:
        judged = _by_floor(found, expected, floor, ratio)
    return _with_outliers(judged, measured, expected, floor)


def _from_summaries(measured: MomentMeasurement, expected: Expectation) -> Judgement:
    assert measured.reference is not None
    assert measured.candidate is not None
    floor = expected.floor
    given = (floor.reference, floor.candidate) if isinstance(floor, MomentMeasurement) else None
    verdict, why = judge_summaries(
        measured.reference, measured.candidate, expected.estimate * AGAINST_ESTIMATE, given
    )
    return Judgement(verdict, why)


def _size(found: Difference) -> float:
    """The root mean square of the reference; 0 of nothing."""
    return found.row.ref_l2 / math.sqrt(found.finite) if found.finite else 0.0


def against_floor(found: Difference, expected: Expectation) -> tuple[float | None, float | None]:
    """The floor as a relative error, and the error's ratio to it; None where undefined."""
    size = _size(found)
    if found.identical or math.isnan(found.rmse):
        return None, None
    given = expected.measured
    if not size:  # a relative error is undefined, and what inputs brought is known all the same
        carried = given is not None and isinstance(expected.floor, Carried)
        return None, found.rmse / given.rmse if carried and given is not None else None
    steps = max(smallest_step(dtype) for dtype in found.dtypes) / 2 / size  # of subnormal numbers
    floor = math.hypot(expected.estimate, steps) if expected.estimate else 0.0
    if given is not None:  # no run is better than its own rounding
        floor = max(given.rmse / size, roundoff(given.dtypes[0]))
    if floor <= 0 or math.isnan(floor):
        return None, None
    return floor, found.rmse / size / floor


def _by_rule(
    rule: Rule, measured: MomentMeasurement, floor: float | None, ratio: float | None
) -> Judgement:
    values = _values(rule, measured, ratio)
    if rule.holds(values):
        return Judgement("within", f"fulfils {rule.text}", floor, ratio)
    return Judgement("diverged", f"{rule.failing(values)} of {rule.text}", floor, ratio)


def _values(rule: Rule, measured: MomentMeasurement, ratio: float | None) -> Mapping[str, float]:
    found = measured.difference
    if not rule.metrics.isdisjoint(_PERCENTILES):
        found = measured.with_percentiles()
    values = {"floor_ratio": math.nan if ratio is None else ratio}
    for name in rule.metrics - set(values):
        own = name in METRICS
        values[name] = _number(getattr(found, name)) if own else measured.added(name)
    return values


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _by_floor(
    found: Difference, expected: Expectation, floor: float | None, ratio: float | None
) -> Judgement:
    given = expected.measured is not None
    limit = AGAINST_FLOOR if given else AGAINST_ESTIMATE
    limit *= scatter(found.finite)
    if floor is None and ratio is not None and ratio <= limit:
        said = f"{_no_floor(found)}, no more than the errors of its inputs become here"
        return Judgement("within", said, floor, ratio)
    if floor is None or ratio is None:
        return Judgement("diverged", _no_floor(found), floor, ratio)
    basis = "measured" if given else f"estimated from {expected.basis}"
    if isinstance(expected.floor, Carried):
        basis = "what the errors of its inputs become here"
    why = f"error {found.error:.3g} is {ratio:.3g} times the floor of {floor:.3g} ({basis}"
    if ratio <= limit:
        return Judgement("within", f"{why})", floor, ratio)
    return Judgement("diverged", f"{why}; up to {limit:.2g} times is allowed)", floor, ratio)


def _no_floor(found: Difference) -> str:
    share = f"{found.mismatched} of {found.count} elements differ"
    if all(roundoff(dtype) == 0.0 for dtype in found.dtypes):
        return f"{share}, and {found.dtypes[0]} does not round"
    return f"the reference is zero everywhere, the candidate has values up to {found.max_abs:.3g}"


def _is_mask(measured: MomentMeasurement, found: Difference) -> bool:
    """Whether both sides hold zeros and the limits of their own dtypes, in the same places."""
    if found.dtypes[0] == found.dtypes[1]:
        return False
    left, right = measured.summaries()
    limits = left.saturated == right.saturated == found.mismatched
    return limits and all(side.zeros + side.saturated == side.count for side in (left, right))


def _disagreeing(
    measured: MomentMeasurement, found: Difference, floor: float | None, ratio: float | None
) -> Judgement:
    table = measured.profile()
    where = non_finite_places(table) if table is not None else ""
    why = f"{found.disagreeing} of {found.count} pairs disagree about NaN or Inf" + (
        f", at {where}" if where else ""
    )
    return Judgement("diverged", why, floor, ratio, (f"NaN or Inf at {where}",) if where else ())


def _with_outliers(
    judged: Judgement, measured: MomentMeasurement, expected: Expectation, floor: float | None
) -> Judgement:
    """Look at tokens and channels; a bad one in a good layer makes it diverged, as do most."""
    own = measured.profile()
    if own is None or floor is None:
        return judged
    other: Profile | None = None
    limit, least = AGAINST_ESTIMATE, AGAINST_ESTIMATE * floor
    if expected.floor is not None and expected.measured is not None:
        other = expected.floor.profile()
        limit, least = AGAINST_FLOOR, QUIET * floor
    hints = tuple(str(outlier) for outlier in find_outliers(own, other, least))
    said = f"good but for {' and '.join(hints)}"
    if not hints and expected.preset is None:
        ratio, axis, places = typical_ratio(own, other, floor if other is None else least)
        limit *= (1.0 + 2.0 / math.sqrt(max(1, places))) * scatter(
            len(own.tokens) * len(own.channels)
        )
        if ratio > limit:
            hints = (f"most {axis}s: error {ratio:.3g} times the floor's",)
            said = (
                f"in most {axis}s the error is {ratio:.3g} times the floor's (up to {limit:.2g} "
                "times is allowed), which a few large ones hide"
            )
    if not hints:
        return replace(judged, spread=usual_error(own))
    if expected.preset is not None:
        said = (
            f"fulfils {expected.preset.text}, but single places do not agree, which limits on the "
            f"whole tensor hide: {' and '.join(hints)}"
        )
    why = judged.why if judged.verdict == "diverged" else said
    return Judgement("diverged", why, judged.floor, judged.ratio, hints)


def scatter(count: int) -> float:
    """What few values may scatter beyond many."""
    return 1.0 + 4.0 / math.sqrt(max(1, count))
