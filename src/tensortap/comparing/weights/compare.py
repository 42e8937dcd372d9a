"""Pairs the weights of two checkpoints by name and by content, and says what became of each.

Tensors are read one pair at a time. Content is sought under other names only for weights that are
not the same: by a few values first, then by all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..causes import explain
from ..names import normalised
from ..results import EnvironmentDifference
from .files import Entry, WeightFiles, open_weights
from .results import WeightComparison, WeightRow

__all__ = ["compare_weights"]

_PIECE = 1 << 20
_VALUES = 64  # that tell which tensors may be the same
_SILENT = ("_name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype")
_DISTINCT = 8  # values, of which not one is a power of two, that show a rounding
_SEEN = 4096  # of the values, among which they are sought
_AXES = {2: ("row", "column"), 4: ("row", "channel", "height", "width")}
_PRECISION = {"float64": 4, "float32": 3, "float16": 2, "bfloat16": 2}


def compare_weights(
    reference: str, candidate: str, *, progress: Callable[[int, int], None] | None = None
) -> WeightComparison:
    """Compare two checkpoints, weight by weight, and their configs key by key.

    Each is a safetensors file, a folder of them, `hf:DIR`, or what torch.save wrote. `progress` is
    told how many weights of how many are done.
    """
    left, right = open_weights(str(reference)), open_weights(str(candidate))
    pairs = _paired(left, right)
    paired = set(pairs.values())
    alone = [entry for name, entry in right.entries.items() if name not in paired]
    contents = (_Contents(left), _Contents(right))
    rows: list[WeightRow] = []
    used: set[str] = set()
    total = len(left.entries) + len(alone)
    for name, entry in left.entries.items():
        other = right.entries.get(pairs.get(name, ""))
        row = _absent(entry, contents[1], paired, used) if other is None else None
        row = row or (None if other is None else _row(entry, other, contents[0]))
        assert row is not None
        if other is None and row.candidate_name is not None:
            used.add(row.candidate_name)
        rows.append(row)
        if progress is not None:
            progress(len(rows), total)
    for entry in alone:
        if entry.name not in used:
            rows.append(_new(entry, contents[0]))
        if progress is not None:
            progress(min(len(rows), total), total)
    return WeightComparison(
        reference=left.path,
        candidate=right.path,
        weights=tuple(rows),
        config=tuple(_config(left, right)),
        notes=tuple(_notes(left, right)),
    )


def _paired(left: WeightFiles, right: WeightFiles) -> dict[str, str]:
    """The candidate's name of each weight: the same, or the same without wrappers and prefixes."""
    found = {name: name for name in left.entries if name in right.entries}
    ours = [name for name in left.entries if name not in found]
    theirs = [name for name in right.entries if name not in found]
    plain: dict[str, list[str]] = {}
    for name in theirs:
        plain.setdefault(normalised(name), []).append(name)
    for name in ours:
        same = plain.get(normalised(name), [])
        if len(same) == 1:
            found[name] = same[0]
    taken = set(found.values())
    for name in ours:
        if name in found:
            continue
        ends = [o for o in theirs if o not in taken and _one_prefix(name, o)]
        if len(ends) == 1 and left.entries[name].shape == right.entries[ends[0]].shape:
            found[name] = ends[0]
            taken.add(ends[0])
    return found


def _one_prefix(a: str, b: str) -> bool:
    """Whether one name is the other with something in front."""
    return a.endswith(f".{b}") or b.endswith(f".{a}")


class _Contents:
    """The tensors of one side by a few of their values, made when they are first asked for."""

    def __init__(self, files: WeightFiles) -> None:
        self._files = files
        self._marks: dict[tuple[tuple[int, ...], str], dict[bytes, list[Entry]]] = {}

    def same_as(self, tensor: Tensor, entry: Entry) -> list[str]:
        """The names under which this side has these bits."""
        key = (entry.shape, entry.dtype)
        if key not in self._marks:
            marks: dict[bytes, list[Entry]] = {}
            for other in self._files.entries.values():
                if (other.shape, other.dtype) == key:
                    marks.setdefault(_mark(other.read()), []).append(other)
            self._marks[key] = marks
        near = self._marks[key].get(_mark(tensor), [])
        return [other.name for other in near if _same_bits(other.read(), tensor)]


