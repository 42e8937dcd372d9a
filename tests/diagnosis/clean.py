"""Pairs in which nothing is wrong: another precision, another number of threads, another order."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from architecture import Architecture
from planting import round_weight, split_sums
from rewritten import REWRITTEN
from torch import nn
from zoo import ARCHITECTURES, make

from tensortap.demo import Int8Linear
from tensortap.targets.modes.builtin import in_mode

__all__ = ["CLEAN", "OTHERWISE", "Pair", "pairs", "threads"]


@dataclass(frozen=True)
class Pair:
    """A model and the same one, computed otherwise."""

    architecture: Architecture
    kind: str
    seed: int

    def __str__(self) -> str:
        return f"{self.architecture.name}, {self.kind}, seed {self.seed}"

    def first(self, recorded: Sequence[str]) -> str | None:
        """The first layer that differs beyond what its dtype makes.

        Rounded weights in a float32 model cannot be told from wrong ones: there it is the first
        linear of the blocks. Weights of torchao say that they are int8.
        """
        if self.kind != "int8 weights":
            return None
        names = _linears(make(self.architecture.name, self.seed))
        return next(name for name in recorded if name in names)

    @property
    def threads(self) -> int:
        return 2 if self.kind == "two threads" else 1

    def model(self) -> nn.Module:
        model = copy.deepcopy(make(self.architecture.name, self.seed))
        if self.kind in OTHERWISE:
            return OTHERWISE[self.kind](model, self)
        return CLEAN[self.kind](model)


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    """Run with so many threads; small models run faster on one."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _linears(model: nn.Module) -> dict[str, nn.Linear]:
    """The linears of the blocks, as quantisers take them; of a Mamba those that it calls.

    The head stays: transformers casts what goes into a Mamba's to the dtype of its weights.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    inside = [name for name in names if ".0." in _numbered(name)]
    outside = {*names} - {*inside} if inside else {*names[-1:]}
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name not in outside and ".dt_proj" not in name
    }


def _numbered(name: str) -> str:
    return ".".join("0" if part.isdigit() else part for part in name.split("."))


def _int8_weights(model: nn.Module) -> nn.Module:
    for linear in _linears(model).values():
        round_weight(linear, 8)
    return model


def _int8(model: nn.Module) -> nn.Module:
    """int8 weights by channel and int8 activations by token."""
    for name, linear in _linears(model).items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, Int8Linear(linear))
    return model


def _torchao(model: nn.Module) -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    wanted = {id(linear) for linear in _linears(model).values()}
    quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda module, name: id(module) in wanted)
    return model


def _other_order(model: nn.Module) -> nn.Module:
    for linear in _linears(model).values():
        split_sums(linear, 4)
    return model


def _eager(model: nn.Module) -> nn.Module:
    """Attention step by step instead of torch's kernel."""
    model.config._attn_implementation = "eager"
    return model


def _mode(name: str) -> Callable[[nn.Module, Pair], nn.Module]:
    """One of our own modes; static scales are calibrated on the inputs."""
    return lambda model, pair: in_mode(model, name, inputs=pair.architecture.inputs(pair.seed))


def _rewritten(model: nn.Module, pair: Pair) -> nn.Module:
    return REWRITTEN[pair.architecture.name](model).eval().requires_grad_(False)


CLEAN: dict[str, Callable[[nn.Module], nn.Module]] = {
    "two threads": lambda model: model,
    "other order of sums": _other_order,
    "eager attention": _eager,
    "bf16": lambda model: model.to(torch.bfloat16),
    "fp16": lambda model: model.to(torch.float16),
    "int8 weights": _int8_weights,
    "int8": _int8,
    "fp64": lambda model: model.double(),
    "channels last": lambda model: model.to(memory_format=torch.channels_last),
}
# What has to know more than the model.
OTHERWISE: dict[str, Callable[[nn.Module, Pair], nn.Module]] = {
    "rewritten": _rewritten,
    "w8a8": _mode("fake:w8a8"),
    "w4a8": _mode("fake:w4a8"),
}
with contextlib.suppress(ImportError):
    import torchao  # noqa: F401

    CLEAN["int8 weights, torchao"] = _torchao
    OTHERWISE["int8, torchao"] = _mode("int8")


def pairs(seeds: range = range(3)) -> list[Pair]:
    return [
        Pair(architecture, kind, seed)
        for kind in (*CLEAN, *OTHERWISE)
        for architecture in ARCHITECTURES.values()
        if _can(architecture, kind)
        for seed in (seeds if architecture.core and kind in FIRST else seeds[: SEEDS.get(kind, 1)])
    ]


# How many of the seeds the models of the families get: low precisions are where routers flip.
SEEDS = {"bf16": 2, "fp16": 2}
# What every seed of the first models gets.
FIRST = (
    "two threads",
    "other order of sums",
    "eager attention",
    "bf16",
    "fp16",
    "int8 weights",
    "int8",
    "int8 weights, torchao",
)


def _can(architecture: Architecture, kind: str) -> bool:
    """Whether this way to compute is another one for the model."""
    if kind == "eager attention":
        return architecture.sdpa
    if kind == "two threads":
        return architecture.core
    if kind == "rewritten":
        return architecture.name in REWRITTEN
    if kind == "channels last":
        return architecture.name in ("resnet", "convnext", "unet", "denoiser")
    if kind == "fp64":
        return architecture.name not in ("qwen3_moe", "jamba")  # grouped products have none
    if kind.endswith("torchao") and architecture.name in ("falcon", "jamba"):
        return False  # they compute with weights in other ways than a linear
    if kind.startswith("int8") and architecture.name == "siamese":
        return False  # torch's encoder layer takes the weights of its linears itself
    if architecture.core or kind in ("bf16", "fp16"):
        return True
    return len(_linears(make(architecture.name))) > 2
