"""`find_window`: between which layers a run goes wrong, found from a few values of each.

From the last layer that is surely good to the first that is surely bad, in order of execution. The
model runs once, and nothing of it is kept; what lies in between can then be recorded in full.
"""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from ...errors import OptionError, TapError
from ...recording.reader import Layer, Recording
from ...recording.reader import open as open_recording
from ...taps.isolation import unchanged
from ...targets import Target
from ...targets.failing import model_failed
from ...targets.floor_run import FloorRun
from ..align import LayerPair, align
from ..checks import Run, check_paired, opened
from ..compare import Work
from ..floor import Floor
from ..floor_runs import floor_beside, is_made
from ..judge import AGAINST_ESTIMATE
from ..results import Comparison, LayerComparison, Moment
from ..sentences import name_of
from ..sites import SitePairer
from .places import check_place, same_place
from .sketches import by_samples, by_summaries, has_samples

__all__ = ["Window", "find_window"]

_SURE = 2.0  # times the limit of the judge: beyond, no bad luck with the sample explains it
State = Literal["good", "bad", "unclear"]


@dataclass(frozen=True)
class Window:
    """Where to look: `layers`, by the candidate's names, behind `good` and up to `bad`.

    `layers` is empty when nothing is suspect. `sure` is False when no layer is surely bad, only
    unclear. `lacking` are those of `layers` of which the reference has no tensors, and `command`
    records them to `folder`. `comparison` holds a row a layer, by its samples.
    """

    good: str | None
    bad: str | None
    layers: tuple[str, ...]
    sure: bool
    batch: int
    lacking: tuple[str, ...]
    command: str | None
    folder: str | None
    comparison: Comparison = field(repr=False)

    def __bool__(self) -> bool:
        return bool(self.layers)

    @property
    def sentence(self) -> str:
        """Where the run goes wrong, in a sentence."""
        seen = len(self.comparison.layers)
        if not self.layers:
            return f"Nothing is suspect: {seen} layers agree with the reference in their samples."
        start = "the start"
        if self.good is not None:
            start = f"'{name_of(self.good)}', the last that is surely good"
        kind = "the first that is surely bad" if self.sure else "which is not surely good"
        bad = name_of(self.bad or "")
        return (
            f"The run goes wrong in batch {self.batch} between {start}, and '{bad}', {kind}: "
            f"{len(self.layers)} {'layer' if len(self.layers) == 1 else 'layers'}."
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "sentence": self.sentence,
            "good": self.good,
            "bad": self.bad,
            "sure": self.sure,
            "batch": self.batch,
            "layers": list(self.layers),
            "lacking": list(self.lacking),
            "command": self.command,
            "folder": self.folder,
        }


def find_window(
    model: Any,
    inputs: Any = None,
    *,
    against: Run,
    layers: str | Sequence[str] = "all",
    floor: Run | None = None,
    map: str | Sequence[str] = (),
    output: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int | None], None] | None = None,
    accept_inferred: bool = False,
    self_check: bool = True,
) -> Window:
    """Run a model once, and say between which layers it leaves its reference.

    `model` is what `tap.record` takes, with the `inputs` that the reference was recorded with, or a
    Target; of a compiled one `accept_inferred` and `self_check` say the same as there. The
    reference holds tensors, sketches (`keep="sketch"`) or summaries; the less it holds, the wider
    the window. The model is left as it was, and nothing is kept. `output` is
    where the window will be recorded: `command` writes to another folder.
    """
    if output is not None:
        check_place(output, reference=against, floor=None if is_made(floor) else floor)
    target = _target(model, inputs)
    reference = opened(against, False)
    maps = [map] if isinstance(map, str) else list(map)
    with tempfile.TemporaryDirectory(prefix="tensortap-coarse-") as folder:
        candidate = _sketched(
            target,
            f"{folder}/run",
            layers,
            progress,
            accept_inferred=accept_inferred,
            self_check=self_check,
        )
        pairs = align(reference, candidate, maps=maps)
        beside = floor_beside(floor, reference, candidate)
        taken = None if output is None else os.fspath(output)
        return _Search(reference, candidate, pairs, beside, taken).window()


