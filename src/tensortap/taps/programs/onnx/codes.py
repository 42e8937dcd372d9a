"""Values that are integer codes of numbers, with the scale and the zero point of each.

A quantised operator returns codes, which say nothing beside the numbers of a float model. What they
stand for is what is recorded of it: scale times (code less zero point).
"""

from __future__ import annotations

from .graph import Block

__all__ = ["Code", "codes_of"]

Code = tuple[str, str]
"""(the name of the scale, that of the zero point)"""

# Where an operator has the scale of what it returns; its zero point comes next.
_SCALES = {
    "QLinearConv": 6, "QLinearMatMul": 6, "QLinearAdd": 6, "QLinearMul": 6, "QGemm": 7,
    "QLinearSigmoid": 3, "QLinearLeakyRelu": 3, "QLinearAveragePool": 3, "QLinearSoftmax": 3,
    "QLinearGlobalAveragePool": 3, "QLinearReduceMean": 3, "QLinearConcat": 0, "QLinearWhere": 7,
}  # fmt: skip
_PASSING = {
    "MaxPool", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Identity",
    "Gather", "DepthToSpace", "SpaceToDepth",
}  # fmt: skip


def codes_of(block: Block) -> dict[str, Code]:
    """The values of a graph that quantised operators made, and those that only moved them."""
    known: dict[str, Code] = {}
    found: dict[str, Code] = {}
    sizes = {tensor.name: tuple(tensor.dims) for tensor in block.graph.initializer}
    for node in block.nodes:
        inputs = list(node.proto.input)
        at = 1 if node.op == "QuantizeLinear" else _SCALES.get(node.op)
        code: Code | None = None
        if at is not None and len(inputs) > at + 1 and inputs[at] and inputs[at + 1]:
            whole = all(sizes.get(name) in ((), (1,)) for name in inputs[at : at + 2])
            code = (inputs[at], inputs[at + 1]) if whole else None
        elif node.op in _PASSING and inputs:
            code = known.get(inputs[0])
        if code is None:
            continue
        known[node.outputs[0]] = code
        if node.op != "QuantizeLinear":
            found[node.outputs[0]] = code
    return found
