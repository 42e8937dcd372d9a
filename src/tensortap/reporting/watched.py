"""A watched run in the terminal: what was logged, then a row a place with its way over the steps.

Who looks at a run in a hurry asks: does the loss fall, does anything grow, is there a NaN, since
when. So a row says the root mean square at the first and the last step, the largest magnitude of
all, what is not finite and since which step, and draws the way between.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..comparing.moments import in_words
from ..recording.schema import PORTS
from ..recording.series import Series, series_of
from . import text
from .console import table
from .tables import LayerRow, bad, row_of

if TYPE_CHECKING:
    from rich.table import Table

    from ..recording.reader import Record

__all__ = ["Way", "scalars_table", "sparkline", "watched_rows", "watched_table", "ways"]

WIDTH = 24
_BLOCKS = "▁▂▃▄▅▆▇█"
_BAD = "×"
_WIDE = 20.0  # from here on a ratio is better seen on a logarithmic scale

Values = NDArray[np.float64]
_ORDER = ("scalar", *(port for port in PORTS if port != "scalar"))


@dataclass(frozen=True, eq=False)
class Way:
    """One place over the steps of a run: `values` are root mean squares, or what was logged."""

    series: Series
    values: Values
    bad: Values

    @property
    def first(self) -> float:
        return float(self.values[0])

    @property
    def last(self) -> float:
        return float(self.values[-1])

    @property
    def first_bad(self) -> Record | None:
        """The record of the first step at which something is not finite."""
        found = np.flatnonzero(self.bad)
        return self.series.records[int(found[0])] if found.size else None

    def sampled(self, width: int = WIDTH) -> list[float]:
        """The way in at most `width` numbers; NaN where a step of a part is not finite."""
        parts = np.array_split(np.arange(len(self.values)), min(width, len(self.values)))
        return [
            math.nan if self.bad[part].any() else float(np.mean(self.values[part]))
            for part in parts
        ]

    def to_dict(self) -> dict[str, Any]:
        """What `show --json` adds to a row."""
        start, end, wrong = self.series.first, self.series.records[-1], self.first_bad
        return {
            "steps": len(self.values),
            "first_step": [start.epoch, start.batch],
            "last_step": [end.epoch, end.batch],
            "first": _finite(self.first),
            "last": _finite(self.last),
            "first_bad": None if wrong is None else [wrong.epoch, wrong.batch],
            "trend": [_finite(value) for value in self.sampled()],
        }


def ways(records: Sequence[Record]) -> list[Way]:
    """The ways of all places, port by port, places in order of execution."""
    found = [_way(series.by_step()) for series in series_of(records)]
    return sorted(found, key=lambda way: _ORDER.index(way.series.port))


def _way(series: Series) -> Way:
    scalar = series.port == "scalar"
    values = series.column("mean" if scalar else "rms")
    return Way(series, values, series.bad)


def watched_rows(found: Sequence[Way]) -> list[LayerRow]:
    """The rows of `show --json`: merged as ever, and the way beside them."""
    return [row_of(way.series, way.to_dict()) for way in found]


def sparkline(values: Sequence[float]) -> str:
    """Numbers as blocks, from the least to the largest; `×` where one is not finite."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return _BAD * len(values)
    low, high = min(finite), max(finite)
    if low > 0 and high > _WIDE * low:
        return sparkline([math.log(value) if value > 0 else value for value in values])
    span = high - low
    if span <= 1e-9 * max(abs(low), abs(high)) or not math.isfinite(span):
        return "".join(_BLOCKS[3] if math.isfinite(value) else _BAD for value in values)
    return "".join(
        _BLOCKS[min(7, int(8 * (value - low) / span))] if math.isfinite(value) else _BAD
        for value in values
    )


def scalars_table(found: Sequence[Way]) -> Table | None:
    """What was logged: the loss; None where nothing was."""
    scalars = [way for way in found if way.series.port == "scalar"]
    if not scalars:
        return None
    result = table(
        ("logged", "left"),
        ("steps", "right"),
        ("first", "right"),
        ("last", "right"),
        ("least", "right"),
        ("most", "right"),
        ("not finite", "left"),
        ("over the steps", "left"),
        folds=("logged",),
    )
    for way in scalars:
        summary = way.series.summary()
        result.add_row(
            text.clean(way.series.layer),
            text.count(len(way.values)),
            _shown(way.first),
            _shown(way.last),
            text.number(summary.min),
            text.number(summary.max),
            _since(way),
            sparkline(way.sampled()),
        )
    return result


def watched_table(found: Sequence[Way]) -> Table | None:
    """A row a place; None where only numbers were logged."""
    places = [way for way in found if way.series.port != "scalar"]
    if not places:
        return None
    leaf = any(way.series.leaf for way in places)
    rank = any(way.series.first.rank for way in places)
    wrong = any(way.first_bad is not None for way in places)
    zeros = any(way.series.column("zeros")[-1] for way in places)
    columns = [("port", "left"), ("layer", "left")]
    columns += [("leaf", "left")] if leaf else []
    columns += [("rank", "right")] if rank else []
    columns += [("steps", "right"), ("rms first", "right"), ("rms last", "right")]
    columns += [("largest", "right")]
    columns += [("zeros", "right")] if zeros else []
    columns += [("NaN", "right"), ("Inf", "right")]
    columns += [("not finite", "left")] if wrong else []
    result = table(*columns, ("rms over the steps", "left"))
    before = ""
    for way in places:
        series = way.series
        if before and series.port != before:
            result.add_section()
        before = series.port
        summary = series.summary()
        cells: list[Any] = [text.clean(series.port), text.layer_name(series.layer)]
        cells += [text.clean(series.leaf)] if leaf else []
        cells += [str(series.first.rank)] if rank else []
        cells += [text.count(len(way.values)), text.number(way.first, 4), _shown(way.last, 4)]
        cells += [text.number(summary.absmax, 4)]
        cells += [_share(series)] if zeros else []
        cells += [bad(summary.nan), bad(summary.posinf + summary.neginf)]
        cells += [_since(way)] if wrong else []
        result.add_row(*cells, sparkline(way.sampled()))
    return result


def _share(series: Series) -> str:
    """The share of zeros at the last step: a layer that dies shows here first."""
    count = series.column("count")[-1]
    return f"{series.column('zeros')[-1] / count:.0%}" if count else "-"


def _since(way: Way) -> Any:
    from rich.text import Text

    wrong = way.first_bad
    if wrong is None:
        return ""
    return Text(f"from {in_words(wrong.epoch, wrong.batch, 0)}", style="bold red")


def _shown(value: float, digits: int = 5) -> Any:
    from rich.text import Text

    if math.isfinite(value):
        return text.number(value, digits)
    return Text("not finite", style="bold red")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
