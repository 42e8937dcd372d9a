"""What a comparison says, as data: a comparison holds layers, a layer holds parts.

A part is one port and leaf of a layer over all its moments; a layer's row repeats the numbers of
its worst output, so that a table has one line a layer. Results render themselves: that is the one
place where comparing reaches for reporting, inside functions.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import OptionError
from ..numerics.difference import Difference
from ..numerics.summary import Summary
from ..recording.schema import Provenance

if TYPE_CHECKING:
    from .causes.cause import Cause
    from .epochs import EpochComparison, EpochPart
    from .flips import Flips
    from .generation import GenerationComparison
    from .maker import Maker

__all__ = [
    "BAD",
    "BitDifference",
    "Comparison",
    "EnvironmentDifference",
    "LayerComparison",
    "Moment",
    "Origin",
    "Part",
    "Verdict",
    "json_text",
    "number",
    "severity",
    "worst",
    "write_text",
]

Verdict = Literal["identical", "within", "diverged", "missing", "incomparable"]
Origin = Literal["made here", "inherited", "unknown"]
Moment = tuple[int, int, int]  # epoch, batch, call

BAD: tuple[Verdict, ...] = ("diverged", "incomparable")
# What a row of JSON holds of a difference, also where there is none.
_METRIC_KEYS = (
    *(item.name for item in fields(Difference) if item.name not in ("row", "histogram")),
    *("error", "grade", "correlation_grade", "device_good"),
)
# From good to bad; a layer is as bad as its worst part.
_ORDER: tuple[Verdict, ...] = ("identical", "within", "missing", "incomparable", "diverged")


def severity(verdict: Verdict) -> int:
    """How bad a verdict is: larger is worse."""
    return _ORDER.index(verdict)


def worst(verdicts: Iterable[Verdict]) -> Verdict | None:
    """The worst of some verdicts; None of none."""
    return max(verdicts, key=severity, default=None)


@dataclass(frozen=True)
class EnvironmentDifference:
    """One thing that the two runs do not have in common."""

    name: str
    reference: str
    candidate: str

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "reference": self.reference, "candidate": self.candidate}


@dataclass(frozen=True)
class Part:
    """One port and leaf of a layer, over all moments that both sides have.

    `error` is the relative L2 error |candidate - reference| / |reference|, `floor` the error that
    was to be expected here, in the same measure, and `floor_measured` whether a floor run has it.
    `why` says in words what the verdict rests on. Where a side holds summaries alone, `difference`
    is None and the two summaries are all there is. `reference_error` and `candidate_error` are the
    distances of both sides from a truth, `nearer` the side that is nearer to it: None where neither
    is, or the distances are unknown (NaN).
    `missing` names the side that has no such leaf.
    `flips` counts the tokens that chose other experts, in a router's choice; `apart` the tokens
    that were judged apart since they follow one, at the moment that has most of them.
    """

    port: str
    leaf: str
    verdict: Verdict
    why: str
    difference: Difference | None = None
    reference_summary: Summary | None = None
    candidate_summary: Summary | None = None
    shape: tuple[int, ...] = ()
    candidate_shape: tuple[int, ...] = ()
    dtype: str = ""
    candidate_dtype: str = ""
    transform: str = ""
    error: float = math.nan
    floor: float | None = None
    floor_ratio: float | None = None
    floor_measured: bool = False
    hints: tuple[str, ...] = ()
    moments: int = 0
    worst_moment: Moment | None = None
    diverged_at: tuple[Moment, ...] = field(default=(), repr=False)
    bits_differ_at: Moment | None = field(default=None, repr=False)
    max_abs_moment: Moment | None = None
    order: int = 0
    nearer: str | None = None
    reference_error: float = math.nan
    candidate_error: float = math.nan
    added: tuple[tuple[str, float], ...] = ()
    epochs: tuple[EpochPart, ...] = field(default=(), repr=False)
    missing: str = ""
    flips: Flips | None = None
    apart: int = 0

    @property
    def changed_shape(self) -> bool:
        """Whether it diverged because its shape is another, so that no value was compared."""
        unmeasured = self.difference is None and self.reference_summary is None
        return self.verdict == "diverged" and unmeasured and self.shape != self.candidate_shape

    def to_dict(self) -> dict[str, Any]:
        return {
            "port": self.port,
            "leaf": self.leaf,
            "verdict": self.verdict,
            "why": self.why,
            "shape": list(self.shape),
            "candidate_shape": list(self.candidate_shape),
            "dtype": self.dtype,
            "candidate_dtype": self.candidate_dtype,
            "transform": self.transform,
            "error": number(self.error),
            "floor": number(self.floor),
            "floor_ratio": number(self.floor_ratio),
            "hints": list(self.hints),
            "moments": self.moments,
            "worst_moment": None if self.worst_moment is None else list(self.worst_moment),
            "first_diverged": list(min(self.diverged_at)) if self.diverged_at else None,
            "diverged_moments": len(self.diverged_at),
            "max_abs_moment": None if self.max_abs_moment is None else list(self.max_abs_moment),
            "nearer": self.nearer,
            "reference_error": number(self.reference_error),
            "candidate_error": number(self.candidate_error),
            "flips": None if self.flips is None else self.flips.to_dict(),
            "apart": self.apart,
            "added": {name: number(value) for name, value in self.added},
            "difference": None if self.difference is None else self.difference.to_dict(),
            "reference_summary": _summary(self.reference_summary),
            "candidate_summary": _summary(self.candidate_summary),
        }


@dataclass(frozen=True)
class LayerComparison:
    """One layer of the reference beside the layer of the candidate that it was paired with.

    `input_verdict` is None when the inputs were not recorded on both sides. `origin` is set on
    diverged layers: `made here` (good inputs, bad output), `inherited` or `unknown`. `causes` are
    on the first divergence of a comparison: what kind of error it is, best first. `provenance` and
    `candidate_provenance` say how each side knows the layer's name; None for a side without it.
    """

    layer: str
    candidate_layer: str | None
    matched_by: str
    verdict: Verdict
    parts: tuple[Part, ...] = field(default=(), repr=False)
    input_verdict: Verdict | None = None
    origin: Origin | None = None
    order: int = 0
    type: str = ""
    candidate_type: str = ""
    note: str = ""
    causes: tuple[Cause, ...] = ()
    provenance: Provenance | None = "hook"
    candidate_provenance: Provenance | None = "hook"

    @property
    def guessed(self) -> bool:
        """Whether the name of the layer is a guess on either side."""
        return "inferred" in (self.provenance, self.candidate_provenance)

    @property
    def main(self) -> Part | None:
        """The part whose numbers stand for the layer: the worst output, or the worst of all."""
        there = [part for part in self.parts if part.verdict != "missing"] or list(self.parts)
        behind = [part for part in there if part.port != "input"] or there
        pool = [part for part in behind if part.port == "output"] or behind
        if self.verdict in BAD and not any(part.verdict == self.verdict for part in pool):
            pool = behind
        return max(pool, key=_badness, default=None)

    @property
    def by_summaries(self) -> bool:
        """Whether a verdict was reached without the tensors."""
        judged, main = self.verdict not in ("missing", "incomparable"), self.main
        return judged and main is not None and main.difference is None and not main.changed_shape

    @property
    def difference(self) -> Difference | None:
        return self.main.difference if self.main is not None else None

    @property
    def error(self) -> float:
        return self.main.error if self.main is not None else math.nan

    @property
    def floor(self) -> float | None:
        return self.main.floor if self.main is not None else None

    @property
    def floor_ratio(self) -> float | None:
        return self.main.floor_ratio if self.main is not None else None

    @property
    def grade(self) -> str | None:
        """The documents' grade, by MSE; None where no tensors were compared."""
        return self.difference.grade if self.difference is not None else None

    @property
    def transform(self) -> str:
        return self.main.transform if self.main is not None else ""

    @property
    def nearer(self) -> str | None:
        """The side that is nearer to the truth, where one was given and one is."""
        return self.main.nearer if self.main is not None else None

    @property
    def reference_error(self) -> float:
        """How far the reference is from the truth; NaN where that is unknown."""
        return self.main.reference_error if self.main is not None else math.nan

    @property
    def candidate_error(self) -> float:
        """How far the candidate is from the truth; NaN where that is unknown."""
        return self.main.candidate_error if self.main is not None else math.nan

    @property
    def first_part(self) -> Part | None:
        """The part that diverged first in time; None where none did."""
        bad = [part for part in self.parts if part.verdict == "diverged"]
        bad = [part for part in bad if part.port != "input"] or bad
        return min(bad, key=lambda part: _part_when(part, self.origin), default=None)

    @property
    def first_moment(self) -> Moment | None:
        """The first moment (epoch, batch, call) at which the layer diverged."""
        part = self.first_part
        return min(part.diverged_at) if part is not None and part.diverged_at else None

    @property
    def flips(self) -> Flips | None:
        """The tokens that chose other experts at this layer; None where none is known to."""
        found = [part.flips for part in self.parts if part.flips is not None]
        return found[0] if found else None

    @property
    def hints(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(hint for part in self.parts for hint in part.hints))

    @property
    def why(self) -> str:
        """What the verdict rests on, in words."""
        main = self.main
        if main is None:
            return self.note
        return main.why if main.port == "output" else f"{main.port}: {main.why}"

    def to_dict(self) -> dict[str, Any]:
        """Flat: the metrics of the main part stand beside the verdict."""
        found = self.difference
        metrics = dict.fromkeys(_METRIC_KEYS) if found is None else found.to_dict()
        main = self.main
        return {
            **metrics,
            "layer": self.layer,
            "candidate_layer": self.candidate_layer,
            "matched_by": self.matched_by,
            "verdict": self.verdict,
            "input_verdict": self.input_verdict,
            "origin": self.origin,
            "type": self.type,
            "candidate_type": self.candidate_type,
            "provenance": self.provenance,
            "candidate_provenance": self.candidate_provenance,
            "order": self.order,
            "port": main.port if main is not None else None,
            "leaf": main.leaf if main is not None else None,
            "error": number(self.error),
            "floor": number(self.floor),
            "floor_ratio": number(self.floor_ratio),
            "grade": self.grade,
            "transform": self.transform,
            "nearer": self.nearer,
            "reference_error": number(self.reference_error),
            "candidate_error": number(self.candidate_error),
            "why": self.why,
            "hints": list(self.hints),
            "causes": [cause.to_dict() for cause in self.causes],
            "flips": None if self.flips is None else self.flips.to_dict(),
            "note": self.note,
            "parts": [part.to_dict() for part in self.parts],
        }


