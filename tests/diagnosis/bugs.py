"""Kinds of bug, each with the layer in which it sits and the hint that one may ask for."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import functional
import reported
import seeing
import torch
import torch.nn.functional as F
from architecture import BLOCKS, HEADS, Architecture, image
from clean import CLEAN
from flaws import DEPTHS, Bug, Plant, generator, hints
from planting import (
    Attention,
    Call,
    Spoil,
    after,
    around,
    attending,
    instead,
    intercepting,
    quantised,
    round_weight,
)
from torch import Tensor, nn
from watching import first_wrong
from zoo import ARCHITECTURES, make

__all__ = ["BUGS", "DEPTHS", "Bug", "Case", "cases", "named"]

ATTENTION, MAMBA, ALL = ("demo", "llama", "bert"), ("mamba",), ("demo", "llama", "bert", "mamba")

# Kinds that are planted in the middle of every other model too that has a layer of that role, and
# those among them that make sense where channels come before places.
EVERYWHERE = (
    "2 % gain",
    "shift",
    "wrong bias",
    "tokens swapped",
    "saturated channel",
    "row never loaded",
    "bf16 in one layer",
    "int8 output",
    "fp8 output",
    "no residual",
    "wrong epsilon",
    "gain never loaded",
    "NaN in one element",
    "wrong activation",
    "embedding gain",
    "final shift",
    "head gain",
)
PICTURES = ("2 % gain", "int8 output", "fp8 output", "head gain", "wrong activation", "no residual")


@dataclass(frozen=True)
class Case:
    """A bug in a model at a depth, and what is to be said of it.

    `precision` is how the model with the bug computes (one of `clean.CLEAN`; "" is float32); the
    reference is in float32.
    """

    architecture: Architecture
    bug: Bug
    depth: str
    precision: str = ""

    def __str__(self) -> str:
        words = (self.architecture.name, self.bug.kind, self.depth, self.precision)
        return ", ".join(word for word in words if word)

    @property
    def kind(self) -> str:
        return self.bug.kind

    @property
    def block(self) -> int:
        return DEPTHS.get(self.depth, 0)

    @property
    def layer(self) -> str:
        """Where the bug was planted."""
        return self.architecture.layer(self.bug.role, self.block)

    @property
    def hints(self) -> frozenset[str] | None:
        """The kinds of cause that are right."""
        asked = self.bug.asked
        return self.bug.hints if not asked or self.architecture.name in asked else None

    def model(self, seed: int = 0) -> nn.Module:
        """A copy of the model with the bug in it."""
        model = copy.deepcopy(make(self.architecture.name, seed))
        with torch.no_grad():
            self.bug.plant(model, model.get_submodule(self.layer), self.architecture, self.block)
        return CLEAN[self.precision](model) if self.precision else model

    def culprit(self, recorded: Sequence[str]) -> str:
        """The innermost recorded layer in which the bug sits."""
        name = self.layer
        while name and name not in recorded:
            name = name.rpartition(".")[0]
        return name

    def first(self, recorded: Sequence[str]) -> str:
        """The recorded layer whose output differs first.

        In the models of a family it is heard with hooks of our own, in float32, unless the bug
        says it.
        """
        if not self.architecture.core or self.bug.shows == "?":
            if self.bug.shows in {**self.architecture.roles, **self.architecture.outside}:
                return self.architecture.layer(self.bug.shows, self.block)
            exact = replace(self, precision="").model()
            clean = make(self.architecture.name)
            found = first_wrong(clean, exact, self.architecture.inputs(), recorded)
            assert found is not None, f"{self} changes nothing"
            return found
        holds = any(name.startswith(f"{self.layer}.") for name in recorded)
        if self.bug.shows and (holds or self.layer not in recorded):
            return self.architecture.layer(self.bug.shows, self.block)
        return self.layer


# How each bug is planted.


def _after(spoil: Spoil) -> Plant:
    return lambda model, layer, architecture, block: after(layer, spoil)


def _attending(before: Callable[[Attention], None]) -> Plant:
    return lambda model, layer, architecture, block: attending(layer, before)


def _weights(change: Callable[[nn.Module], None]) -> Plant:
    return lambda model, layer, architecture, block: change(layer)


def _change(change: Callable[[Tensor], object]) -> Spoil:
    """A spoiler that works in place."""

    def spoil(x: Tensor) -> Tensor:
        change(x)
        return x

    return spoil


def _wrong_bias(model: nn.Module, layer: nn.Module, architecture: Architecture, block: int) -> None:
    """The bias dropped, or one added where the layer has none."""
    if layer.bias is not None:
        layer.bias.zero_()
    else:
        extra = 0.2 * torch.randn(layer.out_features, generator=generator())
        after(layer, lambda x: x + extra.to(x))


def _swap(x: Tensor, first: slice, second: slice, dim: int) -> None:
    a, b = (x.movedim(dim, 0)[part] for part in (first, second))
    held = a.clone()
    a.copy_(b)
    b.copy_(held)


def _two_heads(x: Tensor) -> None:
    width = x.shape[-1] // (2 if x.shape[-1] < 64 else HEADS)
    _swap(x, slice(0, width), slice(width, 2 * width), -1)


def _two_halves(x: Tensor) -> None:
    half = x.shape[-1] // 2
    _swap(x, slice(0, half), slice(half, 2 * half), -1)


def _b_and_c(x: Tensor) -> None:
    state = 8
    end = x.shape[-1]
    _swap(x, slice(end - 2 * state, end - state), slice(end - state, end), -1)


def _heads_out_of_order(
    model: nn.Module, layer: nn.Module, architecture: Architecture, block: int
) -> None:
    attending(layer, behind=lambda heads: heads[:, [1, 0, *range(2, heads.shape[1])]])


def _scale(call: Attention) -> None:
    call.rest["scale"] = 1 / call.query.shape[-1]


def _one_ahead(call: Attention) -> None:
    ahead = torch.ones(call.tokens, call.tokens, dtype=torch.bool).triu(1).tril(1)
    call.allowed = call.allowed | ahead


def _ignored(call: Attention) -> None:
    call.allowed = torch.ones_like(call.allowed)


def _mask(model: nn.Module, layer: nn.Module, architecture: Architecture, block: int) -> None:
    """A causal mask off by one; an encoder's padding ignored."""
    attending(layer, _ignored if architecture.name == "bert" else _one_ahead)


