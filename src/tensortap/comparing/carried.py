"""What errors of good inputs become in what is made of them, where that can be computed.

An estimate says how large an error is usual. It does not know that a norm makes small tokens large,
that an activation hides most of a tensor and leaves its error, or that attention that looks at few
tokens magnifies what its scores are off by. Where a tensor is beyond its estimate though all that
went into it is good, the inputs' own errors are taken through what the layer does, token by token.
The result stands in the place of a floor run. A bug makes more than its inputs brought.
"""

from __future__ import annotations

import math
import re
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..numerics.difference import Difference, difference
from ..numerics.profile import Profile, profile
from ..recording.reader import Record
from .causes.attention import ROLES, heads_of
from .causes.near import Near, near_of
from .measure import MomentMeasurement
from .precision import roundoff

__all__ = ["Carried", "Carrying"]

_FLOATS = ("float", "bfloat")
# Layers that look at more than one token, each a row along the last axis.
_MIXING = re.compile(r"(?:Conv(?:Transpose)?|.*Pool|InstanceNorm|Fold|Unfold)\dd$")
_ELEMENTWISE = re.compile(
    r"^(?:p?re?lu6?|leakyrelu|celu|selu|elu|hard(?:swish|tanh|sigmoid)|tanh|sigmoid|softplus|mish|"
    r"dropout\w*|stochasticdepth|\w*droppath|(?:new|fast|quick)?\w*(?:gelu|silu|swish)\w*)"
    r"(?:activation)?$",
    re.I,
)
_CHANNELWISE = re.compile(r"(?:Frozen|Sync)?BatchNorm")
_ALL = 1e-2  # of the weights of attention, which sum up to 1
_LEAST = 1e-300
_MOST = 1 << 23  # elements: some copies of them in float64 are made
_LATEST = 12  # outputs among which queries, keys and values are looked for
_Step = tuple[int, int, int]
_Call = tuple[str, int, int, int, int]


@dataclass(frozen=True, eq=False)
class Carried:
    """The reference, and what good inputs' errors make of it: measured as a floor run is."""

    difference: Difference
    _tensors: tuple[Tensor, Tensor] = field(repr=False)

    def profile(self) -> Profile | None:
        """Errors by token and by channel."""
        return profile(*self._tensors)


@dataclass(frozen=True, eq=False)
class _Good:
    """A tensor of the reference beside that of the candidate, which is as it should be."""

    record: Record
    moment: MomentMeasurement

    def error(self) -> tuple[Tensor, Tensor]:
        """The reference, and what the candidate has more."""
        ours, theirs = self.sides()
        return ours, theirs - ours

    def sides(self) -> tuple[Tensor, Tensor]:
        ours, theirs = (side.detach().cpu().double() for side in self.moment.pair())
        return ours, theirs


