"""The picture of document 002: how candidate - reference is spread, beside error by layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import RecordingError
from . import text
from .bars import counted
from .figures import GRID, INK, MUTED, Plotted, fit, new_figure, save, say, styled

if TYPE_CHECKING:
    import torch

    from ..comparing.results import Comparison

__all__ = ["Candidate", "Spread", "plot_differences", "spread"]

BINS = 100
_CHUNK = 1 << 21
_LARGEST = 1e300  # matplotlib's own arithmetic overflows beyond
_TICKS = 16
_COLOURS = ("#2563a8", "#d9730d", "#2f8f5b", "#8b4fc6", "#c2385b", "#0f8b8d", "#7a5c2e", "#4b5b6b")

Pairs = Callable[[], Iterable[tuple["torch.Tensor", "torch.Tensor"]]]


@dataclass(frozen=True)
class Spread:
    """How the differences of one layer are spread: counts over equal steps of the finite ones."""

    counts: np.ndarray[Any, Any]
    edges: np.ndarray[Any, Any]
    finite: int
    left_out: int
    squeezed: bool
    zero: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {
            "low": float(self.edges[0]),
            "high": float(self.edges[-1]),
            "counts": [int(count) for count in self.counts],
            "finite": self.finite,
            "left_out": self.left_out,
        }


@dataclass(frozen=True)
class Candidate:
    """One candidate: its name, its comparison with the reference, the tensors to look at."""

    name: str
    comparison: Comparison
    pairs: Pairs


def spread(pairs: Pairs, bins: int = BINS) -> Spread | None:
    """Count candidate - reference in two passes over small pieces; None when nothing is finite."""
    low, high, finite, left_out = math.inf, -math.inf, 0, 0
    for values in _differences(pairs):
        kept = values[np.isfinite(values)]
        left_out += values.size - kept.size
        if kept.size:
            low, high = min(low, float(kept.min())), max(high, float(kept.max()))
            finite += kept.size
    if not finite:
        return None
    zero = low == high == 0
    if low == high:
        room = max(abs(low) * 0.5, 0.5)
        low, high = low - room, high + room
    counts = np.zeros(bins, dtype=np.int64)
    edges = np.linspace(0, 1, bins + 1)
    for values in _differences(pairs):
        some, edges = counted(values[np.isfinite(values)], bins, low, high)
        counts += some
    return Spread(counts, edges, finite, left_out, _squeezed(counts, finite), zero)


def _squeezed(counts: np.ndarray[Any, Any], finite: int) -> bool:
    """Whether a few differences stretch the axis so far that the others share a few bins."""
    cumulative = np.cumsum(counts)
    inner = np.searchsorted(cumulative, [0.01 * finite, 0.99 * finite])
    return bool(inner[1] - inner[0] < len(counts) / 8 and np.count_nonzero(counts) > 2)


def _differences(pairs: Pairs) -> Iterator[np.ndarray[Any, Any]]:
    """The differences as flat float64 arrays of bounded size."""
    for reference, candidate in pairs():
        yield from _pieces(reference, candidate)


def _pieces(reference: torch.Tensor, candidate: torch.Tensor) -> Iterator[np.ndarray[Any, Any]]:
    """Both tensors cut alike, wherever they lie in memory."""
    if reference.numel() > _CHUNK:
        inner = reference.numel() // reference.shape[0]
        step = max(1, _CHUNK // inner)
        for start in range(0, reference.shape[0], step):
            at: Any = slice(start, start + step) if inner <= _CHUNK else start
            yield from _pieces(reference[at], candidate[at])
        return
    mixed = reference.is_complex() != candidate.is_complex()
    a, b = _values(reference, mixed), _values(candidate, mixed)
    with np.errstate(invalid="ignore", over="ignore"):
        yield b - a


def _values(tensor: torch.Tensor, as_complex: bool) -> np.ndarray[Any, Any]:
    """Flat float64 values; a complex tensor, or a real one beside it, as pairs of parts."""
    import torch

    from ..numerics.layout import plain

    tensor = plain(tensor)
    tensor = tensor.to(torch.complex128) if as_complex else tensor
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    values: np.ndarray[Any, Any] = tensor.to(torch.float64).reshape(-1).numpy()
    return values


def plot_differences(
    candidates: Sequence[Candidate], *, reference: str, layer: str, what: str, path: Path
) -> tuple[Plotted, list[Spread | None]]:
    """Draw one histogram a candidate, beside every layer's error; `what` names port and leaf."""
    style = styled()
    spreads = [spread(candidate.pairs) for candidate in candidates]
    for candidate, found in zip(candidates, spreads, strict=True):
        if found is not None and max(abs(found.edges[0]), abs(found.edges[-1])) > _LARGEST:
            raise RecordingError(
                f"The differences of {candidate.name} at '{layer}' are too large for a plot."
            )
    with style:
        figure, notes = _draw(candidates, spreads, reference, layer, what)
        save(figure, path)
    return Plotted(str(path), tuple(notes)), spreads


