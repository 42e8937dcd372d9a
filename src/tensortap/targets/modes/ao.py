"""The modes that torchao computes: what it converts, what it cannot, and what can run here.

torchao converts linears. Where it takes a layer and then computes something else, or nothing, the
layer stays as it was, with a note: it is tried once converted, and the first batch is rehearsed to
see whose weights are read by other code than `F.linear(x, weight, bias)`, of which torchao would
lose a bias given by name without a word.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...errors import MissingExtraError, OptionError
from ...taps.grids import GRID
from ...taps.isolation import unchanged
from ...taps.programs.quiet import quietly
from ..target import Target
from .layers import (
    CONVOLUTIONS,
    TRANSPOSED,
    find_layers,
    is_matrix,
    left_notes,
    listed,
    replace_forward,
    same_device,
    weight_notes,
)
from .observing import eagerly, run_batch

__all__ = ["AO_MODES", "GROUP", "apply_ao", "package", "why_not"]

GROUP = 32
"""How many weights of a row share a scale in int4wo."""
_REFUSALS = (AssertionError, AttributeError, ImportError, RuntimeError, TypeError, ValueError)


def _int8(ao: Any, device: torch.device) -> Any:
    reduced = getattr(importlib.import_module("torchao.utils"), "should_reduce_range", None)
    options = {"reduce_range": True} if reduced is not None and reduced(device) else {}
    return ao.Int8DynamicActivationInt8WeightConfig(set_inductor_config=False, **options)


_CONFIGS: dict[str, Callable[[Any, torch.device], Any]] = {
    "int8": _int8,
    "int8wo": lambda ao, _: ao.Int8WeightOnlyConfig(set_inductor_config=False),
    "int4wo": lambda ao, _: ao.IntxWeightOnlyConfig(
        weight_dtype=torch.int4,  # type: ignore[attr-defined]
        granularity=ao.PerGroup(GROUP),
    ),
    "fp8": lambda ao, _: ao.Float8DynamicActivationFloat8WeightConfig(set_inductor_config=False),
    "fp8wo": lambda ao, _: ao.Float8WeightOnlyConfig(set_inductor_config=False),
}
AO_MODES = tuple(_CONFIGS)
_GRIDS = {
    "int8": "int8",
    "int8wo": "int8",
    "int4wo": "int4",
    "fp8": "float8_e4m3fn",
    "fp8wo": "float8_e4m3fn",
}


def package(mode: str) -> Any:
    """torchao's quantisation, imported without its noise."""
    try:
        with quietly():
            return importlib.import_module("torchao.quantization")
    except ImportError as error:
        raise MissingExtraError("torchao", "quant", f"The mode {mode!r}") from error


def _quantise(layer: nn.Module, mode: str, device: torch.device) -> None:
    ao = package(mode)
    with quietly():
        ao.quantize_(layer, _CONFIGS[mode](ao, device), filter_fn=lambda module, _: module is layer)


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(".")


