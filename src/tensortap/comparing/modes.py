"""Every mode in a folder against one of them: seed 003's table, one row a mode."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import chain
from pathlib import Path
from typing import Any

from ..errors import ComparisonError, OptionError, TapError
from ..numerics.difference import METRICS
from ..recording.html import table
from ..taps.unseen import unseen
from .checks import Run, opened
from .mode_files import SUMMARY, comparison_file, comparison_text, save_files
from .mode_folders import COMPARISONS, open_modes
from .mode_rows import GRADES, ModeRow, itself, mode_row
from .place import Device, placed
from .results import Comparison, LayerComparison, json_text
from .sentences import name_of

__all__ = ["SORTABLE", "ModeRow", "Modes", "compare_modes"]

SORTABLE: tuple[str, ...] = (
    "mode",
    "first_layer_mse",
    "first_layer_mae",
    "last_layer_mse",
    "last_layer_mae",
    "mean_correlation",
    "grade",
    "same",
    "same_input",
    "first_divergence",
)
_MANY = 3  # modes whose trouble is told


@dataclass(frozen=True)
class Modes:
    """A table of comparisons by mode."""

    reference: str
    folder: str
    modes: tuple[ModeRow, ...]
    warnings: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """Every mode could be compared and none diverged."""
        return all(row.same for row in self.modes)

    def __getitem__(self, mode: str) -> ModeRow:
        for row in self.modes:
            if row.mode == mode:
                return row
        raise KeyError(mode)

    def sorted_by(self, metric: str, descending: bool = False) -> Modes:
        """The same table in another order; modes without the number stand last.

        `metric` is a column, or any metric of a difference, which is then the last layer's.
        """
        if metric not in SORTABLE and metric not in METRICS:
            raise OptionError(
                f"The modes cannot be sorted by {metric!r}. Sort by a column "
                f"({', '.join(SORTABLE)}) or by a metric of the last layer ({', '.join(METRICS)})."
            )
        known = [row for row in self.modes if _key(row, metric) is not None]
        rest = [row for row in self.modes if _key(row, metric) is None]
        known.sort(key=lambda row: _key(row, metric), reverse=descending)
        return replace(self, modes=(*known, *rest))

    def to_dict(self) -> dict[str, Any]:
        return {
            "reference": self.reference,
            "folder": self.folder,
            "same": self.same,
            "warnings": list(self.warnings),
            "modes": [row.to_dict() for row in self.modes],
        }

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        return json_text(self.to_dict(), path)

    def save(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write `mode_<M>_vs_<R>.json` a comparison and `summary.json`; the paths."""
        return self._save(folder, "json", comparison_text, [(SUMMARY, self.to_json() + "\n")])

    def save_pages(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write `mode_<M>_vs_<R>.html` a comparison; the paths."""
        return self._save(folder, "html", lambda comparison, *_: comparison.to_html())

    def _save(
        self,
        folder: str | os.PathLike[str],
        suffix: str,
        text: Callable[[Comparison, str, str], str],
        more: Iterable[tuple[str, str]] = (),
    ) -> list[Path]:
        made = (
            (
                comparison_file(row.mode, self.reference, suffix=suffix),
                text(row.comparison, row.mode, self.reference),
            )
            for row in self.modes
            if row.comparison is not None
        )
        return [Path(path) for path in save_files(folder, chain(made, more))]

    def __str__(self) -> str:
        from ..reporting.comparisons import modes_text

        return modes_text(self)

    def _repr_html_(self) -> str:
        columns = [*SORTABLE, "problem"]
        rows = [[_cell(getattr(row, name)) for name in columns] for row in self.modes]
        head = f"<p>{escape(f'All modes against {self.reference}')}</p>"
        warnings = "".join(f"<p>{escape(text)}</p>" for text in self.warnings)
        return head + warnings + table(columns, rows)


def compare_modes(
    folder: str | os.PathLike[str],
    reference: str = "fp32",
    *,
    modes: str | Sequence[str] | None = None,
    layers: str | Sequence[str] | None = None,
    floor: Run | None = None,
    rules: str | Sequence[str] = (),
    map: str | Sequence[str] = (),
    preset: str | None = None,
    truth: Run | None = None,
    metrics: Sequence[str] = (),
    partial: bool = False,
    device: Device | None = None,
    save: bool | str | os.PathLike[str] = False,
    progress: Callable[[int, int], None] | None = None,
) -> Modes:
    """Compare every recording in a folder with the one whose mode, or folder, is `reference`.

    `modes` compares some of them, in that order. A recording that cannot be read or compared is a
    row that says why. `save` writes the comparisons as JSON: True to FOLDER/comparisons, or to
    another folder. All else is as `compare` has it, for every mode.
    """
    found = open_modes(folder, partial=partial)
    chosen = found.reference(reference)
    wanted = found.others(chosen) if modes is None else found.chosen(modes)
    wanted = tuple(item for item in wanted if item is not chosen)
    if not wanted:
        raise OptionError(
            f"{reference} is the reference itself, which is compared with nothing. Name another "
            f"mode: {', '.join(item.mode for item in found.others(chosen))}."
        )
    base = opened(chosen.path if isinstance(chosen.run, TapError) else chosen.run, partial)
    options = {
        "layers": layers,
        "floor": floor,
        "rules": rules,
        "map": map,
        "preset": preset,
        "truth": truth,
        "metrics": metrics,
        "partial": partial,
    }
    rows = []
    warnings = []
    with placed(device) as place, unseen():
        for done, item in enumerate(wanted):
            if isinstance(item.run, TapError):
                rows.append(ModeRow(item.mode, item.path, problem=str(item.run)))
            else:
                rows.append(mode_row(item.mode, base, item.run, device=place, **options))
                warnings += [
                    f"{item.mode} is the {role} itself, and was compared without one."
                    for role in itself(item.run, options)
                ]
            if progress is not None:
                progress(done + 1, len(wanted))
    _check_compared(rows)
    made = Modes(chosen.mode, found.url, tuple(rows), (*_warnings(rows, chosen.mode), *warnings))
    if save is not False:
        made.save(f"{found.url}/{COMPARISONS}" if save is True else save)
    return made


def _warnings(rows: Sequence[ModeRow], reference: str) -> list[str]:
    return [
        *(
            f"{row.mode} was given other inputs than {reference}."
            for row in rows
            if row.same_input is False
        ),
        *(
            f"{row.mode} has no {layer}: its {which} layer has no numbers."
            for row in rows
            for which, layer in (("first", row.first_layer), ("last", row.last_layer))
            if row.comparison is not None
            and any(
                r.verdict == "missing" and name_of(r.layer) == layer for r in row.comparison.layers
            )
        ),
        *(
            f"{row.mode} is NaN or infinite at {name_of(found.layer)} where {reference} is not, or "
            "the other way round: its error is undefined."
            for row in rows
            if row.comparison is not None and (found := _first_unlike(row.comparison)) is not None
        ),
        *(
            f"{row.mode} was compared by summaries alone: no MSE, MAE or correlation is known."
            for row in rows
            if row.comparison is not None and all(r.by_summaries for r in row.comparison.compared)
        ),
        *(
            f"{row.mode}: the error jumps at {row.jump.layer}, from at most {row.jump.before:.2g} "
            f"to {row.jump.ratio:.2g} times the floor. Its precision may make that much, but does "
            "not in the layers before: give a good recording in that precision as the floor to "
            "know."
            for row in rows
            if row.jump is not None
        ),
    ]


def _first_unlike(comparison: Comparison) -> LayerComparison | None:
    """The first layer where one side alone is not finite."""
    measured = (row for row in comparison.layers if row.difference is not None)
    return next((row for row in measured if row.difference and row.difference.disagreeing), None)


def _check_compared(rows: Sequence[ModeRow]) -> None:
    if all(row.problem for row in rows):
        said = " ".join(f"{row.mode}: {row.problem}" for row in rows[:_MANY])
        more = f" And {len(rows) - _MANY} more." if len(rows) > _MANY else ""
        raise ComparisonError(f"No mode could be compared. {said}{more}")


def _layer(name: str) -> str:
    return "" if name == name_of("") else name


def _cell(value: object) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _key(row: ModeRow, metric: str) -> Any:
    if metric in SORTABLE:
        value = getattr(row, metric)
    elif row.comparison is None or not row.last_layer:
        value = None
    else:
        value = getattr(row.comparison[_layer(row.last_layer)].difference, metric, None)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    return GRADES.index(value) if metric == "grade" else value
