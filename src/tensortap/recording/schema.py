"""The recording format, version 1, as data: what the manifest and a segment's header hold.

docs/format.md is the prose twin of this module, docs/recording.schema.json the formal one.
Readers ignore keys that they do not know, so that a minor addition needs no new version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from ..errors import DamagedError, VersionError

__all__ = [
    "COMPARISON",
    "FORMAT",
    "LIVE",
    "MANIFEST",
    "PORTS",
    "PROVENANCES",
    "Manifest",
    "Port",
    "Provenance",
    "Row",
    "Site",
    "Status",
    "Structure",
    "segment_name",
]

FORMAT = 1
MANIFEST = "recording.json"
COMPARISON = "comparison.json"
LIVE = "live.json"
HEADER_KEY = "tensortap"
SUMMARIES = "summaries"
HISTOGRAM_BUCKETS = "histogram_buckets"
HISTOGRAM_COUNTS = "histogram_counts"
SKETCHES = "sketch_values"
PADDING = "padding."

Port = Literal[
    "input", "output", "grad_input", "grad_output", "param", "grad_param", "update", "scalar"
]
PORTS: tuple[Port, ...] = (
    "input",
    "output",
    "grad_input",
    "grad_output",
    "param",
    "grad_param",
    "update",
    "scalar",
)
Status = Literal["recording", "complete", "failed"]
Provenance = Literal["hook", "scope", "value-name", "weight", "inferred"]
PROVENANCES: tuple[Provenance, ...] = ("hook", "scope", "value-name", "weight", "inferred")
"""How a layer's name is known, the surest first (docs/compiled.md)."""


def segment_name(rank: int, number: int) -> str:
    """The file name of a rank's numbered segment."""
    return f"segment-r{rank:03d}-{number:06d}.safetensors"


@dataclass(frozen=True)
class Structure:
    """The parts of a model that have a role, known when it is recorded and lost afterwards."""

    blocks: tuple[str, ...] = ()
    embedding: str | None = None
    final_norm: str | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Structure:
        return cls(
            blocks=tuple(str(name) for name in data.get("blocks", ())),
            embedding=data.get("embedding"),
            final_norm=data.get("final_norm"),
        )


@dataclass(frozen=True)
class Site:
    """Where a tensor stands: what many rows of a recording have in common."""

    layer: str
    port: Port
    leaf: str = ""
    alias: str | None = None
    type: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    device: str = "cpu"
    provenance: Provenance = "hook"


@dataclass(frozen=True)
class Row:
    """One record as the writer gets it: where, when, and in what order."""

    layer: str
    port: Port
    leaf: str = ""
    alias: str | None = None
    type: str = ""
    device: str = "cpu"
    epoch: int = 0
    batch: int = 0
    call: int = 0
    order: int = 0


@dataclass(frozen=True)
class Manifest:
    """What `recording.json` says of a run."""

    format: int = FORMAT
    status: Status = "recording"
    tool: str = ""
    torch: str = ""
    python: str = ""
    created: str = ""
    closed: str | None = None
    device: str = "cpu"
    mode: str | None = None
    seed: int | None = None
    target: dict[str, Any] = field(default_factory=dict)
    selection: dict[str, Any] = field(default_factory=dict)
    structure: Structure = Structure()
    inputs: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    self_checks: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failure: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: object, where: str) -> Manifest:
        """Check what was read from `where`, and refuse what this version cannot know."""
        if not isinstance(data, Mapping):
            raise DamagedError(
                f"{where} is not a manifest: expected a JSON object, got {type(data).__name__}."
            )
        version = data.get("format")
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise DamagedError(
                f"{where} has no usable format version: expected a whole number from 1, "
                f"got {version!r}."
            )
        if version > FORMAT:
            raise VersionError(
                f"{where} is in format version {version}; this tensortap reads up to version "
                f"{FORMAT}. Install a newer tensortap to open it."
            )
        known = {f.name for f in fields(cls)}
        values = {key: value for key, value in data.items() if key in known}
        _check_types(values, where)
        values["structure"] = Structure.from_dict(values.get("structure") or {})
        return cls(**values)


_TEXT = (str, type(None))
_TYPES: dict[str, tuple[type, ...]] = {
    "status": (str,),
    "tool": (str,),
    "torch": (str,),
    "python": (str,),
    "created": (str,),
    "closed": _TEXT,
    "device": (str,),
    "mode": _TEXT,
    "failure": _TEXT,
    "target": (dict,),
    "selection": (dict,),
    "structure": (dict,),
    "inputs": (dict,),
    "environment": (dict,),
    "skipped": (list,),
    "self_checks": (list,),
    "notes": (list,),
}
_ITEMS: dict[str, type] = {"skipped": dict, "self_checks": dict, "notes": str}


def _check_types(values: Mapping[str, Any], where: str) -> None:
    for key, kinds in _TYPES.items():
        if key in values:
            _check_type(values[key], kinds, f"'{key}'", where)
    for key, kind in _ITEMS.items():
        for item in values.get(key, ()):
            _check_type(item, (kind,), f"an item of '{key}'", where)
    _check_type(values.get("target", {}).get("class", ""), (str,), "the class of 'target'", where)
    if values.get("status", "recording") not in ("recording", "complete", "failed"):
        raise DamagedError(f"{where} is damaged: its status is {values['status']!r}.")


def _check_type(value: Any, kinds: tuple[type, ...], what: str, where: str) -> None:
    if not isinstance(value, kinds):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise DamagedError(
            f"{where} is damaged: {what} is {type(value).__name__}, expected {expected}."
        )
