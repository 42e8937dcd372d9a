"""The module calls of a graph's nodes, by the scopes that the dynamo exporter writes beside them.

It writes the modules' paths and classes, but not which call of a module it was: a module's nodes
that follow each other are one call, and where that is not sure, it is said.
"""

from __future__ import annotations

import ast
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..aliases import Module, find_aliases, likely_order
from ..scopes import ModuleCall
from .graph import Block, Node
from .scopes import SHARED, TWICE, Scopes

__all__ = ["from_metadata", "is_marked"]

_SCOPES = "pkg.torch.onnx.name_scopes"
_CLASSES = "pkg.torch.onnx.class_hierarchy"
_FX = "pkg.torch.onnx.fx_node"
_RULE = "pkg.onnxscript.rewriter.rule_name"
_NO_SCOPE = "_empty_nn_module_stack_from_metadata_hook"
_LEAF_HOMES = re.compile(
    r"torch\.nn\.modules\.(linear|conv|batchnorm|normalization|instancenorm|sparse|pooling|dropout|"
    r"flatten|padding|upsampling|activation\.(?!Multihead))"
)


def is_marked(blocks: Sequence[Block]) -> bool:
    """Whether the nodes bear such scopes."""
    return any(_SCOPES in node.metadata for block in blocks for node in block.nodes)


@dataclass(frozen=True)
class _Mark:
    """A node's scope: paths outermost first, and the operation of the traced graph it came from."""

    paths: tuple[str, ...]
    classes: tuple[str, ...]
    unit: str


def from_metadata(blocks: Sequence[Block], owners: Sequence[str]) -> Scopes:
    """What is written beside the nodes.

    `owners` are the layers that had weights when it was exported, in the model's own order.
    """
    scopes = Scopes("metadata")
    for block in blocks:
        marks = {node: mark for node in block.nodes if (mark := _mark(node)) is not None}
        for node, mark in marks.items():
            for path, name in zip(mark.paths, mark.classes, strict=False):
                scopes.types.setdefault(path, name.rsplit(".", 1)[-1])
                if _LEAF_HOMES.match(name):
                    scopes.leaves.add(path)
            scopes.units[node] = mark.unit
            found = re.findall(r"%([\w.]+)", node.metadata.get(_FX, ""))
            if found:
                scopes.reads[node] = frozenset(found[1:])
            if node.metadata.get(_RULE):
                scopes.rewritten.add(node)
        _number_calls(block, marks, scopes)
    _doubt_shared(blocks, scopes, owners)
    return scopes


def _doubt_shared(blocks: Sequence[Block], scopes: Scopes, owners: Sequence[str]) -> None:
    """Doubt what may be called by other names; equal weights were made one, and prove nothing.

    Ones and zeros are equal wherever nothing was trained yet: layers of these alone are let be.
    """
    calls: list[ModuleCall] = []
    weights: dict[str, set[str]] = defaultdict(set)
    sizes = blocks[0].shapes
    for block in blocks:
        for node in block.nodes:
            if node in scopes.calls and block.computes(node):
                calls += scopes.calls[node]
                read = [n for n in block.weights_of(node) if set(sizes.get(n, ())) - {1}]
                for path, _ in scopes.calls[node]:
                    weights[path].update(read)
    held = {tensor.name: tensor for tensor in blocks[0].graph.initializer}
    modules = {}
    for path in dict.fromkeys(path for path, _ in calls):
        telling = any(not _is_uniform(held.get(name)) for name in weights[path])
        own = weights[path] if telling else ()
        kind = scopes.types.get(path, "")
        modules[path] = Module(kind, frozenset(("", n) for n in own), bare=not weights[path])
    found = find_aliases(modules, calls, likely_order(owners), join=False)
    for path in found.doubts:
        scopes.doubts.setdefault(path, SHARED)


def _is_uniform(tensor: Any) -> bool:
    """Whether all values of a tensor are the same, as those of a new norm or bias."""
    raw = tensor.raw_data if tensor is not None else b""
    size = len(raw) // max(math.prod(tensor.dims), 1) if raw else 0
    return size > 0 and raw == raw[:size] * (len(raw) // size)


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
    """A module's nodes that follow each other are one call of it.

    A quantiser may change their order: what one traced operation became is put together again.
    """
    began: dict[_Mark, int] = {}
    for index, mark in enumerate(marks.values()):
        began.setdefault(mark, index)
    order = sorted(marks, key=lambda node: began[marks[node]])
    stripped = any(block.computes(node) and node not in marks for node in block.nodes)
    runs: dict[str, list[list[Node]]] = defaultdict(list)
    now: tuple[str, ...] = ()
    numbers: dict[Node, dict[str, int]] = {}
    for node in order:
        mark = marks[node]
        for path in mark.paths if block.computes(node) else ():
            if path not in now:
                runs[path].append([])
            runs[path][-1].append(node)
        if block.computes(node):
            now = mark.paths
        numbers[node] = {path: max(len(runs.get(path, ())) - 1, 0) for path in mark.paths}
    for path, found in runs.items():
        if path == "":
            merged = [node for run in found for node in run]
            for node in merged:
                numbers[node][path] = 0
            continue
        _judge_runs(path, found, block, marks, numbers, scopes, stripped)
        if any(_repeats_all(path, run, marks) for run in found):
            scopes.doubts[path] = TWICE
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
    signed = [_units(path, run, block, marks, with_weights=not stripped) for run in runs]
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


def _repeats_all(path: str, run: list[Node], marks: dict[Node, _Mark]) -> bool:
    """Whether every layer in a run comes twice: then so may the layer itself.

    Of a layer with parts, calls that follow each other are one run: its parts are looked at.
    """
    counts: Counter[str] = Counter()
    now = ""
    for node in run:
        last = marks[node].paths[-1]
        if last not in (now, path):
            counts[last] += 1
        now = last
    return bool(counts) and min(counts.values()) > 1


_Unit = tuple[list[Node], Any]


def _units(
    path: str, run: list[Node], block: Block, marks: dict[Node, _Mark], *, with_weights: bool
) -> list[_Unit]:
    """The operations of a run: their nodes, and what tells one operation from another.

    A weight that is read twice is made two by quantisers, and by transposing it in advance.
    """
    found: list[_Unit] = []
    last = None
    for node in run:
        mark = marks[node]
        if mark.unit != last:
            found.append(([], (mark.paths[mark.paths.index(path) + 1 :], [])))
            last = mark.unit
        found[-1][0].append(node)
        named = (name for name in block.weights_of(node) if "." in name)
        found[-1][1][1].append((node.op, tuple(sorted(named)) if with_weights else ()))
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