@functools.cache
def why_not(mode: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why torchao cannot run this mode on this device: what happened when it was tried."""
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            layer = nn.Linear(4 * GROUP, 2 * GROUP).to(device, dtype)
            x = torch.randn(GROUP, 4 * GROUP).to(device, dtype)
            expected = layer(x).double()
            _quantise(layer, mode, device)
            if type(layer.weight.data) is Tensor:
                return "torchao leaves the weights as they are"
            error = (layer(x).double() - expected).norm() / expected.norm()
    except MissingExtraError as missing:
        return str(missing)
    except _REFUSALS as refusal:
        return _reason(refusal)
    return None if float(error) < 0.25 else f"torchao's result is off by {float(error):.0%}"


def apply_ao(target: Target, mode: str, *, rehearse: bool = True) -> list[str]:
    """Convert the linears of the target's model in place; notes of what was done.

    Without inputs there is no batch to `rehearse`: every weight then counts as read by its layer.
    """
    model: nn.Module = target.model
    found = find_layers(model, lambda module: isinstance(module, nn.Linear))
    left = {reason: list(names) for reason, names in found.left.items()}
    otherwise = _read_otherwise(target, found.layers) if rehearse else {}
    for name, how in otherwise.items():
        left.setdefault(f"other code reads its weight ({how})", []).append(name)
    read = {name for names in left.values() for name in names}
    layers = {name: layer for name, layer in found.layers.items() if name not in read}
    device = same_device(layers.values())
    made: dict[str, nn.Parameter] = {}
    shared: dict[tuple[int, torch.Size], tuple[nn.Parameter, nn.Parameter | str]] = {}
    for name, layer in layers.items():
        weight = layer.get_parameter("weight")
        key = id(weight), weight.shape
        if key not in shared:
            shared[key] = weight, _converted(layer, weight, mode, device)
        result = shared[key][1]
        if isinstance(result, str):
            left.setdefault(result, []).append(name)
        else:
            made[name] = result
    if not made:
        raise OptionError(_nothing(model, mode, left))
    done = {name: layers[name] for name in made}
    others = [n for n, m in model.named_modules() if isinstance(m, CONVOLUTIONS + TRANSPOSED)]
    others += [n for n, m in model.named_modules() if is_matrix(m)]
    if others:
        left["torchao converts linears alone"] = others
    notes = [*weight_notes(model, mode, done), *left_notes(mode, left)]
    for name, layer in done.items():
        layer._parameters["weight"] = made[name]
        vars(layer)[GRID] = _GRIDS[mode]
        if mode in ("int8", "fp8"):
            replace_forward(layer, _without_rows)
    if any(isinstance(module, nn.TransformerEncoderLayer) for module in model.modules()):
        notes.append(
            "nn.TransformerEncoderLayer runs layer by layer in this mode and not as one fused "
            "operation: last bits, and what stands at padded positions, differ by that too."
        )
    return notes


def _converted(
    layer: nn.Module, weight: nn.Parameter, mode: str, device: torch.device
) -> nn.Parameter | str:
    """The quantised weight of a layer, tried on a few rows, or why there is none."""
    width = weight.shape[1]
    if mode == "int4wo" and width % GROUP:
        return f"its rows are no multiple of {GROUP} long"
    trial = nn.Linear(width, weight.shape[0], bias=False, device="meta")
    trial.weight = nn.Parameter(weight.detach(), requires_grad=False)
    try:
        _quantise(trial, mode, device)
        with torch.no_grad():
            trial(torch.zeros(2, width, dtype=weight.dtype, device=weight.device))
    except _REFUSALS as refusal:
        return f"torchao refuses it: {_reason(refusal)}"
    if type(trial.weight.data) is Tensor:
        return "torchao leaves a weight of its size as it is"
    return trial.weight


def _without_rows(layer: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A forward that also takes inputs without rows (an expert without tokens), unlike torchao."""
    x = args[0] if args else kwargs.get("input")
    if isinstance(x, Tensor) and not x.numel():
        return x.new_zeros(*x.shape[:-1], layer.get_parameter("weight").shape[0])
    return original(*args, **kwargs)


class _Readers(TorchFunctionMode):
    """Hears which functions get one of these weights, other than F.linear as torchao has it."""

    def __init__(self, weights: Mapping[int, str]) -> None:
        super().__init__()
        self.weights = weights
        self.found: dict[str, str] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        told = name in ("__get__", "__set__", "size", "dim", "numel", "is_floating_point", "stride")
        if not told and not (func is F.linear and not kwargs):
            for value in (*args, *kwargs.values()):
                if id(value) in self.weights:
                    self.found.setdefault(self.weights[id(value)], name or str(func))
        return func(*args, **kwargs)


def _read_otherwise(target: Target, layers: Mapping[str, nn.Module]) -> dict[str, str]:
    """The layers whose weights are read by other functions, and by which, in the first batch."""
    model: nn.Module = target.model
    if not layers:
        return {}
    with unchanged(model), eagerly(model):
        weights: dict[str, nn.Parameter] = {}
        for name, layer in layers.items():  # one of its own each, so that ties tell nothing
            own = layer.get_parameter("weight")
            weights[name] = nn.Parameter(own.detach(), requires_grad=own.requires_grad)
            layer._parameters["weight"] = weights[name]
        readers = _Readers({id(weight): name for name, weight in weights.items()})
        with readers:
            run_batch(target, target.batches[0])
    return readers.found


def _nothing(model: nn.Module, mode: str, left: Mapping[str, list[str]]) -> str:
    if not left:
        return (
            f"The mode {mode!r} quantises linears, and {type(model).__name__} has no nn.Linear. "
            "For convolutions and transformers' Conv1D there is simulated quantisation: fake:w8a8."
        )
    reasons = "; ".join(f"{listed(names)}: {why}" for why, names in left.items())
    return f"The mode {mode!r} can convert none of the model's linears. {reasons}."
