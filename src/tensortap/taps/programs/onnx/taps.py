"""More outputs for an ONNX model: the values that are to be recorded.

A value of the graph itself becomes an output by its name alone. One inside a branch of an If is
handed out by the branch; the other branch hands out an empty tensor, and a flag tells which ran.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .graph import Chain

__all__ = ["Tapped", "Wanted", "with_outputs"]

_OTHER = {"then_branch": "else_branch", "else_branch": "then_branch"}


@dataclass(frozen=True)
class Wanted:
    """A value, the branch that it is made in, and its type, which branches must state.

    With a `code`, what its integers stand for is wanted: the names of their scale and zero point.
    """

    name: str
    chain: Chain = ()
    type: int = 1
    code: tuple[str, str] | None = None


@dataclass(frozen=True)
class Tapped:
    """A model with more outputs, and by which output each value comes and whether it was made."""

    model: Any
    outputs: Mapping[Wanted, str]
    flags: Mapping[Wanted, str]


def with_outputs(model: Any, wanted: Sequence[Wanted]) -> Tapped:
    """A copy of a model that also returns these values; weights are copied along."""
    import onnx
    from onnx import helper

    result = onnx.ModelProto()
    result.CopyFrom(model)
    known = {output.name for output in result.graph.output}
    outputs: dict[Wanted, str] = {}
    flags: dict[Wanted, str] = {}
    for index, value in enumerate(dict.fromkeys(wanted)):
        name = value.name
        if value.chain:
            name = f"tensortap.value.{index}"
            flags[value] = f"tensortap.made.{index}"
            _hand_out(result.graph, value, name, flags[value])
            result.graph.output.add().name = flags[value]
        elif value.code is not None:
            name = f"tensortap.value.{index}"
            result.graph.node.append(
                helper.make_node("DequantizeLinear", [value.name, *value.code], [name])
            )
        outputs[value] = name
        if name not in known:
            known.add(name)
            result.graph.output.add().name = name
    return Tapped(result, outputs, flags)


def _hand_out(graph: Any, value: Wanted, name: str, flag: str) -> None:
    """Lead a value of a branch out to the graph, through every If around it."""
    import onnx
    from onnx import helper

    graphs = [graph]
    nodes = []
    for index, attribute in value.chain:
        node = graphs[-1].node[index]
        nodes.append((node, attribute))
        graphs.append(_branch(node, attribute))
    inner = graphs[-1]
    inner.node.append(helper.make_node("Identity", [value.name], [f"{name}.{len(nodes)}"]))
    inner.node.append(_constant(f"{flag}.{len(nodes)}", onnx.TensorProto.INT64, [1], [1]))
    for depth in range(len(nodes), 0, -1):
        node, attribute = nodes[depth - 1]
        here, other = graphs[depth], _branch(node, _OTHER[attribute])
        outer = f".{depth - 1}" if depth > 1 else ""
        for stem, kind, sizes, fill in (
            (name, value.type, [0], []),
            (flag, onnx.TensorProto.INT64, [1], [0]),
        ):
            here.output.append(helper.make_tensor_value_info(f"{stem}.{depth}", kind, None))
            other.node.append(_constant(f"{stem}.{depth}.none", kind, sizes, fill))
            other.output.append(helper.make_tensor_value_info(f"{stem}.{depth}.none", kind, None))
            node.output.append(f"{stem}{outer}")


def _branch(node: Any, attribute: str) -> Any:
    return next(item.g for item in node.attribute if item.name == attribute)


def _constant(name: str, kind: int, sizes: list[int], values: list[int]) -> Any:
    from onnx import helper

    tensor = helper.make_tensor(f"{name}.data", kind, sizes, values)
    return helper.make_node("Constant", [], [name], value=tensor)
