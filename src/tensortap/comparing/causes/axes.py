"""What the axes of a layer's tensors hold: told by the kind of the layer, or of those around it.

Most layers have their channels last. Convolutions, batch norms and pools have them first, and so
has whatever stands between them: an activation or a block says nothing itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["KindAt", "axes_of", "layout_at", "usual_axes"]

_SPATIAL = {1: ("token",), 2: ("row", "column"), 3: ("plane", "row", "column")}
_FIRST = re.compile(
    r"(?:Conv|Norm|Pool|Unpool|Dropout|Pad|Shuffle|Upsample|Upsampling)\w*?([123])d"
)
_GROUPS = ("GroupNorm",)  # channels first, whatever comes behind them
_LAST = ("Linear", "LayerNorm", "RMSNorm", "Embedding", "MultiheadAttention")


@dataclass(frozen=True)
class KindAt:
    """The kind of one layer, in the order of execution, and the shapes of its tensors."""

    kind: str
    shapes: tuple[tuple[int, ...], ...]


def usual_axes(axes: int) -> tuple[str, ...]:
    """What the axes are called where nothing is known: the last are channels, before it tokens."""
    if axes <= 2:
        return ("token", "channel")[-axes:]
    middle = ("head",) if axes == 4 else tuple(f"place of axis {a}" for a in range(1, axes - 2))
    return ("sample", *middle, "token", "channel")


def axes_of(kind: str, dims: int) -> tuple[str, ...] | None:
    """The axes that a layer of this kind has; None where its kind says nothing of such a tensor."""
    name = kind.rpartition(".")[2]
    found = _FIRST.search(name)
    if found is not None:
        spatial = _SPATIAL[int(found[1])]
        whole = ("sample", "channel", *spatial)
        return {len(whole): whole, len(whole) - 1: whole[1:]}.get(dims) if dims > 2 else None
    if name in _GROUPS:
        return ("sample", "channel", *_SPATIAL[dims - 2]) if 3 <= dims <= 5 else None
    if name == "Linear" and dims == 4:
        return ("sample", "row", "column", "channel")
    return usual_axes(dims) if name in _LAST else None


def layout_at(kinds: Sequence[KindAt], index: int, shape: Sequence[int]) -> tuple[str, ...]:
    """The axes of a tensor of the layer at `index`: by its kind, or by the nearest that tells.

    Of others only those count that have a tensor of this shape, or else one of as many axes with
    the channels in the same place and as many of them.
    """
    dims = len(shape)
    own = axes_of(kinds[index].kind, dims)
    if own is not None or dims < 3:
        return own or usual_axes(dims)
    near = sorted(range(len(kinds)), key=lambda other: (abs(other - index), other > index))
    known = [(i, found) for i in near[1:] if (found := axes_of(kinds[i].kind, dims)) is not None]
    for i, found in known:
        if tuple(shape) in kinds[i].shapes:
            return found
    for i, found in known:
        at = found.index("channel")
        if any(len(other) == dims and other[at] == shape[at] for other in kinds[i].shapes):
            return found
    return usual_axes(dims)
