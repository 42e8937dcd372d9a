"""Which module calls each node of an ONNX graph stands in, as its exporter wrote it down.

`torch.onnx.export(dynamo=True)` writes the modules' paths and classes beside every node, but not
which call of a module it was: a module's nodes that follow each other are one call, and where that
is not sure, it is said. The TorchScript exporter puts the path into the names of nodes and values
(`/layers.0/mlp/down/MatMul_output_0`); a second call of `act` is `act_1`, which could also be a
module's own name.
"""

from __future__ import annotations

import ast
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..aliases import Earlier, Module, find_aliases, join_calls, likely_order
from ..scopes import ModuleCall
from .graph import Block, Node

__all__ = ["DROPPED", "Scopes", "read_scopes"]

_SCOPES = "pkg.torch.onnx.name_scopes"
_CLASSES = "pkg.torch.onnx.class_hierarchy"
_FX = "pkg.torch.onnx.fx_node"
_RULE = "pkg.onnxscript.rewriter.rule_name"
_NO_SCOPE = "_empty_nn_module_stack_from_metadata_hook"
_VALUE = re.compile(r"/(?:(?P<path>.+)/)?(?P<op>[A-Za-z]\w*?)(_\d+)?_output_\d+\Z")
_LEAF_HOMES = re.compile(
    r"torch\.nn\.modules\.(linear|conv|batchnorm|normalization|instancenorm|sparse|pooling|dropout|"
    r"flatten|padding|upsampling|activation\.(?!Multihead))"
)

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


def read_scopes(blocks: Sequence[Block], owners: Sequence[str] = ()) -> Scopes:
    """The module calls of all nodes, by whichever way this file has them.

    `owners` are the layers that had weights when it was exported, in the model's own order.
    """
    nodes = [node for block in blocks for node in block.nodes]
    if any(_SCOPES in node.metadata for node in nodes):
        return _from_metadata(blocks, owners)
    return _from_names(blocks)


# The dynamo exporter.


@dataclass(frozen=True)
class _Mark:
    """A node's scope: paths outermost first, and the operation of the traced graph it came from."""

    paths: tuple[str, ...]
    classes: tuple[str, ...]
    unit: str


def _from_metadata(blocks: Sequence[Block], owners: Sequence[str]) -> Scopes:
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


# The TorchScript exporter.
#
# A node's name holds the modules around it; of these the innermost alone bears a number when it is
# called again: `/block/lin_1/Gemm` and `/block_1/Add` are of the second call of `block`.

_Tag = tuple[str, ...]


def _from_names(blocks: Sequence[Block]) -> Scopes:
    names = _Names(blocks)
    return names.scopes if names.direct else Scopes("none")


