"""Copies of values of any type, taken inside a TorchScript graph.

A tap must copy: an op that works in place may rewrite what a layer returned. What a layer returns
is a tensor, or tensors in tuples, lists, dicts and options, and all of them are known to the graph
as types. Tuples are taken apart and put together again by hand, since a NamedTuple has no name that
a new function could use; for the rest a function is compiled from a few lines of TorchScript.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

__all__ = ["append", "constant", "copy_of", "holds_tensors", "list_of_any"]

_PLAIN = {"IntType", "FloatType", "BoolType", "StringType", "NoneType", "NumberType", "ComplexType"}


def list_of_any() -> Any:
    """The type of the list that taps append to."""
    return torch._C.ListType(torch._C.AnyType.get())


def constant(graph: Any, value: Any) -> Any:
    """A constant at the insert point."""
    return graph.insertConstant(value)


def append(graph: Any, taps: Any, site: int, values: list[Any]) -> None:
    """At the insert point, append (site, (values…)) to the list of taps."""
    inner = _insert(graph, "prim::TupleConstruct", values)
    inner.setType(torch._C.TupleType([value.type() for value in values]))
    number = constant(graph, site)
    pair = _insert(graph, "prim::TupleConstruct", [number, inner])
    pair.setType(torch._C.TupleType([number.type(), inner.type()]))
    _insert(graph, "aten::append", [taps, pair]).setType(list_of_any())


def holds_tensors(kind: Any) -> bool:
    """Whether values of a type may hold tensors."""
    name = kind.kind()
    if name == "TensorType":
        return True
    if name == "TupleType":
        return any(holds_tensors(item) for item in kind.elements())
    if name in ("ListType", "OptionalType"):
        return holds_tensors(kind.getElementType())
    if name == "DictType":
        return holds_tensors(kind.getValueType())
    return name not in _PLAIN and name not in ("DeviceObjType", "StreamObjType")


def copy_of(graph: Any, value: Any) -> Any | None:
    """At the insert point, a copy of a value; None where values of its type cannot be copied."""
    kind = value.type()
    name = kind.kind()
    if name == "TensorType":
        return _insert(graph, "aten::clone", [value, constant(graph, None)])
    if name in _PLAIN:
        return value
    if name == "TupleType":
        parts = _unpacked(graph, value, kind)
        copies = [copy_of(graph, part) for part in parts]
        if any(copy is None for copy in copies):
            return None
        made = _insert(graph, "prim::TupleConstruct", copies)
        made.setType(kind)  # its own type: a NamedTuple stays one
        return made
    copier = _copier(kind)
    return None if copier is None else next(iter(graph.insertGraph(copier, [value])))


def _unpacked(graph: Any, value: Any, kind: Any) -> list[Any]:
    elements = kind.elements()
    node = graph.create("prim::TupleUnpack", [value], len(elements))
    graph.insertNode(node)
    outputs = list(node.outputs())
    for output, element in zip(outputs, elements, strict=True):
        output.setType(element)
    return outputs


def _insert(graph: Any, kind: str, inputs: list[Any]) -> Any:
    node = graph.create(kind, inputs, 1)
    graph.insertNode(node)
    return node.output()


def _copier(kind: Any) -> Any | None:
    """The graph of a function that copies values of a type; None where there can be none."""
    lines: list[str] = []
    try:
        name = _write(kind, lines, {})
        graph = _compiled("\n".join(lines), name)
    except (_Unknown, RuntimeError):
        return None
    return graph


@functools.lru_cache(maxsize=256)
def _compiled(source: str, name: str) -> Any:
    unit = torch.jit.CompilationUnit(source)
    graph = getattr(unit, name).graph.copy()
    torch._C._jit_pass_inline(graph)
    return graph


class _Unknown(Exception):
    """A type that a new function cannot spell."""


def _write(kind: Any, lines: list[str], known: dict[str, str]) -> str:
    """Append the source of a function that copies a type, and return its name."""
    text = _spelled(kind)
    if text in known:
        return known[text]
    name = kind.kind()
    if name == "TensorType":
        body = ["    return x.clone()"]
    elif name in _PLAIN:
        body = ["    return x"]
    elif name == "TupleType":
        parts = [_write(item, lines, known) for item in kind.elements()]
        body = [f"    return ({''.join(f'{part}(x[{i}]), ' for i, part in enumerate(parts))})"]
    elif name == "ListType":
        part = _write(kind.getElementType(), lines, known)
        body = [f"    made: {text} = []", "    for y in x:", f"        made.append({part}(y))"]
        body += ["    return made"]
    elif name == "DictType":
        part = _write(kind.getValueType(), lines, known)
        body = [f"    made: {text} = {{}}", "    for k, y in x.items():"]
        body += [f"        made[k] = {part}(y)", "    return made"]
    elif name == "OptionalType":
        part = _write(kind.getElementType(), lines, known)
        body = [
            "    if x is None:",
            "        return None",
            "    else:",
            f"        return {part}(x)",
        ]
    else:
        raise _Unknown(text)
    function = known[text] = f"copy_{len(known)}"
    lines += [f"def {function}(x: {text}) -> {text}:", *body, ""]
    return function


def _spelled(kind: Any) -> str:
    """How a type is written in TorchScript."""
    name = kind.kind()
    if name == "TensorType":
        return "Tensor"
    if name in _PLAIN:
        return str(kind.annotation_str)
    if name == "TupleType":
        if str(kind.annotation_str).split("[")[0] not in ("Tuple", "typing.Tuple", "tuple"):
            raise _Unknown(kind.annotation_str)  # a NamedTuple
        items = [_spelled(item) for item in kind.elements()]
        return f"Tuple[{', '.join(items)}]" if items else "Tuple[()]"
    if name == "ListType":
        return f"List[{_spelled(kind.getElementType())}]"
    if name == "OptionalType":
        return f"Optional[{_spelled(kind.getElementType())}]"
    if name == "DictType":
        return f"Dict[{_spelled(kind.getKeyType())}, {_spelled(kind.getValueType())}]"
    raise _Unknown(str(kind))
