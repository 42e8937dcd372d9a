"""Which layer of the reference a running layer is compared with: by names and where it stands.

What `align` does from content needs both runs whole; while one of them runs, there are the user's
maps, equal names, normalised names, and the tree that the names span.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import ComparisonError
from ...recording.reader import Layer, Recording
from ...recording.schema import Manifest
from ...recording.store import open_store
from ...taps.sink import Slot
from ..names import by_map, by_name, by_normalised_name
from .live import live_layer
from .trees import by_tree

__all__ = ["pair_names"]


class _Listening(Recording):
    """The layers that are listened to, before any of them was heard."""

    def __init__(self, path: str, slots: Sequence[Slot]) -> None:
        super().__init__(open_store(path), Manifest(), [], [])
        self._kinds = {slot.name: slot.type for slot in slots}
        self._rows = {slot.name: [] for slot in slots}
        self._by_alias = {slot.alias: slot.name for slot in slots if slot.alias is not None}

    @property
    def aliases(self) -> dict[str, str]:
        return self._by_alias

    def _layer(self, name: str) -> Layer:
        return live_layer(name, self._kinds[name])


def pair_names(
    reference: Recording, path: str, slots: Sequence[Slot], maps: Sequence[str]
) -> dict[str, tuple[str, str]]:
    """Reference's layer and how it was found, by the candidate's name."""
    candidate = _Listening(path, slots)
    found: dict[str, tuple[str, str]] = {}

    def free() -> list[str]:
        return [name for name in reference.layers if name not in found]

    def others() -> list[str]:
        taken = {theirs for theirs, _ in found.values()}
        return [name for name in candidate.layers if name not in taken]

    found.update((a, (b, "map")) for a, b in by_map(maps, reference, candidate).items())
    named = by_name(reference, candidate, free(), others())
    found.update((a, (b, "name")) for a, b in named.items())
    left, right = free(), others()
    if left and right:
        normal = by_normalised_name(
            {name: reference[name].type for name in left},
            {name: candidate[name].type for name in right},
        )
        found.update((a, (b, "normalised")) for a, b in normal.items())
    if free() and others():
        known = {ours: theirs for ours, (theirs, _) in found.items()}
        alike = by_tree(_types(reference), _types(candidate), known)
        found.update((a, (b, "structure")) for a, b in alike.items())
    if not found:
        raise ComparisonError(
            f"None of the {len(slots)} layers that are listened to is in the reference "
            f"{reference.path} by name or place: it has {_some(reference.layers)}, the model "
            f"{_some(candidate.layers)}. Select layers that the reference has, or name pairs with "
            "--map 'regex=>template'; layers that pair by values alone need two recordings and "
            "tensortap compare."
        )
    return {theirs: (ours, how) for ours, (theirs, how) in found.items()}


def _types(recording: Recording) -> dict[str, str]:
    return {name: recording[name].type for name in recording.layers}


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(name or "(root)" for name in names[:3])
    return f"{shown}, … ({len(names)} layers)" if len(names) > 3 else (shown or "no layers")
