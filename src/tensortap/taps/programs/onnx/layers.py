"""Which values of an ONNX graph are what its layers returned, and how sure that is.

Two things make a graph lie about its layers: nodes that lost their scope (a quantiser's, whose
values may have been inside or outside of a layer) and nodes that were made of several (a batch norm
folded into a convolution, a fused operator). Wherever one of them stands at a layer's edge, the
layer's name is a guess, or the layer is gone.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..scopes import ModuleCall, Step, entering, leaving
from .graph import Block, Chain, Node
from .scopes import Scopes

__all__ = ["Call", "Layers", "read_layers", "settle_guesses"]

UNUSED = "nothing reads what it returns, so the compiler dropped it"
FOLDED = "the layer behind it was folded into it, and its own value is gone"
CONSTANT = "it makes constants and shapes alone, which the graph holds as such"
LOOPED = "it runs inside a loop of the graph, whose values cannot be told call by call"
OWNER = "it was folded into another layer, lost its name to an optimiser, or nothing reads it"
NUMBERED = "its later calls may be layers of their own"
STRIPPED = "nodes beside it bear no names: its end cannot be told"
REWRITTEN = "an optimiser rewrote the nodes behind it"
FUSED = "a fused operator reads its value, and may hold its last part"

_CASTS = {"Identity", "Dropout"}
_HARMLESS = {"SimplifiedLayerNormalization", "LayerNormalization", "QuickGelu", "Gelu"}
_PARTIAL = re.compile(r"val_\d+\Z")


@dataclass(frozen=True)
class Call:
    """One call of a layer: the values that it returned and read, the main one first."""

    layer: str
    outputs: tuple[str, ...]
    inputs: tuple[str, ...]
    order: tuple[int, ...]
    chain: Chain = ()
    nodes: tuple[Node, ...] = ()
    guessed: bool = False  # it may be of a layer of its own
    leaves: tuple[str, ...] = ()  # where each output stands in what it returned, where known


@dataclass
class Layers:
    """Everything that a graph knows of layers, in the order in which their first calls end."""

    calls: list[Call] = field(default_factory=list)
    types: dict[str, str] = field(default_factory=dict)
    doubts: dict[str, str] = field(default_factory=dict)
    gone: dict[str, str] = field(default_factory=dict)
    by_weight: set[str] = field(default_factory=set)  # named by the weights that they read
    style: str = "none"
    notes: list[str] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """The layers, those that are gone behind the others."""
        return list(dict.fromkeys([*(call.layer for call in self.calls), *self.gone]))


def read_layers(blocks: Sequence[Block], scopes: Scopes, owners: Sequence[str]) -> Layers:
    """The layers of a graph; `owners` are layers that had weights when it was exported."""
    layers = Layers(types=dict(scopes.types), doubts=dict(scopes.doubts), style=scopes.style)
    layers.notes += scopes.notes
    if scopes.style == "none":
        return layers
    outside: set[str] = set()
    for block in blocks:
        reading = _Reading(block, scopes)
        if not block.chain:
            outside = {path for step in reading.steps for path, _ in step.calls}
        if block.in_loop:
            for path, _ in reading.leaving:
                if path not in outside:
                    layers.gone[path] = LOOPED
            continue
        reading.tell(layers, outside if block.chain else set())
    layers.calls.sort(key=lambda call: call.order)
    heard = {call.layer for call in layers.calls}
    for name in owners:
        if name and name not in heard:
            layers.gone.setdefault(name, OWNER)
    for name in list(layers.gone):
        if layers.gone[name] == LOOPED:
            layers.calls = [call for call in layers.calls if call.layer != name]
        elif name in heard:
            del layers.gone[name]
    return layers


def settle_guesses(layers: Layers, *, accepted: bool) -> None:
    """Leave out later calls that may be of layers of their own, or take the layer for a guess."""
    guessed = list(dict.fromkeys(call.layer for call in layers.calls if call.guessed))
    if not guessed:
        return
    if accepted:
        for layer in guessed:
            layers.doubts.setdefault(layer, NUMBERED)
        return
    layers.calls = [call for call in layers.calls if not call.guessed]
    several = f"{len(guessed)} layers" if len(guessed) > 1 else "a layer"
    layers.notes.append(
        f"Only the first call of {several} without weights ('{guessed[0]}') is recorded: the "
        f"TorchScript exporter writes '{guessed[0]}_1' for a second call and for a layer of that "
        "name. --accept-inferred takes them for calls."
    )


class _Reading:
    """One block: its steps, and what leaves and enters the calls in it."""

    def __init__(self, block: Block, scopes: Scopes) -> None:
        self.block = block
        self.scopes = scopes
        self.alias: dict[str, str] = {}
        self.doubts: dict[ModuleCall, str] = {}
        self.adopted: dict[Node, tuple[ModuleCall, ...]] = {}
        self._find_aliases()
        self._adopt()
        self.steps = [step for node in block.nodes for step in self._steps(node)]
        self.step = {step.name: step for step in self.steps}
        self.results = [self._real(name) for name in block.results]
        self.leaving = leaving(self.steps, self.results)
        self.entering = entering(self.steps)

    # Steps.

    def _real(self, name: str) -> str:
        while name in self.alias:
            name = self.alias[name]
        return name

    def _find_aliases(self) -> None:
        """What is quantised and at once dequantised is, to its readers, still the same value."""
        for node in self.block.nodes:
            if node.op != "DequantizeLinear" or node in self.scopes.calls:
                continue
            source = self.block.maker.get(node.inputs[0])
            if (
                source is not None
                and source.op == "QuantizeLinear"
                and source not in self.scopes.calls
                and self.block.computes(source)
            ):
                self.alias[source.outputs[0]] = source.inputs[0]
                self.alias[node.outputs[0]] = source.outputs[0]

    def _calls(self, node: Node) -> tuple[ModuleCall, ...]:
        return self.scopes.calls.get(node, self.adopted.get(node, ()))

    def _steps(self, node: Node) -> list[Step]:
        block = self.block
        inputs = tuple(self._real(name) for name in node.inputs if name not in block.constants)
        passes = node.op in _CASTS or (node.op == "Cast" and self._casts_nothing(node))
        calls = self._calls(node)
        return [
            Step(name, inputs, calls, passes and index == 0, block.is_data(name))
            for index, name in enumerate(node.outputs)
            if name not in self.alias
        ]

    def _casts_nothing(self, node: Node) -> bool:
        attribute = node.attribute("to")
        kind = self.block.types.get(node.inputs[0])
        return attribute is not None and kind is not None and attribute.i == kind

    def _adopt(self) -> None:
        """Nodes without a scope stand in the calls of all that read them; at an edge, in doubt."""
        block = self.block
        lost = [
            node
            for node in block.nodes
            if node not in self.scopes.calls
            and block.computes(node)
            and not any(name in self.alias for name in node.outputs)
        ]
        results = set(block.results)
        for group in self._groups(lost):
            made = {name for node in group for name in node.outputs}
            after = {
                reader
                for name in made
                for reader in self._reading(name)
                if reader not in group and block.computes(reader)
            }
            before = {
                block.maker[source]
                for node in group
                for name in node.inputs
                if (source := self._real(name)) in block.maker
                and block.is_data(source)
                and block.maker[source] not in group
            }
            ends = [self.scopes.calls.get(node, ()) for node in after]
            if made & results or not ends:
                ends.append(())
            shared = [call for call in ends[0] if all(call in end for end in ends)]
            self.adopted.update(dict.fromkeys(group, tuple(shared)))
            for node in before:
                for call in self.scopes.calls.get(node, ()):
                    if call not in shared:
                        self.doubts[call] = STRIPPED

    def _reading(self, name: str) -> list[Node]:
        """Who reads a value, also behind quantising it."""
        found = []
        for node in self.block.readers.get(name, []):
            if node.outputs and node.outputs[0] in self.alias:
                found += self._reading(node.outputs[0])
            else:
                found.append(node)
        return found

    def _groups(self, nodes: Sequence[Node]) -> list[set[Node]]:
        """The nodes, each with those that it is joined to by values."""
        wanted, groups = set(nodes), []
        while wanted:
            group, stack = set(), [wanted.pop()]
            while stack:
                node = stack.pop()
                group.add(node)
                near = [reader for name in node.outputs for reader in self._reading(name)]
                sources = (self.block.maker.get(self._real(name)) for name in node.inputs)
                near += [source for source in sources if source is not None]
                found = {other for other in near if other in wanted}
                wanted -= found
                stack += found
            groups.append(group)
        return groups

    # Layers.

    def tell(self, layers: Layers, outside: set[str]) -> None:
        """Add the calls of this block; those of layers that stand around it are not its own."""
        members: dict[ModuleCall, list[Node]] = defaultdict(list)
        for node in self.block.nodes:
            for call in self._calls(node):
                members[call].append(node)
        depth = tuple(index for index, _ in self.block.chain)
        for call, values in self.leaving.items():
            path, number = call
            if path in outside:
                continue
            nodes = [node for node in members[call] if self.block.computes(node)]
            if not values:
                layers.gone.setdefault(path, UNUSED if nodes else CONSTANT)
                continue
            values = self._sorted_out(call, values)
            if self._is_folded(values[0], call, layers):
                continue
            why = self.doubts.get(call) or self._why_unsure(values, call)
            if why and not self._is_one_operation(values, nodes, path):
                layers.doubts.setdefault(path, why)
            last = max(node.index for node in nodes)
            order = (*depth, last, -path.count("."), number)
            layers.calls.append(
                Call(
                    path,
                    values,
                    self.entering.get(call, ()),
                    order,
                    self.block.chain,
                    tuple(nodes),
                    call in self.scopes.guessed,
                )
            )

    def _is_one_operation(self, values: tuple[str, ...], nodes: Sequence[Node], path: str) -> bool:
        """Whether a call is one of torch's own leaves, with all that was traced of it."""
        units = {self.scopes.units.get(node) for node in nodes}
        return path in self.scopes.leaves and units == {values[0]} and len(values) == 1

    def _outside_readers(self, name: str, call: ModuleCall) -> list[Node]:
        return [node for node in self._reading(name) if call not in self._calls(node)]

    def _sorted_out(self, call: ModuleCall, values: tuple[str, ...]) -> tuple[str, ...]:
        """Without what only seems to leave: values that a later layer shares, to save work.

        The dynamo exporter says what every operation read when it was traced.
        """
        if self.scopes.style != "metadata" or len(values) == 1:
            return values
        whole = [name for name in values if not _PARTIAL.match(name)] or list(values)
        read = [name for name in whole if self._was_read(name, call)]
        return tuple(dict.fromkeys([*read, *whole[:1]]))

    def _was_read(self, name: str, call: ModuleCall) -> bool:
        if name in self.results:
            return True
        readers = self._outside_readers(name, call)
        return any(name in self.scopes.reads.get(node, ()) for node in readers)

    def _why_unsure(self, values: tuple[str, ...], call: ModuleCall) -> str | None:
        main = values[0]
        if self.scopes.style == "metadata" and self._is_misnamed(main):
            return REWRITTEN
        for node in self._outside_readers(main, call):
            if self._is_rewritten(node, main) and not self._is_anothers(node, call[0]):
                return REWRITTEN
            if self._is_fused(node):
                return FUSED
            if self.scopes.style == "names" and node.op == "Transpose" and not self._is_small(call):
                return (
                    REWRITTEN  # two transposes in a row were made one, and bear the second's name
                )
        return None

    def _is_misnamed(self, name: str) -> bool:
        """Whether a value bears another name than the operation that was traced.

        A quantiser that drops a ReLU gives the ReLU's name to what it read.
        """
        unit = self.scopes.units.get(self.block.maker[name], name)
        known = name in self.results or name.startswith(("getitem", unit))
        return not known

    def _is_rewritten(self, node: Node, name: str) -> bool:
        """Whether a node was made of several, and the first did not read this value."""
        return node in self.scopes.rewritten and name not in self.scopes.reads.get(node, ())

    def _is_anothers(self, node: Node, path: str) -> bool:
        """Whether the first part of a node made of several reads a weight of another layer."""
        folded = "FuseBatchNorm" in node.metadata.get("pkg.onnxscript.rewriter.rule_name", "")
        weights = [name for name in self.block.weights_of(node) if "." in name]
        return folded and bool(weights) and not any(n.startswith(f"{path}.") for n in weights)

    def _is_fused(self, node: Node) -> bool:
        """Whether an optimiser made a node of several, of which the first may be another's."""
        foreign = str(node.proto.domain).startswith("com.microsoft") and node.op not in _HARMLESS
        return foreign and node in self.scopes.calls

    def _is_small(self, call: ModuleCall) -> bool:
        """Whether a call holds no other, and no more than a product and a sum."""
        own = [node for node in self.block.nodes if call in self._calls(node)]
        own = [node for node in own if self.block.computes(node)]
        return len(own) <= 2 and all(self._calls(node)[-1] == call for node in own)

    def _is_folded(self, main: str, call: ModuleCall, layers: Layers) -> bool:
        """Whether a value is of a convolution whose weight the TorchScript exporter has changed."""
        node = self.block.maker[main]
        if self.scopes.style != "names" or node.op not in ("Conv", "ConvTranspose"):
            return False
        path = call[0]
        calls = self._calls(node)
        inner = calls[-1][0] if calls else ""
        weights = self.block.constants.get(node.inputs[1]) if len(node.inputs) > 1 else None
        if not weights or any(n.startswith(f"{inner}.") for n in (*weights, node.inputs[1])):
            return False
        if inner == path:
            layers.gone[path] = FOLDED
            return True
        layers.doubts.setdefault(path, FOLDED)
        return False
