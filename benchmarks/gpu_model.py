"""The model of benchmarks/gpu.py: Llama-shaped, random weights, made on the device.

Recorders keep their hooks while they are open. So every variant has a module tree of its own (a
`twin`) over the same parameters, and plain and recorded forwards take turns within one run.
"""

from __future__ import annotations

import copy
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gpu_parts import Setting

__all__ = ["SHAPES", "Forward", "Shape", "Whole", "build", "linears", "same_bits", "tokens", "twin"]

VOCABULARY = 32000


@dataclass(frozen=True)
class Shape:
    """Tokens of one forward; how often it runs within a timing, and the recorder's budget.

    `weight`: how much longer to measure it, where the host's noise asks for more rounds.

    Half of a budget is the pool of pinned buffers. It must hold what a timing leaves behind faster
    than a disk can take it: 0.05, 0.8 and 6.2 GB a forward for the outputs of 62 layers.
    """

    batch: int
    length: int
    repeat: int = 1
    budget: int = 1 << 30
    weight: float = 1.0

    @property
    def name(self) -> str:
        return f"{self.batch} x {self.length}"


SHAPES = (
    Shape(1, 128, weight=2.5),
    Shape(1, 2048, budget=4 << 30),
    Shape(8, 2048, budget=16 << 30),
)
TINY_SHAPES = (Shape(2, 8, repeat=2),)


def shapes(setting: Setting) -> tuple[Shape, ...]:
    every = TINY_SHAPES if setting.tiny else SHAPES
    return tuple(shape for shape in every if not setting.only or shape.name in setting.only)


def build(setting: Setting, layers: int | None = None) -> nn.Module:
    """62 layers, hidden 3072, 6.3 B parameters in bf16: 0.3 s on an H200."""
    from transformers import LlamaConfig, LlamaForCausalLM

    size: dict[str, Any] = {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 62,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192,
    }
    if setting.tiny:
        size |= {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
        size |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100}
    if layers is not None and not setting.tiny:
        size["num_hidden_layers"] = layers
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with setting.device:
            model: nn.Module = LlamaForCausalLM(LlamaConfig(**size)).eval().model
    finally:
        torch.set_default_dtype(before)
    return model.requires_grad_(False)


def twin(model: nn.Module) -> nn.Module:
    """The same parameters and buffers in modules of their own."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def linears(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def blocks(model: nn.Module) -> list[nn.Module]:
    found: Any = model.layers
    return list(found)


def tokens(setting: Setting, shape: Shape, count: int = 256) -> list[torch.Tensor]:
    """Other tokens every time: content that was seen before is not stored again."""
    made = torch.Generator(device=setting.device).manual_seed(1)
    top = 100 if setting.tiny else VOCABULARY
    size = (shape.batch, shape.length)
    return [
        torch.randint(0, top, size, device=setting.device, generator=made) for _ in range(count)
    ]


class Forward:
    """One forward of a model on the next tokens, until the device is done."""

    def __init__(
        self,
        setting: Setting,
        model: Callable[..., Any],
        ids: Sequence[torch.Tensor],
        then: Callable[[], object] | None = None,
    ) -> None:
        self.setting, self.model, self.ids, self.then, self.calls = setting, model, ids, then, 0
        self.first = 0.0  # seconds of the very first forward, which compiles and pins

    def __call__(self) -> None:
        self.run(self.ids[self.calls % len(self.ids)])
        self.calls += 1
        self.setting.wait()

    def run(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            output = self.model(input_ids=ids, use_cache=False)
        if self.then is not None:
            self.then()
        return output.last_hidden_state


def same_bits(plain: Forward, own: Forward) -> None:
    """A tap changes nothing, or its row is void."""
    ids = plain.ids[-1]
    expected = plain.run(ids)
    plain.setting.wait()
    start = time.perf_counter()
    found = own.run(ids)
    plain.setting.wait()
    own.first = time.perf_counter() - start
    if not torch.equal(expected, found):
        raise AssertionError("it gives other bits than the plain model")


class Whole(nn.Module):
    """The model behind a forward of tokens alone, which torch.compile and graphs take.

    torch.compile shares graphs between instances of a class and does not look at hooks when it
    does: each variant has a forward of its own (`apart`).
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, use_cache=False).last_hidden_state


def apart(kind: type[nn.Module], name: str) -> Any:
    """The same class with a forward whose code is its own."""
    own = kind.forward
    code = own.__code__.replace(co_name=name)
    forward = types.FunctionType(code, own.__globals__, name, own.__defaults__, own.__closure__)
    return type(f"{kind.__name__}_{name}", (kind,), {"forward": forward})
