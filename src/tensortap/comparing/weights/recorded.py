"""Which layers of two runs have other weights, by the fingerprints in their manifests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["other_weights", "weights_note"]

_MOST_NAMED = 4
_ROUNDED_ALIKE = {"float64", "float32", "bfloat16"}


def other_weights(reference: Mapping[str, Any], candidate: Mapping[str, Any]) -> tuple[str, ...]:
    """The layers whose weights are others, of what two manifests say of their targets.

    Of two dtypes, values are compared as they are in bfloat16; where they may round otherwise,
    nothing is said.
    """
    left, right = (side.get("fingerprints") for side in (reference, candidate))
    dtypes = [set(side.get("dtypes") or ()) for side in (reference, candidate)]
    if not isinstance(left, Mapping) or not isinstance(right, Mapping) or not all(dtypes):
        return ()
    if dtypes[0] == dtypes[1]:
        part = slice(0, 8)
    elif all(found <= _ROUNDED_ALIKE for found in dtypes):
        part = slice(8, 16)
    else:
        return ()
    return tuple(name for name in left if name in right and left[name][part] != right[name][part])


def weights_note(layers: Sequence[str]) -> str:
    """The layers whose weights are others, in words."""
    named = ", ".join(name or "the model itself" for name in layers[:_MOST_NAMED])
    more = f" and {len(layers) - _MOST_NAMED} more" if len(layers) > _MOST_NAMED else ""
    many = "1 layer has" if len(layers) == 1 else f"{len(layers)} layers have"
    return f"{many} other weights than in the reference: {named}{more}."
