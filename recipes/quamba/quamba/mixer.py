"""The mixer of every mode: one forward, with parts in float or in int8.

It has the weights and names of transformers' MambaMixer (in_proj, conv1d, x_proj, dt_proj,
out_proj, A_log, D), and modules of its own for what lies between them: `ssm_input` (what the scan
takes), `operands` (its other operands), `scan` and `scan.state`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from tensortap.errors import TargetError

from .layers import (
    FloatConv,
    Int8Conv,
    Int8Linear,
    Operands,
    SsmInput,
    StepProjection,
    weight_codes,
)
from .mode_config import ModeConfig
from .scan import FloatScan, FusedScan, PlainScan

__all__ = ["FloatParts", "Mixer", "float_mixer", "int8_mixer"]


class FloatParts(Protocol):
    """What a float mixer has, transformers' own as well as ours."""

    in_proj: nn.Linear
    conv1d: nn.Conv1d
    x_proj: nn.Linear
    dt_proj: nn.Linear
    out_proj: nn.Linear
    A_log: nn.Parameter
    D: nn.Parameter


class Mixer(nn.Module):
    """One layer's mixer, whatever its parts compute in."""

    in_proj: nn.Linear | Int8Linear
    conv1d: nn.Conv1d | Int8Conv
    ssm_input: SsmInput
    x_proj: nn.Linear | Int8Linear
    dt_proj: nn.Linear | Int8Linear
    operands: Operands
    scan: FloatScan | FusedScan
    out_proj: nn.Linear | Int8Linear
    A_log: Tensor
    D: Tensor

    def __init__(self, parts: Mapping[str, nn.Module], A_log: Tensor, D: Tensor) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        for name, value in (("A_log", A_log), ("D", D)):
            if isinstance(value, nn.Parameter):
                self.register_parameter(name, value)
            else:
                self.register_buffer(name, value)

    def forward(
        self,
        hidden_states: Tensor,
        cache_params: object = None,
        attention_mask: object = None,
        **_: Any,
    ) -> Tensor:
        if cache_params is not None or attention_mask is not None:
            raise TargetError(
                "The mixers of this model run whole sequences: they take no cache and no "
                "attention mask. Call the model with input_ids alone and use_cache=False."
            )
        x, z = self.in_proj(hidden_states).transpose(1, 2).chunk(2, dim=1)
        u = self.ssm_input(self.conv1d(x))
        rank, state = self.dt_proj.weight.shape[1], self.A_log.shape[1]
        step, b, c = self.x_proj(u).split([rank, state, state], dim=-1)
        rest = self.operands(dt=self.dt_proj(step), B=b, C=c, z=z.transpose(1, 2))
        y = self.scan(u=u, A_log=self.A_log, D=self.D, **rest)
        output: Tensor = self.out_proj(y.to(hidden_states.dtype))
        return output


def float_mixer(source: FloatParts, segment: int) -> Mixer:
    """The same computation as a MambaMixer's, on its own weights, in parts that can be recorded."""
    conv, step = source.conv1d, source.dt_proj
    conv1d = FloatConv(
        conv.in_channels,
        conv.out_channels,
        conv.kernel_size[0],
        padding=conv.padding[0],
        groups=conv.groups,
        bias=conv.bias is not None,
        device="meta",
    )
    dt_proj = StepProjection(
        step.in_features, step.out_features, bias=step.bias is not None, device="meta"
    )
    conv1d.weight, conv1d.bias = conv.weight, conv.bias
    dt_proj.weight, dt_proj.bias = step.weight, step.bias
    parts: dict[str, nn.Module] = {
        "in_proj": source.in_proj,
        "conv1d": conv1d,
        "ssm_input": SsmInput(),
        "x_proj": source.x_proj,
        "dt_proj": dt_proj,
        "operands": Operands(),
        "scan": FloatScan(segment),
        "out_proj": source.out_proj,
    }
    return Mixer(parts, source.A_log, source.D)


def int8_mixer(
    source: FloatParts,
    mode: ModeConfig,
    scales: Mapping[str, Tensor],
    segment: int,
    *,
    hadamard: bool = False,
) -> Mixer:
    """A float mixer's weights in int8, computing as the mode says, with the calibrated scales."""
    u = scales["u"]
    A_log, D = source.A_log.detach(), source.D.detach()
    scan: FloatScan | FusedScan = FloatScan(segment)
    operands = Operands()
    if mode.int8_scan:
        A_log, a_scale = weight_codes(A_log)
        D, d_scale = weight_codes(D)
        taken = {name: scales[name] for name in ("dt", "B", "C", "z")}
        operands = Operands(taken)
        kind = FusedScan if mode.ssm_arithmetic == "fused" else PlainScan
        known = {**taken, "u": u, "A_log": a_scale, "D": d_scale, "state": scales["state"]}
        scan = kind(segment, known)
    static = scales["conv1d"] if mode.conv_input == "static" else None
    parts: dict[str, nn.Module] = {
        "in_proj": Int8Linear(source.in_proj, scales["in_proj"]),
        "conv1d": Int8Conv(source.conv1d, static, mode.conv_output, u),
        "ssm_input": SsmInput(u if mode.ssm_input == "requantised" else None),
        "x_proj": Int8Linear(source.x_proj, u, codes=mode.int8_scan),
        "dt_proj": Int8Linear(source.dt_proj, scales["dt_proj"]),
        "operands": operands,
        "scan": scan,
        "out_proj": Int8Linear(source.out_proj, scales["out_proj"], hadamard=hadamard),
    }
    return Mixer(parts, A_log, D)
