"""What is said when nothing fits, and of values that are not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from ...numerics.profile import Profile
from .cause import Cause
from .fits import Floats, ranges
from .pairs import Pairs

__all__ = ["noise", "not_finite"]

_FAR = 8.0  # times the floor: what rounding hardly ever makes
_UNEVEN = 0.5  # of the squared error in a tenth of the places


def noise(pairs: Pairs, found: Profile) -> Cause:
    """Nothing fits: how large the error is, and how it is spread."""
    size = math.sqrt(_ratio(found.tokens))
    zero = not bool(pairs.reference.any())
    beside = "where the reference is zero" if zero else "beyond all measure of the reference"
    about = f"relative size {size:.2g}" if math.isfinite(size) else beside
    if pairs.floor > 0 and size <= pairs.floor:
        text = (
            f"nothing simple fits, and the error ({size:.2g}) is no larger than rounding explains "
            f"({pairs.floor:.2g})"
        )
    else:
        spread = _spread(found, pairs.row_name)
        text = f"nothing simple fits: the error has no structure that we know ({about}{spread})"
    return Cause("noise", 0.0, text, {"size": size if math.isfinite(size) else None})


def _ratio(table: Floats) -> float:
    size = float(table[:, 1].sum())
    return float(table[:, 0].sum()) / size if size > 0 else math.inf


def _spread(found: Profile, row: str) -> str:
    """Over what the error is spread, beside the sizes of the values."""
    words: dict[bool, list[str]] = {True: [], False: []}
    for name, table in ((f"{row}s", found.tokens), ("channels", found.channels)):
        if len(table) > 1:
            words[_even(table)].append(name)
    parts = [
        f"spread {'evenly' if even else 'unevenly'} over {' and '.join(names)}"
        for even, names in words.items()
        if names
    ]
    return "".join(f", {part}" for part in parts)


def _even(table: Floats) -> bool:
    """Whether the tenth of the places with the largest errors holds less than half of them."""
    energy = table[:, 0]
    top = math.ceil(len(energy) / 10)
    total = float(energy.sum())
    limit = max(_UNEVEN, 3 * top / len(energy))
    most = float(np.partition(energy, len(energy) - top)[-top:].sum())
    return not total > 0 or most < limit * total


def not_finite(pairs: Pairs, found: Profile) -> Cause | None:
    """Where one side is NaN or infinite and the other is not, or another kind of it."""
    count = int(found.tokens[:, 3].sum())
    if not count:
        return None
    where = []
    if len(found.tokens) > 1:
        where.append(_row_words(np.flatnonzero(found.tokens[:, 3] > 0), found.shape, pairs.axes))
    channels = np.flatnonzero(found.channels[:, 3] > 0).tolist()
    if len(found.channels) > 1:
        where.append(f"channel{'s' if len(channels) > 1 else ''} {ranges(channels)}")
    what, about = _kinds(pairs)
    many = f"{count} value{'s' if count > 1 else ''}"
    text = f"{what}, {many}{' at ' + ', '.join(where) if where else ''}{about}"
    usual = _FAR * pairs.floor * math.sqrt(float(pairs.total.rr[0]) / max(1.0, pairs.count))
    wrong = int((pairs.difference.abs() > usual).sum()) if math.isfinite(usual) else 0
    explains = count / (count + wrong)
    return Cause("not finite", explains, text, {"count": count, "channels": channels[:256]})


def _kinds(pairs: Pairs) -> tuple[str, str]:
    """What the candidate holds there, and what is known about why."""
    if pairs.raw is None:
        return "NaN or Inf", ""
    reference, candidate = pairs.raw
    good = torch.isfinite(reference)
    nan = int((candidate.isnan() & ~reference.isnan()).sum())
    infinite = candidate.isinf() & good
    names = [*(["NaN"] if nan else []), *(["Inf"] if bool(infinite.any()) else [])]
    about, most = "", float(np.ldexp(65504.0, -pairs.exponent))
    if bool(infinite.any()) and bool((reference[infinite].abs() >= most).all()):
        about = ": all where the reference is beyond 65504, the maximum of float16"
    what = f"{' and '.join(names)} in the candidate" if names else "NaN or Inf on one side"
    return what, about


def _row_words(
    rows: Sequence[int] | np.ndarray, shape: tuple[int, ...], axes: Sequence[str]
) -> str:
    """Rows as places of each axis: tokens of samples, columns of rows of samples."""
    index = [tuple(int(i) for i in np.unravel_index(int(row), shape)) for row in rows]
    words = []
    for axis in range(len(shape) - 1, -1, -1):
        many = shape[axis] > 1 or axis == len(shape) - 1
        if many:
            places = sorted({place[axis] for place in index})
            words.append(f"{axes[axis]}{'s' if len(places) > 1 else ''} {ranges(places)}")
    return " of ".join(words)
