"""One Llama-shaped model on two devices, in every precision that a device may choose by itself.

    tensortap record recipes/devices/llama.py:build --modes cpu,gpu -o runs --layers all --inputs

The weights are drawn on the CPU from a seed and then sent where they are needed, so that all modes
have the same bits. `--set fault=NAME` plants one of FAULTS, in any mode. docs/devices.md tells what
came out.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensortap import Target
from tensortap.errors import OptionError

MODE_GROUPS: dict[str, tuple[str, ...]] = {
    "cpu": ("cpu-fp32", "cpu-fp64", "cpu-bf16", "cpu-order", "cpu-1-thread"),
    "gpu": ("gpu-fp32", "gpu-repeat", "gpu-tf32", "gpu-bf16", "gpu-compiled"),
}
MODES: tuple[str, ...] = (*MODE_GROUPS["cpu"], *MODE_GROUPS["gpu"])
_DTYPES = {"fp64": torch.float64, "bf16": torch.bfloat16}
_PARTS = 4  # that a sum of products is made in by the mode cpu-order


@dataclass(frozen=True)
class Size:
    """How large the model is."""

    vocabulary: int = 4096
    hidden: int = 512
    inner: int = 1408
    heads: int = 8
    kv_heads: int = 4
    blocks: int = 16
    tokens: int = 256


TINY = Size(vocabulary=128, hidden=64, inner=176, heads=4, kv_heads=2, blocks=4, tokens=24)


class Linear(nn.Linear):
    """x W^T + b, with the sums in one go or, `parts` of them, in another order."""

    parts = 1
    tf32 = False

    def reset_parameters(self) -> None:
        """Nothing: the weights are drawn once, all together."""

    def forward(self, x: Tensor) -> Tensor:
        if self.parts > 1:
            pairs = zip(x.chunk(self.parts, -1), self.weight.chunk(self.parts, -1), strict=True)
            out = sum((F.linear(*pair) for pair in pairs), torch.zeros((), dtype=x.dtype))
            return out if self.bias is None else out + self.bias
        if self.tf32:
            return _in_tf32(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """Root-mean-square norm with a gain, computed in at least float32."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.epsilon = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return (wide * scale).to(x.dtype) * self.weight


class Mix(nn.Module):
    """Rotary positions and causal softmax attention: no weights, a layer all the same."""

    cos: Tensor
    sin: Tensor

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.hidden // size.heads
        steps = torch.arange(0, width, 2, dtype=torch.float64) / width
        angles = torch.outer(torch.arange(size.tokens, dtype=torch.float64), 10000.0**-steps)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        q, k = self.turned(q), self.turned(k).repeat_interleave(groups, 1)
        return F.scaled_dot_product_attention(q, k, v.repeat_interleave(groups, 1), is_causal=True)

    def turned(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        return torch.cat((left * cos - right * sin, left * sin + right * cos), -1)


class Attention(nn.Module):
    """Causal self-attention with fewer heads for keys and values."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.width = size.hidden // size.heads
        narrow = size.kv_heads * self.width
        self.q = Linear(size.hidden, size.hidden)
        self.k = Linear(size.hidden, narrow)
        self.v = Linear(size.hidden, narrow)
        self.mix = Mix(size)
        self.o = Linear(size.hidden, size.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        result: Tensor = self.o(self.mix(q, k, v).transpose(1, 2).flatten(-2))
        return result


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate = Linear(size.hidden, size.inner, bias=False)
        self.up = Linear(size.hidden, size.inner, bias=False)
        self.down = Linear(size.inner, size.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm1 = RMSNorm(size.hidden)
        self.attention = Attention(size)
        self.norm2 = RMSNorm(size.hidden)
        self.mlp = MLP(size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class Model(nn.Module):
    """Embedding, blocks, final norm and head."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        empty = torch.empty(size.vocabulary, size.hidden)
        self.embedding = nn.Embedding(size.vocabulary, size.hidden, _weight=empty)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.blocks))
        self.final_norm = RMSNorm(size.hidden)
        self.head = Linear(size.hidden, size.vocabulary, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.final_norm(x))
        return logits


