"""How a layer's name is known, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from . import text

if TYPE_CHECKING:
    from ..comparing.results import LayerComparison
    from ..recording.reader import Recording

__all__ = ["both_sides", "brief", "in_a_sentence", "self_check_line", "sentence_of_both"]

_WORDS = {
    "hook": "is the module's own",
    "scope": "was written on the graph by its compiler",
    "value-name": "was carried over from the values of a sibling model",
    "weight": "is that of the weight which it reads, found in a checkpoint",
    "inferred": "is a guess, from the shape of the graph",
}


def brief(provenance: str | None) -> str:
    """The word for a column; a guess is called one."""
    return "inferred: a guess" if provenance == "inferred" else provenance or "-"


def in_a_sentence(provenance: str) -> str:
    """What to think of a layer's name."""
    return f"Its name {_WORDS.get(provenance, 'is known otherwise')} ({provenance})."


def both_sides(row: LayerComparison) -> str:
    """How both sides know a layer's name; empty where it is the module's own on both."""
    sides = (row.provenance, row.candidate_provenance)
    if all(side in (None, "hook") for side in sides):
        return ""
    there = [brief(side) for side in sides if side is not None]
    return " / ".join(dict.fromkeys(there))


def sentence_of_both(row: LayerComparison) -> str:
    """The same for one layer in full, side by side."""
    if not both_sides(row):
        return ""
    sides = (("reference", row.provenance), ("candidate", row.candidate_provenance))
    said = [(side, known) for side, known in sides if known is not None]
    if len({known for _, known in said}) == 1 and len(said) == 2:
        return f"the name {_WORDS[str(said[0][1])]} ({said[0][1]}), on both sides"
    return "; ".join(f"{side}: the name {_WORDS[known]} ({known})" for side, known in said)


def self_check_line(recording: Recording) -> str:
    """One line on what a compiled model's self-check found; empty where there was none."""
    checks = recording.manifest.self_checks
    if not checks:
        return ""
    failed = [item for item in checks if item.get("passed") is False]
    if failed:
        first = text.clean(str(failed[0].get("text", "")))
        return (
            f"self-check FAILED: {len(failed)} of {text.plural(len(checks), 'check')}; {first} "
            f"All of them: tensortap check {text.clean(recording.path)}"
        )
    return f"self-check: {'; '.join(_passed(checks))}"


def _passed(checks: Sequence[Mapping[str, Any]]) -> list[str]:
    said = []
    outputs = [item for item in checks if item.get("check") == "output"]
    if outputs:
        largest = max(float(item.get("largest") or 0.0) for item in outputs)
        off = f"at most {largest:.2g} off" if largest else "identical"
        said.append(f"output {off} with and without taps")
    linears = {item.get("layer") for item in checks if item.get("check") == "linear"}
    if linears:
        verb = "agrees" if len(linears) == 1 else "agree"
        said.append(f"{text.plural(len(linears), 'linear')} {verb}")
    others = [item for item in checks if item.get("check") not in ("output", "linear")]
    said += [text.clean(str(item.get("text", ""))).rstrip(".") for item in others[:3]]
    return said or [f"{text.plural(len(checks), 'check')} passed"]
