"""What an artefact returned, taken apart: the model's own output, and the taps behind it.

Compilers flatten. What comes back may be `(output, taps)` as the instrumented model had it, or one
flat list, or a dict of made-up names; the order is all that is left, and the manifest has the rest.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import make_dataclass
from keyword import iskeyword
from typing import Any

import torch

from ....errors import TargetError
from ....recording.dtypes import dtype_name, torch_dtype
from ...leaves import flatten
from ..base import HeardCall
from .manifest import Entry, Manifest, OutputLeaf

__all__ = ["as_tensors", "check_taps", "divide", "heard", "rebuild"]

_ELSE = "(no tensor)"  # what stands where the model returned something that is no tensor
_MOST_ELSE = 1000
_NAME = re.compile(r"\.([^\W\d]\w*)")


def as_tensors(value: Any) -> Any:
    """The same with numpy arrays, which other runtimes return, as tensors."""
    if type(value).__module__ == "numpy" and hasattr(value, "__array_interface__"):
        return torch.as_tensor(value)
    if type(value) in (tuple, list):
        return type(value)(as_tensors(item) for item in value)
    if type(value) is dict:
        return {key: as_tensors(item) for key, item in value.items()}
    return value


def divide(result: Any, manifest: Manifest, where: str) -> tuple[Any, list[torch.Tensor]]:
    """The model's own output and the taps, checked against the manifest."""
    result = as_tensors(result)
    count = len(manifest.entries)
    expected = [leaf for leaf in manifest.output if leaf.tensor]
    if isinstance(result, tuple | list) and len(result) == 2 and _is_taps(result[1], count):
        own, taps = result[0], list(result[1])
        flat = [tensor for _, tensor in flatten(own) if tensor is not None]
        if len(flat) != len(expected):
            return _checked(own, taps, manifest, where)
    else:
        tensors = [tensor for _, tensor in flatten(result) if tensor is not None]
        if len(tensors) != len(expected) + count:
            raise TargetError(
                f"{where} was not made with this manifest: it returned {len(tensors)} tensors, and "
                f"the manifest has {len(expected)} of the model's own and {count} taps. Use the "
                "manifest that was written with the artefact."
            )
        flat, taps = tensors[: len(expected)], tensors[len(expected) :]
    return _checked(rebuild(manifest.output, flat), taps, manifest, where)


def _checked(
    own: Any, taps: list[torch.Tensor], manifest: Manifest, where: str
) -> tuple[Any, list[torch.Tensor]]:
    check_taps(taps, manifest.entries, where)
    return own, taps


def _is_taps(value: Any, count: int) -> bool:
    return (
        isinstance(value, tuple | list)
        and len(value) == count
        and all(isinstance(item, torch.Tensor) for item in value)
    )


def check_taps(taps: Sequence[torch.Tensor], entries: Sequence[Entry], where: str) -> None:
    """Refuse taps that cannot be what the manifest says they are.

    Sizes may vary and compilers may narrow numbers; the rank and the kind of number stay.
    """
    for tap, entry in zip(taps, entries, strict=True):
        expected = torch_dtype(entry.dtype, "The manifest")
        if tap.dim() != len(entry.shape) or _kind(tap.dtype) != _kind(expected):
            raise TargetError(
                f"{where} was not made with this manifest: for the layer '{entry.layer}' it "
                f"returned {dtype_name(tap.dtype)} {tuple(tap.shape)}, expected {entry.dtype} of "
                f"{len(entry.shape)} dimensions. Use the manifest that was written with the "
                "artefact."
            )
    _check_order(taps, entries, where)


