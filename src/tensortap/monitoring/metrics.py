"""What a rule can ask of a step, computed for all places at once.

It runs in the training loop, so nothing here walks over rows in Python: where rows stand is worked
out once for a series of steps (`Layout`), and a metric is a column over its places (`Values`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..recording.schema import Port, Site
from .step import Key, Step

__all__ = ["COUNTS", "METRICS", "SHARES", "Layout", "Level", "Values", "level_of"]

Column = NDArray[np.float64]
Rows = NDArray[np.intp]
Level = Literal["place", "parameter", "step", "scalar"]

NORMS: Mapping[str, Port] = {
    "grad_norm": "grad_param",
    "param_norm": "param",
    "update_norm": "update",
}
"""Norms over a whole step, and the port whose rows they are over."""

ALIASES = {"norm": "l2"}
COUNTS = ("nan", "inf", "bad")
"""Metrics that speak of every port; the others are of outputs unless a rule names a port."""
SHARES = ("dead", "saturated", "underflow")

_PLAIN = ("count", "nan", "zeros", "mean", "std", "min", "max", "absmax")
_DERIVED: Mapping[str, Callable[[Values], Column]] = {
    "inf": lambda of: of.stored("posinf") + of.stored("neginf"),
    "bad": lambda of: of.stored("nan") + of.place("inf"),
    "l2": lambda of: np.where(of.finite() > 0, of.stored("l2"), np.nan),
    "rms": lambda of: of.stored("l2") / np.sqrt(of.finite()),
    "dead": lambda of: of.stored("zeros") / of.stored("count"),
    "saturated": lambda of: of.stored("saturated") / of.stored("count"),
    "underflow": lambda of: of.stored("subnormal") / of.stored("count"),
}
METRICS: tuple[str, ...] = (*_PLAIN, *_DERIVED, *ALIASES, "update_ratio", *NORMS)
"""Every name that is no logged number's."""


def level_of(metric: str) -> Level:
    """Whether a metric is one a place, one a parameter, one a step, or a number that is logged."""
    if metric in NORMS:
        return "step"
    if metric == "update_ratio":
        return "parameter"
    return "place" if metric in METRICS else "scalar"


class Layout:
    """Where the rows of a step stand. Steps that saw the same places in the same calls share it."""

    def __init__(self, step: Step) -> None:
        self.sites, self.calls = step.sites, step.calls
        self.row_keys = _row_keys(step.sites)
        self.numbers: dict[Key, int] = {}
        for key in self.row_keys:
            self.numbers.setdefault(key, len(self.numbers))
        self.keys: tuple[Key, ...] = tuple(self.numbers)
        self.group: Rows = np.array([self.numbers[key] for key in self.row_keys], dtype=np.intp)
        self.repeated = len(self.keys) < len(self.row_keys)
        self.order: Rows = np.argsort(self.group, kind="stable")
        self.starts: Rows = np.searchsorted(self.group[self.order], np.arange(len(self.keys)))
        self.sizes: Column = np.array(
            [math.prod(step.sites[row].shape) for row in self.order[self.starts].tolist()]
        )
        self._chosen: dict[tuple[str | None, Port | None], Rows] = {}
        self._owners: dict[str | None, tuple[Rows, Rows]] = {}

    def fits(self, step: Step) -> bool:
        """Whether a step has these rows; shapes may differ, as with sequences of many lengths."""
        if step.sites is not self.sites and step.sites != self.sites:
            if len(step.sites) != len(self.sites) or _row_keys(step.sites) != self.row_keys:
                return False
            self.sites = step.sites
        return step.calls is self.calls or step.calls == self.calls

    def places(self, layers: re.Pattern[str] | None, port: Port | None) -> Rows:
        """The places of a port (of every port without one) at layers whose whole name matches."""
        scope = (layers.pattern if layers else None, port)
        if scope not in self._chosen:
            self._chosen[scope] = np.array(
                [
                    index
                    for index, (layer, place, _) in enumerate(self.keys)
                    if port in (None, place) and (layers is None or layers.fullmatch(layer))
                ],
                dtype=np.intp,
            )
        return self._chosen[scope]

    def updates(self, layers: re.Pattern[str] | None) -> tuple[Rows, Rows]:
        """The places of updates, and of the parameters that they belong to."""
        name = layers.pattern if layers else None
        if name not in self._owners:
            pairs = [
                (index, self.numbers[layer, "param", leaf])
                for index in self.places(layers, "update").tolist()
                for layer, _, leaf in [self.keys[index]]
                if (layer, "param", leaf) in self.numbers
            ]
            table = np.array(pairs, dtype=np.intp).reshape(-1, 2)
            self._owners[name] = (table[:, 0], table[:, 1])
        return self._owners[name]

    def several(self, key: Key) -> int:
        """How many rows a place has."""
        return int(np.count_nonzero(self.group == self.numbers[key]))


