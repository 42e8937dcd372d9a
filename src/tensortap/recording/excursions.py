"""Steps far outside a run's own history: what a run shows before its first NaN, or without one.

A run has a few series: the loss and gradient norms that were logged, the norm of all gradients, of
all updates, and the size of all outputs, one number per step. Each is held against its own earlier
steps. What counts as far depends on how the run went on: the steps right before a NaN are suspect
early, a run that stays finite is only when it leaves its history and does not come back.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from .series import Series, is_watched, series_of

if TYPE_CHECKING:
    from .reader import Recording

__all__ = ["Excursion", "excursions_of", "quantity_of"]

Values = NDArray[np.float64]
Moment = tuple[int, int]
Quantity = Literal["output", "loss", "gradient", "update"]

_WINDOW = 50  # steps of history that a step is held against
_HISTORY = 5  # steps before anything can be said of the next
_LONG = 20  # steps before a run that stays finite is judged
_GAP = 5  # steps of quiet inside one excursion
_LOST = 5  # steps that a run stays away before it counts as not coming back
_START = 5  # steps that show the scale of the beginning

_ORDER: tuple[Quantity, ...] = ("output", "loss", "gradient", "update")
_PORTS: dict[str, tuple[Quantity, str]] = {
    "output": ("output", "size of the outputs"),
    "grad_output": ("gradient", "norm of the gradients of outputs"),
    "grad_param": ("gradient", "gradient norm"),
    "update": ("update", "norm of the update"),
}
_LOSS = re.compile(r"loss|nll|perplexity|\bppl\b|cost|objective|mse|mae", re.IGNORECASE)
_GRADIENT = re.compile(r"grad.*norm|norm.*grad", re.IGNORECASE)
_NOT = re.compile(r"scal(e|ing)|weight|coef|count|learning|\blr\b", re.IGNORECASE)


@dataclass(frozen=True)
class _Far:
    """How far is far: times the usual value, and times the spread of the values before."""

    ratio: float
    spread: float


_BEFORE_NAN: dict[Quantity, _Far] = {
    "output": _Far(2.0, 4.0),
    "loss": _Far(2.0, 3.0),
    "gradient": _Far(4.0, 3.0),
    "update": _Far(4.0, 3.0),
}
_ALONE: dict[Quantity, _Far] = {
    "output": _Far(10.0, 10.0),
    "loss": _Far(2.0, 8.0),
    "gradient": _Far(10.0, 10.0),
    "update": _Far(10.0, 10.0),
}
_DRIFT: dict[Quantity, float] = {"output": 10.0, "loss": 3.0, "gradient": 10.0, "update": 10.0}
"""Times the lowest level so far: growth so slow that every step has its like before it."""
_SPIKE = 30.0  # times the largest before: worth a word though the run came back
_BLOWN = 10.0  # times the loss of the first steps: no run begins so badly and is well


@dataclass(frozen=True)
class Excursion:
    """The first step at which a quantity left its own history, and how far.

    `usual` and `most` are the median and the largest of the `history` steps before. `layer`, `port`
    and `leaf` are the place that left its own history furthest at that step; of a logged number,
    its name. `recovered` is false when the run never came back, or broke.
    """

    quantity: Quantity
    name: str
    layer: str
    port: str
    leaf: str
    epoch: int
    batch: int
    value: float
    usual: float
    most: float
    history: int
    recovered: bool
    steps: int  # how many are abnormal
    order: int = field(default=-1, repr=False, compare=False)

    @property
    def moment(self) -> Moment:
        return self.epoch, self.batch

    @property
    def rank(self) -> tuple[Moment, int]:
        """In time and, within a step, in order of execution."""
        return self.moment, _ORDER.index(self.quantity)

    def to_dict(self) -> dict[str, Any]:
        """What JSON can hold."""
        named = asdict(self)
        del named["order"]
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in named.items()
        }

    def __str__(self) -> str:
        step = f"step {self.batch} of epoch {self.epoch}" if self.epoch else f"step {self.batch}"
        before = f"the {self.history} steps before it had at most {self.most:.4g}, usually "
        before = f"{before}{self.usual:.4g}"
        if self.history == 1:
            before = f"the step before it had {self.most:.4g}"
        where = (
            f"; the {self.port}{f' {self.leaf}' if self.leaf else ''} of '{self.layer}' grew most"
        )
        where = "" if self.port == "scalar" else where
        after = "It came back" if self.recovered else "It did not come back"
        return f"At {step} the {self.name} is {self.value:.4g}; {before}{where}. {after}."


@dataclass(frozen=True, eq=False)
class _Signal:
    """One quantity of a run, one number per step; NaN where the step was not finite."""

    quantity: Quantity
    name: str
    steps: list[Moment]
    values: Values
    places: list[Series]
    sizes: Values  # one row per place, one column per step


def excursions_of(recording: Recording, broke: Moment | None) -> list[Excursion]:
    """What left its history, in the order of time and, within a step, of execution.

    Args:
        broke: the epoch and batch of the first NaN or Inf; None for a run that stayed finite. Of a
            run that broke, what led up to it is said; what went up and came back long before is
            not, unless it was very large.
    """
    signals = list(_signals(recording))
    if broke is not None:
        found = _led_up(signals, broke)
    elif _trained(recording):
        signals = [_finite(signal) for signal in signals]
        found = [e for signal in signals for e in _alone(signal)]
        found = _confirmed(found, {signal.quantity for signal in signals})
        lost = [e.moment for e in found if not e.recovered]
        if lost:
            end = max(signal.steps[-1] for signal in signals if signal.steps)
            earlier = [e for e in _led_up(signals, (end[0], end[1] + 1)) if e.moment < min(lost)]
            found = [*earlier, *(e for e in found if e.name not in {one.name for one in earlier})]
    else:
        found = []
    return sorted(found, key=lambda e: e.rank)


def _finite(signal: _Signal) -> _Signal:
    """The steps that a run came through: a scaler of losses skips those that overflow."""
    there = np.flatnonzero(np.isfinite(signal.values))
    steps = [signal.steps[at] for at in there.tolist()]
    return replace(signal, steps=steps, values=signal.values[there], sizes=signal.sizes[:, there])


def _led_up(signals: list[_Signal], broke: Moment) -> list[Excursion]:
    """What each quantity shows before the run breaks."""
    before = {step for signal in signals for step in signal.steps if step < broke}
    short = len(before) <= 2 * _HISTORY
    found = (_before_nan(signal, broke, short=short) for signal in signals)
    return [excursion for excursion in found if excursion is not None]


def _confirmed(found: list[Excursion], known: set[Quantity]) -> list[Excursion]:
    """Of a run that stayed finite: a loss that is well says that the run is, whatever else moves.

    Updates follow the learning rate, which a schedule may raise at once: they prove nothing alone.
    """
    lost = {e.quantity for e in found if not e.recovered}
    if ("loss" in known and "loss" not in lost) or lost <= {"update"}:
        found = [e for e in found if e.recovered]
    if lost:  # what came back is no news in a run that did not
        found = [e for e in found if not e.recovered] or found
    return found


def _trained(recording: Recording) -> bool:
    """Whether the steps follow from each other; the batches of an evaluation do not."""
    if is_watched(recording) or "monitor" in recording.manifest.selection:
        return True
    sites = (site for segment in recording._segments for site in segment.sites)
    return any(site.port.startswith("grad") for site in sites)


def _signals(recording: Recording) -> Iterator[_Signal]:
    ports: dict[str, list[Series]] = {}
    for layer in recording.values():
        for series in series_of(layer.records):
            if series.port != "scalar":
                if series.port in _PORTS and series.first.dtype.startswith(("float", "bfloat")):
                    ports.setdefault(series.port, []).append(series.by_step())
                continue
            quantity = quantity_of(series.layer)
            if quantity is not None:
                way = series.by_step()
                values = np.where(way.bad > 0, np.nan, way.column("mean"))
                steps = [(epoch, batch) for epoch, batch in way.steps.tolist()]
                name = f"logged '{series.layer}'"
                yield _Signal(quantity, name, steps, values, [way], values[None])
    for port, places in ports.items():
        yield from _of_port(port, places)


def quantity_of(name: str) -> Quantity | None:
    """What a logged number is by its name; None for one that may grow, as a learning rate."""
    if _NOT.search(name):
        return None
    if _GRADIENT.search(name):
        return "gradient"
    return "loss" if _LOSS.search(name) else None


def _of_port(port: str, places: list[Series]) -> Iterator[_Signal]:
    """The size over all places at each step; steps that saw other places are another series.

    So the two halves of a GAN, which take turns, are each held against their own past.
    """
    quantity, name = _PORTS[port]
    steps = sorted({(e, b) for series in places for e, b in series.steps.tolist()})
    columns = {step: number for number, step in enumerate(steps)}
    sizes = np.full((len(places), len(steps)), np.nan)
    there = np.zeros(sizes.shape, dtype=bool)
    for row, series in enumerate(places):
        moments = [columns[e, b] for e, b in series.steps.tolist()]
        size = series.column("rms" if quantity == "output" else "l2")
        sizes[row, moments] = np.where(series.bad > 0, np.nan, size)
        there[row, moments] = True
    kinds = np.unique(there, axis=1, return_inverse=True)[1].reshape(-1)
    for kind in range(int(kinds.max(initial=-1)) + 1):
        at = np.flatnonzero(kinds == kind)
        rows = np.flatnonzero(there[:, at[0]])
        if len(at) < 2 or not len(rows):
            continue
        own = sizes[np.ix_(rows, at)]
        with np.errstate(over="ignore", invalid="ignore"):
            largest = own.max(axis=0)
            scale = np.where(largest > 0, largest, 1.0)
            whole = np.sqrt(np.square(own / scale).sum(axis=0)) * scale
        taken = [steps[index] for index in at.tolist()]
        yield _Signal(quantity, name, taken, whole, [places[row] for row in rows.tolist()], own)


# One series.


def _before_nan(signal: _Signal, broke: Moment, *, short: bool) -> Excursion | None:
    """The excursion that leads up to the first NaN; None when the NaN came out of the blue."""
    # the step that broke is looked at too: the NaN may have come after this number
    values = signal.values[: sum(step <= broke for step in signal.steps)]
    values = values[: _first_bad(values)]
    runs = _runs(values, _BEFORE_NAN[signal.quantity], _DRIFT[signal.quantity])
    if not runs and short:
        runs = _early(values, _BEFORE_NAN[signal.quantity])
    if not runs or runs[-1][1] < len(values) - _GAP:
        return None
    return _excursion(signal, runs[-1], recovered=False)


def _alone(signal: _Signal) -> Iterator[Excursion]:
    """Of a run that stayed finite: what never came back, and what was very large."""
    values, quantity = signal.values, signal.quantity
    if len(values) < 2:
        return
    if quantity == "loss" and _blown(values):
        far = _BEFORE_NAN[quantity]
        runs = _runs(values, far, _DRIFT[quantity]) or _early(values, far)
        if runs and runs[-1][1] == len(values):
            yield _excursion(signal, runs[-1], recovered=False)
            return
    start = float(np.median(np.abs(values[:_START])))
    for first, last in _runs(values, _ALONE[quantity], None):
        if first < _LONG:
            continue
        stretch, most = values[first:last], float(values[max(0, first - _WINDOW) : first].max())
        tail = float(np.median(stretch[-_LOST:]))
        peak = float(np.median(stretch[: max(1, len(stretch) // 4)]))
        if last == len(values) and len(stretch) >= _LOST:
            # what improves is learning again: after a restart, on other data, with more parameters
            if tail >= max(0.5 * start, 0.5 * peak):
                yield _excursion(signal, (first, last), recovered=False)
        elif float(stretch.max()) > _SPIKE * max(most, 0.05 * start) > 0:
            yield _excursion(signal, (first, last), recovered=True)


def _blown(values: Values) -> bool:
    """Whether a loss ends far above where it began."""
    end = float(np.median(values[-min(3, len(values) // 2) :]))
    return len(values) > _START and end > _BLOWN * float(values[:3].max()) > 0


def _runs(values: Values, far: _Far, drift: float | None) -> list[tuple[int, int]]:
    """Stretches (first, one past the last) that lie far above the steps before them.

    Abnormal steps do not become history, unless they go on and no longer grow: then they are
    what this run is like now.
    """
    history: list[float] = []
    runs: list[tuple[int, int]] = []
    limit = math.inf
    lowest, begun, last = math.inf, -1, -1  # the stretch in hand, and its last abnormal step
    for at, value in enumerate(values.tolist()):
        if begun < 0:
            limit = math.inf
            if len(history) >= _HISTORY:
                window = history[-_WINDOW:]
                level, most = float(np.median(window)), max(window)
                lowest = min(lowest, level)
                far_off = max((far.ratio - 1) * abs(level), far.spread * (most - level))
                limit = level + far_off * (1 + _HISTORY / len(window))  # few steps know little
                if drift is not None and lowest > 0:
                    recent = float(np.median([*history[1 - _HISTORY :], value]))
                    slow = max(drift * lowest, 1.5 * max(history[:_HISTORY]))
                    limit = min(limit, slow) if recent > slow else limit
            if value > limit:
                begun = last = at
            else:
                history.append(value)
            continue
        if value > limit:
            last = at
            if at - begun >= _WINDOW and _settled(values[begun : at + 1]):
                history, begun, lowest = values[begun : at + 1].tolist(), -1, math.inf
        elif at - last > _GAP:
            runs.append((begun, last + 1))
            history += values[last + 1 : at + 1].tolist()
            begun = -1
    if begun >= 0:
        runs.append((begun, last + 1))
    return runs


def _settled(values: Values) -> bool:
    """Whether a stretch no longer grows."""
    half = len(values) // 2
    return bool(np.median(values[half:]) <= 1.5 * np.median(values[:half]))


def _early(values: Values, far: _Far) -> list[tuple[int, int]]:
    """The same for a run that broke in its first steps: the first step that none after undercut.

    The few steps before it may be low by chance, so what comes after it must go on growing.
    """
    for first in range(1, len(values)):
        before = values[:first]
        limit = max(far.ratio * abs(float(np.median(before))), float(before.max()))
        grows = len(values) - first < _HISTORY or not _settled(values[first:])
        if (values[first:] > limit).all() and (first >= _HISTORY or grows):
            return [(first, len(values))]
    return []


def _excursion(signal: _Signal, run: tuple[int, int], *, recovered: bool) -> Excursion:
    first, last = run
    before = signal.values[max(0, first - _WINDOW) : first]
    own = signal.sizes[:, max(0, first - _WINDOW) : first]
    with np.errstate(invalid="ignore", divide="ignore"):
        growth = signal.sizes[:, first] / np.median(own, axis=1)
    counts = signal.sizes[:, first] > 0.01 * np.nanmax(signal.sizes[:, first])
    growth = np.where(np.isnan(growth) | ~counts, 0.0, growth)
    place = signal.places[int(np.argmax(growth))]
    epoch, batch = signal.steps[first]
    order = next((r.order for r in place.records if (r.epoch, r.batch) == (epoch, batch)), -1)
    return Excursion(
        quantity=signal.quantity,
        name=signal.name,
        layer=place.layer,
        port=place.port,
        leaf=place.leaf,
        epoch=epoch,
        batch=batch,
        value=float(signal.values[first]),
        usual=float(np.median(before)),
        most=float(before.max()),
        history=len(before),
        recovered=recovered,
        steps=last - first,
        order=order,
    )


def _first_bad(values: Values) -> int:
    bad = np.flatnonzero(~np.isfinite(values))
    return int(bad[0]) if len(bad) else len(values)
