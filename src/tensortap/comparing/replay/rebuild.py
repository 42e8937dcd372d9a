"""How a layer is made again in a script: by its constructor, or attribute by attribute.

What a constructor was given is mostly kept under the same name, so it can be read off the layer.
Where it is not, the class is enough: its constructor is left out, and children and plain attributes
are set as they were. Either way the weights come from a file, and whoever writes the script runs it
and looks whether the output is the same.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ...selection.sites import unwrap
from .values import CannotWrite, Source, is_name

__all__ = ["Rebuilder"]

_HOLDERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_INTERNAL = frozenset(vars(nn.Module()))
_ELSEWHERE = ("device", "dtype")  # the weights bring theirs along
_INDENT = "    "
_RECURRENT = (
    *("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout"),
    *("bidirectional", "proj_size"),
)
# Where a parameter of a constructor goes under another name.
_OTHER_NAMES = {
    "eps": ("variance_epsilon", "epsilon"),
    "epsilon": ("eps", "variance_epsilon"),
    "layer_idx": ("layer_index",),
}
_Value = Any


class Rebuilder:
    """Writes the expression that makes a layer; `bare` never runs a constructor of others."""

    def __init__(self, source: Source, model: nn.Module, *, bare: bool) -> None:
        self.source = source
        self.model = model
        self.bare = bare
        self.made_bare = False

    def expression(self, module: nn.Module, name: str = "", depth: int = 0) -> str:
        """The layer as source text; lines behind the first are indented to `depth`."""
        module = unwrap(module)
        kind = self.source.named(type(module))
        if type(module) in _HOLDERS:
            return self._holder(module, kind, name, depth)
        if type(module).__module__.startswith("torch.nn.") or not self.bare:
            known = self._constructor(module, name)
            if known is not None:
                given = [f"{key}={text}" for key, text in known.items()]
                return f"{kind}{_lines('(', given, ')', depth)}"
        return self._bare(module, kind, name, depth)

    def _holder(self, module: nn.Module, kind: str, name: str, depth: int) -> str:
        children = [
            (key, self.expression(child, _join(name, key), depth + 1))
            for key, child in module._modules.items()
            if child is not None
        ]
        if isinstance(module, nn.ModuleDict):
            return f"{kind}({_lines('{', [f'{k!r}: {c}' for k, c in children], '}', depth)})"
        if [key for key, _ in children] == [str(at) for at in range(len(children))]:
            inside = [child for _, child in children]
            if isinstance(module, nn.ModuleList):
                return f"{kind}({_lines('[', inside, ']', depth)})"
            return f"{kind}{_lines('(', inside, ')', depth)}"
        return self._bare(module, kind, name, depth)

    # By its constructor.

    def _constructor(self, module: nn.Module, name: str) -> dict[str, str] | None:
        """The arguments that differ from their defaults; None where one cannot be known."""
        try:
            parameters = inspect.signature(type(module)).parameters
        except (TypeError, ValueError):
            return None
        special = _special(module)
        names = list(special) if special is not None else list(parameters)
        found: dict[str, str] = {}
        for key in names:
            parameter = parameters.get(key)
            if key in _ELSEWHERE or key.startswith("_"):
                continue
            if parameter is not None and parameter.kind in (
                inspect.Parameter.VAR_POSITIONAL,
                inspect.Parameter.VAR_KEYWORD,
            ):
                continue
            known, value = self._argument(module, key, special)
            default = inspect.Parameter.empty if parameter is None else parameter.default
            if not known:
                if default is inspect.Parameter.empty:
                    return None
                continue
            if type(value) is type(default) and value == default:
                continue
            try:
                found[key] = self.source.value(value, _join(name, key))
            except CannotWrite:
                return None
        return found

    def _argument(
        self, module: nn.Module, key: str, special: Mapping[str, _Value] | None
    ) -> tuple[bool, _Value]:
        if special is not None:
            return True, special[key]
        for other in (key, *_OTHER_NAMES.get(key, ())):
            if hasattr(module, other):
                value = getattr(module, other)
                if isinstance(value, nn.Module):
                    return False, None  # what was made of the argument, not the argument
                if isinstance(value, torch.Tensor) or (value is None and key == "bias"):
                    return True, value is not None
                return True, value
        if key == "config":
            config = getattr(self.model, "config", None)
            return config is not None, config
        if key in ("hidden_size", "dim", "hidden") and isinstance(
            getattr(module, "weight", None), torch.Tensor
        ):
            return True, int(module.weight.shape[-1])  # type: ignore[index]
        return False, None

    # Attribute by attribute.

    def _bare(self, module: nn.Module, kind: str, name: str, depth: int) -> str:
        self.made_bare = True
        parts: dict[str, str] = {}
        for key, value in self._attributes(module):
            with contextlib.suppress(CannotWrite):  # whether it is needed shows when it is tried
                parts[key] = self.source.value(value, _join(name, key))
        for key, child in module._modules.items():
            made = None if child is None else self.expression(child, _join(name, key), depth + 1)
            parts[key] = str(made)
        if all(map(is_name, parts)):
            inside = [f"{key}={text}" for key, text in parts.items()]
            return f"make{_lines('(', [kind, *inside], ')', depth)}"
        inside = [f"{key!r}: {text}" for key, text in parts.items()]
        return f"make({kind}, **{_lines('{', inside, '}', depth)})"

    def _attributes(self, module: nn.Module) -> Iterator[tuple[str, _Value]]:
        for key, value in vars(module).items():
            if key not in _INTERNAL and is_name(key):
                yield key, value
        for key, value in (*module._parameters.items(), *module._buffers.items()):
            if value is None and is_name(key):
                yield key, None


def _special(module: nn.Module) -> dict[str, _Value] | None:
    """Constructors of torch whose arguments have no attributes of the same name."""
    if isinstance(module, nn.RNNBase):
        names = _RECURRENT if isinstance(module, nn.LSTM) else _RECURRENT[:-1]
        found = {key: getattr(module, key) for key in names}
        if type(module) is nn.RNN:
            found["nonlinearity"] = module.nonlinearity
        return found
    if type(module) is nn.MultiheadAttention:
        own = ("embed_dim", "num_heads", "dropout", "add_zero_attn", "kdim", "vdim")
        return {
            **{key: getattr(module, key) for key in own},
            "bias": module.in_proj_bias is not None,
            "add_bias_kv": module.bias_k is not None,
            "batch_first": module.batch_first,
        }
    if type(module) in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
        layer: Any = module
        return {
            "d_model": layer.self_attn.embed_dim,
            "nhead": layer.self_attn.num_heads,
            "dim_feedforward": layer.linear1.out_features,
            "dropout": layer.dropout.p,
            "activation": layer.activation,
            "layer_norm_eps": layer.norm1.eps,
            "batch_first": layer.self_attn.batch_first,
            "norm_first": layer.norm_first,
            "bias": layer.linear1.bias is not None,
        }
    return None


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _lines(head: str, inside: list[str], tail: str, depth: int) -> str:
    """Items on one line where they fit, else one a line."""
    flat = f"{head}{', '.join(inside)}{tail}"
    if len(flat) <= 88 and "\n" not in flat:
        return flat
    space = "\n" + _INDENT * (depth + 1)
    body = f",{space}".join(inside)
    return f"{head.rstrip()}{space}{body},\n{_INDENT * depth}{tail}"
