"""One mode against the reference: the numbers of a row of document 003's table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import OptionError, TapError
from ..recording.reader import Recording
from ..recording.store import LocalStore, open_store
from .checks import Run
from .compare import compare
from .results import Comparison, LayerComparison, number
from .sentences import name_of
from .sudden import Rise, sudden_rise

__all__ = ["GRADES", "ModeRow", "itself", "mode_row"]

GRADES = ("very close", "good", "fair", "large", "undefined")


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
    jump: Rise | None = field(default=None, repr=False)

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


def mode_row(label: str, base: Recording, run: Recording, **options: Any) -> ModeRow:
    """Compare a mode with the reference; one that cannot be compared is a row that says why."""
    options |= dict.fromkeys(itself(run, options))
    try:
        result = compare(base, run, **options)
    except OptionError:
        raise  # the user's options, which are wrong for every mode
    except TapError as error:
        failure = run.manifest.failure
        cause = f" It failed with: {failure}" if failure else ""
        return ModeRow(label, run.path, problem=f"{error}{cause}")
    blocks = set(base.manifest.structure.blocks)
    ends = [row for row in result.layers if row.layer in blocks] or list(result.compared)
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
        mean_correlation=_mean_correlation(result.layers),
        grade=_worst_grade(ends),
        first_divergence=None if divergence is None else name_of(divergence.layer),
        comparison=result,
        jump=sudden_rise([row for row in ends if row.layer in blocks]) if result.same else None,
    )


def itself(run: Recording, options: Mapping[str, Any]) -> list[str]:
    """The roles, floor or truth, that this run was given: no mode is a measure for itself."""
    thirds = {role: options.get(role) for role in ("floor", "truth")}
    ours = _place(run)
    return [role for role, third in thirds.items() if third is not None and _place(third) == ours]


def _place(run: Run) -> str:
    store = open_store(run.path if isinstance(run, Recording) else run)
    return str(store.root.resolve()) if isinstance(store, LocalStore) else store.url


def _metric(row: LayerComparison | None, name: str) -> float:
    """A number of a layer; none where one side alone is NaN or infinite, since it is not close."""
    if row is None or row.difference is None or row.difference.disagreeing:
        return math.nan
    return float(getattr(row.difference, name))


def _mean_correlation(rows: Sequence[LayerComparison]) -> float:
    measured = [row.difference for row in rows if row.difference is not None]
    known = [d.correlation for d in measured if not math.isnan(d.correlation)]
    if not known or any(d.disagreeing for d in measured):
        return math.nan
    return math.fsum(known) / len(known)


def _worst_grade(ends: Sequence[LayerComparison]) -> str | None:
    """The worse grade of the first and the last layer."""
    grades = [row.grade for row in (*ends[:1], *ends[-1:]) if row.grade is not None]
    return max(grades, key=GRADES.index, default=None)
