"""Every mode in a folder against one of them: seed 003's table, one row a mode."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

from ..errors import ComparisonError, NotARecordingError, OptionError, TapError
from ..numerics.difference import METRICS
from ..recording.html import table
from ..recording.reader import Recording
from ..recording.reader import open as open_recording
from ..recording.schema import MANIFEST
from ..recording.store import open_store
from .checks import Run
from .compare import compare
from .results import Comparison, LayerComparison, json_text, number
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
_SEGMENT = re.compile(r"segment-.*\.safetensors")
_GRADES = ("very close", "good", "fair", "large", "undefined")


@dataclass(frozen=True)
class ModeRow:
    """One mode against the reference; `problem` says why when it could not be compared."""

    mode: str
    path: str
    same: bool | None = None
    same_input: bool | None = None
    first_layer: str = ""
    first_layer_mse: float = math.nan
    first_layer_mae: float = math.nan
    last_layer: str = ""
    last_layer_mse: float = math.nan
    last_layer_mae: float = math.nan
    mean_correlation: float = math.nan
    grade: str | None = None
    first_divergence: str | None = None
    problem: str = ""
    comparison: Comparison | None = field(default=None, repr=False)

    def to_dict(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "path": self.path,
            "same": self.same,
            "same_input": self.same_input,
            "first_layer": self.first_layer,
            "first_layer_mse": number(self.first_layer_mse),
            "first_layer_mae": number(self.first_layer_mae),
            "last_layer": self.last_layer,
            "last_layer_mse": number(self.last_layer_mse),
            "last_layer_mae": number(self.last_layer_mae),
            "mean_correlation": number(self.mean_correlation),
            "grade": self.grade,
            "first_divergence": self.first_divergence,
            "problem": self.problem,
        }


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
        """Write each comparison as JSON, named as in the documents; the paths."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        paths = []
        for row in self.modes:
            if row.comparison is not None:
                name = re.sub(r"[^\w.+-]+", "_", row.mode)
                paths.append(target / f"mode_{name}_comparison.json")
                row.comparison.to_json(paths[-1])
        return paths

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
    layers: str | Sequence[str] | None = None,
    floor: Run | None = None,
    rules: str | Sequence[str] = (),
    map: str | Sequence[str] = (),
    preset: str | None = None,
    partial: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Modes:
    """Compare every recording in a folder with the one whose mode, or folder, is `reference`.

    A recording that cannot be read or compared is a row that says why.
    """
    found = _recordings(folder)
    runs = {name: run for name, run in found.items() if isinstance(run, Recording)}
    chosen = _find(runs, reference)
    if chosen is None:
        raise _no_reference(folder, reference, found)
    if len(found) == 1:
        raise ComparisonError(
            f"{os.fspath(folder)} holds the reference {reference!r} alone: nothing to compare it "
            f"with. Record another mode first: tensortap record TARGET --mode MODE -o "
            f"{os.fspath(folder)}/MODE"
        )
    base = runs[chosen]
    rows = []
    for done, (name, run) in enumerate(found.items()):
        if name != chosen:
            label = _label(name, run, runs)
            if isinstance(run, Recording):
                rows.append(
                    _row(
                        label,
                        base,
                        run,
                        layers=layers,
                        floor=floor,
                        rules=rules,
                        map=map,
                        preset=preset,
                        partial=partial,
                    )
                )
            else:
                rows.append(ModeRow(label, f"{os.fspath(folder)}/{name}", problem=str(run)))
        if progress is not None:
            progress(done + 1, len(found))
    _check_common(rows)
    warnings = [
        f"{row.mode} was given other inputs than {reference}."
        for row in rows
        if row.same_input is False
    ]
    warnings += [
        f"{row.mode} was compared by summaries alone: no MSE, MAE or correlation is known."
        for row in rows
        if row.comparison is not None and all(r.by_summaries for r in row.comparison.compared)
    ]
    return Modes(_label(chosen, base, runs), os.fspath(folder), tuple(rows), tuple(warnings))


def _recordings(folder: str | os.PathLike[str]) -> dict[str, Recording | TapError]:
    store = open_store(folder)
    found: dict[str, Recording | TapError] = {}
    for name in sorted(store.names()):
        inner = f"{store.url}/{name}"
        try:
            inside = open_store(inner).names()
            if MANIFEST not in inside and not any(_SEGMENT.match(file) for file in inside):
                continue
            found[name] = open_recording(inner)
        except NotADirectoryError:
            continue
        except TapError as error:
            found[name] = error
    if MANIFEST in store.names():
        raise NotARecordingError(
            f"{store.url} is itself a recording, of one mode. Name the folder that holds it and "
            "the recordings of the other modes."
        )
    if not found:
        raise NotARecordingError(
            f"There is no recording in {store.url}: expected a folder of recordings, one a mode. "
            f"Record one first: tensortap record TARGET --mode fp32 -o {store.url}/fp32"
        )
    return found