def _target(model: Any, inputs: Any) -> Target:
    if isinstance(model, Target):
        if inputs is not None:
            raise OptionError("A Target brings its inputs along. Give one of the two.")
        return model
    if inputs is None:
        raise OptionError(
            "What should the model run on? Give the inputs that the reference was recorded with, "
            "or a tap.Target that has them."
        )
    return Target(model, inputs)


def _sketched(
    target: Target,
    path: str,
    layers: str | Sequence[str],
    progress: Callable[[int, int | None], None] | None,
    **compiled: Any,
) -> Recording:
    """One run, of which a few values of every tensor are kept."""
    from ...taps import record

    live = isinstance(target.model, nn.Module)
    with unchanged(target.model) if live else nullcontext(), torch.no_grad():
        recorder = record(
            target.model,
            path,
            layers=layers,
            keep="sketch",
            mode=target.mode,
            strict=True,
            **compiled,
        )
        with recorder:
            for number, batch in enumerate(target.batches):
                if progress is not None:
                    progress(number, len(target.batches))
                try:
                    if live or target.run is not None:
                        target(batch)
                    else:
                        recorder.run(*batch.args, **batch.kwargs)
                except TapError:
                    raise
                except Exception as error:  # whatever a user's model raises
                    raise model_failed(error, number) from error
                recorder.step()
    return open_recording(path)


class _Search:
    """One reference and one sketched run, layer by layer."""

    def __init__(
        self,
        reference: Recording,
        candidate: Recording,
        pairs: Sequence[LayerPair],
        floor: FloorRun | None,
        taken: str | None,
    ) -> None:
        self.reference, self.candidate = reference, candidate
        self.folder = _folder(reference.path, taken)
        paired = [p for p in pairs if p.reference is not None and p.candidate is not None]
        check_paired(reference, candidate, None, paired)
        third = None if floor is None else Floor(reference, floor)
        work = Work(
            reference, candidate, SitePairer(reference, candidate), (), None, third, None, ()
        )
        self.pairs = {pair.candidate.name: pair for pair in paired if pair.candidate is not None}
        self.rows = {name: work.row(by_samples(pair)) for name, pair in self.pairs.items()}
        self.slim = {name: work.row(by_summaries(pair)) for name, pair in self.pairs.items()}
        self.calls = {name: _ends(candidate[name]) for name in candidate.layers}

    def window(self) -> Window:
        sure = True
        bad = self._first("bad")
        if bad is None:
            sure, bad = False, self._first("unclear")
        if bad is None:
            return self._made(None, None, (), True, 0)
        order, moment, name = bad
        step, last = moment[:2], order
        if not sure:  # all that is unclear in that step lies in the window
            last, name = max(self._calls_in("unclear", step))
        goods = [
            (at, n)
            for at, n in self._calls_in("good", step)
            if at < order and not self._doubtful(n, bad=name)
        ]
        start, good = max(goods, default=(-1, None))
        inside = [
            (at, n)
            for n, calls in self.calls.items()
            for m, at in calls.items()
            if m[:2] == step and start < at <= last
        ]
        names = tuple(dict.fromkeys(n for _, n in sorted(inside)))
        return self._made(good, name, names, sure, step[1])

    def _made(
        self, good: str | None, bad: str | None, names: tuple[str, ...], sure: bool, batch: int
    ) -> Window:
        lacking = tuple(name for name in names if not self._has_tensors(name))
        command = self._command(names) if lacking else None
        comparison = Comparison(
            reference=self.reference.path,
            candidate="a run of which a few values of each tensor were kept",
            layers=tuple(self.rows.values()),
            floor="of samples: estimated, or measured where a floor run was given",
            notes=("Verdicts rest on a few values of each tensor, and on its statistics.",),
        )
        folder = self.folder if command else None
        return Window(good, bad, names, sure, batch, lacking, command, folder, comparison)

    # What is known of a layer.

    def _first(self, state: State) -> tuple[int, Moment, str] | None:
        """The first call in this state: when it ended, its moment, its layer."""
        found = [
            (order, moment, name)
            for name in self.rows
            for moment, order in self.calls[name].items()
            if self._at(name, moment) == state
        ]
        return min(found, default=None)

    def _calls_in(self, state: State, step: tuple[int, int]) -> list[tuple[int, str]]:
        """All calls of a step in this state: when they ended, and of which layer."""
        return [
            (order, name)
            for name in self.rows
            for moment, order in self.calls[name].items()
            if moment[:2] == step and self._at(name, moment) == state
        ]

    def _at(self, name: str, moment: Moment) -> State:
        """How sure it is that one call of a layer is good, or bad: by samples and statistics."""
        states = [_state(self.rows[name], moment), _state(self.slim[name], moment)]
        if "bad" in states:
            return "bad"
        return "good" if states == ["good", "good"] else "unclear"

    def _doubtful(self, name: str, bad: str) -> bool:
        """Whether a good layer stands so near to a bad one that statistics alone do not clear it.

        They are blind to another order of the same values: without samples, a block is good as a
        whole or not.
        """
        pair = self.pairs[bad]
        assert pair.reference is not None
        if all(has_samples(record) for record in pair.reference.port("output")):
            return False
        blocks = self.candidate.manifest.structure.blocks
        home = [block for block in blocks if _within(bad, block)]
        return any(_within(name, block) for block in home)

    # What the reference lacks.

    def _named(self, name: str) -> str:
        """The reference's name for a layer; what it does not have is called as here."""
        pair = self.pairs.get(name)
        return name if pair is None or pair.reference is None else pair.reference.name

    def _may_have(self, name: str) -> bool:
        """Whether the reference's model has a layer, as far as its recording tells."""
        whole = "all" in (self.reference.manifest.selection.get("layers") or ())
        return name in self.pairs or not whole

    def _has_tensors(self, name: str) -> bool:
        pair = self.pairs.get(name)
        if pair is None or pair.reference is None:
            return False
        return all(record.stored for record in pair.reference.records)

    def _command(self, names: Sequence[str]) -> str:
        """What records the window of the reference."""
        manifest = self.reference.manifest
        command = manifest.selection.get("command")
        if not command:
            target = manifest.target.get("spec") or manifest.target.get("class") or "TARGET"
            words = ["tensortap", "record", str(target)]
            words += ["--mode", manifest.mode] if manifest.mode else []
            command = shlex.join(words)
        chosen: list[str] = []
        wanted = [self._named(name) for name in names if self._may_have(name)]
        known = [self._named(name) for name in self.candidate.layers]
        for pattern in _patterns(wanted, known):
            chosen += ["--layers", pattern]
        return f"{command} -o {shlex.quote(self.folder)} {shlex.join(chosen)} --inputs"


