"""Rows that were looked up in a table: other ids, a smaller table, a row that is another.

The layer was given integers, and the reference makes one row of each. What row the candidate makes
of an id is sought among the rows that the reference makes of the others.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .fits import Fit, ranges
from .near import Near
from .pairs import Pairs

__all__ = ["lookup", "moved_ids"]

_COLUMNS = 64  # of a row, that tell it from others
_MOST_ROWS = 1 << 16
_MOST_IDS = 4096
_SAME = 1e-5


def lookup(pairs: Pairs, near: Sequence[Near]) -> Fit | None:
    """What the candidate looked up instead of an id's row."""
    if pairs.whole is None or pairs.energy <= 0 or pairs.exponent or pairs.finite is not None:
        return None
    reference, candidate = (pairs.as_given(side) for side in pairs.whole[:2])
    for one in near:
        whole = one.own and not one.floats and one.shape == tuple(reference.shape[:-1])
        if whole and reference[..., 0].numel() <= _MOST_ROWS:
            found = _found(one.tensor(), reference, candidate, pairs.floor)
            if found is not None:
                return found
    return None


def moved_ids(reference: Tensor, candidate: Tensor) -> Fit | None:
    """How other ids follow from the reference's: a smaller table, a hash, ids that are clamped."""
    ours, theirs = reference.reshape(-1).long(), candidate.reshape(-1).long()
    places = sorted(set(ours.tolist()))
    if len(places) < 2 or len(places) > _MOST_IDS:
        return None
    taken: dict[int, int] = {}
    for place in places:
        found = set(theirs[ours == place].tolist())
        if len(found) != 1:
            return None  # an id does not follow from its own alone
        taken[place] = found.pop()
    bad = [place for place in places if taken[place] != place]
    shared: dict[int, list[int]] = {}
    for place, other in taken.items():
        shared.setdefault(other, []).append(place)
    groups = {place: [n for n in shared[other] if n != place] for place, other in taken.items()}
    return _named(places, bad, taken, groups, zeros=False)


def _found(ids: Tensor, reference: Tensor, candidate: Tensor, floor: float) -> Fit | None:
    flat = ids.reshape(-1).long()
    sides = [side.detach().reshape(len(flat), -1)[:, :_COLUMNS] for side in (reference, candidate)]
    ours, theirs = (side.cpu().double() for side in sides)
    names, of = torch.unique(flat, return_inverse=True)
    if len(names) < 2 or len(names) > _MOST_IDS:
        return None
    first = torch.empty(len(names), dtype=torch.long)
    first[of] = torch.arange(len(flat))
    ours_of, theirs_of = ours[first], theirs[first]
    size = float(ours_of.square().mean().sqrt()) or 1.0
    near = (_SAME + 2 * floor) * size * math.sqrt(ours.shape[1])
    if _far(ours, ours_of[of]) > near or _far(theirs, theirs_of[of]) > near:
        return None  # a row does not follow from its id alone
    wrong = (ours_of - theirs_of).norm(dim=1) > near
    apart = torch.cdist(theirs_of, ours_of)
    nearest, at = apart.min(1)
    there = (nearest <= near) & (torch.cdist(ours_of, ours_of) <= near).sum(1).eq(1)[at]
    places = names.tolist()
    taken = {places[i]: places[int(at[i])] for i in range(len(places)) if there[i]}
    bad = [place for place, is_wrong in zip(places, wrong.tolist(), strict=True) if is_wrong]
    alike = torch.cdist(theirs_of, theirs_of) <= near
    shared = alike & ~(torch.cdist(ours_of, ours_of) <= near)
    groups = [[places[j] for j in shared[i].nonzero()[:, 0].tolist()] for i in range(len(places))]
    zeros = not bool(theirs_of[wrong].any())
    return _named(places, bad, taken, dict(zip(places, groups, strict=True)), zeros=zeros)


def _far(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm(dim=1).max())


def _named(
    places: Sequence[int],
    bad: Sequence[int],
    taken: Mapping[int, int],
    shared: Mapping[int, Sequence[int]],
    *,
    zeros: bool,
) -> Fit | None:
    """What is wrong with the ids, in words; None where that is not clear."""
    if not bad:
        return None
    known = {place: taken[place] for place in bad if place in taken and taken[place] != place}
    good = [place for place in places if place not in set(bad)]
    steps = {other - place for place, other in known.items()}
    enough = 2 * len(known) >= len(bad) or len(known) >= 8
    if len(known) > 1 and len(steps) == 1 and enough and len(good) < 2:  # the last may stay
        step = steps.pop()
        text = f"each id is looked up as id {'+' if step > 0 else '-'} {abs(step)}"
        return _fit(text, {"offset": step, "of": "ids"}, kind="offset")
    ends = set(known.values())
    if len(known) > 1 and len(ends) == 1 and enough:
        text = f"ids {ranges(bad)} are looked up as id {ends.pop()}"
        return _fit(text, {"ids": list(bad[:256])})
    together = all({place, *shared.get(place, ())} >= set(bad) for place in bad)
    if together and len(bad) > 1 and min(bad) > max(good, default=-1):
        text = f"ids from {min(bad)} on all have one row, as ids that are clamped"
        return _fit(text, {"ids": list(bad[:256])})
    gaps = [abs(place - other) for place, other in known.items()]
    gaps += [abs(place - other) for place in bad for other in shared.get(place, ())]
    size = functools.reduce(math.gcd, gaps, 0)
    if size > 1 and all(place >= size for place in bad) and all(place < size for place in good):
        text = f"ids from {size} on are looked up as id mod {size}: the table has {size} rows"
        return _fit(text, {"rows": size})
    if any(shared.get(place) for place in bad):
        place = next(place for place in bad if shared.get(place))
        both = ", ".join(str(other) for other in sorted({place, *shared[place]})[:4])
        count = sum(bool(shared.get(place)) for place in places)
        text = f"ids share a row ({both}, …): {count} of {len(places)} ids are looked up in a "
        return _fit(text + "smaller table, or by a hash", {"ids": sorted({place, *shared[place]})})
    filled = ", which is zero" if zeros else ""
    if good and len(bad) <= max(1, len(places) // 8):
        many = "s" if len(bad) > 1 else ""
        text = f"the row{many} of id{many} {ranges(bad)} alone{filled}"
        return _fit(text, {"ids": list(bad)}, cost=1.5)
    if len(good) > 1 and max(good) < min(bad):
        text = f"the rows of ids from {min(bad)} on (at most, above {max(good)}){filled}"
        return _fit(text, {"ids": list(bad[:256])}, cost=1.5)
    return None


def _fit(text: str, details: dict[str, object], cost: float = 1.0, kind: str = "lookup") -> Fit:
    return Fit(kind, 0.0, 0.0, text, cost, 0.1, details=details)
