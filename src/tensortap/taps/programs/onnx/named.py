"""The module calls of a graph's nodes, by the names that the TorchScript exporter gives them.

A node's name holds the modules around it (`/layers.0/mlp/down/MatMul_output_0`); of these the
innermost alone bears a number when it is called again: `/block/lin_1/Gemm` and `/block_1/Add` are
of the second call of `block`. So is `act_1` of `act`, unless it is a module's own name.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ..aliases import Earlier, Module, find_aliases, join_calls, likely_order
from ..scopes import ModuleCall
from .graph import Block, Node
from .scopes import DROPPED, MIXED, SHARED, TWICE, Scopes

__all__ = ["from_names"]

_VALUE = re.compile(r"/(?:(?P<path>.+)/)?(?P<op>[A-Za-z]\w*?)(_\d+)?_output_\d+\Z")

_Tag = tuple[str, ...]


def from_names(blocks: Sequence[Block]) -> Scopes:
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
