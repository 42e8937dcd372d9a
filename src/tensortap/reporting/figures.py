"""What every picture shares: the look, an empty figure, writing it to a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import MissingExtraError, OptionError

__all__ = ["BLUE", "GRID", "INK", "MUTED", "Plotted", "fit", "new_figure", "save", "say", "styled"]

INK, MUTED, BLUE, GRID = "#1f2933", "#66788a", "#2563a8", "#e8edf1"

_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": "#c5ced6",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "axes.formatter.limits": (-4, 5),
    "axes.formatter.use_mathtext": True,
}


@dataclass(frozen=True)
class Plotted:
    """Where a picture went, and what it leaves out."""

    path: str
    notes: tuple[str, ...] = ()


def styled() -> Any:
    """Matplotlib with our look, as a context; without matplotlib, a sentence."""
    try:
        import matplotlib
    except ImportError:
        raise MissingExtraError("matplotlib", "plot", "Plotting") from None
    return matplotlib.rc_context(_STYLE)


def new_figure(width: float, height: float) -> Any:
    """An empty white figure that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    engine: Any = figure.get_layout_engine()
    engine.set(w_pad=0.12, h_pad=0.08)
    return figure


def save(figure: Any, path: Path) -> None:
    """Write a figure; the ending of `path` decides between PNG, PDF and SVG."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise OptionError(f"Cannot write {path}: {error.strerror or error}.") from None
    except ValueError as error:
        raise OptionError(f"Cannot write {path}: {error}. Use a name as l3.png.") from None


def fit(name: str, most: int) -> str:
    """The end of a long name: layers differ there."""
    return name if len(name) <= most else f"…{name[1 - most :]}"


def say(panel: Any, words: str) -> None:
    """Words in a panel that has nothing to draw."""
    panel.set_xticks([])
    panel.set_yticks([])
    panel.text(0.5, 0.5, words, transform=panel.transAxes, ha="center", va="center", color=MUTED)
