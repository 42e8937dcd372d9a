"""What single nodes of an exported graph are: data or a number, a write, a cast to the same."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

__all__ = [
    "Region",
    "eager_name",
    "is_data",
    "is_quantising",
    "mutates_first",
    "operator_of",
    "passes_on",
    "region",
    "same_kind",
    "scopes_of",
    "writes",
]

_STRIPPED = "_export_root"
_MAY_PASS = {
    "alias",
    "clone",
    "contiguous",
    "detach",
    "detach_",
    "expand",
    "flatten",
    "lift_fresh",
    "lift_fresh_copy",
    "reshape",
    "slice",
    "to",
    "_to_copy",
    "type_as",
    "_unsafe_view",
    "view",
}
_DROPOUTS = {"dropout", "dropout_", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"}


class Region:
    """A graph inside the graph that always runs where it is called, and what it is given."""

    def __init__(self, attribute: str, graph: fx.GraphModule, operands: Sequence[Any]) -> None:
        self.attribute = attribute
        self.graph = graph
        self.operands = operands


def region(module: fx.GraphModule, node: fx.Node) -> Region | None:
    """The region that a node calls: what ran under `no_grad` or `autocast`."""
    before = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}.get(str(node.target))
    if before is None:
        return None
    holder = node.args[before]
    if not isinstance(holder, fx.Node) or holder.op != "get_attr":
        return None
    graph = module.get_submodule(str(holder.target))
    if not isinstance(graph, fx.GraphModule):
        return None
    return Region(str(holder.target), graph, node.args[before + 1 :])


def scopes_of(node: fx.Node) -> list[tuple[str, str, str]]:
    """(key, path, class) of every module call that a node was traced in, outermost first."""
    found: list[tuple[str, str, str]] = []
    stack: dict[str, tuple[Any, Any]] = node.meta.get("nn_module_stack") or {}
    for key, (path, kind) in stack.items():
        name = eager_name(str(path))
        if found and name and found[-1][1] == name:
            found.pop()  # the wrapper of torch.compile around the module that it wraps
        whole = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
        found.append((str(key), name, whole))
    return found


def eager_name(path: str) -> str:
    """A module's or parameter's path as the eager model has it, without what wrappers add."""
    parts = path.removeprefix("L['self'].").split(".")
    return ".".join(part for part in parts if part not in ("", _STRIPPED, "_orig_mod"))


def is_data(node: fx.Node) -> bool:
    """Whether a node's value is a tensor; a shape, a number or several tensors at once are not."""
    value = node.meta.get("val")
    if value is not None:
        return isinstance(value, torch.Tensor)
    if node.op == "placeholder":
        return True
    schema = getattr(node.target, "_schema", None)
    returns: Any = getattr(schema, "returns", ())
    return len(returns) == 1 and str(returns[0].type) == "Tensor"


def is_quantising(node: fx.Node) -> bool:
    """Whether a node is one that a quantiser puts between two layers."""
    name = operator_of(node)
    return name.startswith(("quantize_", "dequantize_", "choose_qparams"))


def writes(node: fx.Node) -> bool:
    """Whether a node writes to any of its arguments."""
    schema = getattr(node.target, "_schema", None)
    return bool(getattr(schema, "is_mutable", False))


def mutates_first(node: fx.Node) -> bool:
    """Whether a node writes to its first argument."""
    schema = getattr(node.target, "_schema", None)
    arguments = getattr(schema, "arguments", ())
    if not arguments or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    alias = arguments[0].alias_info
    return alias is not None and bool(alias.is_write)


def passes_on(node: fx.Node) -> bool:
    """Whether a node's value is its first argument's, unchanged."""
    name = operator_of(node)
    if name in _DROPOUTS:
        return len(node.args) > 2 and node.args[2] is False
    if name == "copy_":
        return False
    return name in _MAY_PASS and same_kind(node, node.args[0] if node.args else None)


def same_kind(one: Any, other: Any) -> bool:
    """Whether two nodes have the same shape, dtype and device, as far as the graph says so."""
    if not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
        return False
    left, right = one.meta.get("val"), other.meta.get("val")
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return False
    with contextlib.suppress(RuntimeError):
        return (
            [str(size) for size in left.shape] == [str(size) for size in right.shape]
            and left.dtype == right.dtype
            and left.device == right.device
        )
    return False


def operator_of(node: fx.Node) -> str:
    """The bare name of a node's operator, without library and overload."""
    schema = getattr(node.target, "_schema", None)
    name = str(getattr(schema, "name", ""))
    return name.rsplit("::", 1)[-1]