def _folder(reference: str, taken: str | None) -> str:
    """Where the reference's window goes: beside it, and not where the candidate's goes."""
    folder = f"{reference.rstrip('/')}-window"
    return folder if taken is None or not same_place(folder, taken) else f"{folder}-reference"


def _within(name: str, block: str) -> bool:
    return name == block or name.startswith(f"{block}.")


def _ends(layer: Layer) -> dict[Moment, int]:
    """When each call of a layer ended, by its moment: a layer may be called often in a step."""
    found: dict[Moment, int] = {}
    for record in layer.records:
        if record.port == "output":
            moment = record.epoch, record.batch, record.call
            found[moment] = min(record.order, found.get(moment, record.order))
    return found


def _state(row: LayerComparison, moment: Moment) -> State:
    part = row.main
    if row.verdict in ("identical", "within"):
        return "good"
    if part is None or row.verdict != "diverged":
        return "unclear"
    if moment not in part.diverged_at:
        return "good"
    found = part.difference
    if found is None or found.disagreeing or part.floor_ratio is None:
        return "bad"
    limit = AGAINST_ESTIMATE * (1 + 4 / max(1, found.finite) ** 0.5)
    return "bad" if part.floor_ratio > _SURE * limit else "unclear"


def _patterns(names: Sequence[str], known: Sequence[str]) -> list[str]:
    """Few patterns that name these layers: a block with all that is in it is two."""
    chosen = set(names)
    inside = {name: {n for n in known if n.startswith(f"{name}.")} for name in names if name}
    whole = [name for name, inner in inside.items() if inner and chosen >= inner]
    outer = [n for n in whole if not any(n.startswith(f"{other}.") for other in whole)]
    left = [n for n in names if not any(n == o or n.startswith(f"{o}.") for o in outer)]
    found = [pattern for name in outer for pattern in (name, f"{name}.**")]
    return [*found, *left] or ["all"]
