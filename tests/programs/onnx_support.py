"""Small models for ONNX, exported by either exporter, and what hooks hear of them."""

from __future__ import annotations

import logging
import warnings
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tensortap.taps.leaves import flatten
from tensortap.taps.programs.base import HeardCall, Options
from tensortap.taps.programs.onnx.kind import KIND, OnnxProgram

STYLES = ("dynamo", "dynamo-plain", "torchscript")
CLOSE = 1e-5


class Norm(nn.Module):
    """As in Llama: a cast that does nothing in float32, and the weight last."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(torch.float32)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.o = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        samples, tokens, width = x.shape
        q, k, v = (
            layer(x).view(samples, tokens, 4, width // 4).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        weights = ((q @ k.transpose(-1, -2)) / 3 + mask).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).reshape(samples, tokens, width)), k, v


class Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attn = Norm(width), Attention(width)
        self.norm2, self.mlp = Norm(width), Gated(width)
        self.same, self.drop = nn.Identity(), nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, k, v = self.attn(self.norm1(x), mask)
        x = x + self.same(y)
        return x + self.drop(self.mlp(self.norm2(x))), k, v


class Small(nn.Module):
    """A Llama of two blocks, and behind it a layer that is called twice."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.emb = nn.Embedding(50, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(2))
        self.shared = nn.Linear(width, width)
        self.norm, self.head = Norm(width), nn.Linear(width, 50, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        tokens = ids.shape[1]
        mask = torch.full((tokens, tokens), -1e9).triu(1)
        x = self.emb(ids)
        for layer in self.layers:
            x, _, _ = layer(x, mask)
        return self.head(self.norm(self.shared(torch.relu(self.shared(x)))))


class Pictures(nn.Module):
    """Convolutions with batch norms, which exporters fold; a ReLU that works in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.down = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8))
        self.pool, self.flat, self.fc = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn(self.conv(x)))
        x = self.relu(x + self.down(x))
        return self.fc(self.flat(self.pool(x)))


def pictures() -> Pictures:
    """With statistics that are not those of a new batch norm, so that folding shows."""
    torch.manual_seed(0)
    model = Pictures()
    for norm in (model.bn, model.down[1]):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias)
    for _ in range(3):
        model(torch.randn(4, 3, 8, 8) * 2 + 1)
    return model.eval()


def export(model: nn.Module, args: tuple[Any, ...], path: Path, style: str, **more: Any) -> Path:
    """Write a model by one of `STYLES`; `dynamic` are the axes that vary, by name of input."""
    dynamic: Mapping[str, Sequence[int]] = more.pop("dynamic", {})
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if style == "torchscript":
            axes = {name: {axis: f"d{axis}" for axis in found} for name, found in dynamic.items()}
            more.setdefault("input_names", list(dynamic) or None)
            torch.onnx.export(
                model, args, str(path), dynamo=False, dynamic_axes=axes or None, **more
            )
            return path
        auto = torch.export.Dim.AUTO
        shapes = {name: dict.fromkeys(found, auto) for name, found in dynamic.items()}
        program = torch.onnx.export(
            model, args, dynamo=True, optimize=style == "dynamo", verbose=False,
            dynamic_shapes=shapes or None, **more,
        )  # fmt: skip
        program.save(str(path))
    return path


def opened(path: Any, **options: Any) -> OnnxProgram:
    return KIND.program(path, Options(**options))


def eager(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, list[list[Tensor]]]:
    """What every call of every layer returned, tensor by tensor."""
    found: dict[str, list[list[Tensor]]] = defaultdict(list)

    def hook(name: str) -> Any:
        def hear(module: nn.Module, args: Any, output: Any) -> None:
            found[name].append([t.clone() for _, t in flatten(output) if t is not None])

        return hear

    handles = [m.register_forward_hook(hook(n)) for n, m in model.named_modules() if n]
    with torch.no_grad():
        model(*args, **kwargs)
    for handle in handles:
        handle.remove()
    return dict(found)


def sure(program: OnnxProgram, *, guesses: bool = False) -> list[str]:
    """The layers that are recorded, without the root."""
    return [
        place.name
        for place in program.places
        if place.name and place.gone is None and (guesses or place.provenance != "inferred")
    ]


def heard(
    program: OnnxProgram, *args: Any, layers: Sequence[str] | None = None, **kwargs: Any
) -> dict[str, list[HeardCall]]:
    found: dict[str, list[HeardCall]] = defaultdict(list)
    wanted = sure(program) if layers is None else layers
    for call in program.tapped(wanted, inputs=False, linears=[])(args, kwargs).calls:
        found[call.layer].append(call)
    return dict(found)


def is_close(one: Tensor, other: Tensor, tolerance: float = CLOSE) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    largest = float(other.abs().max()) if other.is_floating_point() else 1.0
    return bool((one.double() - other.double()).abs().max() <= tolerance * largest)


def assert_right(
    found: Mapping[str, Sequence[HeardCall]],
    expected: Mapping[str, Sequence[Sequence[Tensor]]],
    tolerance: float = CLOSE,
    first_alone: Collection[str] = (),
) -> None:
    """Every call that was heard is the eager one's: in number, and one of its tensors each.

    Of `first_alone`, only the first call can be told.
    """
    for layer, calls in found.items():
        assert layer in expected, f"{layer}: eager has no such layer"
        number = 1 if layer in first_alone else len(expected[layer])
        assert len(calls) == number, f"{layer}: {len(calls)} calls"
        for number, (call, tensors) in enumerate(zip(calls, expected[layer], strict=False)):
            for leaf, value in call.outputs:
                assert value is not None
                near = any(is_close(value, tensor, tolerance) for tensor in tensors)
                assert near, f"{layer} call {number} leaf {leaf!r}: {tuple(value.shape)}"
