"""Pairs in which nothing is wrong: another precision, another number of threads, another order."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from planting import round_weight, split_sums
from torch import nn
from zoo import ARCHITECTURES, Architecture, make

from tensortap.demo import Int8Linear

__all__ = ["CLEAN", "Pair", "pairs", "threads"]


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
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and ".0." in _numbered(name) and ".dt_proj" not in name
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


CLEAN: dict[str, Callable[[nn.Module], nn.Module]] = {
    "two threads": lambda model: model,
    "other order of sums": _other_order,
    "eager attention": _eager,
    "bf16": lambda model: model.to(torch.bfloat16),
    "fp16": lambda model: model.to(torch.float16),
    "int8 weights": _int8_weights,
    "int8": _int8,
}
with contextlib.suppress(ImportError):
    import torchao  # noqa: F401

    CLEAN["int8 weights, torchao"] = _torchao


def pairs(seeds: range = range(3)) -> list[Pair]:
    return [
        Pair(architecture, kind, seed)
        for kind in CLEAN
        for architecture in ARCHITECTURES.values()
        if kind != "eager attention" or architecture.name in ("llama", "bert")
        for seed in seeds
    ]
