"""What most blocks say of a layer's place: `q_proj` of one side is `wq` of the other, everywhere.

Values pair the layers that agree. A layer with a bug holds other values, or those of its
neighbour: two projections that were exchanged in one block look right in each other's place. Where
most blocks say which name inside a block stands for which, that holds in the others too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

__all__ = ["by_consensus"]

_LEAST = 2  # blocks that say the same
_MOST = 2 / 3  # of all that say anything: fewer do not outvote values

_Place = tuple[str, str]  # the type of a block, and a name inside of it


def by_consensus(
    ours: Mapping[str, str],
    theirs: Mapping[str, str],
    pairs: Mapping[str, str],
    fixed: Sequence[str],
) -> dict[str, str | None]:
    """Layers whose partner changes, each with its new one; None for those that lose theirs.

    `ours` and `theirs` give each layer's type; `pairs` are all that were found so far, and those
    of the layers in `fixed` stay as they are.
    """
    stay = {name: pairs[name] for name in fixed}
    votes = _votes(ours, pairs)
    found = dict(pairs)
    taken = set(stay.values())
    wanted: dict[str, str] = {}
    for name in sorted(ours, key=lambda name: name.count(".")):
        if name in stay:
            continue
        partner = _elected(name, ours, theirs, {**found, **wanted}, votes)
        if partner is not None and partner not in taken:
            wanted[name] = partner
            taken.add(partner)
    back = {partner: name for name, partner in found.items()}
    for partner in wanted.values():
        if partner in back and back[partner] not in wanted:
            found.pop(back[partner], None)
    found.update(wanted)
    changed = {name: partner for name, partner in found.items() if pairs.get(name) != partner}
    return {**changed, **{name: None for name in pairs if name not in found}}


def _votes(ours: Mapping[str, str], pairs: Mapping[str, str]) -> dict[_Place, Counter[str]]:
    """How often a place inside a block of some type has its partner at which place."""
    votes: dict[_Place, Counter[str]] = {}
    for name, partner in pairs.items():
        for block, inside in _blocks(name):
            other = pairs.get(block)
            if other and partner.startswith(f"{other}."):
                place = (ours[block], inside)
                votes.setdefault(place, Counter())[partner[len(other) + 1 :]] += 1
    return votes


def _elected(
    name: str,
    ours: Mapping[str, str],
    theirs: Mapping[str, str],
    pairs: Mapping[str, str],
    votes: Mapping[_Place, Counter[str]],
) -> str | None:
    """The partner that the nearest paired block around a layer elects, where it has one."""
    for block, inside in _blocks(name):
        other = pairs.get(block)
        counts = votes.get((ours.get(block, ""), inside))
        if not other or counts is None:
            continue
        ((place, most),) = counts.most_common(1)
        partner = f"{other}.{place}"
        if most >= _LEAST and most >= _MOST * counts.total() and partner in theirs:
            return partner
    return None


def _blocks(name: str) -> Iterator[tuple[str, str]]:
    """The layers around a layer, from the innermost on, each with the rest of the name."""
    block, dot, inside = name.rpartition(".")
    while dot:
        yield block, inside
        block, dot, last = block.rpartition(".")
        inside = f"{last}.{inside}"
