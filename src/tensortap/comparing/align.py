"""Which layer of the candidate stands for which layer of the reference.

Passes from the surest to the boldest; each takes what the earlier ones left, and none forces a
pair: a layer without a partner stays alone and is said to be missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..recording.reader import Layer, Recording

__all__ = ["LayerPair", "align"]


@dataclass(frozen=True)
class LayerPair:
    """Two layers that are compared, or one that the other side lacks.

    `matched_by` is `map`, `name`, `normalised`, `structure` or `content`; empty for a lone layer.
    """

    reference: Layer | None
    candidate: Layer | None
    matched_by: str


def align(
    reference: Recording,
    candidate: Recording,
    *,
    maps: Sequence[str] = (),
    names: Sequence[str] | None = None,
) -> list[LayerPair]:
    """Every layer beside its partner, in the reference's order of execution.

    A layer of the candidate alone stands behind the layer that it follows in the candidate. With
    `names` only those layers of the reference are listed, and no lone layers of the candidate.
    """
    found = {name: (name, "name") for name in reference.layers if name in candidate.layers}
    pairs = list(_in_order(reference, candidate, found))
    if names is None:
        return pairs
    wanted = {reference.resolve(name) for name in names}
    return [p for p in pairs if p.reference is not None and p.reference.name in wanted]


def _in_order(
    reference: Recording, candidate: Recording, found: Mapping[str, tuple[str, str]]
) -> Iterator[LayerPair]:
    taken = {name for name, _ in found.values()}
    followers: dict[str | None, list[str]] = {}
    last: str | None = None
    for name in candidate.layers:
        if name in taken:
            last = name
        else:
            followers.setdefault(last, []).append(name)
    for name in followers.get(None, ()):
        yield LayerPair(None, candidate[name], "")
    for name in reference.layers:
        if name not in found:
            yield LayerPair(reference[name], None, "")
            continue
        partner, how = found[name]
        yield LayerPair(reference[name], candidate[partner], how)
        for other in followers.get(partner, ()):
            yield LayerPair(None, candidate[other], "")