def _window(call: Attention) -> None:
    near = torch.ones(call.tokens, call.tokens, dtype=torch.bool).triu(-7)
    call.allowed = call.allowed & near


def _stale(call: Attention) -> None:
    for name in ("key", "value"):
        held = getattr(call, name).clone()
        held[..., -1, :] = held[..., -2, :]
        setattr(call, name, held)


def _lagging(model: nn.Module, layer: nn.Module, architecture: Architecture, block: int) -> None:
    """Rotary positions that lag by one from token 10 on."""

    def lag(positions: Tensor) -> Tensor:
        return torch.where(torch.arange(len(positions)) >= 10, positions - 1, positions)

    if architecture.name == "demo":
        outer = torch.outer
        intercepting(layer, outer, lambda positions, speed: outer(lag(positions), speed))
        return

    def wrap(inner: Call) -> Call:
        def call(*args: object, **kwargs: object) -> object:
            tables = kwargs["position_embeddings"]
            assert isinstance(tables, tuple)
            order = lag(torch.arange(tables[0].shape[-2]))
            moved = tuple(table[..., order, :] for table in tables)
            return inner(*args, **{**kwargs, "position_embeddings": moved})

        return call

    around(layer, wrap)


def _transpose(layer: nn.Module) -> None:
    layer.weight.copy_(layer.weight.t().clone())


def _in_dtype(dtype: torch.dtype) -> Plant:
    def change(layer: nn.Module) -> None:
        def forward(x: Tensor) -> Tensor:
            bias = None if layer.bias is None else layer.bias.to(dtype)
            return F.linear(x.to(dtype), layer.weight.to(dtype), bias).to(x.dtype)

        instead(layer, forward)

    return _weights(change)


def _another_blocks(
    model: nn.Module, layer: nn.Module, architecture: Architecture, block: int
) -> None:
    other = architecture.layer("down", (block + 1) % BLOCKS)
    layer.load_state_dict(model.get_submodule(other).state_dict())


def _row_never_loaded(layer: nn.Module) -> None:
    layer.weight[7].normal_(std=1 / math.sqrt(layer.in_features), generator=generator())
    if layer.bias is not None:
        layer.bias[7] = 0