def _mark(tensor: Tensor) -> bytes:
    flat = tensor.detach().reshape(-1)
    step = max(1, flat.numel() // _VALUES)
    few = flat[::step].contiguous()
    return bytes(few.view(torch.uint8).numpy().tobytes()) if few.numel() else b""


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(*(side.contiguous().reshape(-1).view(torch.uint8) for side in (a, b)))


def _shared(entry: Entry, other: Entry | None) -> dict[str, Any]:
    """What both sides say of a pair without being read."""
    return {
        "shape": entry.shape,
        "candidate_shape": () if other is None else other.shape,
        "dtype": entry.dtype,
        "candidate_dtype": "" if other is None else other.dtype,
    }


def _absent(entry: Entry, theirs: _Contents, paired: set[str], used: set[str]) -> WeightRow:
    """A weight whose name the candidate does not have; `used` are names that stand for others."""
    same = theirs.same_as(entry.read(), entry)
    free = [name for name in same if name not in paired and name not in used]
    facts = _shared(entry, None)
    if free or same:
        name = max(free or same, key=lambda other: _likeness(entry.name, other))
        how, text = ("renamed", f"is {name} in the candidate")
        if not free:
            how, text = "tied", f"the candidate has its content once, as {name}"
        facts |= {"candidate_shape": entry.shape, "candidate_dtype": entry.dtype}
        return WeightRow(entry.name, name, "identical", how, text, error=0.0, **facts)
    text = "the candidate does not have it"
    return WeightRow(entry.name, None, "missing", "missing", text, **facts)


def _likeness(a: str, b: str) -> tuple[int, int]:
    """How many parts two names share at their ends, and anywhere: norms have the same values."""
    left, right = a.split("."), b.split(".")
    pairs = zip(reversed(left), reversed(right), strict=False)
    ends = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return ends, len(set(left) & set(right))


def _new(entry: Entry, ours: _Contents) -> WeightRow:
    """A weight that the candidate alone has."""
    same = ours.same_as(entry.read(), entry)
    facts: dict[str, Any] = {"candidate_shape": entry.shape, "candidate_dtype": entry.dtype}
    if same:
        text = f"the reference has its content once, as {same[0]}"
        return WeightRow(entry.name, entry.name, "identical", "tied", text, error=0.0, **facts)
    text = "the reference does not have it"
    return WeightRow(entry.name, entry.name, "missing", "new", text, **facts)


def _row(entry: Entry, other: Entry, ours: _Contents) -> WeightRow:
    """A weight that both sides have."""
    facts = _shared(entry, other)
    renamed = "" if entry.name == other.name else f"is {other.name} in the candidate"

    def row(verdict: Any, how: str = "", text: str = "", **more: Any) -> WeightRow:
        how, text = how or ("renamed" if renamed else ""), text or renamed
        return WeightRow(entry.name, other.name, verdict, how, text, **facts, **more)

    reference, candidate = entry.read(), other.read()
    if _same_bits(reference, candidate):
        return row("identical", error=0.0)
    if entry.shape != other.shape:
        if entry.shape == other.shape[::-1] and _equal(reference.T, candidate):
            return row("diverged", "transposed", "transposed")
        found = f"{list(other.shape)} instead of {list(entry.shape)}"
        return row("incomparable", "shape", f"another shape: {found}")
    rounded = _rounded(reference, candidate)
    if rounded:
        return row("within", "rounded", rounded, error=_error(reference, candidate))
    if not (reference.is_floating_point() and candidate.is_floating_point()):
        count = int((reference != candidate).sum()) if reference.dtype == candidate.dtype else -1
        text = f"{count} values differ" if count >= 0 else "another kind of numbers"
        return row("diverged", "changed", text)
    error = _error(reference, candidate)
    moved = [name for name in ours.same_as(candidate, other) if name != entry.name]
    if moved:
        text = f"holds what is {moved[0]} in the reference"
        return row("diverged", "moved", text, error=error)
    if reference.dim() == 2 and _equal(reference.T, candidate):
        return row("diverged", "transposed", "transposed", error=error)
    axes = _AXES.get(reference.dim(), ())
    wide = [side.float() if side.element_size() == 1 else side for side in (reference, candidate)]
    causes = explain(wide[0], wide[1], axes=axes)
    best = next((cause for cause in causes if cause.kind != "noise"), None)
    how = "changed" if best is None else best.kind
    text = f"other values (relative error {error:.2g})" if best is None else str(best)
    return row("diverged", how, text, error=error, causes=causes)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a == b).all())


