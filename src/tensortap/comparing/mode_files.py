"""Where comparisons of modes are kept: `comparisons/mode_<M>_vs_<R>.json`, as in document 003."""

from __future__ import annotations

import os
from collections.abc import Iterable

from ..recording.store import open_store
from ..targets.modes.declared import folder_name
from .results import Comparison, json_text

__all__ = ["SUMMARY", "comparison_file", "comparison_text", "save_comparison", "save_files"]

SUMMARY = "summary.json"


def comparison_file(
    mode: str, reference: str, *, layer: str | None = None, suffix: str = "json"
) -> str:
    """The name of a comparison's file; that of one layer has a file of its own."""
    of_layer = "" if layer is None else f"_layer_{folder_name(layer or 'root')}"
    return f"mode_{folder_name(mode)}_vs_{folder_name(reference)}{of_layer}.{suffix}"


def comparison_text(comparison: Comparison, mode: str, reference: str) -> str:
    """A comparison's JSON under the names of the two modes."""
    data = {"mode": mode, **comparison.to_dict(), "reference": reference}
    return json_text(data) + "\n"


def save_comparison(
    comparison: Comparison,
    folder: str | os.PathLike[str],
    mode: str,
    reference: str,
    *,
    layer: str | None = None,
) -> str:
    """Write one mode's comparison; where it lies."""
    name = comparison_file(mode, reference, layer=layer)
    return save_files(folder, [(name, comparison_text(comparison, mode, reference))])[0]


def save_files(folder: str | os.PathLike[str], files: Iterable[tuple[str, str]]) -> list[str]:
    """Write texts, each whole or not at all; two of one name are told apart by a number."""
    store = open_store(folder)
    store.make()
    names: list[str] = []
    for wanted, text in files:
        stem, dot, suffix = wanted.rpartition(".")
        name, number = wanted, 1
        while name in names:
            number += 1
            name = f"{stem}-{number}{dot}{suffix}"
        store.write_text(name, text)
        names.append(name)
    return [f"{store.url}/{name}" for name in names]