@dataclass(frozen=True)
class BitDifference:
    """The first layer whose bits differ, though all that ran before it has the same bits.

    That alone does not prove a bug: its verdict may be `within`. `maker` is the module that made
    it, where the inputs tell.
    """

    row: LayerComparison
    maker: Maker | None

    @property
    def layer(self) -> str:
        return self.row.layer

    def to_dict(self) -> dict[str, Any]:
        return {
            "layer": self.row.layer,
            "candidate_layer": self.row.candidate_layer,
            "verdict": self.row.verdict,
            "error": number(self.row.error),
            "floor_ratio": number(self.row.floor_ratio),
            "made_in": None if self.maker is None else self.maker.to_dict(),
        }


@dataclass(frozen=True)
class Comparison:
    """Two recordings, aligned, layer by layer, with verdicts; true when nothing diverged.

    `environment` is what else differs between the runs, `in_common` what does not.
    """

    reference: str
    candidate: str
    layers: tuple[LayerComparison, ...] = field(repr=False)
    environment: tuple[EnvironmentDifference, ...] = field(default=(), repr=False)
    in_common: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    same_input: bool | None = None
    floor: str = ""
    preset: str | None = None
    truth: str | None = None
    measured_on: str = "cpu"
    generations: tuple[GenerationComparison, ...] = field(default=(), repr=False)
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """Nothing diverged and nothing was incomparable; missing layers alone do not count.

        A text that parts for another reason than rounding or a draw counts.
        """
        bad = any(one.kind == "bug" for one in self.generations)
        return not bad and not any(row.verdict in BAD for row in self.layers)

    def __bool__(self) -> bool:
        return self.same

    @property
    def first_divergence(self) -> LayerComparison | None:
        """The first diverged layer in order of execution; gradients run behind all outputs."""
        diverged = [row for row in self.layers if row.verdict == "diverged"]
        return min(diverged, key=_when, default=None)

    @property
    def maker(self) -> Maker | None:
        """The module that made the first divergence, where the recordings tell."""
        from .maker import maker_of

        first = self.first_divergence
        return None if first is None else maker_of(self.layers, first)

    @property
    def first_bit_difference(self) -> BitDifference | None:
        """Where the bits part, when all that ran before has the same bits; whatever the verdict."""
        from .maker import first_bit_difference

        found = first_bit_difference(self.layers)
        return None if found is None else BitDifference(*found)

    @property
    def epochs(self) -> tuple[EpochComparison, ...]:
        """The comparison epoch by epoch, for training runs."""
        from .epochs import epochs_of

        return epochs_of(self)

    @property
    def counts(self) -> dict[str, int]:
        """How many layers got each verdict."""
        found = Counter(row.verdict for row in self.layers)
        return {verdict: found[verdict] for verdict in _ORDER if found[verdict]}

    @property
    def compared(self) -> tuple[LayerComparison, ...]:
        """The layers that could be compared."""
        return tuple(r for r in self.layers if r.verdict not in ("missing", "incomparable"))

    def __getitem__(self, layer: str) -> LayerComparison:
        for row in self.layers:
            if layer in (row.layer, row.candidate_layer):
                return row
        raise KeyError(layer)

    @property
    def sentence(self) -> str:
        """The answer in a sentence."""
        from .sentences import answer

        return answer(self)

    def to_dict(self) -> dict[str, Any]:
        first, bits = self.first_divergence, self.first_bit_difference
        return {
            "format": 1,
            "same": self.same,
            "sentence": self.sentence,
            "reference": self.reference,
            "candidate": self.candidate,
            "first_divergence": None if first is None else _first(first, self.maker),
            "first_bit_difference": None if bits is None else bits.to_dict(),
            "counts": self.counts,
            "same_input": self.same_input,
            "floor": self.floor,
            "preset": self.preset,
            "truth": self.truth,
            "measured_on": self.measured_on,
            "generations": [one.to_dict() for one in self.generations],
            "warnings": list(self.warnings),
            "notes": list(self.notes),
            "environment": [item.to_dict() for item in self.environment],
            "in_common": dict(self.in_common),
            "epochs": [epoch.to_dict() for epoch in self.epochs],
            "layers": [row.to_dict() for row in self.layers],
        }

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Strict JSON, as docs/comparison.schema.json describes it; also written to `path`."""
        return json_text(self.to_dict(), path)

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """A single page with everything in it, which opens without a network."""
        from ..reporting.page import render_page

        text = render_page(self)
        if path is not None:
            write_text(path, text)
        return text

    def __rich__(self) -> Any:
        from ..reporting.comparisons import comparison_table

        return comparison_table(self)

    def __str__(self) -> str:
        from ..reporting.comparisons import comparison_text

        return comparison_text(self)

    def _repr_html_(self) -> str:
        from ..reporting.page import notebook

        return notebook(self)


def number(value: float | None) -> float | str | None:
    """A number as strict JSON holds it."""
    if value is None or math.isnan(value):
        return None
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return value


def _badness(part: Part) -> tuple[int, float, float]:
    ratio = part.floor_ratio if part.floor_ratio is not None else -1.0
    error = -1.0 if math.isnan(part.error) else part.error
    return severity(part.verdict), ratio, error


def _when(row: LayerComparison) -> tuple[int, ...]:
    """When a layer first diverged: by step, forward before backward, then in order.

    A gradient is seen at the layer that it goes to before it is seen at the layer that made it, so
    within a backward pass those that made it come first.
    """
    part = row.first_part
    return (0, 0, 0, 0, row.order) if part is None else _part_when(part, row.origin)


def _part_when(part: Part, origin: Origin | None) -> tuple[int, ...]:
    from .epochs import phase

    epoch, batch, _ = min(part.diverged_at, default=(0, 0, 0))
    backward = part.port.startswith("grad")
    return epoch, batch, phase(part.port), backward and origin != "made here", part.order


def _first(row: LayerComparison, maker: Maker | None) -> Mapping[str, Any]:
    names = ("layer", "candidate_layer", "verdict", "input_verdict", "origin", "why")
    causes = [cause.to_dict() for cause in row.causes]
    moment = row.first_moment
    return {
        **{name: getattr(row, name) for name in names},
        "moment": None if moment is None else list(moment),
        "made_in": None if maker is None else maker.to_dict(),
        "hints": list(row.hints),
        "causes": causes,
    }


def _summary(summary: Summary | None) -> dict[str, Any] | None:
    return None if summary is None else summary.to_dict()


def json_text(data: Mapping[str, Any], path: str | os.PathLike[str] | None = None) -> str:
    """Strict JSON for people to read too; also written to `path`."""
    text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)
    if path is not None:
        write_text(path, text + "\n")
    return text


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a result where the user said, making folders on the way."""
    target = Path(path)
    if target.is_dir():
        raise OptionError(f"{os.fspath(path) or 'That'} is a folder. Name a file, as report.html.")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
