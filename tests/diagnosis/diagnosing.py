"""What the library says of a pair of models, and whether it is right."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from bugs import Case
from clean import Pair, threads
from torch import Tensor, nn
from zoo import make

import tensortap as tap

__all__ = ["Outcome", "Workshop", "workshop"]


@dataclass(frozen=True)
class Outcome:
    """What was said of one case or clean pair.

    `hint` is the kind of the best cause at the culprit, or where none was named at the first
    divergence. `hint_right` is None where no hint was asked for; `false_hint` says that one was
    given all the same.
    """

    case: Case | Pair
    first: str | None
    expected_first: str | None
    culprit: str | None
    expected_culprit: str | None
    share: float
    hint: str | None
    explains: float
    hint_right: bool | None
    false_hint: bool
    seconds: float
    sentence: str = ""

    @property
    def kind(self) -> str:
        return self.case.kind if isinstance(self.case, Pair) else self.case.bug.kind

    @property
    def first_right(self) -> bool:
        if isinstance(self.case, Pair) and self.case.quantised:
            return True
        return self.first == self.expected_first

    @property
    def blame_right(self) -> bool:
        return self.culprit == self.expected_culprit

    @property
    def false_blame(self) -> bool:
        """Whether a layer was named that did nothing wrong."""
        return self.culprit is not None and self.culprit != self.expected_culprit


class Workshop:
    """Runs cases in a folder of its own; the recordings of the clean models are made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._references: dict[tuple[str, int], tap.Recording] = {}

    def reference(self, name: str, inputs: dict[str, Tensor], seed: int) -> tap.Recording:
        if (name, seed) not in self._references:
            path = self.folder / f"{name}-{seed}"
            self._references[name, seed] = _record(make(name, seed), inputs, path)
        return self._references[name, seed]

    def diagnose(self, case: Case | Pair) -> Outcome:
        """Record the candidate, compare, blame, and hold the answers against what was planted."""
        began = time.perf_counter()
        architecture = case.architecture
        seed = case.seed if isinstance(case, Pair) else 0
        inputs = architecture.inputs(seed)
        with torch.no_grad(), threads(1):
            reference = self.reference(architecture.name, inputs, seed)
            model = case.model()
            with threads(case.threads if isinstance(case, Pair) else 1):
                candidate = _record(model, inputs, self.folder / "candidate")
                first = tap.compare(reference, candidate).first_divergence
                blame = tap.blame(reference, model, inputs)
        causes = blame.causes or (() if first is None else first.causes)
        best = next((cause for cause in causes if cause.kind != "noise"), None)
        wanted = None if isinstance(case, Pair) else case.bug.hints
        recorded = reference.layers
        return Outcome(
            case=case,
            first=None if first is None else first.layer,
            expected_first=None if isinstance(case, Pair) else case.first(recorded),
            culprit=blame.culprit,
            expected_culprit=None if isinstance(case, Pair) else case.culprit(recorded),
            share=blame.share,
            hint=None if best is None else best.kind,
            explains=0.0 if best is None else best.explains,
            hint_right=None if wanted is None else best is not None and best.kind in wanted,
            false_hint=wanted is None and isinstance(case, Case) and best is not None,
            seconds=time.perf_counter() - began,
            sentence=blame.sentence,
        )


@contextmanager
def workshop() -> Iterator[Workshop]:
    with tempfile.TemporaryDirectory() as folder:
        yield Workshop(Path(folder))


def _record(model: nn.Module, inputs: dict[str, Tensor], path: Path) -> tap.Recording:
    with tap.record(model, path, layers="all", inputs=True, overwrite=True) as rec:
        model(**inputs)
    assert rec.failure is None
    return tap.open(path)