@torch.no_grad()
def _draw(model: Model) -> None:
    """Weights at the size that trained ones have: scores that vary, a residual stream that grows,
    biases, and a few channels that are much larger than all others."""
    depth = len(model.blocks)
    model.embedding.weight.normal_(0.0, 0.05)
    model.embedding.weight[:, :3] *= 20.0
    for part in model.modules():
        if isinstance(part, Linear):
            part.weight.normal_(0.0, part.in_features**-0.5)
            if part.bias is not None:
                part.bias.normal_(0.0, 0.5)
        if isinstance(part, RMSNorm):
            part.weight.uniform_(0.5, 1.5)
            part.weight[:3] *= 0.1
    for number in range(depth):
        for name in ("attention.o", "mlp.down"):
            _linear(model, f"blocks.{number}.{name}").weight *= 0.1 + 1.5 * number / depth


def _epsilon(model: Model) -> str:
    name = f"blocks.{len(model.blocks) // 8}.norm2"
    norm = model.get_submodule(name)
    assert isinstance(norm, RMSNorm)
    norm.epsilon = 1e-5
    return name


def _bias(model: Model) -> str:
    name = f"blocks.{len(model.blocks) // 4}.attention.k"
    bias = _linear(model, name).bias
    with torch.no_grad():
        bias.zero_()
    return name


def _transposed(model: Model) -> str:
    name = f"blocks.{len(model.blocks) * 5 // 8}.attention.o"
    weight = _linear(model, name).weight
    with torch.no_grad():
        weight.copy_(weight.t().clone())
    return name


def _one_in_tf32(model: Model) -> str:
    name = f"blocks.{len(model.blocks) * 3 // 4}.mlp.down"
    _linear(model, name).tf32 = True
    return name


def _linear(model: Model, name: str) -> Linear:
    layer = model.get_submodule(name)
    assert isinstance(layer, Linear)
    return layer


FAULTS: dict[str, Callable[[Model], str]] = {
    "epsilon": _epsilon,  # of a norm: 1e-5 for 1e-6
    "bias": _bias,  # of the keys: not loaded
    "transposed": _transposed,  # weight of an output projection, which is square
    "tf32": _one_in_tf32,  # one layer alone multiplies in tf32
}
"""What can be planted: each changes one layer and returns its name."""


def build(
    mode: str = "cpu-fp32",
    seq_len: int | None = None,
    seed: int = 0,
    fault: str = "",
    tiny: bool | None = None,
) -> Target:
    """The model in a mode, and one sequence of random tokens."""
    if mode not in MODES:
        raise OptionError(f"There is no mode {mode!r}. The modes are {', '.join(MODES)}.")
    if fault and fault not in FAULTS:
        raise OptionError(f"There is no fault {fault!r}. The faults are {', '.join(FAULTS)}.")
    device, _, kind = mode.partition("-")
    if device == "gpu" and not torch.cuda.is_available():
        raise OptionError(
            f"The mode {mode!r} needs a CUDA device, and torch {torch.__version__} sees none here. "
            f"Without one there are {', '.join(MODE_GROUPS['cpu'])}."
        )
    small = os.environ.get("TENSORTAP_TINY", "") not in ("", "0") if tiny is None else tiny
    size = TINY if small else Size()
    length = size.tokens if seq_len is None else seq_len
    if not 1 <= length <= size.tokens:
        raise OptionError(f"seq_len is {length}, expected a whole number from 1 to {size.tokens}.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Model(size)
        _draw(model)
        ids = torch.randint(size.vocabulary, (1, length))
    if fault:
        FAULTS[fault](model)
    if kind == "order":
        for part in model.modules():
            if isinstance(part, Linear):
                part.parts = _PARTS
    if kind == "1-thread":
        torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high" if kind == "tf32" else "highest")
    where = "cuda" if device == "gpu" else "cpu"
    model.to(device=where, dtype=_DTYPES.get(kind, torch.float32)).eval()
    ready = torch.compile(model) if kind == "compiled" else model
    return Target(ready, {"input_ids": ids.to(where)}, mode=mode, config=asdict(size))


def _in_tf32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A product in tf32 in the midst of others: by the GPU's own setting, on a CPU by rounding."""
    if x.dtype != torch.float32:
        return F.linear(x, weight, bias)
    if not x.is_cuda:
        return F.linear(_ten_bits(x), _ten_bits(weight), bias)
    with _matmul_precision("high"):
        return F.linear(x, weight, bias)


def _ten_bits(x: Tensor) -> Tensor:
    """The nearest number with a mantissa of 10 bits."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


@contextlib.contextmanager
def _matmul_precision(wanted: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(wanted)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
