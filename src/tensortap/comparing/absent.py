"""Why a compiled model has no value for a layer or a leaf that the other run has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ..recording.reader import Recording
from ..recording.schema import Manifest
from .names import normalised

__all__ = ["Absences", "runtime_of", "skipped_of"]

Place = tuple[str, str, str]  # layer, port, leaf


def runtime_of(recording: Recording) -> str:
    """What ran the model: a recording that does not say is of a module that ran as it is."""
    return str(recording.manifest.target.get("runtime") or "eager")


def skipped_of(manifest: Manifest) -> dict[Place, str]:
    """Why places of a run were not recorded."""
    return {
        (str(item.get("layer")), str(item.get("port")), str(item.get("leaf"))): reason
        for item in manifest.skipped
        if (reason := str(item.get("reason") or "").rstrip("."))
    }


class Absences:
    """Says of each layer that one of two runs lacks why that run does."""

    def __init__(
        self,
        reference: Recording,
        candidate: Recording,
        paired: Iterable[tuple[str, str]] = (),
    ) -> None:
        self._runs = {"reference": reference, "candidate": candidate}
        self._skipped = {side: _by_layer(run) for side, run in self._runs.items()}
        self._prefixes = _prefixes(paired)

    def reason(self, layer: str, side: str) -> str:
        """Why `side` has no value of a layer that the other side has; empty when nobody knows."""
        skipped = self._skipped[side]
        for name in self._names(layer, side):
            if name in skipped:
                return skipped[name]
        absent = str(self._runs[side].manifest.target.get("absent") or "").rstrip(".")
        return absent if absent and self._asked(side) else ""

    def _asked(self, side: str) -> bool:
        """Whether the run would have the layer, had the model it: it was asked for the same."""
        ours, theirs = (
            tuple(self._runs[name].manifest.selection.get("layers") or ())
            for name in (side, "candidate" if side == "reference" else "reference")
        )
        return "all" in ours or ours == theirs

    def _names(self, layer: str, side: str) -> Sequence[str]:
        """What a layer of the other side may be called on this one."""
        longer, prefix = self._prefixes
        names = [layer, normalised(layer)]
        if prefix and longer == side:
            names.append(f"{prefix}.{layer}" if layer else prefix)
        elif prefix and f"{layer}.".startswith(f"{prefix}."):
            names.append(layer[len(prefix) + 1 :])
        return names


def _by_layer(run: Recording) -> dict[str, str]:
    """One reason a layer: that of its output, where there is one.

    A layer that was recorded, but for a None in what it returned, is not absent.
    """
    places = skipped_of(run.manifest)
    there = set(run.layers)
    found: dict[str, str] = {}
    for (layer, _, _), reason in sorted(places.items(), key=lambda item: item[0][1] != "output"):
        if layer in there:
            continue
        found.setdefault(layer, reason)
        found.setdefault(normalised(layer), reason)
    return found


def _prefixes(paired: Iterable[tuple[str, str]]) -> tuple[str, str]:
    """The side whose names have something in front of the other's, and what that is."""
    votes: Counter[tuple[str, str]] = Counter()
    for ours, theirs in paired:
        for side, long, short in (("reference", ours, theirs), ("candidate", theirs, ours)):
            if short and long.endswith(f".{short}"):
                votes[side, long[: -len(short) - 1]] += 1
    return votes.most_common(1)[0][0] if votes else ("", "")
