"""A training run as a picture: the numbers over the steps, one panel for each port.

A layer is one line in a panel, and has the same colour in all of them. Colours go with depth, which
shows at a glance whether early and late layers part. What is not finite has no height: its steps
are marked at the foot of the panel. Alarms are lines through all panels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from . import text
from .figures import BLUE, GRID, INK, MUTED, Plotted, fit, new_figure, save, say, styled
from .watched import Way

if TYPE_CHECKING:
    from ..monitoring.live import LiveAlarm

__all__ = ["plot_steps"]

RED = "#d64545"
_NAMED = 6  # up to so many lines have their names beside them
_WIDE = 20.0
_TOP = 0.92  # of the scale of colours: the last shades are too pale on white
_TITLES = {
    "scalar": "Logged",
    "input": "Inputs",
    "output": "Outputs",
    "grad_input": "Gradients of inputs",
    "grad_output": "Gradients of outputs",
    "param": "Parameters",
    "grad_param": "Gradients of parameters",
    "update": "Updates of parameters",
}

Steps = Mapping[tuple[int, int], float]


def plot_steps(
    found: Sequence[Way],
    layers: Sequence[str],
    path: Path,
    *,
    title: str,
    alarms: Sequence[LiveAlarm] = (),
) -> Plotted:
    """Draw the ways of places; `layers` are all of the run's, in order of execution."""
    style = styled()
    where, label = _positions(found)
    groups: dict[str, list[Way]] = {}
    for way in found:
        groups.setdefault(_group(way), []).append(way)
    notes: list[str] = []
    with style:
        columns = 1 if len(groups) == 1 else 2
        rows = -(-len(groups) // columns)
        figure = new_figure(7.0 * columns, 0.6 + 3.0 * rows)
        panels = np.atleast_1d(figure.subplots(rows, columns, squeeze=False)).ravel()
        shades = _shades(found, layers)
        for panel, (name, ways) in zip(panels, groups.items(), strict=False):
            _panel(figure, panel, name, ways, where, shades)
            _mark(panel, where, alarms)
            panel.set_xlabel(label)
            panel.set_xlim(*_span(where))
        for panel in panels[len(groups) :]:
            panel.set_axis_off()
        figure.suptitle(title.replace("$", r"\$"), x=0.008, ha="left", fontsize=12, color=INK)
        save(figure, path)
    unplaced = [alarm for alarm in alarms if not _steps_of(alarm, where)]
    if unplaced:
        notes.append(f"{text.plural(len(unplaced), 'alarm')} of steps that were not kept.")
    return Plotted(str(path), tuple(notes))


def _shades(found: Sequence[Way], layers: Sequence[str]) -> dict[str, float]:
    """Where each layer that is drawn stands on the scale of colours, from the first to the last.

    Gradients come in the other direction, so the order is that of the port that has most layers
    among the rest. A layer that is not there stands in the middle of the layers inside it, or at
    the one that ran before it.
    """
    ports: dict[str, dict[str, None]] = {}
    for way in found:
        ports.setdefault(way.series.port, {})[way.series.layer] = None
    ports.pop("scalar", None)
    forward = [names for port, names in ports.items() if not port.startswith("grad")]
    order = max(forward or ports.values(), key=len, default={})
    depth = {name: float(at) for at, name in enumerate(order)}
    drawn = {name for names in ports.values() for name in names}
    before = 0.0
    for name in layers:
        if name in drawn and name not in depth:
            inside = [depth[inner] for inner in order if inner.startswith(f"{name}.")]
            depth[name] = (inside[0] + inside[-1]) / 2 if inside else before
        before = depth.get(name, before)
    return {name: _TOP * at / max(1, len(order) - 1) for name, at in depth.items()}


def _group(way: Way) -> str:
    """A panel a port; what was logged has its own scale each, so a panel each."""
    series = way.series
    return f"scalar {series.layer}" if series.port == "scalar" else series.port


def _positions(found: Sequence[Way]) -> tuple[Steps, str]:
    """Where each step stands on the axis: at its number, unless numbers begin anew each epoch."""
    steps = sorted({(r.epoch, r.batch) for way in found for r in way.series.records})
    batches = [batch for _, batch in steps]
    if all(a < b for a, b in pairwise(batches)):
        return {step: float(step[1]) for step in steps}, "Step"
    return {step: float(number) for number, step in enumerate(steps)}, "Step, over all epochs"


def _span(where: Steps) -> tuple[float, float]:
    """The same stretch in every panel, so that they can be read one below the other."""
    low, high = min(where.values()), max(where.values())
    room = 0.02 * (high - low) or 0.5
    return low - room, high + room


def _panel(
    figure: Any,
    panel: Any,
    name: str,
    ways: Sequence[Way],
    where: Steps,
    shades: Mapping[str, float],
) -> None:
    import matplotlib

    scalar = name.startswith("scalar ")
    title = fit(text.clean(name.removeprefix("scalar ")), 40) if scalar else _TITLES[name]
    panel.set_title(title.replace("$", r"\$") if scalar else f"{title}: root mean square")
    panel.grid(True, axis="y", color=GRID, linewidth=0.8)
    panel.set_axisbelow(True)
    ways = sorted(ways, key=lambda way: shades.get(way.series.layer, 0.0))
    names = list(dict.fromkeys(way.series.layer for way in ways))
    colours = matplotlib.colormaps["viridis"].resampled(256)
    low, high, drawn = np.inf, 0.0, False
    for way in ways:
        x = np.array([where[r.epoch, r.batch] for r in way.series.records])
        y = np.where(way.bad > 0, np.nan, way.values)
        alone = scalar or len(shades) == 1
        colour = BLUE if alone else colours(shades[way.series.layer])
        few = len(x) <= 60
        panel.plot(
            x,
            y,
            color=colour,
            linewidth=1.1,
            alpha=0.9,
            marker="." if few else None,
            markersize=3,
            label=_label(way),
        )
        drawn = drawn or bool(np.isfinite(y).any())
        positive = y[np.isfinite(y) & (y > 0)]
        if positive.size:
            low, high = min(low, float(positive.min())), max(high, float(positive.max()))
    if not drawn:
        say(panel, "nothing is finite")
        return
    smallest = min(float(np.nanmin(w.values)) for w in ways if np.isfinite(w.values).any())
    if high > _WIDE * low and smallest >= 0:
        panel.set_yscale("log", nonpositive="mask")
    _not_finite(panel, ways, where)
    if not scalar and len(ways) > 1:
        ends = shades[names[0]], shades[names[-1]]
        _key(figure, panel, ways, names, colours(np.linspace(*ends, 256)))


def _label(way: Way) -> str:
    name = fit(f"{text.layer_name(way.series.layer)}{text.clean(way.series.leaf)}", 32)
    return name.replace("$", r"\$")


def _key(figure: Any, panel: Any, ways: Sequence[Way], names: Sequence[str], colours: Any) -> None:
    """Names where they are few, else a bar from the first layer to the last."""
    if len(ways) <= _NAMED:
        panel.legend(loc="best", fontsize=7, frameon=False, labelcolor=MUTED)
        return
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    shown = ListedColormap(colours)
    bar = figure.colorbar(
        ScalarMappable(Normalize(0, 1), shown), ax=panel, pad=0.02, aspect=28, ticks=[0, 1]
    )
    ends = [fit(text.layer_name(name), 24).replace("$", r"\$") for name in (names[0], names[-1])]
    bar.ax.set_yticklabels(ends, rotation=90, va="center", fontsize=7)
    for label, side in zip(bar.ax.get_yticklabels(), ("bottom", "top"), strict=True):
        label.set_verticalalignment(side)
    bar.outline.set_visible(False)


def _not_finite(panel: Any, ways: Sequence[Way], where: Steps) -> None:
    """Steps at which something is not finite, at the foot of the panel."""
    from matplotlib.transforms import blended_transform_factory

    steps = sorted(
        {
            where[way.series.records[at].epoch, way.series.records[at].batch]
            for way in ways
            for at in np.flatnonzero(way.bad).tolist()
        }
    )
    if not steps:
        return
    foot = blended_transform_factory(panel.transData, panel.transAxes)
    panel.plot(
        steps,
        [0.02] * len(steps),
        "x",
        color=RED,
        markersize=5,
        transform=foot,
        clip_on=False,
        zorder=5,
    )
    panel.text(
        steps[0],
        0.06,
        "NaN or Inf",
        color=RED,
        fontsize=8,
        transform=foot,
        ha="left" if steps[0] < 0.8 * max(where.values()) else "right",
    )


def _mark(panel: Any, where: Steps, alarms: Sequence[LiveAlarm]) -> None:
    """Alarms as lines through the panel, epochs as faint ones."""
    firsts: dict[int, float] = {}
    for (epoch, _), x in sorted(where.items()):
        firsts.setdefault(epoch, x)
    for x in [] if len(firsts) > 40 else list(firsts.values())[1:]:
        panel.axvline(x, color=GRID, linewidth=1.2, zorder=0)
    for x in {x for alarm in alarms for x in _steps_of(alarm, where)}:
        panel.axvline(x, color=RED, linewidth=1, linestyle="--", alpha=0.7, zorder=1)


def _steps_of(alarm: LiveAlarm, where: Steps) -> list[float]:
    return [x for (_, batch), x in where.items() if batch == alarm.batch][:1]