class Values:
    """The metrics of one step, each computed when it is first asked for."""

    def __init__(self, step: Step, layout: Layout) -> None:
        self.step = step
        self.layout = layout
        self._stored: dict[str, Column] = {}
        self._places: dict[str, Column] = {}

    def place(self, metric: str) -> Column:
        """A metric of every place, its calls taken together; NaN where it is undefined."""
        metric = ALIASES.get(metric, metric)
        if metric not in self._places:
            make = _DERIVED.get(metric)
            self._places[metric] = self.stored(metric) if make is None else make(self)
        return self._places[metric]

    def ratio(self, updates: Rows, params: Rows) -> Column:
        """The size of updates over that of their parameters; undefined for one that is zero."""
        rms = self.place("rms")  # by value, for an update may be that of a sample
        whole = rms[params]
        return np.where(whole > 0, rms[updates] / whole, np.nan)

    def norm(self, rows: Rows) -> float:
        """The L2 norm over places, as `clip_grad_norm_` has it: Inf and NaN are not left out."""
        if self.place("nan")[rows].any():
            return math.nan
        if self.place("inf")[rows].any():
            return math.inf
        taken = self.stored("count")[rows]
        whole = np.sqrt(np.maximum(1.0, self.layout.sizes[rows] / np.maximum(taken, 1.0)))
        return math.hypot(*(self.stored("l2")[rows] * whole).tolist())

    def finite(self) -> Column:
        """How many values of each place are finite."""
        return self.stored("count") - self.place("bad")

    def stored(self, name: str) -> Column:
        """A column of the summary over places: as `Summary.merge` has it, for all at once."""
        if not self.layout.repeated:
            return self.step.column(name)
        if name not in self._stored:
            self._stored[name] = self._merge(name)
        return self._stored[name]

    def _merge(self, name: str) -> Column:
        layout = self.layout
        if name in ("mean", "std"):
            self._stored["mean"], self._stored["std"] = self._moments()
            return self._stored[name]
        ways: dict[str, np.ufunc] = {
            "min": np.fmin,
            "max": np.fmax,
            "absmax": np.fmax,
            "l2": np.hypot,
        }
        column = self.step.column(name)[layout.order]
        merged: Column = ways.get(name, np.add).reduceat(column, layout.starts)
        return merged

    def _moments(self) -> tuple[Column, Column]:
        layout, step = self.layout, self.step
        order, starts = layout.order, layout.starts
        group = layout.group[order]
        finite = (step.column("count") - step.bad)[order]
        total: Column = np.add.reduceat(finite, starts)
        some = finite > 0
        share = np.where(some, finite / total[group], 0.0)
        own = np.where(some, step.column("mean")[order], 0.0)
        mean: Column = np.add.reduceat(own * share, starts)
        within = np.where(some, step.column("std")[order], 0.0)
        apart = np.where(some, own - mean[group], 0.0)
        std: Column = np.hypot.reduceat(np.hypot(within, apart) * np.sqrt(share), starts)
        return np.where(total > 0, mean, np.nan), np.where(total > 0, std, np.nan)


def _row_keys(sites: tuple[Site, ...]) -> list[Key]:
    return [(site.layer, site.port, site.leaf) for site in sites]
