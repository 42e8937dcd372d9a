"""Two runs that write text: where their tokens part, and whether rounding can have done it.

Up to the first token that differs both runs read the same tokens, and their layers can be judged.
After it they have different inputs: those steps are left out of the comparison.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from ..recording.reader import Recording
from ..recording.segment import RawRow, Segment
from ..taps.generations import LOGITS

if TYPE_CHECKING:
    from .results import LayerComparison

__all__ = ["FAR", "GenerationComparison", "Writing", "about_generations", "without_other_inputs"]

Kind = Literal["same", "rounding", "bug", "sampled", "unknown"]
Logits = NDArray[np.float64]
_Moment = tuple[int, int]

FAR = 4.0
"""Times the error of the logits: two of them differ by less from rounding alone, in 99.5 % and more
of all cases (the difference of two errors of one size is 1.4 times as large)."""


@dataclass(frozen=True)
class GenerationComparison:
    """What two runs wrote after one prompt, and why their tokens part, where they do.

    `first` is the first token that differs, counted from 0, in sequence `row` of `rows`; None
    where all tokens that both wrote are the same. `margin` is by how much the reference prefers its
    best token to its second best there, `error` the standard deviation over the vocabulary of the
    difference between the two runs' logits there. `layers` are those that diverged up to that step,
    the first of them first.
    """

    epoch: int
    batch: int
    row: int
    rows: int
    prompt: str | None
    prompt_length: int | None
    same_prompt: bool
    reference_tokens: tuple[int, ...]
    candidate_tokens: tuple[int, ...]
    reference_text: str | None
    candidate_text: str | None
    kind: Kind
    first: int | None = None
    reference_token: int | None = None
    candidate_token: int | None = None
    reference_piece: str | None = None
    candidate_piece: str | None = None
    margin: float = math.nan
    error: float = math.nan
    best: int | None = None  # the token with the largest logit in the reference
    layers: tuple[str, ...] = ()
    judged_steps: int = 0  # up to and with the one whose token differs

    def to_dict(self) -> dict[str, Any]:
        """What JSON can hold."""
        found: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, float) and not math.isfinite(value):
                value = None
            found[item.name] = list(value) if isinstance(value, tuple) else value
        return {**found, "sentence": str(self)}

    def __str__(self) -> str:
        if not self.same_prompt:
            return "The two runs were given different prompts: what they write is not compared."
        if self.first is None:
            ours, theirs = len(self.reference_tokens), len(self.candidate_tokens)
            if ours == theirs:
                return f"All {_tokens(ours)} are the same."
            return (
                f"The first {_tokens(min(ours, theirs))} are the same; the reference wrote {ours}, "
                f"the candidate {theirs}."
            )
        token = _named(self.reference_token, self.reference_piece)
        other = _named(self.candidate_token, self.candidate_piece)
        where = f"token {self.first + 1} of {len(self.reference_tokens)}"
        row = f" in sequence {self.row + 1} of {self.rows}" if self.rows > 1 else ""
        return (
            f"The texts part at {where}{row}: the reference writes {token}, the candidate {other}. "
            f"{self._why()} What follows has other inputs and was not judged."
        )

    def _why(self) -> str:
        known = not (math.isnan(self.margin) or math.isnan(self.error))
        numbers = (
            f"The margin of the reference's best token is {self.margin:.3g}, and the logits of the "
            f"two runs differ by {self.error:.3g} there"
        )
        if self.kind == "sampled":
            said = "Tokens are drawn at random, so that they part depends on the draw, too."
            return f"{said} {numbers}." if known else said
        if self.kind == "unknown":
            return "Whether rounding did it cannot be said: the logits of that step are not known."
        if self.layers:
            more = f" and {len(self.layers) - 1} more" if len(self.layers) > 1 else ""
            above = f"{numbers}. " if known else ""
            return (
                f"{above}That is not rounding: up to that step {self.layers[0] or '(root)'}{more} "
                "diverged."
            )
        if self.kind == "rounding":
            return f"{numbers}: rounding decides this token, and no layer diverged up to it."
        if self.error == 0 or self.best != self.reference_token:
            how = "the best logit of the reference is that of another token"
            how = "the logits of the two runs are the same there" if self.error == 0 else how
            return f"That is not rounding: {how}, so something after the logits chose the token."
        return (
            f"{numbers}: the margin is {self.margin / self.error:.3g} times that, far "
            "above what rounding does, though no layer diverged. Look at what the two runs do with "
            "the logits."
        )


def _tokens(count: int) -> str:
    return f"{count} token{'s' * (count != 1)}"


def _named(token: int | None, piece: str | None) -> str:
    return f"{token}" if piece is None else f"{piece!r} ({token})"


@dataclass(frozen=True)
class _Pair:
    """One `generate` of both runs; `first` (row, token) is where they part."""

    ours: dict[str, Any]
    theirs: dict[str, Any]
    same_prompt: bool
    first: tuple[int, int] | None

    @property
    def moment(self) -> _Moment:
        return int(self.ours["epoch"]), int(self.ours["batch"])

    @property
    def judged(self) -> int:
        """How many steps both runs made on the same tokens."""
        common = min(int(self.ours["steps"]), int(self.theirs["steps"]))
        return common if self.first is None else min(common, self.first[1] + 1)


class Writing:
    """What two runs wrote, and the recordings without the steps that have different inputs."""

    def __init__(self, reference: Recording, candidate: Recording) -> None:
        self.whole = reference, candidate
        self.pairs = _paired(reference, candidate)
        self.reference = _limited(reference, self.pairs, 0)
        self.candidate = _limited(candidate, self.pairs, 1)

    def judged(self, rows: Sequence[LayerComparison]) -> tuple[GenerationComparison, ...]:
        """What can be said of each text, with the layers' verdicts at hand."""
        return tuple(self._judged(pair, rows) for pair in self.pairs)

    def _judged(self, pair: _Pair, rows: Sequence[LayerComparison]) -> GenerationComparison:
        row, first = pair.first or (0, None)
        known: dict[str, Any] = {
            "epoch": pair.moment[0],
            "batch": pair.moment[1],
            "row": row,
            "rows": len(pair.ours["tokens"]),
            "prompt": _prompt(self.whole[0], pair.moment[1]),
            "prompt_length": pair.ours.get("prompt_length"),
            "same_prompt": pair.same_prompt,
            "judged_steps": pair.judged,
            "first": first,
        }
        for side, data in (("reference", pair.ours), ("candidate", pair.theirs)):
            tokens = data["tokens"][row]
            text, pieces = data.get("text"), data.get("pieces")
            known[f"{side}_tokens"] = tuple(tokens)
            known[f"{side}_text"] = text[row] if text else None
            if first is not None:
                known[f"{side}_token"] = tokens[first]
                known[f"{side}_piece"] = pieces[row][first] if pieces else None
        if first is None:
            return GenerationComparison(kind="same" if pair.same_prompt else "unknown", **known)
        ours = _logits(self.whole[0], pair.ours, row, first)
        theirs = _logits(self.whole[1], pair.theirs, row, first)
        if ours is not None and theirs is not None and ours.shape == theirs.shape and len(ours) > 1:
            best = np.sort(ours)[-2:]
            known["margin"] = float(best[1] - best[0])
            finite = np.isfinite(ours) & np.isfinite(theirs)
            known["error"] = float(np.std((ours - theirs)[finite])) if finite.any() else math.nan
            known["best"] = int(np.argmax(ours))
        known["layers"] = tuple(_diverged(rows, pair.moment))
        return GenerationComparison(kind=_kind(pair, known), **known)


