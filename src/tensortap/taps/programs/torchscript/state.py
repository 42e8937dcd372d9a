"""What a run of a TorchScript model changes in the model itself, read off its graph.

A check runs the model once more than its user does. That must leave no trace: what a run sets or
writes into is kept before and put back behind it. Numbers and tensors can be; a list or a dict that
grows, or an object of which we know nothing, cannot, and then there must be no such run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..state import restore
from .graphs import Owner, nodes_of, origin
from .tree import Tree

__all__ = ["STATELESS", "State", "state_of"]

_SINGLE = {"IntType", "FloatType", "BoolType", "StringType", "NoneType", "NumberType"}
_SINGLE |= {"ComplexType", "DeviceObjType", "TensorType"}
_ALIAS = re.compile(r"\(\w+|\*\)")
_STATISTICS = (
    "aten::batch_norm",
    "aten::instance_norm",
)  # their schemas do not say what they write
_FRESH = ("prim::ListConstruct", "prim::DictConstruct", "prim::CreateObject", "prim::Uninitialized")
_VALUES = (torch.Tensor, int, float, bool, complex, str, torch.device, type(None))
_CHANGES = "it changes its attribute '{}'"
_CALLS = ("prim::CallMethod", "prim::CallFunction", "prim::awaitable_wait")


@dataclass(frozen=True)
class State:
    """The attributes that a run changes, each with the object that has it.

    `unsure` says what else a run may change, where that cannot be put back.
    """

    attributes: tuple[tuple[Any, str], ...] = ()
    unsure: str | None = None
    names: frozenset[str] = frozenset()

    @property
    def stateful(self) -> str | None:
        """Why a run must not be made for a check alone; None where it can be undone."""
        for holder, name in () if self.unsure else self.attributes:
            if not isinstance(holder.getattr(name), _VALUES):  # an Optional that is a list now
                return _CHANGES.format(name)
        return self.unsure

    def keep(self) -> Callable[[], None]:
        """Keep what the attributes are now; the returned function puts it back."""
        kept = []
        for holder, name in self.attributes:
            value = holder.getattr(name)
            content = value.detach().clone() if isinstance(value, torch.Tensor) else None
            kept.append((holder, name, value, content))

        def put_back() -> None:
            for holder, name, value, content in kept:
                if content is not None:
                    restore(value, content)
                if holder.getattr(name) is not value:
                    holder.setattr(name, value)

        return put_back


STATELESS = State()


def state_of(tree: Tree) -> State:
    """What the forward of a model changes in it."""
    graph = tree.root.cpp._get_method("forward").graph.copy()
    torch._C._jit_pass_inline(graph)
    inputs = list(graph.inputs())
    reader = _Reader(Owner(tree.root, inputs[0].unique(), {}))
    try:
        for node in _all_nodes(graph):
            reader.read(node)
    except _Unsure as reason:
        return State(unsure=str(reason))
    found = {(node.path, name): (node.cpp, name) for node, name in reader.changed}
    for node in tree.root.walk():  # an op may write into one without saying so, as batch norm does
        found.update({(node.path, name): (node.cpp, name) for name in node.buffers()})
    names = frozenset(".".join(part for part in key if part) for key in found)
    return State(tuple(found.values()), names=names)


class _Unsure(Exception):
    """Something may be changed that we cannot put back."""


def _all_nodes(graph: Any) -> Iterator[Any]:
    for node in nodes_of(graph):
        yield node
        if node.kind() == "prim::fork" and "Subgraph" in node.attributeNames():
            inner = node.g("Subgraph")
            for step in _all_nodes(inner):
                if step.kind() == "prim::SetAttr" or _written(step):
                    raise _Unsure("it runs tasks of its own (torch.jit.fork) that write")


@dataclass
class _Reader:
    """Gathers the attributes that nodes set, or write into."""

    owner: Owner

    def __post_init__(self) -> None:
        self.changed: list[tuple[Any, str]] = []

    def read(self, node: Any) -> None:
        kind = node.kind()
        if kind in _CALLS:
            raise _Unsure("it calls what is known only while it runs")
        if kind == "prim::SetAttr":
            self._set(node)
        elif kind == "prim::GetAttr" and node.output().type().kind() == "GeneratorType":
            raise _Unsure(f"it draws from a generator of its own, '{node.s('name')}'")
        for value in _written(node):
            self._write(value, set())

    def _set(self, node: Any) -> None:
        holder, value = node.inputsAt(0), node.inputsAt(1)
        if holder.node().kind() == "prim::CreateObject":
            return  # made in this run, and gone behind it
        self._change(holder, str(node.s("name")), value.type())

    def _change(self, holder: Any, name: str, kind: Any) -> None:
        module = self.owner.module(holder)
        if module is None or not module.cpp.hasattr(name) or not _is_single(kind):
            raise _Unsure(_CHANGES.format(name))
        self.changed.append((module, name))

    def _write(self, value: Any, seen: set[int]) -> None:
        """A value is written into: what of the model is it?"""
        if value.unique() in seen:
            return
        seen.add(value.unique())
        for source in self._sources(value):
            self._write(source, seen)

    def _sources(self, value: Any) -> list[Any]:
        """What a value may be, or be a part of; nothing where it was made in this run."""
        node = value.node()
        kind = node.kind()
        if kind == "prim::GetAttr":
            self._change(node.inputsAt(0), str(node.s("name")), value.type())
        elif kind == "prim::Constant" and value.type().kind() != "NoneType":
            raise _Unsure("it writes into a constant")
        elif kind == "prim::Param":
            return _carried(value, node)
        elif kind == "prim::If":
            return [list(block.outputs())[value.offset()] for block in node.blocks()]
        elif kind == "prim::Loop":
            (body,) = node.blocks()
            return [node.inputsAt(value.offset() + 2), list(body.outputs())[value.offset() + 1]]
        elif kind == "prim::TupleUnpack" and (made := origin(value)).unique() != value.unique():
            return [made]
        elif kind in ("prim::TupleUnpack", "prim::TupleIndex"):
            return [node.inputsAt(0)]
        elif kind == "prim::TupleConstruct":  # which cannot be written into itself
            return [source for source in node.inputs() if _holds(source.type())]
        elif kind == "prim::ListUnpack" and node.inputsAt(0).node().kind().startswith("aten::"):
            return [node.inputsAt(0)]
        elif kind not in _FRESH and _aliases(node):
            if any(_is_many(source.type()) for source in node.inputs()):
                raise _Unsure("it writes into what a list, tuple, dict or object holds")
            return [source for source in node.inputs() if _holds(source.type())]
        return []


def _carried(value: Any, node: Any) -> list[Any]:
    """An input of the graph is a copy; one of a loop's body is what the loop began with."""
    loop = node.owningBlock().owningNode()
    if loop is None:
        return []
    if loop.kind() != "prim::Loop":
        raise _Unsure(f"it writes into what {loop.kind()} was given")
    (body,) = loop.blocks()
    return [loop.inputsAt(value.offset() + 1), list(body.outputs())[value.offset()]]


