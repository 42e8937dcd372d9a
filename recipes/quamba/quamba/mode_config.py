"""What each mode of the model means: the one place where that is written down.

The code that converts the model reads these rows, the tests derive from them which tensors two
modes share, and the table of SSM_MODE_GUIDE.md is printed from them:

    python3 -m quamba.mode_config

Nothing is imported here, so that scripts which only need the names start quickly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["MODES", "MODE_GROUPS", "ModeConfig", "mode_config", "table"]


@dataclass(frozen=True)
class ModeConfig:
    """One mode: what flows between the convolution and the scan, and who computes in integers.

    `conv_input` is how the convolution's input becomes int8: with the scale from calibration
    (`static`), with one from the tensor at hand (`dynamic`), or not at all (`float`).
    `conv_output` is what the convolution hands on: int8 `codes`, floats that lie on the int8
    `grid`, or the `float` results themselves. `ssm_input` is what the scan makes of that: takes
    it `as is`, or is handed it `requantised` to int8. `ssm_arithmetic` is `float`, or int8
    operands in the `fused` path or in `plain` PyTorch.
    """

    name: str
    conv_input: Literal["float", "static", "dynamic"]
    conv_output: Literal["float", "codes", "grid"]
    ssm_input: Literal["as is", "requantised"]
    ssm_arithmetic: Literal["float", "fused", "plain"]
    linears: Literal["float", "w8a8"]
    dtype: Literal["fp32", "fp16"]
    purpose: str

    def __post_init__(self) -> None:
        codes = self.conv_output == "codes" or self.ssm_input == "requantised"
        if codes != (self.ssm_arithmetic != "float"):
            raise ValueError(f"Mode {self.name}: int8 codes go to an int8 scan, and only there.")
        if (self.conv_input == "float") != (self.linears == "float"):
            raise ValueError(f"Mode {self.name}: conv1d and the linears are quantised together.")

    @property
    def quantised(self) -> bool:
        return self.linears == "w8a8"

    @property
    def int8_scan(self) -> bool:
        """Whether the scan takes int8 operands."""
        return self.ssm_arithmetic != "float"

    def words(self) -> tuple[str, str, str, str, str]:
        """The row of the table: mode, conv1d output, SSM input, SSM arithmetic, linears."""
        if not self.quantised:
            return self.name, self.dtype, self.dtype, self.dtype, self.dtype
        output = {"codes": "int8", "grid": "fp32 on the int8 grid", "float": "true fp32"}
        arithmetic = {"fused": "int8", "plain": "int8, written in PyTorch", "float": "fp32"}
        if self.ssm_input == "requantised":
            taken = "requantised to int8"
        elif self.conv_output == "codes":
            taken = "int8" if self.ssm_arithmetic == "fused" else "int8, direct"
        else:
            taken = "as it is" if self.conv_output == "grid" else "true fp32"
        dynamic = ", input quantised dynamically" if self.conv_input == "dynamic" else ""
        return (
            self.name,
            output[self.conv_output] + dynamic,
            taken,
            arithmetic[self.ssm_arithmetic],
            "W8A8",
        )


_ROWS = (
    ModeConfig(
        "fp32", "float", "float", "as is", "float", "float", "fp32",
        "the reference: the model as transformers computes it",
    ),
    ModeConfig(
        "0", "static", "codes", "as is", "fused", "w8a8", "fp32",
        "the baseline: int8 from the convolution through the scan, in the fused path",
    ),
    ModeConfig(
        "2-0", "static", "grid", "requantised", "fused", "w8a8", "fp32",
        "the codes leave int8 and come back: shows whether requantising loses anything",
    ),
    ModeConfig(
        "2-1", "static", "codes", "as is", "plain", "w8a8", "fp32",
        "the baseline's operands in plain PyTorch: shows whether the fused path is right",
    ),
    ModeConfig(
        "2-2", "static", "grid", "as is", "float", "w8a8", "fp32",
        "a float scan on an int8 input: shows what the scan's other int8 operands cost",
    ),
    ModeConfig(
        "2-3", "static", "float", "requantised", "fused", "w8a8", "fp32",
        "a float convolution output, rounded only at the scan's door",
    ),
    ModeConfig(
        "2-4", "static", "float", "as is", "float", "w8a8", "fp32",
        "a float scan on a float input: shows what rounding the scan's input costs",
    ),
    ModeConfig(
        "3", "dynamic", "float", "as is", "float", "w8a8", "fp32",
        "as 2-4, the convolution's input scaled by what it is: shows what a static scale costs",
    ),
    ModeConfig(
        "fp16", "float", "float", "as is", "float", "float", "fp16",
        "the whole model in half precision: another reference",
    ),
)  # fmt: skip

MODES: dict[str, ModeConfig] = {row.name: row for row in _ROWS}

MODE_GROUPS: dict[str, tuple[str, ...]] = {
    "all": tuple(row.name for row in _ROWS if row.dtype == "fp32"),
    "essential": ("fp32", "0", "2-1", "2-2", "2-4"),
    "quant_only": tuple(row.name for row in _ROWS if row.quantised),
    "fp_only": ("fp32",),
}


def mode_config(name: str) -> ModeConfig:
    """The row of a mode; a KeyError that names the modes for one that is not there."""
    if name not in MODES:
        raise KeyError(f"There is no mode {name!r}. The modes are {', '.join(MODES)}.")
    return MODES[name]


def table() -> str:
    """All modes as a Markdown table."""
    head = ("mode", "conv1d output", "SSM input", "SSM arithmetic", "linears", "what it is for")
    rows = [head, ("---",) * len(head), *[(*row.words(), row.purpose) for row in _ROWS]]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


if __name__ == "__main__":
    print(table(), end="")