def _draw(
    candidates: Sequence[Candidate],
    spreads: Sequence[Spread | None],
    reference: str,
    layer: str,
    what: str,
) -> tuple[Any, list[str]]:
    across = {1: 1, 2: 2, 4: 2}.get(len(candidates), 3)
    down = -(-len(candidates) // across)
    figure = new_figure(4.2 * across + 6.4, max(4.6, 3.1 * down + 0.6))
    grid = figure.add_gridspec(down, across + 1, width_ratios=[1] * across + [1.5])
    for number, (candidate, found) in enumerate(zip(candidates, spreads, strict=True)):
        panel = figure.add_subplot(grid[number // across, number % across])
        panel.set_title(_safe(f"{fit(candidate.name, 24)} - {fit(reference, 24)}"))
        _histogram(panel, found, _colour(number))
    notes = _error_by_layer(figure.add_subplot(grid[:, across]), candidates, layer)
    title = f"{fit(text.layer_name(layer), 70)} · {what}"
    figure.suptitle(_safe(title), x=0.008, ha="left", fontsize=12, color=INK)
    return figure, notes


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _safe(words: str) -> str:
    return text.clean(words).replace("$", r"\$")


def _histogram(panel: Any, found: Spread | None, colour: str) -> None:
    panel.set_xlabel("Difference")
    panel.set_ylabel("Frequency")
    if found is None:
        say(panel, "no pair of finite values")
        return
    if found.zero:
        say(panel, f"all {text.count(found.finite)} differences are 0")
        return
    panel.stairs(found.counts, found.edges, fill=True, color=colour, alpha=0.85)
    panel.axvline(0, color=INK, linewidth=0.8, alpha=0.6)
    panel.set_xlim(found.edges[0], found.edges[-1])
    if found.squeezed:
        panel.set_yscale("log")
        panel.set_ylabel("Frequency (log scale)")
        panel.set_ylim(0.7, found.counts.max() * 1.5)
    else:
        panel.set_ylim(0, max(1, found.counts.max()) * 1.05)
        panel.yaxis.set_major_formatter("{x:,.0f}")
    panel.yaxis.grid(True, color=GRID, linewidth=0.8)
    panel.set_axisbelow(True)
    panel.xaxis.get_major_locator().set_params(nbins=5)
    if found.left_out:
        panel.set_xlabel(f"Difference ({text.count(found.left_out)} pairs are not finite)")


def _error_by_layer(panel: Any, candidates: Sequence[Candidate], layer: str) -> list[str]:
    """Relative L2 errors on a log scale: a line a candidate, dotted where its floor is."""
    panel.set_title("Error by layer")
    panel.set_ylabel("Relative L2 error (log scale)")
    names = list(dict.fromkeys(r.layer for c in candidates for r in c.comparison.compared))
    places = {name: place for place, name in enumerate(names)}
    errors = [r.error for c in candidates for r in c.comparison.compared]
    floors = [r.floor for c in candidates for r in c.comparison.compared if r.floor is not None]
    positive = [value for value in (*errors, *floors) if 0 < value < math.inf]
    notes = _undefined(candidates)
    if not names:
        say(panel, "no layer could be compared")
        return notes
    bottom = min(positive) / 3 if positive else 1e-9
    panel.set_yscale("log")
    marks = {"identical": False, "diverged": False, "floor": False}
    for number, candidate in enumerate(candidates):
        _line(panel, candidate, places, bottom, _colour(number), marks)
    if layer in places:
        panel.axvline(places[layer], color=INK, linewidth=8, alpha=0.09, zorder=0)
    _name_layers(panel, names, layer)
    panel.set_ylim(bottom, (max(positive) if positive else 1.0) * 3)
    panel.set_xlim(-0.6, len(names) - 0.4)
    panel.yaxis.grid(True, color=GRID, linewidth=0.8)
    panel.set_axisbelow(True)
    _legend(panel, marks)
    return notes


def _line(
    panel: Any,
    candidate: Candidate,
    places: dict[str, int],
    bottom: float,
    colour: str,
    marks: dict[str, bool],
) -> None:
    rows = [r for r in candidate.comparison.compared if not math.isnan(r.error)]
    rows = [r for r in rows if r.error < math.inf]
    x = [places[r.layer] for r in rows]
    y = [r.error or 1.25 * bottom for r in rows]  # zero has no place on a log scale: at its foot
    line = [r.error or math.nan for r in rows]
    panel.plot(x, line, color=colour, linewidth=1.3, label=_safe(fit(candidate.name, 24)))
    kinds: dict[str, list[int]] = {"o": [], "X": [], "v": []}
    for place, row in enumerate(rows):
        kinds["X" if row.verdict == "diverged" else "v" if row.error == 0 else "o"].append(place)
    for kind, at in kinds.items():
        if not at:
            continue
        face = "white" if kind == "v" else colour
        size = 7 if kind == "X" else 3.5 if len(places) <= 60 else 2
        panel.plot(
            [x[i] for i in at],
            [y[i] for i in at],
            kind,
            color=colour,
            markerfacecolor=face,
            markeredgecolor="white" if kind == "X" else colour,
            markersize=size,
            markeredgewidth=0.8,
        )
    marks["diverged"] |= bool(kinds["X"])
    marks["identical"] |= bool(kinds["v"])
    floors = [(places[r.layer], r.floor) for r in rows if r.floor]
    if floors:
        marks["floor"] = True
        panel.plot(*zip(*floors, strict=True), color=colour, linewidth=1, linestyle=":", alpha=0.8)


def _name_layers(panel: Any, names: Sequence[str], layer: str) -> None:
    """As many names as fit, the chosen layer's among them."""
    step = max(1, -(-len(names) // _TICKS))
    shown = set(range(0, len(names), step)) | {len(names) - 1}
    if layer in names:
        chosen = names.index(layer)
        shown = {at for at in shown if abs(at - chosen) >= step or step == 1} | {chosen}
    ticks = sorted(shown)
    labels = [_safe(fit(text.layer_name(names[at]), 26)) for at in ticks]
    panel.set_xticks(ticks, labels, rotation=40, ha="right", rotation_mode="anchor", size=8)
    for at, label in zip(ticks, panel.get_xticklabels(), strict=True):
        if names[at] == layer:
            label.set_color(INK)
            label.set_fontweight("bold")


def _legend(panel: Any, marks: dict[str, bool]) -> None:
    from matplotlib.lines import Line2D

    handles, labels = panel.get_legend_handles_labels()
    signs: dict[str, dict[str, Any]] = {
        "diverged": {"marker": "X", "linestyle": "", "markersize": 7, "markeredgecolor": "white"},
        "identical": {"marker": "v", "linestyle": "", "markersize": 4, "markerfacecolor": "white"},
        "floor": {"linestyle": ":"},
    }
    for name, look in signs.items():
        if marks[name]:
            handles.append(Line2D([], [], color=MUTED, **look))
            labels.append(name)
    panel.legend(handles, labels, frameon=False, fontsize=8, loc="best", ncols=2)


def _undefined(candidates: Sequence[Candidate]) -> list[str]:
    """Layers whose error has no place on the axis."""
    notes = []
    for candidate in candidates:
        rows = [r for r in candidate.comparison.compared if not math.isfinite(r.error)]
        if rows:
            names = ", ".join(text.layer_name(row.layer) for row in rows[:4])
            more = f" and {len(rows) - 4} more" if len(rows) > 4 else ""
            notes.append(f"The error of {candidate.name} is undefined at {names}{more}.")
    return notes
