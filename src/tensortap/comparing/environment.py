"""Before the tensors: what the two runs do not have in common.

Most differences between runs are explained here, so this comes first in every output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..recording.reader import Recording
from ..recording.schema import Manifest
from ..recording.training_mode import EFFECTS
from .absent import runtime_of
from .results import EnvironmentDifference

__all__ = ["environment_differences", "same_input"]

_MISSING = "not said"
# Paths and times of a run say nothing about its numbers.
_SILENT = {"spec", "file", "path", "created", "closed", "_name_or_path", "transformers_version"}
# Said elsewhere: versions and runtimes have lines of their own, what is absent is said of layers,
# weights that differ in a note, what depends on training mode is a warning, and grids are part of
# the estimates.
_ELSEWHERE = {
    ("target", "fingerprints"),
    ("environment", "python"),
    ("target", "runtime"),
    ("target", "absent"),
    ("target", EFFECTS),
    ("target", "grids"),
}
_MOST = 120
_WIDTHS = {"float64": 64, "float32": 32, "bfloat16": 16, "float16": 16}


def environment_differences(
    reference: Recording, candidate: Recording
) -> tuple[tuple[EnvironmentDifference, ...], tuple[tuple[str, str], ...]]:
    """What differs (versions, device, dtypes, config, seed, inputs, settings), and the rest."""
    left, right = _facts(reference.manifest), _facts(candidate.manifest)
    runtimes = [runtime_of(run) for run in (reference, candidate)]
    if runtimes != ["eager", "eager"]:
        left, right = {"runtime": runtimes[0], **left}, {"runtime": runtimes[1], **right}
    if runtimes[0] != runtimes[1]:
        left, right = _said_by_both(left, right), _said_by_both(right, left)
    alike = _same_values(reference, candidate) or _same_rounded(reference, candidate)
    if alike and "inputs" in left:
        right["inputs"] = left["inputs"]
    names = [*left, *(name for name in right if name not in left)]
    differing = [n for n in names if left.get(n, _MISSING) != right.get(n, _MISSING)]
    return (
        tuple(EnvironmentDifference(n, _shown(left, n), _shown(right, n)) for n in differing),
        tuple((n, _shown(left, n)) for n in names if n not in differing),
    )


def same_input(reference: Recording, candidate: Recording) -> bool | None:
    """Whether both models were given the same inputs; None when a recording does not say.

    The same bytes, or the same numbers where one was given them cast to a narrower dtype.
    """
    digests = [run.manifest.inputs.get("digest") for run in (reference, candidate)]
    if not all(isinstance(digest, str) and digest for digest in digests):
        return None
    batches = [run.manifest.inputs.get("batches") or [] for run in (reference, candidate)]
    if any("unknown" in batch for batch in batches):
        return None
    return (
        digests[0] == digests[1]
        or _same_values(reference, candidate)
        or _same_rounded(reference, candidate)
    )


def _same_rounded(reference: Recording, candidate: Recording) -> bool:
    """Whether one side's floats are the other's in a narrower dtype, as a mode is given them."""
    inputs = [run.manifest.inputs for run in (reference, candidate)]
    floats = [data.get("floats") for data in inputs]
    names = [str(found[0]) for found in floats if isinstance(found, list) and len(found) == 1]
    if len(names) < 2 or not all(name in _WIDTHS for name in names):
        return False
    narrow, wide = sorted(names, key=lambda name: _WIDTHS[name])
    if _WIDTHS[narrow] == _WIDTHS[wide]:
        return False
    digests = [(data.get("rounded") or {}).get(narrow) for data in inputs]
    return digests[0] == digests[1] is not None


def _same_values(reference: Recording, candidate: Recording) -> bool:
    """Whether two runtimes were given the same tensors: what each calls them is its own affair."""
    values = [run.manifest.inputs.get("values") for run in (reference, candidate)]
    return runtime_of(reference) != runtime_of(candidate) and values[0] == values[1] is not None


def _facts(manifest: Manifest) -> dict[str, Any]:
    """One flat table of what a run was made with, the inputs first."""
    facts: dict[str, Any] = {}
    if manifest.inputs.get("digest") is not None:
        facts["inputs"] = manifest.inputs["digest"]
    for name in ("tool", "torch", "python", "device", "mode"):
        facts[name] = getattr(manifest, name)
    facts["seed"] = _seed(manifest.seed)
    facts.update(_flat("target", manifest.target))
    facts.update(_flat("environment", manifest.environment))
    if manifest.selection.get("keep") is not None:
        facts["keep"] = manifest.selection["keep"]
    return facts


def _said_by_both(facts: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """Without what the other says nothing of: a compiled model has no config, and no modules."""
    found = {k: v for k, v in facts.items() if k in others or not k.startswith("target.")}
    if isinstance(found.get("target.class"), str):
        found["target.class"] = found["target.class"].rpartition(".")[2]
    return found


def _seed(seed: int | None) -> int | str:
    """The seed that somebody set; torch's own, drawn anew in each process, tells nothing."""
    return _MISSING if seed is None or abs(seed) >= 1 << 32 else seed


def _flat(prefix: str, data: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if key in _SILENT or (prefix, key) in _ELSEWHERE:
            continue
        name = f"{prefix}.{key}"
        if isinstance(value, Mapping) and key != "dtypes":
            yield from _flat(name, value)
        else:
            yield name, value


def _shown(facts: Mapping[str, Any], name: str) -> str:
    value = facts.get(name, _MISSING)
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        text = ", ".join(f"{key} {item}" for key, item in value.items())
    else:
        text = str(value)
    return text if len(text) <= _MOST else text[: _MOST - 1] + "…"
