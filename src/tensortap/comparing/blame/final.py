"""The output whose error is explained: which it is, how large, and what a floor run makes of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...errors import OptionError
from ...numerics.difference import difference
from ...recording.reader import Record, Recording
from .reference import Known
from .stage import Final, measured, squares

__all__ = ["choose_final", "floor_error", "norm_of", "relative"]


def choose_final(
    known: Known, recording: Recording, kept: Sequence[str], wanted: str | None
) -> Final:
    """The layer and leaf whose error is explained."""
    if wanted is not None:
        wanted = "" if wanted == "(root)" else wanted
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


def _leaf(known: Known, layer: str) -> str | None:
    """The first floating-point output, rather one that is no mere number, as a loss is."""
    records = list(known.at(layer, "output", 0, 0).values())
    floats = [r for r in records if r.dtype.startswith(("float", "bfloat"))]
    found = next((r for r in floats if r.shape), floats[0] if floats else None)
    return None if found is None else found.leaf


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


def floor_error(floor: Recording, known: Known, final: Final) -> float | None:
    """The floor run's relative error at the final output; None where it lacks it."""
    name = known.names[final.layer]
    if name not in floor:
        return None
    theirs = {(r.epoch, r.batch, r.call, r.leaf): r for r in floor[name].port("output") if r.stored}
    error, scale = 0.0, norm_of(known, final)
    for record in _records(known, final):
        other = theirs.get((record.epoch, record.batch, record.call, record.leaf))
        if other is None or other.shape != record.shape:
            return None
        error += squares(measured(record.tensor(), other.tensor()), scale or 1.0)
    return math.sqrt(error) if scale else None


def relative(error: float, size: float) -> float:
    """The relative L2 error from squares in units of the reference's size."""
    if not error:
        return 0.0
    return math.sqrt(error) if size else math.inf
