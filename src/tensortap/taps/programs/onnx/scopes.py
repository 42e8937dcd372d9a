"""Which module calls each node of an ONNX graph stands in, as its exporter wrote it down.

`marked` reads what `torch.onnx.export(dynamo=True)` writes beside every node, `named` the names
that the TorchScript exporter gives to nodes and values.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..scopes import ModuleCall
from .graph import Node

__all__ = ["DROPPED", "MIXED", "SHARED", "TWICE", "Scopes"]

DROPPED = {"Relu", "Clip"}
"""What a quantiser leaves out, giving its name to the value before it: the scale does the rest."""

TWICE = "the graph does not tell one call of it from two"
MIXED = "another layer's values bear the same name"
SHARED = "another layer that ran before may be the same module, and its calls may be this one's"


@dataclass
class Scopes:
    """What the exporter says of every node. A node that is not in `calls` bears no scope."""

    style: str
    calls: dict[Node, tuple[ModuleCall, ...]] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    reads: dict[Node, frozenset[str]] = field(default_factory=dict)
    rewritten: set[Node] = field(default_factory=set)
    units: dict[Node, str] = field(default_factory=dict)  # the traced operation it belongs to
    leaves: set[str] = field(default_factory=set)  # modules of torch's own, of one operation each
    doubts: dict[str, str] = field(default_factory=dict)
    guessed: set[ModuleCall] = field(default_factory=set)  # may be calls of layers of their own
    notes: list[str] = field(default_factory=list)
