"""How precise a run can be: what rounding alone is expected to do at a layer.

Used where no floor run was given. It is an estimate, and every report says so: the error of one
operation in the coarser of the two precisions, growing with the square root of the depth, as
independent roundings do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..numerics.difference import Difference
from ..recording.reader import Recording

__all__ = [
    "estimated_floor",
    "floor_mode",
    "is_quantised",
    "offset_of",
    "precision_of",
    "roundoff",
    "smallest_step",
    "unit_of",
]

_FLOATS = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "tf32": 2.0**-11,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "float8_e4m3fn": 2.0**-4,
    "float8_e4m3fnuz": 2.0**-4,
    "float8_e5m2": 2.0**-3,
    "float8_e5m2fnuz": 2.0**-3,
    "complex32": 2.0**-11,
    "complex64": 2.0**-24,
    "complex128": 2.0**-53,
}
# The distance of neighbours among the smallest numbers, where precision is no longer relative.
_STEPS = {
    "float64": 2.0**-1074,
    "float32": 2.0**-149,
    "float16": 2.0**-24,
    "bfloat16": 2.0**-133,
    "float8_e4m3fn": 2.0**-9,
    "float8_e4m3fnuz": 2.0**-10,
    "float8_e5m2": 2.0**-16,
    "float8_e5m2fnuz": 2.0**-17,
    "complex32": 2.0**-24,
    "complex64": 2.0**-149,
    "complex128": 2.0**-1074,
}
# Weights of these types mean quantised arithmetic: the step of a grid over a tensor's range.
_QUANTISED = {
    **dict.fromkeys(("int8", "uint8", "qint8", "quint8"), 2.0 ** (-7)),
    **{f"int{bits}": 2.0 ** (1 - bits) for bits in range(2, 8)},
    **{f"fake int{bits}": 2.0 ** (1 - bits) for bits in range(2, 17)},  # simulated
}
_AO_MODES = ("int8", "int8wo", "int4wo", "fp8", "fp8wo")
_BITS = re.compile(r"int(\d+)")
_CASTS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_SHARE = 0.05  # of a model's parameters, for a dtype to be called its precision
_MOST_OFFSET = 1e4
_ACCUMULATION = 4.0  # a sum of products in float32 is off by some units in the last place


def roundoff(dtype: str) -> float:
    """Half a unit in the last place, relative; 0 for integers, which do not round."""
    return _FLOATS.get(dtype, 0.0)


def smallest_step(dtype: str) -> float:
    """The distance between a dtype's subnormal numbers; 0 for integers."""
    return _STEPS.get(dtype, 0.0)


def precision_of(recording: Recording) -> str | None:
    """The coarsest precision that a run computes in, as far as its manifest says."""
    manifest = recording.manifest
    dtypes = manifest.target.get("dtypes")
    gpu = not manifest.device.startswith("cpu")
    fast = manifest.environment.get("float32_matmul_precision") in ("high", "medium", "tf32")
    return coarsest(dtypes if isinstance(dtypes, dict) else {}, tf32=gpu and fast)


def coarsest(counts: Mapping[str, Any], *, tf32: bool = False) -> str | None:
    """The coarsest of the dtypes that hold a good share of a model's parameters."""
    total = sum(count for count in counts.values() if isinstance(count, int)) or 1
    used = [
        name
        for name, count in counts.items()
        if isinstance(count, int) and count >= _SHARE * total and unit_of(name) > 0
    ]
    return max([*used, *(["tf32"] if tf32 else [])], key=unit_of, default=None)


def offset_of(difference: Difference | None) -> float:
    """How large the reference's values are beside their spread; 1 when they lie around zero."""
    if difference is None or not difference.reference_std > 0:
        return 1.0
    size = math.hypot(difference.reference_mean, difference.reference_std)
    return min(_MOST_OFFSET, size / difference.reference_std)


def estimated_floor(
    dtypes: Sequence[str], precisions: Sequence[str | None], depth: float, offset: float = 1.0
) -> float:
    """The relative L2 error to expect; 0 when both sides are integers, which must be equal.

    `offset` is how large the layer's inputs are beside their spread: a norm takes the offset away
    and leaves its rounding.
    """
    if all(roundoff(dtype) == 0.0 for dtype in dtypes):
        return 0.0
    named = [name for name in precisions if name is not None]
    unit = max(unit_of(name) for name in (*dtypes, *named)) / 2
    single = 0.0 if unit < 2.0**-40 else _ACCUMULATION * 2.0**-24
    return (unit + single) * (1 + math.sqrt(depth) / 2) * max(1.0, offset)


def floor_mode(reference: Recording, precision: str | None, mode: str | None) -> str | None:
    """The built-in mode in which the reference is as coarse as a candidate; None where it is so.

    `precision` and `mode` are the candidate's; a mode of its own counts where it is a built-in one.
    """
    ours = precision_of(reference)
    if precision is None or unit_of(precision) <= (0.0 if ours is None else unit_of(ours)):
        return None
    if precision in _CASTS:
        return _CASTS[precision]
    if mode is not None and (mode.startswith("fake:") or mode in _AO_MODES):
        return mode
    if precision.startswith("float8"):
        return "fp8wo"
    bits = _BITS.search(precision)
    return f"fake:w{bits[1]}a8" if bits is not None else None


def is_quantised(name: str) -> bool:
    """Whether a precision is a grid over a tensor's range, or nearly as coarse as one."""
    return name in _QUANTISED or name.startswith("float8")


def unit_of(name: str) -> float:
    """How coarse a precision is, quantised ones included; 0 for what does not round."""
    return _FLOATS.get(name, _QUANTISED.get(name, 0.0))
