"""Attention computed again from its queries, keys and values: what was changed in between.

The heads that the reference returns are reproduced first: how many there are, the scale, the mask,
rotary positions. Only where that comes out down to rounding, one thing at a time is changed until
the candidate comes out.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .arguments import allowed_by
from .fits import Fit, factor_words, number_words
from .near import Near
from .pairs import Pairs

__all__ = ["ROLES", "attention", "heads_of"]

_WORK = 1 << 23  # scores that are computed for a try on all rows
_ROWS = 12  # queries that are tried first
_EXACT = 1e-4  # of the values
_CLEAR = 0.02  # of the squared error
_LIKE = 0.02  # of the values: near enough to tell what errors become in them
_MOST_GIVEN = 3
_BASES = (10000.0, 500000.0, 1000000.0, 160000.0, 100000.0, 150000.0, 5000000.0)
_CAPS = (50.0, 30.0, 20.0)
_WORDS = {"q": "q|query|wq", "k": "k|key|wk", "v": "v|value|wv"}
_ROLE = {
    role: re.compile(rf"^(?:to_|self_|attn_)?(?:{words})(?:_?(?:proj|lin|linear|norm|layernorm))?$")
    for role, words in _WORDS.items()
}
_FUSED = re.compile(r"^(?:to_|attn_)?(?:w?qkv|c_attn|query_key_value|in_proj)(?:_proj)?$", re.I)
ROLES = (tuple(_ROLE.values()), (_FUSED,))
"""How layers are called that make queries, keys and values, and one that makes all three."""


@dataclass(frozen=True)
class _Setting:
    """How scores are made. `mask` says what is masked; `rotary` is (pairing, base)."""

    scale: float
    mask: str = "none"
    rotary: tuple[str, float | None] | None = None
    cap: float | None = None
    shift: int = 0  # of the keys' positions
    window: int | None = None
    ahead: int = 0
    exchanged: bool = False
    tiled: bool = False
    given: tuple[int, ...] = ()  # of the masks and biases that were handed over


@dataclass(frozen=True, eq=False)
class _Given:
    """A mask, or what is added to the scores: (sample or 1, head or 1, token, key)."""

    name: str
    values: Tensor

    @property
    def hides(self) -> bool:
        return allowed_by(self.values) is not None


@dataclass(frozen=True, eq=False)
class _Call:
    """Queries (sample, head, token, width), keys and values, and what else the layer was given."""

    query: Tensor
    key: Tensor
    value: Tensor
    padding: Tensor | None
    tables: tuple[Tensor, Tensor] | None
    given: tuple[_Given, ...] = ()

    def run(self, how: _Setting, rows: Tensor) -> Tensor:
        """The heads of some queries, side by side: (sample, row, channel)."""
        query, key = self.query, self.key
        if how.rotary is not None:
            query, key = (
                self._rotated(side, how, shift) for side, shift in ((query, 0), (key, how.shift))
            )
        heads = self.query.shape[1]
        key, value = (_repeated(side, heads, how.tiled) for side in (key, self.value))
        if how.exchanged:
            query, key = key, query
        scores = query[:, :, rows] @ key.transpose(-1, -2) * how.scale
        if how.cap is not None:
            scores = how.cap * torch.tanh(scores / how.cap)
        for index in how.given:
            values = self.given[index].values[:, :, rows]
            if values.dtype == torch.bool:
                scores = scores.masked_fill(~values, -math.inf)
            else:
                scores = scores + values
        allowed = self._allowed(how, rows, key.shape[-2])
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -math.inf)
        made = torch.nan_to_num(scores.softmax(-1)) @ value
        return made.transpose(1, 2).flatten(2)

    def _allowed(self, how: _Setting, rows: Tensor, keys: int) -> Tensor | None:
        far = rows[:, None] - torch.arange(keys)[None, :]
        allowed = torch.ones(1, 1, len(rows), keys, dtype=torch.bool)
        if "causal" in how.mask:
            allowed = allowed & (far >= -how.ahead)
        if how.window is not None:
            allowed = allowed & (far < how.window)
        if "padding" in how.mask and self.padding is not None:
            allowed = allowed & self.padding[:, None, None, :]
        return None if bool(allowed.all()) else allowed

    def _rotated(self, side: Tensor, how: _Setting, shift: int) -> Tensor:
        assert how.rotary is not None
        pairing, base = how.rotary
        width = side.shape[-1]
        if base is None:
            assert self.tables is not None
            width = self.tables[0].shape[-1]
        side, rest = side[..., :width], side[..., width:]  # some turn a part of a head alone
        half = width // 2
        if base is None:
            assert self.tables is not None
            cos, sin = (table[:, None, :, :half] for table in self.tables)
        else:
            speed = base ** (-torch.arange(half, dtype=torch.float64) / half)
            angle = torch.outer(torch.arange(side.shape[-2], dtype=torch.float64) + shift, speed)
            cos, sin = angle.cos(), angle.sin()
        if pairing == "halves":
            a, b = side[..., :half], side[..., half:]
            return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)
        a, b = side[..., ::2], side[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
        return torch.cat((turned, rest), -1)


def _repeated(side: Tensor, heads: int, tiled: bool) -> Tensor:
    times = heads // side.shape[1]
    if times == 1:
        return side
    return side.repeat(1, times, 1, 1) if tiled else side.repeat_interleave(times, 1)


def attention(pairs: Pairs, near: Sequence[Near]) -> Fit | None:
    """What was changed between queries, keys and values, and the heads that attention returns."""
    if pairs.energy <= 0 or pairs.exponent or pairs.finite is not None or pairs.whole is None:
        return None
    reference, candidate = (pairs.as_given(side) for side in pairs.whole[:2])
    if reference.dim() != 3 or reference.shape[1] < 3:
        return None
    for call in _calls(reference.shape, near):
        tokens = reference.shape[1]
        samples = max(1, _WORK // (call.query.shape[1] * tokens * call.key.shape[2]))
        if samples * call.query.shape[1] * tokens * call.key.shape[2] > 4 * _WORK:
            return None
        worst = (candidate - reference).double().square().flatten(1).sum(1).argsort(descending=True)
        chosen = worst[:samples].sort()[0]
        part = _at(call, chosen)
        ours, theirs = (side.detach()[chosen].cpu().double() for side in (reference, candidate))
        trial = _Trial(part, ours, theirs, pairs.floor)
        base = next((how for how in _settings(part) if trial.is_reference(how)), None)
        if base is not None:
            return _changed(trial, base)
    return None


def heads_of(
    reference: Tensor, near: Sequence[Near], others: Sequence[Near]
) -> tuple[Tensor, Tensor] | None:
    """What attention returned, computed again, and the same of `others` in the place of `near`.

    None where the reference does not come out of the tensors near by.
    """
    exact = reference.double()
    every = torch.arange(exact.shape[1])
    few = torch.linspace(0, len(every) - 1, min(len(every), _ROWS)).long()
    pairs = zip(_calls(exact.shape, near), _calls(exact.shape, others), strict=False)
    for call, other in pairs:
        if math.prod(call.query.shape[:3]) * call.key.shape[2] > 4 * _WORK:
            continue
        for how in _settings(call):
            if all(_like(call.run(how, rows), exact[:, rows]) for rows in (few, every)):
                return call.run(how, every), other.run(how, every)
    return None


def _like(made: Tensor, wanted: Tensor) -> bool:
    rest, size = (float(side.square().sum()) for side in (made - wanted, wanted))
    return rest <= _LIKE**2 * size


class _Trial:
    """Tries settings on a few rows first, then on all."""

    def __init__(self, call: _Call, reference: Tensor, candidate: Tensor, floor: float) -> None:
        self.call, self.reference, self.candidate = call, reference, candidate
        tokens = reference.shape[1]
        self.every = torch.arange(tokens)
        self.few = torch.linspace(0, tokens - 1, min(tokens, _ROWS)).long()
        self.exact = (_EXACT + 2 * floor) ** 2

    def is_reference(self, how: _Setting) -> bool:
        return self._same(how, self.reference)

    def is_candidate(self, how: _Setting) -> bool:
        return self._same(how, self.candidate)

    def left(self, how: _Setting, rows: Tensor) -> float:
        """The squared error that a setting leaves of the candidate's rows."""
        return float((self.call.run(how, rows) - self.candidate[:, rows]).square().sum())

    def share(self, how: _Setting) -> float:
        before = float((self.reference - self.candidate).square().sum())
        return self.left(how, self.every) / before if before > 0 else 1.0

    def _same(self, how: _Setting, side: Tensor) -> bool:
        return all(self._same_at(how, side, rows) for rows in (self.few, self.every))

    def _same_at(self, how: _Setting, side: Tensor, rows: Tensor) -> bool:
        rest = float((self.call.run(how, rows) - side[:, rows]).square().sum())
        error = float((self.reference - self.candidate)[:, rows].square().sum())
        size = float(side[:, rows].square().sum())
        return rest <= self.exact * size and (rest <= _CLEAR * error or rows is self.few)


