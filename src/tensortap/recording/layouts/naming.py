"""The documents' short names for layers, and plain values for files that others load."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import torch

from ..schema import Structure

if TYPE_CHECKING:
    from ..reader import Recording

__all__ = [
    "fill_blocks",
    "found_structure",
    "in_order",
    "json_safe",
    "mode_of",
    "plain",
    "short_names",
    "told_about",
]

_BLOCK = re.compile(r"layer_(\d{1,9})")
_EMBEDDING, _FINAL_NORM = "embedding", "final_norm"
_MOST_BLOCKS = 100_000


def short_names(layers: Iterable[str], structure: Structure) -> dict[str, str]:
    """`embedding`, `layer_<i>` and `final_norm` by role, the full name for every other layer."""
    roles = {name: f"layer_{i}" for i, name in enumerate(structure.blocks)}
    if structure.embedding is not None:
        roles.setdefault(structure.embedding, _EMBEDDING)
    if structure.final_norm is not None:
        roles.setdefault(structure.final_norm, _FINAL_NORM)
    layers = list(layers)
    short = {layer: roles[layer] for layer in layers if layer in roles}
    used = set(short.values())
    for layer in layers:
        if layer in short:
            continue
        name = layer or "root"
        while name in used:
            name += "_"
        used.add(name)
        short[layer] = name
    return {layer: short[layer] for layer in layers}


def fill_blocks(known: Mapping[int, str]) -> tuple[str, ...]:
    """All blocks of a model of which some are known by their index.

    A tree may hold the first and the last block alone; the others keep their places, so that
    indices stay what they were.
    """
    if not known:
        return ()
    last = max(known)
    if last >= _MOST_BLOCKS:
        return tuple(known[i] for i in sorted(known))
    stems = {name.removesuffix(str(i)) for i, name in known.items() if name.endswith(f".{i}")}
    stem = stems.pop() if len(stems) == 1 else "layer_"
    return tuple(known.get(i, f"{stem}{i}") for i in range(last + 1))


def found_structure(layers: Mapping[str, str]) -> Structure:
    """The roles that short names tell of; `layers` maps short names to layer names."""
    blocks = {int(m[1]): name for short, name in layers.items() if (m := _BLOCK.fullmatch(short))}
    return Structure(fill_blocks(blocks), layers.get(_EMBEDDING), layers.get(_FINAL_NORM))


def in_order(found: Iterable[str], told: Sequence[str]) -> list[str]:
    """Short names in order of execution: as the tree tells it, else by role."""
    place = {short: i for i, short in enumerate(told)}

    def key(short: str) -> tuple[int, int, int, str]:
        if short in place:
            return (0, place[short], 0, "")
        if short == _EMBEDDING:
            return (1, 0, 0, "")
        if block := _BLOCK.fullmatch(short):
            return (1, 1, int(block[1]), "")
        return (1, 2 if short == _FINAL_NORM else 3, 0, short)

    names = set(found)
    if not names <= set(place):  # told of some alone: roles are the better guide
        place = {}
    return sorted(names, key=key)


def plain(value: Any, depth: int = 0) -> Any:
    """A copy of plain Python values alone, which JSON and `torch.load` take without question."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        return value.tolist() if value.numel() <= 1 << 20 else f"tensor {list(value.shape)}"
    if depth < 20 and isinstance(value, Mapping):
        return {str(key): plain(item, depth + 1) for key, item in value.items()}
    if depth < 20 and isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item, depth + 1) for item in value]
    return str(value)


def mode_of(recording: Recording, wanted: str | None) -> str:
    """The mode a tree is written under: as asked, as recorded, or the recording's folder."""
    return wanted or recording.manifest.mode or PurePath(recording.path).name or "recording"


def told_about(recording: Recording) -> dict[str, Any]:
    """What a tree's statistics say of the model, so that an import knows it again."""
    manifest = recording.manifest
    name = manifest.target.get("class") or manifest.target.get("spec") or ""
    return {
        "model": str(name),
        "structure": asdict(manifest.structure),
        "inputs": json_safe(manifest.inputs),
        "target": json_safe(manifest.target),
    }


def json_safe(value: Any) -> Any:
    """Plain values without the numbers that JSON does not know."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in value]
    return plain(value)