def without_other_inputs(reference: Recording, third: Recording) -> Recording:
    """A floor run without the steps that it made on other tokens than the reference."""
    return _limited(third, _paired(reference, third), 1)


def about_generations(found: Sequence[GenerationComparison]) -> str:
    """The texts in a sentence, for the front of the answer; empty where nothing was written."""
    if not found:
        return ""
    parted = [one for one in found if one.first is not None]
    worst = sorted(parted, key=lambda one: one.kind != "bug")
    several = f" {len(parted)} of {len(found)} texts part." if len(found) > 1 and parted else ""
    if worst:
        said = str(worst[0])
        if len(found) > 1:
            said = f"After prompt {found.index(worst[0]) + 1} {said[0].lower()}{said[1:]}"
        return f"{several} {said} ".lstrip()
    if len(found) > 1 and all(one.kind == "same" for one in found):
        return f"The {len(found)} texts are the same, token by token. "
    return f"{found[0]} "


def _kind(pair: _Pair, known: dict[str, Any]) -> Kind:
    if pair.ours.get("sampled") or pair.theirs.get("sampled"):
        return "sampled"
    if known["layers"]:
        return "bug"
    margin, error = known.get("margin", math.nan), known.get("error", math.nan)
    beams = max(int(side.get("beams") or 1) for side in (pair.ours, pair.theirs))
    if math.isnan(margin) or math.isnan(error) or beams > 1:
        return "unknown"
    return "rounding" if margin <= FAR * error else "bug"


