"""What the library says of a pair of models, and whether it is right."""

from __future__ import annotations

import copy
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from bugs import Case
from clean import CLEAN, Pair, threads
from torch import Tensor, nn
from zoo import ARCHITECTURES, make

import tensortap as tap

__all__ = ["Outcome", "Workshop", "failed", "workshop"]


# Causes that say where the error is, and not what made it.
PLACES = ("tokens", "channels", "heads", "samples", "places")


@dataclass(frozen=True)
class Outcome:
    """What was said of one case or clean pair.

    `hint` is the kind of the best cause at the culprit, `first_hint` at the first divergence; both
    count as right or wrong where a hint is asked for, the second where the bug sits in that layer.
    `false_hint` says that none was asked for, and one was given that is more than a place.
    """

    case: Case | Pair
    first: str | None
    expected_first: str | None
    culprit: str | None
    expected_culprit: str | None
    bisected: str | None
    bisected_side: str
    share: float
    hint: str | None
    explains: float
    hint_right: bool | None
    first_hint: str | None
    first_hint_right: bool | None
    false_hint: bool
    seconds: float
    first_error: float = 0.0
    final_error: float = 0.0
    sentence: str = ""
    said: str = ""
    failure: str = ""

    @property
    def kind(self) -> str:
        return self.case.kind

    @property
    def first_right(self) -> bool:
        return self.first == self.expected_first and not self.failure

    @property
    def blame_right(self) -> bool:
        return self.culprit == self.expected_culprit and not self.failure

    @property
    def bisect_right(self) -> bool | None:
        """Bisection runs along the blocks: of a bug outside of them it may say on which side.

        None where it was not asked.
        """
        if not self.case.architecture.core:
            return None
        if self.bisected is None and self.bisected_side:
            return isinstance(self.case, Case) and self.case.depth == self.bisected_side
        return self.bisected == self.expected_culprit

    @property
    def false_blame(self) -> bool:
        """Whether a layer was named that did nothing wrong."""
        return any(
            named is not None and named != self.expected_culprit
            for named in (self.culprit, self.bisected)
        )


def failed(case: Case | Pair, error: Exception) -> Outcome:
    """What counts as missed, because the library or the model raised."""
    text = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return Outcome(
        case=case,
        first=None,
        expected_first="",
        culprit=None,
        expected_culprit="",
        bisected=None,
        bisected_side="",
        share=0.0,
        hint=None,
        explains=0.0,
        hint_right=False if isinstance(case, Case) and case.hints else None,
        first_hint=None,
        first_hint_right=None,
        false_hint=False,
        seconds=0.0,
        failure=text,
    )


class Workshop:
    """Runs cases in a folder of its own; the recordings of the clean models are made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._clean: dict[Path, tap.Recording] = {}
        self._rounding: dict[Path, dict[str, float]] = {}

    def clean(self, name: str, seed: int = 0, precision: str = "") -> tap.Recording:
        """The model without a bug: the reference, or in a lower precision the floor."""
        path = self.folder / f"{name}-{seed}-{precision}"
        if path not in self._clean:
            model = make(name, seed)
            if precision:
                model = CLEAN[precision](copy.deepcopy(model))
            inputs = _as(model, ARCHITECTURES[name].inputs(seed))
            self._clean[path] = _record(model, inputs, path)
        return self._clean[path]

    def shows(self, outcome: Outcome, precision: str) -> bool:
        """Whether a bug is at least three times what this precision makes of the model anyway.

        At the layer where it shows first, and at the end.
        """
        name = outcome.case.architecture.name
        path = self.folder / f"{name}-0-{precision}"
        if path not in self._rounding:
            found = tap.compare(self.clean(name), self.clean(name, precision=precision))
            self._rounding[path] = {row.layer: _error(row) for row in found.layers}
        usual = self._rounding[path]
        pairs = (
            (outcome.first_error, usual[outcome.expected_first or ""]),
            (outcome.final_error, usual[""]),
        )
        return all(3 * usually < error < math.inf for error, usually in pairs)

    def diagnose(self, case: Case | Pair) -> Outcome:
        """Record the candidate, compare, blame, and hold the answers against what was planted."""
        began = time.perf_counter()
        architecture = case.architecture
        seed = case.seed if isinstance(case, Pair) else 0
        inputs = architecture.inputs(seed)
        with torch.no_grad(), threads(1):
            reference = self.clean(architecture.name, seed)
            floor = None
            if isinstance(case, Case) and case.precision:
                floor = self.clean(architecture.name, seed, case.precision)
            model = case.model()
            inputs = _as(model, inputs)
            with threads(case.threads if isinstance(case, Pair) else 1):
                candidate = _record(model, inputs, self.folder / "candidate")
                comparison = tap.compare(reference, candidate, floor=floor)
                first = comparison.first_divergence
                blame = tap.blame(reference, model, inputs, floor=floor)
                bisected = None
                if architecture.core:
                    bisected = tap.blame(reference, model, inputs, floor=floor, bisect=True)
        wanted = None if isinstance(case, Pair) else case.hints
        recorded = reference.layers
        expected_first = case.first(recorded)
        expected_culprit = None if isinstance(case, Pair) else case.culprit(recorded)
        best = _best(blame.causes)
        hint = None if best is None else best.kind
        early = _best(() if first is None else first.causes)
        first_hint = None if early is None else early.kind
        here = wanted is not None and expected_first == expected_culprit
        return Outcome(
            case=case,
            first=None if first is None else first.layer,
            expected_first=expected_first,
            culprit=blame.culprit,
            expected_culprit=expected_culprit,
            bisected=None if bisected is None else bisected.culprit,
            bisected_side="" if bisected is None else _side(bisected),
            share=blame.share,
            hint=hint,
            explains=0.0 if best is None else best.explains,
            hint_right=None if wanted is None else hint in wanted,
            first_hint=first_hint,
            first_hint_right=first_hint in wanted if here and wanted is not None else None,
            false_hint=wanted is None and best is not None and best.kind not in PLACES,
            seconds=time.perf_counter() - began,
            first_error=0.0 if first is None else _error(first),
            final_error=blame.final_error,
            sentence=blame.sentence,
            said=comparison.sentence,
        )


def _side(blame: tap.Blame) -> str:
    """Where most of the error comes in, if not in the blocks."""
    sides = {"before": blame.before, "behind": blame.behind}
    return next((name for name, share in sides.items() if share > 0.5), "")


def _best(causes: Sequence[tap.Cause]) -> tap.Cause | None:
    """The first cause that says anything."""
    return next((cause for cause in causes if cause.kind != "noise"), None)


def _error(row: tap.LayerComparison) -> float:
    return max((part.error for part in row.parts if part.port == "output"), default=0.0)


@contextmanager
def workshop() -> Iterator[Workshop]:
    with tempfile.TemporaryDirectory() as folder:
        yield Workshop(Path(folder))


def _as(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inputs in the precision of the model's parameters."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}


def _record(model: nn.Module, inputs: dict[str, Tensor], path: Path) -> tap.Recording:
    with tap.record(model, path, layers="all", inputs=True, overwrite=True) as rec:
        model(**inputs)
    assert rec.failure is None
    return tap.open(path)
