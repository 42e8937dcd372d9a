"""Where an error was made: the layer that shows it first, or the code of a module around it.

A layer whose inputs are off already is the first that shows an error and did nothing wrong. What it
was given was made in the forward of a module around it, between the layers that it calls: the
innermost one whose own inputs agree is the maker. The same is asked of the first bits that differ:
where all that ran before has the same bits, that is the place to look, however small the error is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .results import LayerComparison, Moment, Part

__all__ = ["Maker", "contains", "first_bit_difference", "is_lost", "maker_of", "within"]


@dataclass(frozen=True)
class Maker:
    """The module that made a divergence, and where in its forward.

    `before` is the layer inside it that was given the wrong tensor, None where the module's own
    output shows it first; `after` is the last good layer that it called before that. `source` is
    the file and its lines, where a live model tells.
    """

    layer: str
    after: str | None = None
    before: str | None = None
    source: str = ""

    @property
    def beside_layers(self) -> bool:
        """Whether it was made in the module's own code, between the layers that it calls."""
        return self.after is not None or self.before is not None

    def to_dict(self) -> dict[str, Any]:
        return {
            "layer": self.layer,
            "after": self.after,
            "before": self.before,
            "source": self.source,
        }


def contains(outer: str, inner: str) -> bool:
    """Whether one layer is inside another, or the same; the root contains all."""
    return not outer or outer == inner or inner.startswith(f"{outer}.")


def within(outer: str, inner: str) -> str:
    """A layer's name as the module around it calls it."""
    return inner[len(outer) + 1 :] if outer and inner.startswith(f"{outer}.") else inner


def maker_of(rows: Sequence[LayerComparison], first: LayerComparison) -> Maker | None:
    """The module that made the first divergence; None where the recordings do not tell.

    Asked of outputs alone: a backward pass makes gradients, an optimizer makes parameters.
    """
    part = first.first_part
    if part is None or part.port != "output" or first.origin in (None, "unknown"):
        return None
    return _dropped(rows, first) or _maker(rows, first, part, _Divergences(rows, first))


def _dropped(rows: Sequence[LayerComparison], first: LayerComparison) -> Maker | None:
    """The module that hands some of what it was given on to no layer inside it.

    It returns another shape of the same inputs, and so does what it gives to a layer that it calls.
    """
    if not _changed_shape(first) and not _given_another_shape(first):
        return None
    around = [r for r in rows if contains(r.layer, first.layer) and _changed_shape(r)]
    around = [first] if first in around else around
    for row in sorted(around, key=lambda row: -len(row.layer)):
        inner = _inside(rows, row)
        given = [other for other in inner if _given_another_shape(other)]
        if given:
            early = min(given, key=lambda other: other.order)
            before = min((r for r in given if contains(r.layer, early.layer)), key=_depth)
            done = [
                r for r in inner if r.order < early.order and not contains(before.layer, r.layer)
            ]
            return Maker(row.layer, _last(done), before.layer)
    return None


def _depth(row: LayerComparison) -> int:
    return len(row.layer)


def _changed_shape(row: LayerComparison) -> bool:
    return any(part.port == "output" and part.changed_shape for part in row.parts)


def _given_another_shape(row: LayerComparison) -> bool:
    return any(p.port == "input" and p.shape != p.candidate_shape for p in row.parts)


def first_bit_difference(
    rows: Sequence[LayerComparison],
) -> tuple[LayerComparison, Maker | None] | None:
    """The first layer whose bits differ after others that have the same bits, and who made that.

    None where no bits differ, where they differ from the start, as in another precision, and where
    the recordings do not tell what is the same: they hold summaries alone, or a shape changed.
    """
    found = [item for row in rows for item in _parted(row)]
    if not found:
        return None
    *_, part, first = min(found, key=lambda item: item[:3])
    if part.difference is None or part.dtype != part.candidate_dtype:
        return None
    maker = _dropped(rows, first) or _maker(rows, first, part, _other_bits)
    upstream = any(row.verdict == "identical" and row.order < first.order for row in rows)
    return (first, maker) if upstream or maker is not None else None