def _at(call: _Call, chosen: Tensor) -> _Call:
    """The call of some samples."""

    def of(side: Tensor) -> Tensor:
        return side[chosen] if side.shape[0] > 1 else side

    return replace(
        call,
        query=of(call.query),
        key=of(call.key),
        value=of(call.value),
        padding=None if call.padding is None else of(call.padding),
        tables=None if call.tables is None else (of(call.tables[0]), of(call.tables[1])),
        given=tuple(replace(one, values=of(one.values)) for one in call.given),
    )


def _calls(shape: Sequence[int], near: Sequence[Near]) -> Iterator[_Call]:
    """What attention may have been called with: queries, keys, values, and a number of heads."""
    samples, tokens, channels = shape
    padding = _padding(near, samples)
    for query, key, value in _triples(near, channels):
        widths = [query.shape[-1]] if query.dim() == 4 else _widths(channels)
        for width in widths:
            sides = [_heads(side, width, samples) for side in (query, key, value)]
            if any(side is None for side in sides):
                continue
            q, k, v = (side.cpu().double() for side in sides if side is not None)
            fits = q.shape[1] * width == channels and q.shape[2] == tokens
            if not fits or k.shape[1:3] != v.shape[1:3] or q.shape[1] % k.shape[1]:
                continue
            held = padding if padding is not None and padding.shape[1] == k.shape[2] else None
            given = tuple(_given(near, q, k))
            for tables in _tables(near, width, tokens):
                yield _Call(q, k, v, held, tables, given)


