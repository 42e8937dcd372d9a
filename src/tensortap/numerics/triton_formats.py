"""What the summary kernels must know of each dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

__all__ = ["FORMATS", "Format"]


@dataclass(frozen=True, eq=False)
class Format:
    """A dtype, as kernels read it; magnitudes are bits without the sign.

    The instructions are those of sm_90 for two halves at once; what they count, they count in
    halves, so not far.
    """

    name: str
    torch: torch.dtype  # what the kernels are given: bytes, where Triton has no such dtype
    element: Any
    bits: int
    whole: bool = False  # an integer
    wide: bool = False  # needs float64
    least: int = 0  # of integers: what counts as saturated
    most: int = 0
    mantissa: int = 0
    bias: int = 0
    normal: int = 0  # the smallest normal magnitude
    top: int = 0  # the largest finite one
    nan: int = 0  # the smallest that is NaN; between the two lies infinity, if there is one
    largest: float = 0.0  # the largest finite value
    half: Any = None
    minimum: str = ""
    maximum: str = ""
    add_zero: str = ""
    add_small: str = ""

    @property
    def each(self) -> int:
        """Elements of a lane: 16 bytes, or 8 of small ones, whose sums would take too much room."""
        return min(8, 128 // self.bits)

    @property
    def steps(self) -> int:
        """How often a lane reads in a chunk: the fewer, the less cancels where digits are many."""
        return 4 if self.bits >= 32 else 8

    @property
    def highest(self) -> int:
        """No integer of the kind is above."""
        return 2**63 - 1 if self.bits == 64 else 2**31 - 1

    @property
    def lowest(self) -> int:
        """No integer of the kind is below."""
        return -self.highest - 1

    def __repr__(self) -> str:  # Triton makes it part of the names of its functions
        return self.name


def _float(
    dtype: torch.dtype, name: str, element: Any, mantissa: int, bias: int, nan: int, tiny: str = ""
) -> Format:
    info = torch.finfo(dtype)
    given = dtype if info.bits > 8 else torch.uint8
    bits = {8: torch.uint8, 16: torch.int16, 32: torch.int32}[info.bits]
    top = int(torch.tensor(info.max, dtype=dtype).view(bits))
    half: dict[str, Any] = {}
    if tiny:
        kind = "bf16x2" if name == "bf16" else "f16x2"
        # Of float16, taking the size is part of the comparison; of bfloat16, it is not.
        size = "and.b32 t, $2, 0x7FFF7FFF;" if name == "bf16" else "abs.f16x2 t, $2;"
        add = f".{kind}.{kind} t, t, c; add.{kind} $0, $1, t; }}"
        half = {
            "half": tl.bfloat16 if name == "bf16" else tl.float16,
            "minimum": f"min.{kind} $0, $1, $2;",
            "maximum": f"max.{kind} $0, $1, $2;",
            "add_zero": "{ .reg .b32 t, c; mov.b32 c, 0; mov.b32 t, $2; set.eq" + add,
            "add_small": f"{{ .reg .b32 t, c; mov.b32 c, {tiny}; {size} set.lt" + add,
        }
    return Format(
        name, given, element, info.bits, mantissa=mantissa, bias=bias, normal=1 << mantissa,
        top=top, nan=nan, largest=info.max, **half,
    )  # fmt: skip


def _whole(dtype: torch.dtype, name: str, element: Any) -> Format:
    if dtype == torch.bool:  # of which nothing is saturated
        return Format(name, torch.uint8, element, 8, whole=True, least=-1, most=256)
    info = torch.iinfo(dtype)
    least = info.min or -1
    return Format(
        name, dtype, element, info.bits, whole=True, wide=info.bits > 16, least=least, most=info.max
    )


FORMATS = {
    torch.float32: _float(torch.float32, "f32", tl.float32, 23, 127, 0x7F800001),
    torch.bfloat16: _float(torch.bfloat16, "bf16", tl.bfloat16, 7, 127, 0x7F81, "0x00800080"),
    torch.float16: _float(torch.float16, "f16", tl.float16, 10, 15, 0x7C01, "0x04000400"),
    torch.float8_e5m2: _float(torch.float8_e5m2, "e5m2", tl.uint8, 2, 15, 0x7D, "0x04000400"),
    torch.float8_e4m3fn: _float(torch.float8_e4m3fn, "e4m3", tl.uint8, 3, 7, 0x7F, "0x24002400"),
    torch.int8: _whole(torch.int8, "i8", tl.int8),
    torch.uint8: _whole(torch.uint8, "u8", tl.uint8),
    torch.int16: _whole(torch.int16, "i16", tl.int16),
    torch.int32: _whole(torch.int32, "i32", tl.int32),
    torch.int64: _whole(torch.int64, "i64", tl.int64),
    torch.bool: _whole(torch.bool, "bool", tl.uint8),
}
