"""The picture of document 000: distribution, first 1000 values, heat map of 100 features."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import RecordingError
from . import text
from .bars import counted, finite_values
from .figures import BLUE, GRID, INK, Plotted, fit, new_figure, save, say, styled

if TYPE_CHECKING:
    import torch

    from ..recording.reader import Record

__all__ = ["Plotted", "plot_record"]

BINS = 100
FIRST = 1000
FEATURES = 100
_POSITIONS = 2048
_SAMPLED = 1 << 24
_CLIP = 2  # percent at each end: one massive feature must not hide all others
_LARGEST = 1e300  # matplotlib's own arithmetic overflows beyond


@dataclass(frozen=True)
class _Grid:
    """What the heat map shows of a tensor of any number of dimensions."""

    values: Any
    rows: str
    columns: str
    title: str


def plot_record(record: Record, path: Path) -> Plotted:
    """Draw one recorded tensor; `path` decides by its ending between PNG, PDF and SVG."""
    style = styled()
    tensor = record.tensor()
    if tensor.numel() == 0:
        raise RecordingError(
            f"The {record.where()} is empty (shape {text.shape(record.shape)}): "
            "there is nothing to plot."
        )
    if record.summary.absmax > _LARGEST:
        raise RecordingError(
            f"The {record.where()} reaches {record.summary.absmax:.3g}, too large for a plot."
        )
    with style:
        figure, notes = _draw(record, tensor)
        save(figure, path)
    return Plotted(str(path), tuple(notes))


def _draw(record: Record, tensor: torch.Tensor) -> tuple[Any, list[str]]:
    notes: list[str] = []
    figure = new_figure(14, 4.6)
    panels = figure.subplots(1, 3, width_ratios=[1, 1.1, 1.25])
    _distribution(panels[0], tensor, notes)
    _first_values(panels[1], tensor)
    _heat_map(figure, panels[2], tensor, notes)
    figure.suptitle(_title(record), x=0.008, ha="left", fontsize=12, color=INK)
    return figure, notes


def _title(record: Record) -> str:
    """Name, shape and dtype; what is not finite is counted, since no panel can show it."""
    s = record.summary
    leaf = f" {record.leaf}" if record.leaf else ""
    name = fit(f"{text.layer_name(record.layer)} · {record.port}{leaf}", 70)
    parts = [name, text.shape(record.shape), record.dtype]
    if record.epoch or record.batch or record.call:
        epoch = f"epoch {record.epoch}, " if record.epoch else ""
        parts.append(f"{epoch}batch {record.batch}, call {record.call}")
    if s.nan:
        parts.append(f"{text.count(s.nan)} NaN")
    if s.posinf + s.neginf:
        parts.append(f"{text.count(s.posinf + s.neginf)} Inf")
    return "   ".join(parts).replace("$", r"\$")


def _distribution(panel: Any, tensor: torch.Tensor, notes: list[str]) -> None:
    values = finite_values(tensor, _SAMPLED)
    title = f"Distribution ({BINS} bins)"
    if tensor.numel() > _SAMPLED:
        title = f"Distribution (sampled, {BINS} bins)"
        notes.append(
            f"The histogram is drawn from every {-(-tensor.numel() // _SAMPLED)}th of "
            f"{text.count(tensor.numel())} values."
        )
    panel.set_title(title)
    panel.set_xlabel("Value")
    panel.set_ylabel("Frequency")
    if not values.size:
        say(panel, "no finite values")
        return
    low, high = float(values.min()), float(values.max())
    if high == low:
        room = max(abs(low) * 0.5, 0.5)
        low, high = low - room, high + room
    counts, edges = counted(values, BINS, low, high)
    panel.stairs(counts, edges, fill=True, color=BLUE)
    panel.set_xlim(low, high)
    if _outliers(values, low, high):
        panel.set_yscale("log")
        panel.set_ylabel("Frequency (log scale)")
        panel.set_ylim(0.7, counts.max() * 1.5)
    else:
        panel.set_ylim(0, max(1, counts.max()) * 1.05)
        panel.yaxis.set_major_formatter("{x:,.0f}")
    panel.yaxis.grid(True, color=GRID, linewidth=0.8)
    panel.set_axisbelow(True)


def _outliers(values: Any, low: float, high: float) -> bool:
    """Whether a few values stretch the axis so far that the others share a handful of bins."""
    inner = np.percentile(values[:: max(1, values.size >> 20)], [1, 99])
    return bool(0 < inner[1] - inner[0] < (high - low) / 8)


def _first_values(panel: Any, tensor: torch.Tensor) -> None:
    values = _numbers(tensor.reshape(-1)[:FIRST])
    if values.ndim > 1:
        values = values.reshape(-1)[:FIRST]
    panel.set_title(f"First {len(values)} values" if len(values) > 1 else "The only value")
    panel.set_xlabel("Index")
    panel.set_ylabel("Value")
    if not np.isfinite(values).any():
        say(panel, "no finite values")
        return
    shown = np.where(np.isfinite(values), values, np.nan)
    style = {"marker": "o", "markersize": 3} if len(values) < 40 else {}
    panel.plot(np.arange(len(values)), shown, linewidth=0.7, color=BLUE, **style)
    panel.margins(x=0.01)
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.yaxis.grid(True, color=GRID, linewidth=0.8)
    panel.set_axisbelow(True)


def _heat_map(figure: Any, panel: Any, tensor: torch.Tensor, notes: list[str]) -> None:
    import matplotlib

    grid = _grid(tensor)
    if grid is None:
        panel.set_title("Heat map")
        say(panel, "a single value has no positions")
        return
    values = grid.values
    if values.shape[0] > _POSITIONS:
        notes.append(f"The heat map shows the first {_POSITIONS} of {values.shape[0]} positions.")
        values = values[:_POSITIONS]
    shown = np.ma.masked_invalid(_numbers(values))
    masked = shown.count() < shown.size
    panel.set_title(grid.title)
    panel.set_xlabel(f"{grid.columns} (red: NaN or Inf)" if masked else grid.columns)
    panel.set_ylabel(grid.rows)
    colours = matplotlib.colormaps["viridis"].with_extremes(bad="#d64545")
    limits: dict[str, float] = {}
    if shown.count():
        low, high = np.percentile(shown.compressed(), [_CLIP, 100 - _CLIP])
        if high > low:
            limits = {"vmin": float(low), "vmax": float(high)}
    image = panel.imshow(
        shown, aspect="auto", cmap=colours, interpolation="nearest", origin="upper", **limits
    )
    panel.spines[:].set_visible(False)
    for axis in (panel.xaxis, panel.yaxis):
        axis.get_major_locator().set_params(integer=True)
    if values.shape[0] == 1:
        panel.set_yticks([])
    if not shown.count():
        return
    below = bool(limits and shown.min() < limits["vmin"])
    above = bool(limits and shown.max() > limits["vmax"])
    extend = "both" if below and above else "min" if below else "max" if above else "neither"
    bar = figure.colorbar(image, ax=panel, pad=0.02, aspect=28, extend=extend)
    bar.outline.set_visible(False)
    if extend != "neither":
        bar.set_label(f"Value (colours span the {_CLIP}nd to {100 - _CLIP}th percentile)", size=8)


def _grid(tensor: torch.Tensor) -> _Grid | None:
    """Positions by features: what that means depends on how many dimensions there are."""
    if tensor.dim() == 0:
        return None
    first = f"first {min(FEATURES, tensor.shape[-1])} features"
    if tensor.dim() == 1:
        return _Grid(tensor[None, :FEATURES], "", "Feature", f"Heat map ({first})")
    if tensor.dim() == 2:
        return _Grid(tensor[:, :FEATURES], "Row", "Feature", f"Heat map ({first})")
    if tensor.dim() == 3:
        title = f"Heat map ({first})"
        return _Grid(tensor[0, :, :FEATURES], "Position", "Feature", title)
    if tensor.dim() == 4:
        # A picture or a stack of attention heads: one channel as it lies.
        title = "Heat map (first sample, channel 0)"
        return _Grid(tensor[0, 0], "Row", "Column", title)
    inner = tensor
    while inner.dim() > 2:
        inner = inner[0]
    return _Grid(inner[:, :FEATURES], "Position", "Feature", "Heat map (first of each outer axis)")


def _numbers(tensor: torch.Tensor) -> Any:
    """Values as float64; a complex one by its magnitude."""
    import torch

    if tensor.is_complex():
        tensor = tensor.detach().to(torch.complex128).abs()
    return tensor.detach().to(torch.float64).numpy()
