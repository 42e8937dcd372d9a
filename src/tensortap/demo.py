"""The built-in target: a small decoder-only transformer of our own, seeded, with no download.

tensortap record tensortap.demo:build -o runs/fp32

Its modes are one model: in another dtype, with int8 weights and activations, or with a bug that
was planted for comparisons to find (`bug`: BUG_LAYER returns BUG_GAIN times what it should).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import OptionError
from .targets import Target
from .targets.options import parse_device

__all__ = ["BUG_GAIN", "BUG_LAYER", "MODES", "MODE_GROUPS", "DemoModel", "Int8Linear", "build"]

VOCABULARY = 1000
_DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
MODES: tuple[str, ...] = (*_DTYPES, "int8", "bug")
MODE_GROUPS: dict[str, tuple[str, ...]] = {
    "essential": ("fp32", "bf16", "int8"),
    "fp_only": ("fp32", "bf16", "fp16"),
    "quant_only": ("int8",),
}
BUG_LAYER = "blocks.4.mlp.down"
BUG_GAIN = 1.02


class RMSNorm(nn.Module):
    """Root-mean-square norm with a gain, computed in at least float32."""

    def __init__(self, hidden: int, epsilon: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return (wide * scale).to(x.dtype) * self.weight


def _rotate(x: Tensor) -> Tensor:
    """Rotary positions: turn each pair of features by an angle that grows with the position."""
    length, width = x.shape[-2], x.shape[-1]
    steps = torch.arange(0, width, 2, device=x.device, dtype=torch.float32) / width
    positions = torch.arange(length, device=x.device, dtype=torch.float32)
    angles = torch.outer(positions, torch.pow(10000.0, -steps))
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(hidden, hidden, bias=False)
        self.k = nn.Linear(hidden, hidden, bias=False)
        self.v = nn.Linear(hidden, hidden, bias=False)
        self.o = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(-2, -3)
            for part in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(_rotate(q), _rotate(k), v, is_causal=True)
        result: Tensor = self.o(mixed.transpose(-2, -3).flatten(-2))
        return result


class MLP(nn.Module):
    """Two linears with a GELU between them."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, inner)
        self.activation = nn.GELU()
        self.down = nn.Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.activation(self.up(x)))
        return result


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.norm1 = RMSNorm(hidden)
        self.attention = Attention(hidden, heads)
        self.norm2 = RMSNorm(hidden)
        self.mlp = MLP(hidden, 4 * hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class DemoModel(nn.Module):
    """Embedding, blocks, final norm and head: the parts of any decoder, at a toy's size."""

    def __init__(
        self, vocabulary: int = VOCABULARY, hidden: int = 256, layers: int = 8, heads: int = 8
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.final_norm = RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.final_norm(x))
        return logits


class Int8Linear(nn.Module):
    """A linear layer in int8: weights scaled by output channel, activations by token, as they come.

    Products are summed exactly, in int32; the scales are multiplied in afterwards, in float32.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        scale = _scale(weight)
        self.weight = nn.Parameter(_quantise(weight, scale), requires_grad=False)
        self.scale = nn.Parameter(scale.squeeze(-1), requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        scale = _scale(x.float())
        tokens = _quantise(x.float(), scale).reshape(-1, x.shape[-1])
        products = _product(tokens, self.weight).reshape(*x.shape[:-1], -1)
        result = products.float() * scale * self.scale
        return (result if self.bias is None else result + self.bias).to(x.dtype)


def _scale(x: Tensor) -> Tensor:
    """What one step of int8 is worth in each row; a row of zeros keeps a scale that divides."""
    return x.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127


def _quantise(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).round().clamp(-127, 127).to(torch.int8)


def _product(tokens: Tensor, weight: Tensor) -> Tensor:
    """tokens @ weight.T, exactly; where the int8 kernel does not take the shape, in float64."""
    (rows, width), columns = tokens.shape, weight.shape[0]
    on_cuda = tokens.is_cuda and rows > 16 and width % 8 == columns % 8 == 0
    if tokens.device.type == "cpu" or on_cuda:
        return torch._int_mm(tokens, weight.t())
    return (tokens.double() @ weight.t().double()).to(torch.int32)


def _to_int8(model: DemoModel) -> None:
    """The linears of the blocks in int8; embedding, norms and head stay as they are."""
    for part in list(model.blocks.modules()):
        for name, child in list(part.named_children()):
            if isinstance(child, nn.Linear):
                setattr(part, name, Int8Linear(child))


def _plant(model: DemoModel) -> None:
    """The bug of the mode `bug`: a gain that is a little off."""
    layer = model.get_submodule(BUG_LAYER)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(BUG_GAIN)


def build(
    mode: str = "fp32",
    seq_len: int = 64,
    samples: int = 1,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Target:
    """The demo model and `samples` batches of one sequence each.

    The weights are drawn in float32 on the CPU and cast afterwards, so that all modes and devices
    start from the same numbers; the global random state is left alone. `dtype` is another way
    to say the mode.
    """
    for name, value in (("seq_len", seq_len), ("samples", samples)):
        if value < 1:
            raise OptionError(f"{name} is {value}, expected a whole number from 1.")
    mode = _mode(mode, dtype)
    device = str(parse_device(str(device)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DemoModel()
        batches = [torch.randint(VOCABULARY, (1, seq_len)) for _ in range(samples)]
    if mode == "int8":
        _to_int8(model)
    elif mode == "bug":
        _plant(model)
    model.to(device=device, dtype=_DTYPES.get(mode, torch.float32)).eval()
    return Target(model, [{"input_ids": ids.to(device)} for ids in batches], mode=mode)


def _mode(mode: str, dtype: torch.dtype | None) -> str:
    if mode not in MODES:
        raise OptionError(f"The demo has no mode {mode!r}. Its modes are {', '.join(MODES)}.")
    if dtype is None or dtype == _DTYPES.get(mode, torch.float32):
        return mode
    named = {kind: name for name, kind in _DTYPES.items()}
    if dtype not in named:
        raise OptionError(
            f"The demo does not run in {dtype}. It runs in "
            f"{', '.join(str(kind).removeprefix('torch.') for kind in named)}."
        )
    if mode != "fp32":
        raise OptionError(f"The mode {mode!r} and the dtype {dtype} disagree. Give one of them.")
    return named[dtype]