def _diverged(rows: Sequence[LayerComparison], moment: _Moment) -> list[str]:
    """The layers that diverged in this text, in the order in which they first did."""
    found = [
        (min(at), row.order, row.layer)
        for row in rows
        if row.verdict == "diverged"
        if (at := [m[2] for part in row.parts for m in part.diverged_at if m[:2] == moment])
    ]
    return [layer for _, _, layer in sorted(found)]


def _paired(reference: Recording, candidate: Recording) -> list[_Pair]:
    ours, theirs = (_by_place(run) for run in (reference, candidate))
    found = []
    for key in ours:
        if key in theirs:
            left, right = ours[key], theirs[key]
            prompts = left.get("prompt"), right.get("prompt")
            same = None in prompts or prompts[0] == prompts[1]
            first = _first(left["tokens"], right["tokens"]) if same else None
            found.append(_Pair(left, right, same, first))
    return found


def _by_place(run: Recording) -> dict[tuple[int, int, int], dict[str, Any]]:
    """The texts of a run by epoch, batch and number in the batch; damaged entries are left out."""
    found: dict[tuple[int, int, int], dict[str, Any]] = {}
    numbers: dict[_Moment, int] = {}
    for item in run.manifest.generations:
        whole = all(isinstance(item.get(name), int) for name in ("epoch", "batch", "before"))
        steps = item.get("steps")
        if not whole or not isinstance(steps, int) or steps < 1 or not _rows(item.get("tokens")):
            continue
        epoch, batch = int(item["epoch"]), int(item["batch"])
        number = numbers.get((epoch, batch), 0)
        found[epoch, batch, number] = item
        numbers[epoch, batch] = number + 1
    return found


def _rows(tokens: Any) -> bool:
    return isinstance(tokens, list) and bool(tokens) and all(isinstance(r, list) for r in tokens)


def _first(ours: list[list[int]], theirs: list[list[int]]) -> tuple[int, int] | None:
    """The earliest token that differs in any sequence of the batch, as (row, token)."""
    found = []
    for row, (left, right) in enumerate(zip(ours, theirs, strict=False)):
        at = next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), None)
        if at is not None:
            found.append((at, row))
    return (min(found)[1], min(found)[0]) if found else None


def _limited(run: Recording, pairs: Sequence[_Pair], side: int) -> Recording:
    """The recording without the steps that the two runs made on different tokens."""
    limits: dict[_Moment, int] = {}
    totals: dict[_Moment, int] = {}
    for pair in pairs:
        data = (pair.ours, pair.theirs)[side]
        before, steps = int(data["before"]), int(data["steps"])
        totals[pair.moment] = max(totals.get(pair.moment, 0), before + steps)
        if pair.judged < max(int(pair.ours["steps"]), int(pair.theirs["steps"])):
            limit = before + pair.judged
            limits[pair.moment] = min(limits.get(pair.moment, limit), limit)
    if not limits:
        return run
    calls: dict[tuple[str, int, int], int] = {}
    for segment in run._segments:
        for row in segment.rows:
            key = (segment.sites[row[0]].layer, row[2], row[3])
            calls[key] = max(calls.get(key, 0), row[4] + 1)

    def keep(segment: Segment, row: RawRow) -> bool:
        moment = (row[2], row[3])
        if moment not in limits:
            return True
        several = calls[segment.sites[row[0]].layer, row[2], row[3]]  # of an encoder, one
        return row[4] * totals[moment] // several < limits[moment]

    return run.limited(keep)


def _logits(run: Recording, data: dict[str, Any], row: int, step: int) -> Logits | None:
    """The logits by which a run chose a token; None where they were not kept."""
    if "" not in run:
        return None
    moment = (int(data["epoch"]), int(data["batch"]), int(data["before"]) + step)
    for record in run[""].records:
        here = (record.epoch, record.batch, record.call) == moment
        if here and record.port == "output" and record.leaf == LOGITS and record.stored:
            tensor = record.tensor()
            if tensor.dim() == 3 and row < tensor.shape[0]:
                found: Logits = tensor[row, -1].to(torch.float64).numpy()
                return found
    return None


def _prompt(run: Recording, number: int) -> str | None:
    prompts = run.manifest.inputs.get("prompt")
    if isinstance(prompts, list) and number < len(prompts) and isinstance(prompts[number], str):
        return str(prompts[number])
    return None