class Carrying:
    """The good tensors of a comparison so far, and what their errors become."""

    def __init__(self) -> None:
        self._inputs: dict[_Call, list[_Good]] = {}
        self._outputs: dict[_Step, list[tuple[int, int, _Good]]] = {}
        self._known: dict[tuple[str, str, str, _Call], _Good] = {}
        self._count = 0

    def learn(self, record: Record, moment: MomentMeasurement) -> None:
        """What the reference recorded has a partner that is as it should be."""
        found = moment.difference
        if found is None or not moment.whole or not record.dtype.startswith(_FLOATS):
            return
        if moment.fleeting:  # its tensor will be gone
            return
        good = _Good(record, moment)
        self._known[_key(record)] = good
        if record.port == "input":
            self._inputs.setdefault(_call(record), []).append(good)
        elif record.port == "output":
            self._count += 1
            insort(self._outputs.setdefault(_step(record), []), (record.order, self._count, good))

    def into(self, record: Record, moment: MomentMeasurement, estimate: float) -> Carried | None:
        """What the errors of good inputs let expect of a tensor beside its own rounding.

        None where it is not known what was done with them, and of tensors that are so large that
        copies of them in float64 would not fit beside a comparison.
        """
        found = moment.difference
        if found is None or found.disagreeing or not moment.whole or not found.finite:
            return None
        if not record.dtype.startswith(_FLOATS) or record.port not in ("input", "output"):
            return None
        if math.prod(record.shape) > _MOST:
            return None
        reference = moment.pair()[0].detach().cpu().double()
        error = self._through_scores(record, reference, moment.dtypes)
        if error is None and reference.dim() == 3:
            error = self._through_attention(record, reference, moment.dtypes)
        if error is None:
            error = self._through_tokens(record, reference)
        if error is None:
            return None
        own = estimate * float(reference.square().mean().sqrt())
        made = reference + error + own * _noise(reference.shape)
        return Carried(difference(reference, made, percentiles=False), (reference, made))

    def _through_tokens(self, record: Record, reference: Tensor) -> Tensor | None:
        """The error of a layer, or of code between layers, that looks at one token at a time."""
        if record.port == "output" and _MIXING.match(_class(record)):
            return None
        given = self._inputs.get(_call(record), []) if record.port == "output" else []
        if record.port == "input":
            given = self._before(record)
        alone = [good for good in given if good.record.shape == record.shape]
        if record.port == "output" and len(alone) == 1 and _ELEMENTWISE.match(_class(record)):
            return alone[0].error()[1]
        if len(alone) == 1 and _CHANNELWISE.match(_class(record)) and reference.dim() > 1:
            ours, error = alone[0].error()
            return error * _spread(reference) / _spread(ours).clamp(min=_LEAST)
        if reference.dim() not in (2, 3):
            return None
        worst: Tensor | None = None
        for good in given:
            if good.record.shape[:-1] == record.shape[:-1]:
                ours, error = good.error()
                size = (ours - ours.mean(-1, keepdim=True)).square().sum(-1, keepdim=True)
                share = error.square().sum(-1, keepdim=True) / size.clamp(min=_LEAST)
                worst = share if worst is None else torch.maximum(worst, share)
        if worst is None:
            return None
        size = reference.square().mean(-1, keepdim=True).sqrt()
        # What is all error may come out as large as any other token, and turned about.
        return torch.minimum(worst.sqrt() * size, 2 * size.max()) * _noise(reference.shape)

    def _through_scores(
        self, record: Record, reference: Tensor, dtypes: Sequence[str]
    ) -> Tensor | None:
        """The error that a softmax makes of its scores, or of the layers that they are made of."""
        sums = reference.sum(-1)
        if reference.dim() < 3 or bool((reference < 0).any()):
            return None
        if not bool(((sums - 1).abs() < _ALL).logical_or(sums == 0).all()):
            return None
        if record.port == "output":
            for good in self._inputs.get(_call(record), ()):
                if good.record.shape == record.shape:
                    ours, theirs = (torch.nan_to_num(side.softmax(-1)) for side in good.sides())
                    if float((ours - reference).abs().max()) < _ALL:
                        return theirs - ours
        made = [good for good in self._before(record) if good.record.port == "output"]
        errors = sorted(good.moment.difference.error for good in made if good.moment.difference)
        if len(errors) < 2:
            return None
        scores = torch.where(reference > 0, reference.clamp(min=_LEAST).log(), torch.nan)
        far = _reach(scores)
        unit = max(roundoff(dtype) for dtype in dtypes)
        noise = math.hypot(*errors[-2:], unit) * far * _noise(reference.shape)
        moved = torch.where(reference > 0, reference * noise.exp(), 0.0)
        return moved / moved.sum(-1, keepdim=True).clamp(min=_LEAST) * sums[..., None] - reference

    def _before(self, record: Record) -> list[_Good]:
        """What the code before the input of a layer was given: by layers, and by its caller."""
        scope = record.layer.rpartition(".")[0]
        latest = [
            good
            for order, _, good in self._outputs.get(_step(record), ())
            if order < record.order and good.record.layer.rpartition(".")[0] == scope
        ][-_LATEST:]
        calls = [call for call in self._inputs if call[0] == scope and call[1:4] == _step(record)]
        return [*latest, *(good for call in calls for good in self._inputs[call])]

    def _through_attention(
        self, record: Record, reference: Tensor, dtypes: Sequence[str]
    ) -> Tensor | None:
        """The error that attention makes of its queries, keys and values."""
        if not self._may_be_heads(record):
            return None
        ours: list[Near] = []
        theirs: list[Near] = []
        unit = max(roundoff(dtype) for dtype in dtypes)
        for near in near_of(record):
            good = self._known.get(_key(near.record))
            if good is None:
                ours.append(near)
                theirs.append(near)
                continue
            left, right = good.sides()
            ours.append(_Held.of(near, left))
            theirs.append(_Held.of(near, _rounded(right, unit)))
        made = heads_of(reference, ours, theirs)
        return None if made is None else made[1] - made[0]

    def _may_be_heads(self, record: Record) -> bool:
        """Whether queries, keys and values were made just before, and are good."""
        latest = [
            good.record.layer.rpartition(".")[2].lower()
            for order, _, good in self._outputs.get(_step(record), ())
            if order < record.order
        ][-_LATEST:]
        return any(all(any(p.match(n) for n in latest) for p in way) for way in ROLES)


@dataclass(frozen=True, eq=False)
class _Held(Near):
    """A tensor near by with the values that one of the two runs has there."""

    values: Tensor = field(default_factory=lambda: torch.empty(0), repr=False)

    @classmethod
    def of(cls, near: Near, values: Tensor) -> _Held:
        return cls(near.name, near.record, near.own, near.later, values)

    def tensor(self) -> Tensor:
        return self.values


def _reach(scores: Tensor) -> Tensor:
    """How far the scores of each row lie apart; NaN are left out."""
    low, high = (scores.nan_to_num(nan=end) for end in (math.inf, -math.inf))
    return (high.amax(-1, keepdim=True) - low.amin(-1, keepdim=True)).clamp(min=0.0)


def _spread(values: Tensor) -> Tensor:
    """The deviation of each channel, the second axis."""
    others = [axis for axis in range(values.dim()) if axis != 1]
    return values.std(others, keepdim=True, correction=0)


def _rounded(values: Tensor, unit: float) -> Tensor:
    """Values as code rounds them once more, each and all of a token alike, as it does scores."""
    for shape in (values.shape, (*values.shape[:-1], 1)):
        values = values * (1 + unit * _noise(shape))
    return values


def _noise(shape: Sequence[int]) -> Tensor:
    """The same at every call, so that a comparison says the same every time."""
    drawing = torch.Generator().manual_seed(0)
    return torch.randn(tuple(shape), generator=drawing, dtype=torch.float64)


def _class(record: Record) -> str:
    return record.type.rpartition(".")[2]


def _key(record: Record) -> tuple[str, str, str, _Call]:
    return record.layer, record.port, record.leaf, _call(record)


def _call(record: Record) -> _Call:
    return record.layer, record.rank, record.epoch, record.batch, record.call


def _step(record: Record) -> _Step:
    return record.rank, record.epoch, record.batch