def _gain_never_loaded(layer: nn.Module) -> None:
    layer.weight.fill_(1)


def _epsilon(layer: nn.Module) -> None:
    names = [name for name in ("epsilon", "variance_epsilon", "eps") if hasattr(layer, name)]
    setattr(layer, names[0], 1e-2)


def _another_activation(layer: nn.Module) -> None:
    instead(layer, F.relu)


def _no_residual(
    model: nn.Module, layer: nn.Module, architecture: Architecture, block: int
) -> None:
    """What came in is not added; in a BERT, to what the MLP makes."""
    if architecture.name == "bert":
        around(layer, lambda inner: lambda x, residual: inner(x, torch.zeros_like(residual)))
    else:
        around(layer, lambda inner: lambda x, *args, **more: _less(inner(x, *args, **more), x))


def _less(result: Tensor | tuple[Tensor, ...], x: Tensor) -> Tensor | tuple[Tensor, ...]:
    return (result[0] - x, *result[1:]) if isinstance(result, tuple) else result - x


def _nan(x: Tensor) -> None:
    x[(1, 4, 3)[-x.dim() :]] = math.nan


def _saturate(x: Tensor) -> None:
    x[..., 5].clamp_(-0.2, 0.2)


def _bad_token(x: Tensor) -> None:
    x[0, 9] *= 1.3


def _last_token(x: Tensor) -> None:
    x[:, -1] = x[:, -2]


def _swap_tokens(x: Tensor) -> None:
    _swap(x, slice(11, 12), slice(12, 13), 1)


def _swap_samples(x: Tensor) -> None:
    _swap(x, slice(0, 1), slice(1, 2), 0)


def _negate(x: Tensor) -> None:
    x[..., :16] *= -1


def _fp8(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn).to(x.dtype)


def _mixer(change: Callable[[nn.Module], None]) -> Plant:
    return lambda model, layer, architecture, block: change(layer)


def _conv_bias(layer: nn.Module) -> None:
    layer.bias.zero_()


def _conv_shift(layer: nn.Module) -> None:
    layer.weight.copy_(layer.weight.roll(1, -1))


def _steps(layer: nn.Module) -> None:
    layer.weight.mul_(1.5)


def _decay(layer: nn.Module) -> None:
    layer.A_log.add_(math.log(1.5))


def _no_skip(layer: nn.Module) -> None:
    layer.D.zero_()


def _positions_ahead(
    model: nn.Module, layer: nn.Module, architecture: Architecture, block: int
) -> None:
    around(layer, lambda inner: lambda ids: inner(ids + 1))