def _rounded(reference: Tensor, candidate: Tensor) -> str:
    """How the one is the other rounded, in words; empty where it is not."""
    names = [str(side.dtype).removeprefix("torch.") for side in (reference, candidate)]
    if reference.dtype != candidate.dtype:
        if not all(name in _PRECISION for name in names):
            return ""
        if _PRECISION[names[1]] <= _PRECISION[names[0]] and _equal(
            reference.to(candidate.dtype), candidate
        ):
            return f"rounded to {names[1]}"
        if _PRECISION[names[1]] >= _PRECISION[names[0]] and _equal(
            candidate.to(reference.dtype), reference
        ):
            return f"{names[1]} instead of {names[0]}"
        if set(names) == {"bfloat16", "float16"} and _one_origin(reference, candidate):
            return f"{names[1]} instead of {names[0]}, of the same values"
        return ""
    for narrow in (torch.bfloat16, torch.float16):
        if reference.dtype in (torch.float32, torch.float64):
            name = str(narrow).removeprefix("torch.")
            if _telling(candidate) and _equal(reference.to(narrow).to(reference.dtype), candidate):
                return f"rounded to {name}, kept as {names[1]}"
            if _telling(reference) and _equal(candidate.to(narrow).to(reference.dtype), reference):
                return f"the reference is rounded to {name}"
    return ""


def _telling(rounded: Tensor) -> bool:
    """Whether values can show that they were rounded: ones and zeros are near to anything."""
    mantissas, _ = torch.frexp(rounded)
    values = rounded[(mantissas.abs() != 0.5) & (mantissas != 0)]
    return len(set(values[:_SEEN].tolist())) >= min(_DISTINCT, rounded.numel())


def _one_origin(a: Tensor, b: Tensor) -> bool:
    """Whether every two values may be one number, rounded to the dtype of each side."""
    if a.shape != b.shape:
        return False
    wide = (a.double(), b.double())
    allowed = torch.zeros_like(wide[0])
    for side, values in zip((a, b), wide, strict=True):
        kind = torch.finfo(side.dtype)
        allowed += values.abs().clamp_min(kind.smallest_normal) * (kind.eps / 2)
    return bool(((wide[0] - wide[1]).abs() <= allowed).all())


def _error(reference: Tensor, candidate: Tensor) -> float:
    """The relative L2 error; a million values at a time."""
    size = rest = 0.0
    ours, theirs = reference.reshape(-1), candidate.reshape(-1)
    for start in range(0, len(ours), _PIECE):
        wide = ours[start : start + _PIECE].double()
        size += float(wide.square().sum())
        rest += float((theirs[start : start + _PIECE].double() - wide).square().sum())
    return math.sqrt(rest / size) if size > 0 else (math.inf if rest > 0 else 0.0)


def _config(left: WeightFiles, right: WeightFiles) -> Iterator[EnvironmentDifference]:
    if left.config is None or right.config is None:
        return
    ours, theirs = (dict(_flat("", side.config or {})) for side in (left, right))
    for key in [*ours, *(key for key in theirs if key not in ours)]:
        a, b = (side.get(key, "not said") for side in (ours, theirs))
        if a != b and key.rpartition(".")[2] not in _SILENT:
            yield EnvironmentDifference(key, _said(a), _said(b))


def _flat(prefix: str, data: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", value


def _said(value: Any) -> str:
    return "none" if value is None else str(value)


def _notes(left: WeightFiles, right: WeightFiles) -> Iterator[str]:
    configs = [side.config is not None for side in (left, right)]
    if any(configs) and not all(configs):
        lacking = right if configs[0] else left
        yield f"The configs were not compared: '{lacking.path}' has no config.json."
