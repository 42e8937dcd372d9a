"""Which module calls each node of an ONNX graph stands in, as its exporter wrote it down.

`torch.onnx.export(dynamo=True)` writes the modules' paths and classes beside every node, but not
which call of a module it was: a module's nodes that follow each other are one call, and where that
is not sure, it is said. The TorchScript exporter puts the path into the names of nodes and values
(`/layers.0/mlp/down/MatMul_output_0`); a second call of `act` is `act_1`, which could also be a
module's own name.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .onnx_graph import Block, Node
from .scopes import ModuleCall

__all__ = ["Scopes", "read_scopes"]

_SCOPES = "pkg.torch.onnx.name_scopes"
_CLASSES = "pkg.torch.onnx.class_hierarchy"
_FX = "pkg.torch.onnx.fx_node"
_RULE = "pkg.onnxscript.rewriter.rule_name"
_NO_SCOPE = "_empty_nn_module_stack_from_metadata_hook"
_VALUE = re.compile(r"/(?:(?P<path>.+)/)?[A-Za-z]\w*?_output_\d+\Z")
_LEAF_HOMES = re.compile(
    r"torch\.nn\.modules\.(linear|conv|batchnorm|normalization|instancenorm|sparse|pooling|dropout|"
    r"flatten|padding|upsampling|activation\.(?!Multihead))"
)

TWICE = "the graph does not tell one call of it from two"
MIXED = "another layer's values bear the same name"


@dataclass
class Scopes:
    """What the exporter says of every node. A node that is not in `calls` bears no scope."""

    style: str
    calls: dict[Node, tuple[ModuleCall, ...]] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    reads: dict[Node, frozenset[str]] = field(default_factory=dict)
    rewritten: set[Node] = field(default_factory=set)
    doubts: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_scopes(blocks: Sequence[Block]) -> Scopes:
    """The module calls of all nodes, by whichever way this file has them."""
    nodes = [node for block in blocks for node in block.nodes]
    if any(_SCOPES in node.metadata for node in nodes):
        return _from_metadata(blocks)
    return _from_names(blocks)


# The dynamo exporter.


@dataclass(frozen=True)
class _Mark:
    """A node's scope: paths outermost first, and the operation of the traced graph it came from."""

    paths: tuple[str, ...]
    classes: tuple[str, ...]
    unit: str


def _from_metadata(blocks: Sequence[Block]) -> Scopes:
    scopes = Scopes("metadata")
    for block in blocks:
        marks = {node: mark for node in block.nodes if (mark := _mark(node)) is not None}
        for node, mark in marks.items():
            for path, name in zip(mark.paths, mark.classes, strict=False):
                scopes.types.setdefault(path, name.rsplit(".", 1)[-1])
            found = re.findall(r"%([\w.]+)", node.metadata.get(_FX, ""))
            if found:
                scopes.reads[node] = frozenset(found[1:])
            if node.metadata.get(_RULE):
                scopes.rewritten.add(node)
        _number_calls(block, marks, scopes)
    return scopes


def _mark(node: Node) -> _Mark | None:
    paths, classes = _listed(node, _SCOPES), _listed(node, _CLASSES)
    if not paths:
        return None
    *modules, unit = paths
    if modules and modules[0] == _NO_SCOPE:
        return _Mark((), (), unit)
    return _Mark(tuple(modules), tuple(classes[: len(modules)]), unit)


def _listed(node: Node, key: str) -> list[str]:
    text = node.metadata.get(key, "")
    if not text or len(text) > 100_000:
        return []
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return []
    return [str(item) for item in found] if isinstance(found, list) else []


def _number_calls(block: Block, marks: dict[Node, _Mark], scopes: Scopes) -> None:
    """A module's nodes that follow each other are one call of it."""
    stripped = any(block.computes(node) and node not in marks for node in block.nodes)
    runs: dict[str, list[list[Node]]] = defaultdict(list)
    now: tuple[str, ...] = ()
    numbers: dict[Node, dict[str, int]] = {}
    for node in block.nodes:
        mark = marks.get(node)
        if mark is None:
            continue
        for path in mark.paths if block.computes(node) else ():
            if path not in now:
                runs[path].append([])
            runs[path][-1].append(node)
        if block.computes(node):
            now = mark.paths
        numbers[node] = {path: max(len(runs[path]) - 1, 0) for path in mark.paths}
    for path, found in runs.items():
        if path == "":
            merged = [node for run in found for node in run]
            for node in merged:
                numbers[node][path] = 0
            continue
        _judge_runs(path, found, block, marks, numbers, scopes, stripped)
    for node, mark in marks.items():
        own = dict.fromkeys(path for path in mark.paths if path)
        scopes.calls[node] = tuple((path, numbers[node][path]) for path in own)