def _given(near: Sequence[Near], query: Tensor, key: Tensor) -> Iterator[_Given]:
    """Masks and biases for these scores, the nearest first."""
    samples, heads, tokens, _ = query.shape
    count = 0
    for one in near:
        shape = one.shape
        whole = not one.floats and one.record.dtype != "bool"
        if whole or one.later or len(shape) not in (3, 4) or count == _MOST_GIVEN:
            continue
        if len(shape) == 3 and (one.port == "output" or shape[0] == samples):
            continue  # tokens, that may be as many as channels
        if shape[-2] not in (1, tokens) or shape[-1] != key.shape[2]:
            continue
        values = one.tensor().detach().cpu()
        values = values if values.dtype == torch.bool else values.double()
        if values.dim() == 3:
            values = values[None] if shape[0] == heads else values[:, None]
        if values.shape[1] not in (1, heads) or samples % values.shape[0]:
            continue
        if values.shape[0] not in (1, samples):  # of windows, that come one after the other
            values = values.repeat(samples // values.shape[0], 1, 1, 1)
        count += 1
        yield _Given(one.name, values.expand(-1, -1, tokens, -1))


def _triples(near: Sequence[Near], channels: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    made = [one for one in near if one.floats and one.port == "output" and not one.later]
    roles = {
        role: next((one for one in made if pattern.match(_end(one))), None)
        for role, pattern in _ROLE.items()
    }
    q, k, v = (roles[role] for role in "qkv")
    if q is not None and k is not None and v is not None:
        yield q.tensor(), k.tensor(), v.tensor()
    fused = next((one for one in made if _FUSED.match(_end(one)) and len(one.shape) == 3), None)
    if fused is not None:
        rest = fused.shape[-1] - channels
        if rest > 0 and rest % 2 == 0:
            half, made_of = rest // 2, fused.tensor()
            ends = (channels, channels + half)
            if 3 * channels == fused.shape[-1]:
                yield from _by_head(made_of, channels)
            yield made_of[..., : ends[0]], made_of[..., ends[0] : ends[1]], made_of[..., ends[1] :]


def _by_head(fused: Tensor, channels: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Queries, keys and values of the first head, then of the next, each apart."""
    for width in _widths(channels):
        heads = fused.reshape(*fused.shape[:2], channels // width, 3, width).transpose(1, 2)
        yield heads[..., 0, :], heads[..., 1, :], heads[..., 2, :]


def _end(one: Near) -> str:
    return one.layer.rpartition(".")[2].lower()


def _heads(side: Tensor, width: int, samples: int) -> Tensor | None:
    """(sample, head, token, width) of a tensor with all heads side by side, or apart."""
    if side.shape[0] != samples or side.dim() not in (3, 4) or side.shape[-1] % width:
        return None
    if side.dim() == 3:
        apart = side.detach().reshape(*side.shape[:2], side.shape[-1] // width, width)
        return apart.transpose(1, 2)
    return side.detach().transpose(1, 2) if side.shape[1] > side.shape[2] else side.detach()


def _widths(channels: int) -> list[int]:
    """How wide a head may be; the usual ones first."""
    usual = [width for width in (64, 128, 32, 16, 80, 96, 256) if channels % width == 0]
    others = [w for w in range(4, min(channels, 256) + 1) if channels % w == 0 and w not in usual]
    return [*usual, *others]


def _padding(near: Sequence[Near], samples: int) -> Tensor | None:
    """Which tokens are real, where the model was given that."""
    for one in near:
        mask = one.padding()
        if mask is not None and mask.shape[0] == samples and not bool(mask.all()):
            return mask
    return None


def _tables(
    near: Sequence[Near], width: int, tokens: int
) -> Iterator[tuple[Tensor, Tensor] | None]:
    """The cosines and sines that a layer of rotary positions made, of each of its calls."""
    tables = [one for one in near if one.floats and len(one.shape) == 3 and one.rotary]
    calls: dict[tuple[str, int], list[Tensor]] = {}
    for one in tables:
        if one.shape[1] == tokens and one.shape[2] <= width:
            of = calls.setdefault((one.layer, one.record.call), [])
            of.append(one.tensor().detach().cpu().double())
    pairs = [found for found in calls.values() if len(found) == 2]
    for first, second in pairs:
        yield (first, second) if bool((first[:, 0] == 1).all()) else (second, first)
    if not pairs:
        yield None


def _settings(call: _Call) -> Iterator[_Setting]:
    """What the reference may do, the usual first."""
    width = call.query.shape[-1]
    square = call.query.shape[2] == call.key.shape[2]
    masks = ["none", *(["causal"] if square else [])]
    if call.padding is not None:
        masks = [*masks, "padding", *(["causal and padding"] if square else [])]
    rotations: list[tuple[str, float | None] | None] = [None]
    if call.tables is not None:
        rotations += [("halves", None), ("neighbours", None)]
    elif square and width % 2 == 0:
        rotations += [(how, base) for base in _BASES[:3] for how in ("halves", "neighbours")]
    places = range(len(call.given))
    combined = [c for size in (1, 2) for c in itertools.combinations(places, size)]
    for cap in (None, *_CAPS):
        for scale in (width**-0.5, 1.0, 1 / 16):
            for rotary in rotations:
                for mask in masks:
                    yield _Setting(scale, mask, rotary, cap)
                for given in combined:
                    for mask in masks[:2]:
                        yield _Setting(scale, mask, rotary, cap, given=given)


def _changed(trial: _Trial, base: _Setting) -> Fit | None:
    """The one change that makes the candidate of the reference."""
    for how, kind, text in _variants(trial, base):
        if trial.is_candidate(how):
            left = trial.share(how)
            details = {
                "scale": how.scale,
                "mask": how.mask,
                "window": how.window,
                "reference_scale": base.scale,
                "reference_mask": base.mask,
                "width": trial.call.query.shape[-1],
            }
            return Fit(kind, left, left, f"attention: {text}", 0.7, 0.05, details=details)
    return None


def _variants(trial: _Trial, base: _Setting) -> Iterator[tuple[_Setting, str, str]]:
    """Everything that is tried, with its kind and words."""
    call = trial.call
    tokens, keys = call.query.shape[2], call.key.shape[2]
    yield from _masks(call, base, square=tokens == keys)
    for index in base.given:
        one = call.given[index]
        rest = tuple(other for other in base.given if other != index)
        text = f"{'the mask' if one.hides else 'what is added to the scores'}, {one.name}, is lost"
        yield replace(base, given=rest), "mask" if one.hides else "positions", text
    scale = _fitted_scale(trial, base)
    times = scale / base.scale
    yield (
        replace(base, scale=scale),
        "scale",
        f"the scores have the scale {number_words(scale)} instead of {number_words(base.scale)} "
        f"({factor_words(times)} times)",
    )
    yield from _rotations(call, base)
    for cap in (None, *_CAPS):
        if cap != base.cap:
            was = "no cap" if base.cap is None else f"a soft cap of {base.cap:g}"
            now = "no cap" if cap is None else f"a soft cap of {cap:g}"
            yield replace(base, cap=cap), "scale", f"the scores have {now} instead of {was}"
    if tokens == keys:
        yield replace(base, exchanged=True), "source", "queries and keys are exchanged"
    if call.query.shape[1] != call.key.shape[1]:
        text = "keys and values go to other queries' heads: repeated (0, 1, 0, 1) instead of "
        text += "(0, 0, 1, 1)"
        yield replace(base, tiled=True), "permutation", text
    if tokens == keys:
        last = torch.arange(tokens - 1, tokens)
        for window in range(1, tokens):
            how = replace(base, window=window)
            size = float(trial.candidate[:, last].square().sum())
            if trial.left(how, last) <= 4 * trial.exact * size:
                yield how, "mask", f"each token sees {window} tokens only: a window"


def _masks(call: _Call, base: _Setting, *, square: bool) -> Iterator[tuple[_Setting, str, str]]:
    causal, padded = "causal" in base.mask, "padding" in base.mask
    if padded:
        mask = "causal" if causal else "none"
        yield replace(base, mask=mask), "mask", "padding is attended: its mask is lost"
    if causal:
        mask = "padding" if padded else "none"
        text = "tokens see those after them: the causal mask is lost"
        yield replace(base, mask=mask), "mask", text
        for ahead in (1, 2, -1):
            text = f"the causal mask is off by {abs(ahead)}: each token sees "
            text += f"{ahead} ahead" if ahead > 0 else "not itself"
            yield replace(base, ahead=ahead), "mask", text
    if causal and padded:
        text = "the mask is lost: padding and tokens that come after are attended"
        yield replace(base, mask="none"), "mask", text
    if not causal and square:
        mask = "causal and padding" if padded else "causal"
        text = "tokens do not see those after them: there is a causal mask"
        yield replace(base, mask=mask), "mask", text
    if not padded and call.padding is not None:
        mask = "causal and padding" if causal else "padding"
        yield replace(base, mask=mask), "mask", "padding is masked, which it was not"


def _rotations(call: _Call, base: _Setting) -> Iterator[tuple[_Setting, str, str]]:
    if base.rotary is None:
        return
    pairing, used = base.rotary
    other = "neighbours" if pairing == "halves" else "halves"
    text = f"rotary positions turn {other} as pairs instead of {pairing}"
    yield replace(base, rotary=(other, used)), "rotary", text
    yield replace(base, rotary=None), "rotary", "rotary positions are lost"
    for value in _BASES:
        if value != used:
            how = replace(base, rotary=(pairing, value))
            yield how, "rotary", f"rotary positions have the base {value:g}"
            for shift in (1, -1, 2, -2):
                text = f"the keys' rotary positions are off by {shift}"
                yield replace(how, shift=shift), "rotary", text


def _fitted_scale(trial: _Trial, base: _Setting) -> float:
    """The scale that leaves least of the candidate."""

    def left(power: float) -> float:
        return trial.left(replace(base, scale=base.scale * 2**power), trial.few)

    return base.scale * 2 ** _least(left, [power / 2 for power in range(-16, 17)])


def _least(function: Callable[[float], float], grid: Sequence[float]) -> float:
    """Where a function is least, from a grid on by golden section."""
    best = min(range(len(grid)), key=lambda index: function(grid[index]))
    low, high = grid[max(0, best - 1)], grid[min(len(grid) - 1, best + 1)]
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(40):
        a, b = high - golden * (high - low), low + golden * (high - low)
        if function(a) < function(b):
            high = b
        else:
            low = a
    return (low + high) / 2
