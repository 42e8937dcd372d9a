"""The selective scan in three ways: float, int8 in plain PyTorch, and int8 fused.

    h[t] = exp(dt[t] A) h[t-1] + dt[t] B[t] u[t]
    y[t] = (C[t] h[t] + D u[t]) silu(z[t])        A = -exp(A_log), dt through softplus first

`u`, `dt` and `z` are [batch, length, inner], `B` and `C` [batch, length, state], `A_log` [inner,
state], `D` [inner]. A sequence runs in segments, and the state is handed from one to the next as
a decode cache would keep it: in float, or in int8 with a static scale.

The exponential is no integer arithmetic: the int8 ways take int8 operands with their scales and
compute in float. The plain way dequantises every operand and follows the textbook formulas,
a few steps at a time; the fused way makes one pass over time, holds nothing but the running
state, and multiplies codes, the scales being folded together and applied once at the end. What
is the same in exact arithmetic differs in the last bits: `paths.path_difference` says how much.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensortap.taps.plan import rehearsing

from .integers import dequantise, quantise

__all__ = ["OPERANDS", "FloatScan", "FusedScan", "PlainScan", "StateCodes"]

OPERANDS = ("u", "dt", "A_log", "B", "C", "D", "z")
_AT_ONCE = 16  # steps whose factors are computed together: as many as the cache holds


class StateCodes(nn.Module):
    """The state as it is kept between segments: int8 codes of a static scale."""

    scale: Tensor

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale)

    def forward(self, state: Tensor) -> Tensor:
        return quantise(state, self.scale)


class FloatScan(nn.Module):
    """The scan in floating point, with the operations of transformers in their order."""

    state: nn.Module

    def __init__(self, segment: int) -> None:
        super().__init__()
        self.segment = segment
        self.state = nn.Identity()

    def forward(
        self, *, u: Tensor, dt: Tensor, A_log: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor
    ) -> Tensor:
        return self._scan(u, dt, -torch.exp(A_log.float()), B, C, D, z)

    def _scan(
        self, u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor
    ) -> Tensor:
        u, z = u.transpose(1, 2), z.transpose(1, 2)
        steps = F.softplus(dt.transpose(1, 2))
        state = torch.zeros(*u.shape[:2], A.shape[-1], dtype=u.dtype)
        outputs: list[Tensor] = []
        for start, end, length in _segments(u.shape[-1], self.segment):
            for first in range(start, end, _AT_ONCE):
                now = slice(first, min(first + _AT_ONCE, end))
                # Time in front, so that each step lies in one piece.
                step = steps[:, :, now].permute(2, 0, 1).contiguous()[..., None]
                decay = torch.exp(A * step)
                fed = step * B[:, now].transpose(0, 1)[:, :, None].float()
                fed = fed * u[:, :, now].permute(2, 0, 1)[..., None].float()
                for kept, added in zip(decay.unbind(), fed.unbind(), strict=True):
                    state = added.add_(kept.mul_(state))  # so that `fed` holds all the states
                outputs.append(_read(fed.to(u.dtype), C[:, now].transpose(0, 1)[..., None]))
            outputs += [outputs[-1][-1:]] * (length - (end - start))
            state = self._handed_on(state)
        y = torch.cat(outputs).permute(1, 2, 0).contiguous() + u * D.float()[None, :, None]
        return (y * F.silu(z)).transpose(1, 2)

    def _handed_on(self, state: Tensor) -> Tensor:
        handed: Tensor = self.state(state)
        return handed


class PlainScan(FloatScan):
    """int8 operands, each dequantised, then the same formulas."""

    state: StateCodes

    def __init__(self, segment: int, scales: Mapping[str, Tensor]) -> None:
        super().__init__(segment)
        _keep_scales(self, scales)
        self.state = StateCodes(scales["state"])

    def forward(
        self, *, u: Tensor, dt: Tensor, A_log: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor
    ) -> Tensor:
        codes = {"u": u, "dt": dt, "A_log": A_log, "B": B, "C": C, "D": D, "z": z}
        x = {name: dequantise(codes[name], _scale(self, name)) for name in OPERANDS}
        A = -torch.exp(x["A_log"])
        return self._scan(x["u"], x["dt"], A, x["B"], x["C"], x["D"], x["z"])

    def _handed_on(self, state: Tensor) -> Tensor:
        return dequantise(self.state(state), self.state.scale)


class FusedScan(nn.Module):
    """int8 operands in one pass over time; the state runs in units of the scales of u and B."""

    def __init__(self, segment: int, scales: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.segment = segment
        _keep_scales(self, scales)
        self.state = StateCodes(scales["state"])

    def forward(
        self, *, u: Tensor, dt: Tensor, A_log: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor
    ) -> Tensor:
        scale = {name: _scale(self, name) for name in OPERANDS}
        A = -torch.exp(A_log.t().float() * scale["A_log"])
        unit = scale["u"] * scale["B"]
        steps = F.softplus(dt.float() * scale["dt"])
        codes = u.float()
        fed, b, c = steps * codes, B.float(), C.float()
        batch, length, inner = u.shape
        state = torch.zeros(batch, A.shape[0], inner)  # channels last: the longest runs
        decay = torch.empty_like(state)
        y = torch.empty(batch, length, inner)
        for start, end, _ in _segments(length, self.segment):
            for t in range(start, end):
                torch.mul(steps[:, t, None], A, out=decay)
                state.mul_(decay.exp_()).addcmul_(fed[:, t, None], b[:, t, :, None])
                torch.bmm(c[:, t, None], state, out=y[:, t, None])
            kept = self.state(state.transpose(1, 2) * unit)
            state = kept.transpose(1, 2).float() * (self.state.scale / unit)
        y.mul_(unit * scale["C"])
        y.addcmul_(codes, D.float() * (scale["u"] * scale["D"]))
        return y.mul_(F.silu(dequantise(z, scale["z"])))


def _segments(length: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Where each segment starts, up to where it is computed, and its length.

    That is its end, but for a recording's rehearsal, which wants calls and shapes alone:
    thousands of steps would tell it nothing that the first does not.
    """
    once = rehearsing()
    for start in range(0, length, size):
        end = min(start + size, length)
        yield start, start + 1 if once else end, end - start


def _read(states: Tensor, c: Tensor) -> Tensor:
    """C h of some steps, each by itself: in one product torch may sum in another order.

    Half precision has no fast product here: the sum is float, then rounded.
    """
    half = states.dtype == torch.float16
    if half:
        states, c = states.float(), c.float()
    both = zip(states.unbind(), c.unbind(), strict=True)
    read = torch.stack([state @ column for state, column in both])[..., 0]
    return read.half() if half else read


def _keep_scales(scan: nn.Module, scales: Mapping[str, Tensor]) -> None:
    for name in OPERANDS:
        scan.register_buffer(f"{name}_scale", scales[name])


def _scale(scan: nn.Module, name: str) -> Tensor:
    scale: Tensor = scan.get_buffer(f"{name}_scale")
    return scale
