"""The document's screen: statistics of the layers that tell most, the ends and the middle."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["key_layers", "statistics_screen"]

_BLOCK = re.compile(r"layer_(\d+)")


def statistics_screen(statistics: Mapping[str, Any]) -> str:
    """`关键层统计信息:` and four lines a layer, as the document has them."""
    parts = [_layer(name, statistics[name]) for name in key_layers(list(statistics))]
    return "关键层统计信息:\n" + "\n\n".join(parts)


def key_layers(names: list[str]) -> list[str]:
    """The embedding, the first, the middle (of 62: layer_30) and the last block, the final norm."""
    blocks = sorted(int(match[1]) for name in names if (match := _BLOCK.fullmatch(name)))
    middle = blocks[:1] + blocks[(len(blocks) - 1) // 2 :][:1] + blocks[-1:]
    wanted = ["embedding", *dict.fromkeys(f"layer_{index}" for index in middle), "final_norm"]
    return [name for name in wanted if name in names]


def _layer(name: str, about: Mapping[str, Any]) -> str:
    return "\n".join(
        (
            f"  {name}:",
            f"    Shape: {list(about['shape'])}",
            f"    Mean: {about['mean']:.6f}, Std: {about['std']:.6f}",
            f"    Range: [{about['min']:.6f}, {about['max']:.6f}]",
            f"    Has NaN: {about['has_nan']}, Has Inf: {about['has_inf']}",
        )
    )
