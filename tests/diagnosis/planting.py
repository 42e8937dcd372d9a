"""Ways to plant a bug in a model that we did not write, names and types of layers unchanged.

A layer gets a class of its own that derives from the one it had: hooks, weights, signature and
copies work as before, and only its forward is another.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = [
    "Attention",
    "Spoil",
    "after",
    "around",
    "attending",
    "instead",
    "intercepting",
    "quantised",
    "round_weight",
    "split_sums",
]

Spoil = Callable[[Tensor], Tensor]
Call = Callable[..., Any]


def around(layer: nn.Module, wrap: Callable[[Call], Call]) -> None:
    """Give this one layer a forward of its own, made from the one that it had."""
    old = type(layer)

    @functools.wraps(old.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return wrap(functools.partial(old.forward, self))(*args, **kwargs)

    # Made in a copy's own class: a deep copy of the layer keeps the bug.
    layer.__class__ = type(old.__name__, (old,), {"forward": forward, "__module__": old.__module__})


def instead(layer: nn.Module, forward: Call) -> None:
    """Replace what a layer computes."""
    around(layer, lambda inner: forward)


def after(layer: nn.Module, spoil: Spoil) -> None:
    """Spoil what a layer returns; of several values, the first."""

    def wrap(inner: Call) -> Call:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = inner(*args, **kwargs)
            if isinstance(result, tuple):
                return (spoil(result[0].clone()), *result[1:])
            return spoil(result.clone())

        return call

    around(layer, wrap)


class _Intercept(TorchFunctionMode):
    """Calls of one function of torch go elsewhere."""

    def __init__(self, function: Call, other: Call) -> None:
        super().__init__()
        self.function, self.other = function, other

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = self.other if func is self.function else func
        return call(*args, **(kwargs or {}))


def intercepting(layer: nn.Module, function: Call, other: Call) -> None:
    """Inside this layer, `function` of torch is another: for what is no layer of its own."""

    def wrap(inner: Call) -> Call:
        def call(*args: Any, **kwargs: Any) -> Any:
            with _Intercept(function, other):
                return inner(*args, **kwargs)

        return call

    around(layer, wrap)


class Attention:
    """One call of softmax attention: heads in, heads out; `allowed` is its mask as booleans."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **rest: Any,
    ) -> None:
        self.query, self.key, self.value = query, key, value
        self.rest = rest
        self.tokens = query.shape[-2]
        every = torch.ones(self.tokens, self.tokens, dtype=torch.bool, device=query.device)
        if attn_mask is not None:
            self.allowed = attn_mask if attn_mask.dtype == torch.bool else attn_mask > -1
        else:
            self.allowed = every.tril() if is_causal else every

    def run(self) -> Tensor:
        return F.scaled_dot_product_attention(
            self.query, self.key, self.value, attn_mask=self.allowed, **self.rest
        )


def attending(
    layer: nn.Module,
    before: Callable[[Attention], None] = lambda call: None,
    behind: Spoil = lambda x: x,
) -> None:
    """Change the attention inside a layer: what it is called with, or the heads it returns."""

    def attend(*args: Any, **kwargs: Any) -> Tensor:
        call = Attention(*args, **kwargs)
        before(call)
        return behind(call.run())

    intercepting(layer, F.scaled_dot_product_attention, attend)


# Other ways to compute: what quantisation and other machines do.


def quantised(x: Tensor, bits: int, dim: int | None = None) -> Tensor:
    """Values on a symmetric grid, one scale for all or one for each row along `dim`."""
    largest = 2 ** (bits - 1) - 1
    peak = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = peak.clamp_min(1e-12) / largest
    return (x / scale).round().clamp(-largest, largest) * scale


def round_weight(layer: nn.Module, bits: int) -> None:
    """Weights on a grid with a scale for each output channel, as weight-only quantisation has."""
    with torch.no_grad():
        layer.weight.copy_(quantised(layer.weight, bits, dim=-1))


def split_sums(linear: nn.Linear, parts: int) -> None:
    """A linear whose sum over the inputs is made in parts, as across devices."""

    def forward(x: Tensor) -> Tensor:
        pairs = zip(x.chunk(parts, -1), linear.weight.chunk(parts, -1), strict=True)
        total = functools.reduce(torch.add, (F.linear(a, w) for a, w in pairs))
        return total if linear.bias is None else total + linear.bias

    instead(linear, forward)