class _Names:
    def __init__(self, blocks: Sequence[Block]) -> None:
        self.scopes = Scopes("names")
        self.tags: dict[Node, _Tag] = {}
        self.direct: dict[_Tag, list[tuple[Block, Node]]] = defaultdict(list)
        for block in blocks:
            for node in block.nodes:
                tag = _tag(node)
                if tag is not None:
                    self.tags[node] = tag
                    if tag and block.computes(node):
                        self.direct[tag].append((block, node))
        weights = {name for block in blocks for name in block.constants}
        self.named = {name for name in weights if "::" not in name and "." in name}
        self.around = {tag[:depth] for tag in self.tags.values() for depth in range(1, len(tag))}
        self.first: dict[str, str] = {}
        self.again: set[_Tag] = set()  # taken for second calls, with no weight to show it
        self.base = {tag: self._base(tag) for tag in self.direct}
        self.counts: Counter[_Tag] = Counter(module for module, _ in self.base.values())
        modules = {*self.counts, *(m[:n] for m in self.counts for n in range(1, len(m)))}
        self.paths = {module: self._path(module) for module in sorted(modules, key=len)}
        self.per_call = {module: self._per_call(module) for module in modules}
        self._join()
        self._doubt_what_weights_deny()

    def _join(self) -> None:
        """Name the calls; a module that is called in several places is joined under one name."""
        named = {"/".join(module): path for module, path in self.paths.items()}
        nodes = {node: self._calls(tag) for node, tag in self.tags.items()}
        calls = [call for found in nodes.values() for call in found]
        alike = self._alike(calls)
        once = find_aliases(alike, [(named[key], n) for key, n in calls], _as_given(alike))
        self.scopes.doubts.update(dict.fromkeys(once.doubts, SHARED))
        first = {key: once.first.get(path, path) for key, path in named.items()}
        joined = join_calls(calls, first)
        for node, found in nodes.items():
            self.scopes.calls[node] = tuple(joined[call] for call in found)
        sure = {call for tag in self.base if tag not in self.again for call in self._calls(tag)}
        later = [self._calls(tag)[-1] for tag in self.again]
        self.scopes.guessed.update(joined[call] for call in later if call not in sure)

    def _alike(self, calls: Sequence[ModuleCall]) -> dict[str, Module]:
        """What tells modules apart: their weights and, where there are none, what they do.

        The exporter calls a module in another place by the last part of its first name. Those that
        bear the name of their own weights come first.
        """
        weights: dict[_Tag, set[tuple[str, str]]] = defaultdict(set)
        signs: dict[_Tag, str] = {}
        owners: set[str] = set()
        for tag, (module, _) in self.base.items():
            named = self._read(tag)
            owners.update(name.rpartition(".")[0] for name in named)
            read = {(name.rpartition(".")[2], name) for name in named}
            read |= {("", name) for name in self._weights(tag) if "::" in name}
            signs.setdefault(module, str(sorted(node.op for _, node in self.direct[tag])))
            for depth in range(1, len(module) + 1):
                below = ".".join(module[depth:])
                weights[module[:depth]].update((f"{below}.{own}", name) for own, name in read)
        order = dict.fromkeys(path for path, _ in calls)
        tags = sorted(
            (tuple(path.split("/")) for path in order), key=lambda t: self.paths[t] not in owners
        )
        return {
            self.paths[tag]: Module(
                f"{tag[-1].rpartition('.')[2]} {signs.get(tag, '')}",
                frozenset(weights[tag]),
                bare=not weights[tag],
            )
            for tag in tags
        }

    def _doubt_what_weights_deny(self) -> None:
        """Parts of a ModuleDict lose its name: `/b/a/Gemm` reads `b.parts.a.weight`."""
        for tag, (module, _) in self.base.items():
            path = self.paths[module]
            owners = {name.rsplit(".", 1)[0] for name in self._read(tag)}
            if owners and path not in owners and any(n.endswith(f".{path}") for n in owners):
                self._doubt([module[:depth] for depth in range(1, len(module) + 1)], MIXED)

    def _base(self, tag: _Tag) -> tuple[_Tag, int]:
        """(the module, the number of its call) of a tag: `act_1` may be `act` once more."""
        match = re.match(r"(.+)_([1-9]\d*)\Z", tag[-1])
        first = (*tag[:-1], match[1]) if match else tag
        if match is None or tag in self.around:
            return tag, 0
        weights = self._weights(tag)
        if first not in self.direct:
            if any(name.startswith(".".join(first) + ".") for name in self._read(tag)):
                self._doubt((first, tag), MIXED)
            return tag, 0
        theirs = self._weights(first)
        if any(name.startswith(".".join(tag) + ".") for name in self._read(tag)):
            if self._read(tag) & self._read(first):
                self._doubt((tag,), MIXED)
            return tag, 0
        if weights and not weights & theirs:
            return tag, 0
        others = [(*tag[:-1], f"{match[1]}_{index}") for index in range(1, int(match[2]))]
        same = [self._sign(other) == self._sign(first) for other in (tag, *others)]
        if not all(same):
            self._doubt((first, tag), MIXED)
            return tag, 0
        if not weights:
            self.again.add(tag)
        return first, int(match[2])

    def _weights(self, tag: _Tag) -> frozenset[str]:
        return frozenset().union(*(block.weights_of(node) for block, node in self.direct[tag]))

    def _read(self, tag: _Tag) -> set[str]:
        """The parameters by name; equal ones were made one, but each is read by its own name."""
        read = {name for _, node in self.direct[tag] for name in node.inputs}
        return read & self.named

    def _sign(self, tag: _Tag) -> Counter[tuple[Any, ...]]:
        return Counter(
            (node.op, tuple(sorted(block.weights_of(node))))
            for block, node in self.direct.get(tag, ())
        )

    def _path(self, module: _Tag) -> str:
        """The dotted name: below a Sequential `net`, a part is called `net.0`, not `0`."""
        path = self._whole(module[0])
        for index in range(1, len(module)):
            before, part = module[index - 1], module[index]
            repeated = part.startswith(f"{before}.") and not any(
                name.startswith(f"{path}.{before}.") for name in self.named
            )
            path = path + part[len(before) :] if repeated else f"{path}.{part}"
        return path

    def _whole(self, part: str) -> str:
        """The first part of a name with what stands before it in the names of its weights.

        A model that calls `self.model.decoder` itself, or a part of a ModuleDict, skips a name.
        """
        if part not in self.first:
            tags = [tag for tag in self.direct if tag[0] == part]
            read = {name for tag in tags for name in self._read(tag)}
            before = {name.split(f".{part}.")[0] for name in read if f".{part}." in name}
            skipped = len(before) == 1 and not any(name.startswith(f"{part}.") for name in read)
            self.first[part] = f"{before.pop()}.{part}" if skipped else part
        return self.first[part]

    def _per_call(self, module: _Tag) -> dict[_Tag, int]:
        """How often each module below is called in one call of this one."""
        below = [other for other in self.counts if other[: len(module)] == module != other]
        counts = [self.counts[other] for other in below]
        calls = self.counts[module] if module in self.counts else math.gcd(*counts)
        if module not in self.counts and min(counts) > 1:
            self._doubt((module,), TWICE)
        if any(count % calls for count in counts):
            self._doubt((module,), TWICE)
            calls = 1
        return {other: max(self.counts[other] // calls, 1) for other in below}

    def _calls(self, tag: _Tag) -> tuple[ModuleCall, ...]:
        if tag not in self.base:  # shapes and constants
            return ()
        module, number = self.base[tag]
        outer = [module[:depth] for depth in range(1, len(module))]
        found = [("/".join(m), number // self.per_call[m][module]) for m in outer]
        return (*found, ("/".join(module), number))

    def _doubt(self, tags: Sequence[_Tag], why: str) -> None:
        for tag in tags:
            self.scopes.doubts[self._path(tag)] = why


def _as_given(modules: Mapping[str, Module]) -> Earlier:
    return likely_order(path for path, module in modules.items() if module.tensors)


def _tag(node: Node) -> _Tag | None:
    """The parts of a node's path, by the names of its values or by its own."""
    for name in node.outputs:
        match = _VALUE.match(name)
        if match and match["op"] in DROPPED and node.op != match["op"] and not node.proto.domain:
            return None
        if match:
            return _parts(match["path"])
    match = re.match(rf"/(?:(?P<path>.+)/)?{re.escape(node.op)}(_\d+)?\Z", str(node.proto.name))
    return _parts(match["path"]) if match else None


def _parts(path: str | None) -> _Tag:
    return tuple(path.split("/")) if path else ()