BUGS: tuple[Bug, ...] = (
    Bug("2 % gain", "down", _after(lambda x: x * 1.02), hints("factor")),
    Bug("10 % gain", "down", _after(lambda x: x * 1.1), hints("factor")),
    Bug("shift", "norm", _after(lambda x: x + 0.05), hints("shift")),
    Bug("wrong bias", "up", _wrong_bias, hints("bias")),
    Bug("negated head", "v", _after(_change(_negate)), hints("sign"), models=ATTENTION),
    Bug("negated channels", "up", _after(_change(_negate)), hints("sign"), models=MAMBA),
    Bug("heads swapped", "v", _after(_change(_two_heads)), hints("permutation"), models=ATTENTION),
    Bug("halves swapped", "up", _after(_change(_two_halves)), hints("permutation"), models=MAMBA),
    Bug("B and C swapped", "x", _after(_change(_b_and_c)), hints("permutation"), models=MAMBA),
    Bug("tokens swapped", "up", _after(_change(_swap_tokens)), hints("tokens", "permutation")),
    Bug("samples swapped", "up", _after(_change(_swap_samples)), hints("permutation")),
    Bug("saturated channel", "down", _after(_change(_saturate)), hints("channels", "saturation")),
    Bug("clipped output", "down", _after(lambda x: x.clamp(-0.8, 0.8)), hints("saturation")),
    Bug("bad token", "up", _after(_change(_bad_token)), hints("tokens")),
    Bug("stale last token", "down", _after(_change(_last_token)), hints("tokens")),
    Bug("row never loaded", "up", _weights(_row_never_loaded), hints("channels")),
    Bug("bf16 in one layer", "up", _in_dtype(torch.bfloat16), hints("rounding")),
    Bug("fp16 in one layer", "up", _in_dtype(torch.float16), hints("rounding")),
    Bug("int8 output", "down", _after(lambda x: quantised(x, 8)), hints("grid")),
    Bug("int4 output", "down", _after(lambda x: quantised(x, 4)), hints("grid")),
    Bug("fp8 output", "down", _after(_fp8), hints("grid", "rounding")),
    Bug("int4 weights", "down", _weights(lambda layer: round_weight(layer, 4)), None),
    Bug(
        "no residual",
        "residual",
        _no_residual,
        hints("residual"),
        shows="shows_residual",
    ),
    Bug("wrong epsilon", "norm", _weights(_epsilon), hints("factor", "factors", "affine")),
    Bug("gain never loaded", "norm", _weights(_gain_never_loaded), hints("factors", "affine")),
    Bug("another block's weights", "down", _another_blocks, None),
    Bug("NaN in one element", "up", _after(_change(_nan)), hints("not finite")),
    Bug(
        "wrong activation",
        "activation",
        _weights(_another_activation),
        hints("function"),
        models=ATTENTION,
    ),
    Bug("transposed weight", "o", _weights(_transpose), None, models=ATTENTION),
    # The first token sees itself alone, whatever the scale.
    Bug(
        "wrong scale",
        "attention",
        _attending(_scale),
        hints("tokens", "scale"),
        "behind",
        ATTENTION,
        asked=("demo", "llama"),
    ),
    Bug(
        "head order",
        "attention",
        _heads_out_of_order,
        hints("permutation"),
        "behind",
        ATTENTION,
        asked=("bert",),
    ),
    # The last token has none ahead; the padded sample is the only one with a mask.
    Bug("wrong mask", "attention", _mask, hints("tokens", "samples", "mask"), "behind", ATTENTION),
    Bug(
        "window",
        "attention",
        _attending(_window),
        hints("tokens", "mask"),
        "behind",
        ("demo", "llama"),
    ),
    Bug("position lag", "attention", _lagging, hints("tokens"), "behind", ("demo", "llama")),
    Bug(
        "stale cache",
        "attention",
        _attending(_stale),
        hints("tokens"),
        "behind",
        ATTENTION,
        asked=("demo", "llama"),
    ),
    Bug(
        "embedding gain",
        "embedding",
        _after(lambda x: x * 1.1),
        hints("factor"),
        depths=("before",),
    ),
    Bug(
        "positions off by one",
        "positions",
        _positions_ahead,
        hints("offset"),
        models=("bert",),
        depths=("before",),
    ),
    Bug(
        "final shift", "final_norm", _after(lambda x: x + 0.05), hints("shift"), depths=("behind",)
    ),
    Bug("head gain", "head", _after(lambda x: x * 1.02), hints("factor"), depths=("behind",)),
    Bug("conv bias dropped", "conv", _mixer(_conv_bias), None, "x", MAMBA),
    Bug("conv off by one", "conv", _mixer(_conv_shift), None, "x", MAMBA),
    Bug("time steps too long", "dt", _mixer(_steps), None, "down", MAMBA),
    Bug("decay too fast", "mixer", _mixer(_decay), hints("tokens"), "down", MAMBA),
    Bug("D missing", "mixer", _mixer(_no_skip), None, "down", MAMBA),
    *functional.BUGS,
    *seeing.BUGS,
    *reported.BUGS,
)
_BY_KIND = {bug.kind: bug for bug in BUGS}


def named(kind: str) -> Bug:
    return _BY_KIND[kind]


def cases() -> list[Case]:
    """Every kind in every model that can have it, at every depth; in families in the middle."""
    core = [
        Case(ARCHITECTURES[name], bug, depth)
        for bug in BUGS
        for name in bug.models
        for depth in bug.depths
    ]
    others = [
        Case(model, bug, "middle" if "middle" in bug.depths else bug.depths[0])
        for bug in BUGS
        for model in ARCHITECTURES.values()
        if not model.core and bug.kind in EVERYWHERE and _can_have(model, bug)
    ]
    return core + others


def _can_have(model: Architecture, bug: Bug) -> bool:
    if bug.role not in {**model.roles, **model.outside}:
        return False
    return model.takes is not image or bug.kind in PICTURES or model.name == "vit"
