"""Which of its own tensors an exported graph writes into.

Buffers are written by habit; a parameter only by a model that changes its weights as it runs, and
keeping all weights for the sake of those would cost as much memory as the model.
"""

from __future__ import annotations

from typing import Any

from torch import fx

__all__ = ["written_attributes"]


def written_attributes(module: fx.GraphModule) -> set[str]:
    """The attributes that the graph's ops write into, directly or through views."""
    return {
        str(node.target)
        for node in module.graph.nodes
        if node.op == "get_attr" and _is_written(node, module, set())
    }


def _is_written(node: fx.Node, module: fx.GraphModule, seen: set[fx.Node]) -> bool:
    for user in node.users:
        if user in seen:
            continue
        schema: Any = getattr(user.target, "_schema", None)
        if schema is None:
            if user.op == "call_function" and _enters(user, node, module):
                return True
            continue
        given = [*zip(schema.arguments, user.args, strict=False)]
        given += [(a, user.kwargs[a.name]) for a in schema.arguments if a.name in user.kwargs]
        mine = [argument for argument, value in given if value is node]
        if any(a.alias_info is not None and a.alias_info.is_write for a in mine):
            return True
        if any(a.alias_info is not None for a in mine) and _is_written(user, module, {*seen, node}):
            return True  # a view
    return False


def _enters(user: fx.Node, node: fx.Node, module: fx.GraphModule) -> bool:
    """Whether a graph that is called with a value writes into it."""
    graphs = [
        inner
        for value in user.args
        if isinstance(value, fx.Node) and value.op == "get_attr"
        if isinstance(inner := getattr(module, str(value.target), None), fx.GraphModule)
    ]
    flat: list[Any] = []
    for value in user.args:
        flat += value if isinstance(value, tuple | list) else [value]
    tensors = [
        value
        for value in flat
        if isinstance(value, fx.Node)
        and not isinstance(getattr(module, str(value.target), None), fx.GraphModule)
    ]
    for inner in graphs:
        places = [item for item in inner.graph.nodes if item.op == "placeholder"]
        for place, value in zip(places, tensors, strict=False):
            if value is node and _is_written(place, inner, set()):
                return True
    return False