def _check_order(taps: Sequence[torch.Tensor], entries: Sequence[Entry], where: str) -> None:
    """Refuse taps whose shapes are those of the manifest, but stand at other places.

    A batch may be larger than the one that was compiled: what most sizes became is taken for what
    they all became, and only if all shapes are then there, in another order, is it another order.
    """
    votes: dict[int, Counter[int]] = {}
    for tap, entry in zip(taps, entries, strict=True):
        for size, now in zip(entry.shape, tap.shape, strict=True):
            if size is not None:
                votes.setdefault(size, Counter())[now] += 1
    became = {size: counted.most_common(1)[0][0] for size, counted in votes.items()}
    if any(size is None for entry in entries for size in entry.shape):
        return
    expected = [tuple(became[size or 0] for size in entry.shape) for entry in entries]
    found = [tuple(tap.shape) for tap in taps]
    if found != expected and sorted(found) == sorted(expected):
        wrong = next(i for i, shape in enumerate(found) if shape != expected[i])
        raise TargetError(
            f"{where} returns its taps in another order than this manifest has them: for the layer "
            f"'{entries[wrong].layer}' it returned {found[wrong]}, expected {expected[wrong]}. Use "
            "the manifest that was written with the artefact."
        )


def _kind(dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return "bool"
    if dtype.is_complex:
        return "complex"
    return "float" if dtype.is_floating_point else "int"


def heard(pairs: Sequence[tuple[Entry, torch.Tensor]], layers: Sequence[str]) -> list[HeardCall]:
    """The calls of these layers, each with its leaves, in the order of the manifest."""
    wanted = set(layers)
    calls: dict[tuple[str, int], list[tuple[str, torch.Tensor | None]]] = {}
    for entry, tensor in pairs:
        if entry.layer in wanted:
            calls.setdefault((entry.layer, entry.call), []).append((entry.leaf, tensor))
    return [HeardCall(layer, leaves) for (layer, _), leaves in calls.items()]


def rebuild(output: Sequence[OutputLeaf], tensors: Sequence[torch.Tensor]) -> Any:
    """A nested value in which each tensor stands at its leaf, as the model returned it."""
    left = iter(tensors)
    items = [(_steps(leaf.leaf), next(left) if leaf.tensor else None) for leaf in output]
    return _build(items)


def _steps(leaf: str) -> list[tuple[str, Any]]:
    """`.logits[0]['mask']` as attribute, index and key; what is none of these is one key."""
    steps: list[tuple[str, Any]] = []
    rest = leaf
    while rest:
        name = _NAME.match(rest)
        if name is not None and not iskeyword(name[1]):
            steps.append(("attribute", name[1]))
            rest = rest[name.end() :]
            continue
        found = _key(rest)
        if found is None:
            return [("item", leaf)]
        key, rest = found
        steps.append(("item", key))
    return steps


def _key(text: str) -> tuple[Any, str] | None:
    """The key of `[key]…`, which may itself hold brackets, and what follows it."""
    if not text.startswith("["):
        return None
    ends = [match.start() for match in re.finditer(r"\]", text)]
    tried = ((_literal(text[1:end]), end) for end in ends)
    return next(((key[0], text[end + 1 :]) for key, end in tried if key is not None), None)


def _literal(text: str) -> tuple[Any] | None:
    try:
        key = ast.literal_eval(text)
        hash(key)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return (key,)


def _build(items: Sequence[tuple[list[tuple[str, Any]], torch.Tensor | None]]) -> Any:
    if len(items) == 1 and not items[0][0]:
        return items[0][1]
    groups: dict[tuple[str, Any], list[tuple[list[tuple[str, Any]], torch.Tensor | None]]] = {}
    for steps, tensor in items:
        if steps:
            groups.setdefault(steps[0], []).append((steps[1:], tensor))
    made = {step: _build(group) for step, group in groups.items()}
    if not made:
        return ()
    if all(kind == "attribute" for kind, _ in made):
        fields = {name: value for (_, name), value in made.items()}
        return make_dataclass("Output", list(fields), frozen=True, eq=False)(**fields)
    keys = [key for _, key in made]
    if _are_indices(keys):
        return tuple(made.get(("item", index), _ELSE) for index in range(keys[-1] + 1))
    return {key: value for (_, key), value in made.items()}


def _are_indices(keys: Sequence[Any]) -> bool:
    whole = all(type(key) is int and key >= 0 for key in keys)
    return whole and list(keys) == sorted(keys) and keys[-1] < len(keys) + _MOST_ELSE
