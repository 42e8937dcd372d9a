"""The output whose error is explained: which it is, and how large."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...errors import OptionError
from ...numerics.difference import difference
from ...recording.reader import Record, Recording
from .reference import Known
from .stage import Final

__all__ = ["choose_final", "norm_of", "other_finals", "relative"]


def choose_final(
    known: Known, recording: Recording, kept: Sequence[str], wanted: str | None
) -> Final:
    """The layer and leaf whose error is explained."""
    if wanted is not None:
        wanted = "" if wanted == "(root)" else wanted
        back = {ours: theirs for theirs, ours in known.names.items()}
        wanted = wanted if wanted in kept else back.get(wanted, wanted)
        if wanted not in kept:
            recording.resolve(wanted)
            raise OptionError(f"The candidate has no layer '{wanted}' to take as the final one.")
        layer = wanted
    elif "" in kept and _leaf(known, "") is not None:
        layer = ""
    else:
        order = {ours: number for number, ours in enumerate(recording.layers)}
        named = sorted(kept, key=lambda name: order[known.names[name]])
        layer = next((n for n in reversed(named) if _leaf(known, n) is not None), named[-1])
    leaf = _leaf(known, layer)
    if leaf is None:
        raise OptionError(
            f"The output of layer '{layer}' holds no floating-point tensor in {recording.path}: "
            "there is no error to explain. Name another layer with final= (--final)."
        )
    return Final(layer, leaf)


def other_finals(known: Known, final: Final) -> list[Final]:
    """The other outputs of the same layer that could be asked about."""
    return [Final(final.layer, leaf) for leaf in _leaves(known, final.layer) if leaf != final.leaf]


def _leaf(known: Known, layer: str) -> str | None:
    """The first floating-point output, rather one that is no mere number, as a loss is."""
    return next(iter(_leaves(known, layer)), None)


def _leaves(known: Known, layer: str) -> list[str]:
    records = list(known.at(layer, "output", 0, 0).values())
    floats = [r for r in records if r.dtype.startswith(("float", "bfloat"))]
    return [r.leaf for r in sorted(floats, key=lambda record: not record.shape)]


def _records(known: Known, final: Final) -> list[Record]:
    found = []
    for batch in range(known.batches):
        call = 0
        while (record := known.at(final.layer, "output", batch, call).get(final.leaf)) is not None:
            found.append(record)
            call += 1
    return found


def norm_of(known: Known, final: Final) -> float:
    """The L2 norm of the reference's final output."""
    norms = []
    for record in _records(known, final):
        tensor = record.tensor()
        norms.append(difference(tensor, tensor, percentiles=False).row.ref_l2)
    return math.hypot(*norms)


def relative(error: float, size: float) -> float:
    """The relative L2 error from squares in units of the reference's size."""
    if not error:
        return 0.0
    return math.sqrt(error) if size else math.inf
