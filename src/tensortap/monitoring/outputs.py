"""What a layer returned, taken apart: a form made of plain tuples, and the tensors in order.

The form says where each tensor stood, so that the same structure can be put together again around
copies, shapes or statistics. It is made of constants alone, because under `torch.compile` it is
made while the graph is traced, when there are no values yet.

    ("tensor", 0, "[0]")                     the first tensor, at the leaf [0]
    ("none",)  ("value", 3)  ("other", "DynamicCache")
    ("tuple", (("[0]", 0, form), …))         "list" and "dict" alike: leaf, key, form

A tuple stays a tuple (a named one becomes a plain one), a list a list; mappings, dataclasses and
ModelOutput become dicts. Objects that are none of these are named and not kept: what is saved must
open with `torch.load(weights_only=True)`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..taps.leaves import children, shortened
from ..taps.plain import is_plain, plain_parts

__all__ = [
    "Form",
    "compact",
    "pick",
    "put_together",
    "shape_of",
    "snapshot",
    "take_apart",
    "tensors_of",
]

Form = tuple[Any, ...]

_DEEPEST = 64
_LARGEST_DENSE = 1 << 30
_PLAIN_VALUES = (bool, str, int, float, complex, bytes)
_TRACED_VALUES = (bool, str)  # a number in a graph may be a symbol


def take_apart(value: Any, tensors: list[torch.Tensor], leaf: str = "", depth: int = 0) -> Form:
    """The form of a value; its tensors are appended to `tensors`. Traceable by `torch.compile`."""
    if isinstance(value, torch.Tensor):
        if torch.compiler.is_compiling() or is_plain(value):
            tensors.append(value)
            return ("tensor", len(tensors) - 1, shortened(leaf))
        return _odd(value, tensors, leaf)
    if value is None:
        return ("none",)
    kept = _TRACED_VALUES if torch.compiler.is_compiling() else _PLAIN_VALUES
    if type(value) in kept:
        return ("value", value)
    if depth >= _DEEPEST:
        return ("other", type(value).__name__)
    if isinstance(value, tuple | list):
        items = [
            (name, index, take_apart(item, tensors, leaf + name, depth + 1))
            for index, (name, item) in enumerate(children(value))
        ]
        return ("list" if isinstance(value, list) else "tuple", tuple(items))
    if isinstance(value, Mapping) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    ):
        return ("dict", tuple(_named(value, tensors, leaf, depth)))
    return ("other", type(value).__name__)


def _named(value: Any, tensors: list[torch.Tensor], leaf: str, depth: int) -> list[Form]:
    plain = not dataclasses.is_dataclass(value)
    keys = list(value) if plain else []
    items: list[Form] = []
    taken: list[Any] = []
    for index, (name, item) in enumerate(children(value)):
        if item is None and not plain and isinstance(value, Mapping):
            continue  # a ModelOutput has no keys for what it does not hold
        key = keys[index] if plain else name[1:]
        key = _plain_key(key)
        while key in taken:
            key = f"{key}_"
        taken.append(key)
        items.append((name, key, take_apart(item, tensors, leaf + name, depth + 1)))
    return items


def _plain_key(key: Any) -> str | int:
    """A key that opens without the class it had: that of an enumeration is its value."""
    if type(key) in (str, int, bool):
        return key  # type: ignore[no-any-return]
    if isinstance(key, str):
        return str.__str__(key)
    return int(key) if isinstance(key, int) else str(key)


def _odd(tensor: torch.Tensor, tensors: list[torch.Tensor], leaf: str) -> Form:
    """Sparse, quantised, nested and wrapped tensors: the plain ones that stand for them."""
    with torch.no_grad():
        if tensor.is_nested:  # jagged or not, a tuple of what it holds
            parts = [(f"[{index}]", part) for index, part in enumerate(tensor.unbind())]
        else:
            parts = list(plain_parts(tensor, _LARGEST_DENSE))
    forms = []
    for index, (tail, part) in enumerate(parts):
        tensors.append(part)
        forms.append((tail, index, ("tensor", len(tensors) - 1, shortened(leaf + tail))))
    return forms[0][2] if len(forms) == 1 and not tensor.is_nested else ("tuple", tuple(forms))


def pick(form: Form, steps: Sequence[str | int]) -> Form:
    """One item of a form: `[0]` and `.logits` are the steps 0 and "logits"."""
    for step in steps:
        form = _child(form, step)
    return form


def _child(form: Form, step: str | int) -> Form:
    if form[0] in ("tuple", "list", "dict"):
        items: tuple[Form, ...] = form[1]
        for name, key, item in items:
            if key == step or name == f".{step}":
                return tuple(item)
        if isinstance(step, int) and -len(items) <= step < len(items):
            return tuple(items[step][2])  # from the end, or a ModelOutput by number
    raise LookupError(f"no item {step!r} in {_said(form)}")


def _said(form: Form) -> str:
    if form[0] in ("tuple", "list"):
        return f"a {form[0]} of {len(form[1])}"
    if form[0] == "dict":
        return f"a dict with {', '.join(repr(key) for _, key, _ in form[1]) or 'nothing'}"
    return {"tensor": "a tensor", "none": "None"}.get(form[0], "a plain value")


def tensors_of(form: Form) -> list[tuple[int, str]]:
    """(number, leaf) of every tensor, in order."""
    if form[0] == "tensor":
        return [(form[1], form[2])]
    if form[0] in ("tuple", "list", "dict"):
        return [found for _, _, item in form[1] for found in tensors_of(item)]
    return []


def compact(form: Form) -> Form:
    """The same form with its tensors numbered from 0."""
    numbers = {number: new for new, (number, _) in enumerate(tensors_of(form))}
    return _renumbered(form, numbers)


def _renumbered(form: Form, numbers: Mapping[int, int]) -> Form:
    if form[0] == "tensor":
        return ("tensor", numbers[form[1]], form[2])
    if form[0] in ("tuple", "list", "dict"):
        return (form[0], tuple((n, k, _renumbered(item, numbers)) for n, k, item in form[1]))
    return form


def put_together(form: Form, found: Sequence[Any], *, values: bool = True) -> Any:
    """The structure again, with `found[i]` in the place of tensor i; without values: None."""
    kind = form[0]
    if kind == "tensor":
        return found[form[1]]
    if kind == "tuple":
        return tuple(put_together(item, found, values=values) for _, _, item in form[1])
    if kind == "list":
        return [put_together(item, found, values=values) for _, _, item in form[1]]
    if kind == "dict":
        return {key: put_together(item, found, values=values) for _, key, item in form[1]}
    if kind == "value" and values:
        return form[1]
    return f"<{form[1]}>" if kind == "other" and values else None


def shape_of(form: Form, shapes: Sequence[list[int]]) -> Any:
    """The document's output_shape: a list, a list of lists for a tuple, None where no tensor is."""
    if form[0] in ("tuple", "list"):
        return [shape_of(item, shapes) for _, _, item in form[1]]
    if form[0] == "dict":
        return {key: shape_of(item, shapes) for _, key, item in form[1]}
    return shapes[form[1]] if form[0] == "tensor" else None


def snapshot(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in CPU memory that shares nothing with the tensor: no storage, no graph, no mode."""
    with torch.inference_mode(False), torch.no_grad():
        if not is_plain(tensor):
            tensor = next(iter(plain_parts(tensor, _LARGEST_DENSE)))[1]
        copied = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        return copied.copy_(tensor.detach())


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """A nested value of our own making with every tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple):
        return tuple(map_tensors(item, change) for item in value)
    if isinstance(value, list):
        return [map_tensors(item, change) for item in value]
    if isinstance(value, dict):
        return {key: map_tensors(item, change) for key, item in value.items()}
    return value