def _written(node: Any) -> list[Any]:
    """The inputs of a node that it writes into."""
    kind = node.kind()
    if kind in _STATISTICS:
        if node.inputsAt(5).toIValue() is False:
            return []  # in eval mode: the statistics are read
        return [node.inputsAt(i) for i in (3, 4) if node.inputsAt(i).type().kind() != "NoneType"]
    schema = node.schema()
    if "!" not in schema:
        return []
    arguments = torch._C.parse_schema(schema).arguments
    return [
        value
        for value, argument in zip(node.inputs(), arguments, strict=False)
        if (info := argument.alias_info) is not None and info.is_write
    ]


def _aliases(node: Any) -> bool:
    """Whether what a node makes may be what it was given, or a part of it."""
    schema = node.schema()
    return schema.startswith("(no schema") or bool(_ALIAS.search(schema.rpartition(") -> ")[2]))


def _is_single(kind: Any) -> bool:
    while kind.kind() == "OptionalType":
        kind = kind.getElementType()
    return kind.kind() in _SINGLE


def _is_many(kind: Any) -> bool:
    """Whether values of a type hold others that can be written into."""
    while kind.kind() in ("OptionalType", "ListType"):
        many = kind.kind() == "ListType"
        kind = kind.getElementType()
        if many and _holds(kind):
            return True
    return not _is_single(kind)


def _holds(kind: Any) -> bool:
    """Whether values of a type can be written into, or hold what can."""
    while kind.kind() == "OptionalType":
        kind = kind.getElementType()
    return kind.kind() == "TensorType" or not _is_single(kind)