def _judge_runs(
    path: str,
    runs: list[list[Node]],
    block: Block,
    marks: dict[Node, _Mark],
    numbers: dict[Node, dict[str, int]],
    scopes: Scopes,
    stripped: bool,
) -> None:
    """Whether each run is surely one call; where a leaf of torch's own repeats, each turn is."""
    signed = [_units(path, run, block, marks) for run in runs]
    if len(runs) > 1:
        same = all(_signature(units) == _signature(signed[0]) for units in signed)
        if not same or stripped:
            scopes.doubts[path] = TWICE
        if not same:
            for node in (node for run in runs for node in run):
                numbers[node][path] = 0
            return
    turns = max(_turns(_signature(units)) for units in signed)
    if turns == 1:
        return
    first = marks[runs[0][0]]
    kind = first.classes[first.paths.index(path)]
    if not _LEAF_HOMES.match(kind):
        scopes.doubts[path] = TWICE
    count = 0
    for units in signed:
        turns = _turns(_signature(units))
        each = len(units) // turns
        for turn in range(turns):
            for nodes, _ in units[turn * each : (turn + 1) * each]:
                for node in nodes:
                    numbers[node][path] = count
            count += 1


_Unit = tuple[list[Node], Any]


def _units(path: str, run: list[Node], block: Block, marks: dict[Node, _Mark]) -> list[_Unit]:
    """The operations of a run: their nodes, and what tells one operation from another."""
    found: list[_Unit] = []
    last = None
    for node in run:
        mark = marks[node]
        if mark.unit != last:
            found.append(([], (mark.paths[mark.paths.index(path) + 1 :], [])))
            last = mark.unit
        found[-1][0].append(node)
        found[-1][1][1].append((node.op, tuple(sorted(block.weights_of(node)))))
    return found


def _signature(units: list[_Unit]) -> list[Any]:
    return [sign for _, sign in units]


def _turns(signature: list[Any]) -> int:
    """How often the shortest part that repeats is repeated; 1 where none is."""
    total = len(signature)
    for size in range(1, total // 2 + 1):
        if total % size == 0 and signature == signature[:size] * (total // size):
            return total // size
    return 1


# The TorchScript exporter.

_Tag = tuple[str, ...]


def _from_names(blocks: Sequence[Block]) -> Scopes:
    scopes = Scopes("names")
    tags: dict[Node, _Tag] = {}
    members: dict[_Tag, list[tuple[Block, Node]]] = defaultdict(list)
    for block in blocks:
        for node in block.nodes:
            tag = _tag(node)
            if tag is None:
                continue
            tags[node] = tag
            if block.computes(node):
                for depth in range(1, len(tag) + 1):
                    members[tag[:depth]].append((block, node))
    if not any(len(tag) for tag in tags.values()):
        return Scopes("none")
    signs = {tag: _sign(tag, found, tags) for tag, found in members.items()}
    base = {tag: _base(tag, signs, members, scopes) for tag in sorted(members, key=len)}
    numbers: dict[_Tag, ModuleCall] = {}
    by_path: dict[str, list[tuple[tuple[int, ...], _Tag]]] = defaultdict(list)
    for tag in members:
        parts = [base[tag[:depth]] for depth in range(1, len(tag) + 1)]
        path = ".".join(name for name, _ in parts)
        by_path[path].append((tuple(number for _, number in parts), tag))
    for path, found in by_path.items():
        for number, (_, tag) in enumerate(sorted(found)):
            numbers[tag] = (path, number)
    for node, tag in tags.items():
        prefixes = (tag[:depth] for depth in range(1, len(tag) + 1))
        scopes.calls[node] = tuple(numbers[prefix] for prefix in prefixes if prefix in numbers)
    return scopes


def _tag(node: Node) -> _Tag | None:
    """The parts of a node's path, by the names of its values or by its own."""
    for name in node.outputs:
        match = _VALUE.match(name)
        if match:
            return _parts(match["path"])
    match = re.match(rf"/(?:(?P<path>.+)/)?{re.escape(node.op)}(_\d+)?\Z", str(node.proto.name))
    return _parts(match["path"]) if match else None


def _parts(path: str | None) -> _Tag:
    return tuple(path.split("/")) if path else ()


def _sign(
    tag: _Tag, members: list[tuple[Block, Node]], tags: dict[Node, _Tag]
) -> Counter[tuple[Any, ...]]:
    return Counter(
        (tags[node][len(tag) :], node.op, tuple(sorted(block.weights_of(node))))
        for block, node in members
    )


def _base(
    tag: _Tag,
    signs: dict[_Tag, Counter[tuple[Any, ...]]],
    members: dict[_Tag, list[tuple[Block, Node]]],
    scopes: Scopes,
) -> tuple[str, int]:
    """(the last part's own name, the number of the call): `act_1` may be `act` once more."""
    match = re.match(r"(.+)_(\d+)\Z", tag[-1])
    if match is None or int(match[2]) == 0:
        return tag[-1], 0
    name, number = match[1], int(match[2])
    first = (*tag[:-1], name)
    if first not in signs:
        return tag[-1], 0
    named = ".".join(tag) + "."
    weights = frozenset().union(*(block.weights_of(node) for block, node in members[tag]))
    own = any(weight.startswith(named) for weight in weights)
    others = [(*tag[:-1], f"{name}_{index}") for index in range(1, number)]
    same = signs[tag] == signs[first] and not own
    if same and all(signs.get(other) == signs[first] for other in others):
        if not weights:
            scopes.notes.append(
                f"'{'.'.join(tag)}' is taken for call {number} of '{'.'.join(first)}': the "
                "TorchScript exporter writes a second call of a layer so."
            )
        return name, number
    if same or not signs[first] - signs[tag]:
        scopes.doubts[".".join(tag)] = MIXED
    return tag[-1], 0
