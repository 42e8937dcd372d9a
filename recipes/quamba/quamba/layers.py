"""The parts of a mixer, in float and in int8, under the names that the float model has.

Each int8 part has its steps as inner modules, so that a recording can hold them: `quantise` gives
the codes, `sums` the int32 sums.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .hadamard import rotate
from .integers import conv_sums, on_grid, product_sums, quantise, scale_for

__all__ = [
    "ConvSums",
    "FloatConv",
    "Int8Conv",
    "Int8Head",
    "Int8Linear",
    "Operands",
    "ProductSums",
    "Quantise",
    "QuantiseDynamically",
    "Rotate",
    "SsmInput",
    "StepProjection",
    "weight_codes",
]


def weight_codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight as int8 codes and their scale: per tensor, by its largest magnitude."""
    weight = weight.detach().float()
    scale = scale_for(weight.abs().max())
    return quantise(weight, scale), scale


class Quantise(nn.Module):
    """Floats to int8 codes, with the scale that calibration found."""

    scale: Tensor

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return quantise(x, self.scale), self.scale


class QuantiseDynamically(nn.Module):
    """Floats to int8 codes, with the scale of this very tensor: of each sample its own.

    So a sample is the same bits whatever others are in its batch.
    """

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scale = scale_for(x.abs().amax(dim=(1, 2), keepdim=True))
        return quantise(x, scale), scale


class ProductSums(nn.Module):
    """int8 codes times int8 weights, summed in int32."""

    def forward(self, codes: Tensor, weight: Tensor) -> Tensor:
        return product_sums(codes, weight)


class ConvSums(nn.Module):
    """int8 codes through an int8 depthwise convolution, summed in int32."""

    def forward(self, codes: Tensor, weight: Tensor) -> Tensor:
        return conv_sums(codes, weight[:, 0])


class Rotate(nn.Module):
    """The Hadamard transform of the last axis."""

    def forward(self, x: Tensor) -> Tensor:
        return rotate(x)


class Int8Linear(nn.Module):
    """A W8A8 linear layer. Takes floats, or (`codes`) int8 codes of its input's scale."""

    weight_scale: Tensor
    input_scale: Tensor
    bias: Tensor | None

    def __init__(
        self,
        source: nn.Linear,
        input_scale: Tensor,
        *,
        codes: bool = False,
        hadamard: bool = False,
    ) -> None:
        super().__init__()
        weight = source.weight.detach()
        int8, scale = weight_codes(rotate(weight) if hadamard else weight)
        self.weight = nn.Parameter(int8, requires_grad=False)  # a parameter: its dtype counts
        self.register_buffer("weight_scale", scale)
        self.register_buffer("input_scale", input_scale)
        bias = source.bias
        self.register_buffer("bias", None if bias is None else bias.detach().float().clone())
        self.rotate = Rotate() if hadamard else None
        self.quantise = None if codes else Quantise(input_scale)
        self.sums = ProductSums()

    def codes(self, x: Tensor) -> Tensor:
        """The int8 codes that are multiplied."""
        if self.rotate is not None:
            x = self.rotate(x)
        if self.quantise is None:
            return x
        codes: Tensor = self.quantise(x)[0]
        return codes

    def forward(self, x: Tensor) -> Tensor:
        sums: Tensor = self.sums(self.codes(x), self.weight)
        y = sums.float() * (self.input_scale * self.weight_scale)
        return y if self.bias is None else y + self.bias


class Int8Head(nn.Module):
    """The language head in W8A8.

    transformers casts the head's input to the dtype of its `weight`, which would cut the floats to
    whole numbers: so the int8 weight lies one level deeper.
    """

    def __init__(self, source: nn.Linear, input_scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(0), persistent=False)
        self.linear = Int8Linear(source, input_scale)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y


class StepProjection(nn.Linear):
    """dt_proj in float, with the operations of transformers: the bias is added to the product."""

    def forward(self, step: Tensor) -> Tensor:
        y = self.weight @ step.transpose(1, 2)
        return (y if self.bias is None else y + self.bias[..., None]).transpose(1, 2)


class FloatConv(nn.Conv1d):
    """The causal convolution and its SiLU, [batch, inner, length] to the same."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.conv1d(x, self.weight, self.bias, padding=self.padding, groups=self.groups)
        return F.silu(y[:, :, : x.shape[-1]])


class Int8Conv(nn.Module):
    """The causal convolution on int8 codes, its SiLU in float, and the output as the mode has it.

    `output` is `codes` (int8 with the SSM input's scale), `grid` (the floats of these codes) or
    `float`. Without a static `input_scale` the input's own is taken.
    """

    weight_scale: Tensor
    bias: Tensor | None
    output_scale: Tensor

    def __init__(
        self, source: nn.Conv1d, input_scale: Tensor | None, output: str, output_scale: Tensor
    ) -> None:
        super().__init__()
        codes, scale = weight_codes(source.weight)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.register_buffer("weight_scale", scale)
        bias = source.bias
        self.register_buffer("bias", None if bias is None else bias.detach().float().clone())
        self.register_buffer("output_scale", output_scale)
        self.output = output
        self.quantise: nn.Module = (
            QuantiseDynamically() if input_scale is None else Quantise(input_scale)
        )
        self.sums = ConvSums()

    def forward(self, x: Tensor) -> Tensor:
        codes, scale = self.quantise(x)
        y = self.sums(codes, self.weight).float() * (scale * self.weight_scale)
        y = F.silu(y if self.bias is None else y + self.bias[:, None])
        if self.output == "codes":
            return quantise(y, self.output_scale)
        return on_grid(y, self.output_scale) if self.output == "grid" else y


class SsmInput(nn.Module):
    """What the scan and x_proj take, [batch, length, inner]: as it comes, or as int8 codes."""

    scale: Tensor | None

    def __init__(self, scale: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        return x if self.scale is None else quantise(x, self.scale)


class Operands(nn.Module):
    """The scan's other operands, as int8 codes where there are scales for them."""

    def __init__(self, scales: dict[str, Tensor] | None = None) -> None:
        super().__init__()
        self.int8 = scales is not None
        for name, scale in (scales or {}).items():
            self.register_buffer(f"{name}_scale", scale)

    def forward(self, *, dt: Tensor, B: Tensor, C: Tensor, z: Tensor) -> dict[str, Tensor]:
        found = {"dt": dt, "B": B, "C": C, "z": z}
        if not self.int8:
            return found
        return {
            name: quantise(value, self.get_buffer(f"{name}_scale")) for name, value in found.items()
        }