def _find(runs: dict[str, Recording], reference: str) -> str | None:
    """The folder of a mode: by the folder's name, else by the mode that the manifest names."""
    for name in (reference, f"mode_{reference}"):
        if name in runs:
            return name
    modes = [name for name, run in runs.items() if run.manifest.mode == reference]
    if len(modes) > 1:
        raise ComparisonError(
            f"{len(modes)} recordings are of the mode {reference!r}: {', '.join(modes)}. Say which "
            f"one is the reference by its folder, as --reference {modes[0]}."
        )
    return modes[0] if modes else None


def _label(name: str, run: Recording | TapError, runs: dict[str, Recording]) -> str:
    """What to call a row: its mode, unless two folders hold the same one."""
    mode = run.manifest.mode if isinstance(run, Recording) else None
    shared = sum(other.manifest.mode == mode for other in runs.values()) > 1
    return name if mode is None or shared else mode


def _no_reference(
    folder: str | os.PathLike[str], reference: str, found: dict[str, Recording | TapError]
) -> ComparisonError:
    where = os.fspath(folder)
    broken = found.get(reference)
    if isinstance(broken, TapError):
        return ComparisonError(f"The reference {reference!r} cannot be read: {broken}")
    specs = {
        run.manifest.target.get("spec") for run in found.values() if isinstance(run, Recording)
    }
    spec = next(iter(specs)) if len(specs) == 1 else None
    return ComparisonError(
        f"There is no recording of the reference mode {reference!r} in {where}, only: "
        f"{', '.join(list(found)[:12])}. Record it first: "
        f"tensortap record {spec or 'TARGET'} --mode {reference} -o {where}/{reference}"
    )


def _row(label: str, base: Recording, run: Recording, **options: Any) -> ModeRow:
    if options["floor"] is not None and _path(options["floor"]) in (run.path, base.path):
        options["floor"] = None  # a mode is no floor for itself
    try:
        result = compare(base, run, **options)
    except OptionError:
        raise  # the user's options, which are wrong for every mode
    except TapError as error:
        return ModeRow(label, run.path, problem=str(error))
    measured = [row for row in result.layers if row.difference is not None]
    blocks = set(base.manifest.structure.blocks)
    ends = [row for row in result.compared if row.layer in blocks] or list(result.compared)
    correlations = [
        value
        for row in measured
        if row.difference is not None and not math.isnan(value := row.difference.correlation)
    ]
    first, last = (ends[0], ends[-1]) if ends else (None, None)
    divergence = result.first_divergence
    return ModeRow(
        mode=label,
        path=run.path,
        same=result.same,
        same_input=result.same_input,
        first_layer="" if first is None else name_of(first.layer),
        first_layer_mse=_metric(first, "mse"),
        first_layer_mae=_metric(first, "mae"),
        last_layer="" if last is None else name_of(last.layer),
        last_layer_mse=_metric(last, "mse"),
        last_layer_mae=_metric(last, "mae"),
        mean_correlation=math.fsum(correlations) / len(correlations) if correlations else math.nan,
        grade=_worst_grade(ends),
        first_divergence=None if divergence is None else name_of(divergence.layer),
        comparison=result,
    )


def _path(run: Run) -> str:
    return run.path if isinstance(run, Recording) else open_store(run).url


def _metric(row: LayerComparison | None, name: str) -> float:
    if row is None or row.difference is None:
        return math.nan
    return float(getattr(row.difference, name))


def _worst_grade(ends: Sequence[LayerComparison]) -> str | None:
    """The worse grade of the first and the last layer."""
    grades = [row.grade for row in (*ends[:1], *ends[-1:]) if row.grade is not None]
    return max(grades, key=_GRADES.index, default=None)


def _layer(name: str) -> str:
    return "" if name == name_of("") else name


def _check_common(rows: Sequence[ModeRow]) -> None:
    if all(row.problem for row in rows):
        raise ComparisonError(f"No mode could be compared. {rows[0].mode}: {rows[0].problem}")


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
    return _GRADES.index(value) if metric == "grade" else value