def _parted(row: LayerComparison) -> Iterator[tuple[int, int, int, Part, LayerComparison]]:
    """When and where the outputs of a layer stop having the same bits, or may do so."""
    for part in row.parts:
        if part.port != "output" or part.verdict == "missing":
            continue
        if part.difference is None or part.bits_differ_at is not None:
            epoch, batch, _ = part.bits_differ_at or (0, 0, 0)
            yield epoch, batch, part.order, part, row


_GOOD = ("identical", "within")
_ALWAYS: Moment = (-1, -1, -1)


# The moments at which a part is wrong, in one sense or the other; None where that is not known.
_Wrong = Callable[[Part], tuple[Moment, ...] | None]


class _Divergences:
    """The moments at which a part diverged; an argument that is not given is wrong at all.

    A mask that is lost, or a state that is not carried, is what a layer was handed. Where an
    earlier layer of the same kind does without the same argument and is right, it does not matter:
    another implementation may pass a mask in other words.
    """

    def __init__(self, rows: Sequence[LayerComparison], first: LayerComparison) -> None:
        good = [row for row in rows if row.order < first.order and row.verdict in _GOOD]
        harmless = {(row.type, part.leaf) for row in good for part in row.parts if is_lost(part)}
        lost = {
            id(p) for r in rows for p in r.parts if is_lost(p) and (r.type, p.leaf) not in harmless
        }
        self._lost = lost

    def __call__(self, part: Part) -> tuple[Moment, ...] | None:
        if id(part) in self._lost:
            return (_ALWAYS,)
        return None if part.verdict in ("missing", "incomparable") else part.diverged_at


def is_lost(part: Part) -> bool:
    """Whether the candidate was not given what the reference was."""
    return part.port == "input" and part.missing == "candidate"


def _other_bits(part: Part) -> tuple[Moment, ...] | None:
    if part.difference is None:
        return None
    return () if part.bits_differ_at is None else (part.bits_differ_at,)


def _maker(
    rows: Sequence[LayerComparison], first: LayerComparison, part: Part, wrong: _Wrong
) -> Maker | None:
    moments = wrong(part) or ()
    moment = min(moments, default=(0, 0, 0))
    inputs = [wrong(other) for other in first.parts if other.port == "input"]
    known = [found for found in inputs if found is not None]
    if not any(moment in found or _ALWAYS in found for found in known):
        if not known:
            return None
        inner = _inside(rows, first)
        good = all(not wrong(p) for row in inner for p in row.parts if p.port == "output")
        return Maker(first.layer, _last(inner) if good else None)
    around = [r for r in rows if r is not first and contains(r.layer, first.layer)]
    given = first.layer  # the outermost layer so far that was given a wrong tensor
    for row in sorted(around, key=lambda row: -len(row.layer)):
        came_in = _came_in(row, part, moment, wrong)
        if came_in is None:
            return None
        if not came_in:
            before = [r for r in _inside(rows, row) if r.order < first.order]
            return Maker(row.layer, _last(r for r in before if not contains(given, r.layer)), given)
        given = row.layer
    return None


def _inside(rows: Sequence[LayerComparison], row: LayerComparison) -> list[LayerComparison]:
    """The layers inside one that both sides have."""
    return [
        other
        for other in rows
        if other is not row and other.verdict != "missing" and contains(row.layer, other.layer)
    ]


def _last(rows: Iterable[LayerComparison]) -> str | None:
    """The last layer that a module called, the outermost one that had returned by then."""
    found = list(rows)
    names = [row.layer for row in found]
    outermost = [
        row for row in found if not any(o != row.layer and contains(o, row.layer) for o in names)
    ]
    return max(outermost, key=lambda row: row.order).layer if outermost else None


def _came_in(row: LayerComparison, shown: Part, moment: Moment, wrong: _Wrong) -> bool | None:
    """Whether a module was given wrong tensors by the time an error showed; None if unknown."""
    unknown = True
    for part in row.parts:
        if part.port != "input":
            continue
        moments = wrong(part)
        if moments is None:
            return None
        unknown = False
        for at in moments:
            earlier = at <= moment if part.moments == shown.moments else at[:2] <= moment[:2]
            if earlier:
                return True
    return None if unknown else False
