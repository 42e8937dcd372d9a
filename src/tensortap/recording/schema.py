"""The recording format, version 1, as data: what the manifest and a segment's header hold.

docs/format.md is the prose twin of this module, docs/recording.schema.json the formal one.
Readers ignore keys that they do not know, so that a minor addition needs no new version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from ..errors import DamagedError, VersionError
from .contents import MANIFEST_KINDS, PORTS, PROVENANCES, Port, Provenance
from .kinds import Unfit

__all__ = [
    "COMPARISON",
    "FORMAT",
    "LARGEST_MANIFEST",
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
LARGEST_MANIFEST = 128 << 20
"""Bytes of a manifest: a larger one is neither written nor read."""
COMPARISON = "comparison.json"
LIVE = "live.json"
HEADER_KEY = "tensortap"
SUMMARIES = "summaries"
HISTOGRAM_BUCKETS = "histogram_buckets"
HISTOGRAM_COUNTS = "histogram_counts"
SKETCHES = "sketch_values"
PADDING = "padding."

Status = Literal["recording", "complete", "failed"]


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
    generations: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failure: str | None = None
    writer: dict[str, Any] | None = None

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
                f"got {str(version)[:40]!r}."
            )
        if version > FORMAT:
            raise VersionError(
                f"{where} is in format version {str(version)[:40]}; this tensortap reads up to "
                f"version {FORMAT}. Install a newer tensortap to open it."
            )
        known = {f.name for f in fields(cls)}
        try:
            values = {
                key: MANIFEST_KINDS[key](value, f"'{key}'")
                for key, value in data.items()
                if key in known
            }
        except Unfit as error:
            raise DamagedError(f"{where} is damaged: {error}.") from None
        values["structure"] = Structure.from_dict(values.get("structure") or {})
        return cls(**values)
