"""The manifest of an instrumented model: which extra output is which layer's.

A compiler keeps the order of outputs and loses everything else, so names live beside the artefact:
`model.pt` has `model.taps.json`. It may come from anywhere, so nothing in it is believed before it
was looked at. docs/manifest.schema.json is the formal twin of this module.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ....errors import OptionError, TargetError
from ....recording.dtypes import torch_dtype
from ....recording.kinds import parse, plain
from ....recording.schema import PROVENANCES, Provenance, Structure
from ....regular_files import must_be_regular, read_regular

__all__ = [
    "SUFFIX",
    "Entry",
    "Manifest",
    "OutputLeaf",
    "Part",
    "digest",
    "is_manifest",
    "manifest_beside",
    "manifest_path",
]

SUFFIX = ".taps.json"
VERSION = 1
_LARGEST = 64 << 20
_MOST = 1_000_000
_LONGEST = 4096
_END = 1 << 20


@dataclass(frozen=True)
class Entry:
    """One tapped tensor; a size of None may vary, or was not known."""

    layer: str
    type: str
    leaf: str
    call: int
    shape: tuple[int | None, ...]
    dtype: str
    port: str = "output"
    provenance: Provenance = "hook"


@dataclass(frozen=True)
class OutputLeaf:
    """One place in what the model itself returns; `tensor` is False where it was None."""

    leaf: str
    tensor: bool = True


@dataclass(frozen=True)
class Part:
    """An artefact with taps on these layers; a model may be in several, one after the other.

    The digest is of the file's size and ends, so that another file is not taken for it.
    """

    file: str
    layers: tuple[str, ...]
    digest: str


@dataclass(frozen=True)
class Manifest:
    """What the tensors are that an instrumented model returns: first its own, then the taps.

    `structure` names the model's repeated blocks, embedding and final norm, which nobody could find
    again among the tapped layers alone; empty in manifests of older versions.
    """

    model: str
    entries: tuple[Entry, ...]
    output: tuple[OutputLeaf, ...]
    inputs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()
    plain: str | None = None
    structure: Structure = field(default_factory=Structure)
    version: int = VERSION

    @property
    def layers(self) -> tuple[str, ...]:
        """The tapped layers in the order in which their first calls finish."""
        return tuple(dict.fromkeys(entry.layer for entry in self.entries))

    def of(self, layers: Sequence[str]) -> Manifest:
        """The manifest of an artefact with taps on these layers alone."""
        wanted = set(layers)
        kept = tuple(entry for entry in self.entries if entry.layer in wanted)
        return replace(self, entries=kept, parts=())

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        made = asdict(self)
        return {"format": "tensortap-manifest", "version": made.pop("version"), **made}

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it as JSON, all or nothing."""
        target = Path(path)
        text = json.dumps(self.to_dict(), indent=1, ensure_ascii=False)
        scratch = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            scratch.write_text(text + "\n", encoding="utf-8")
            scratch.replace(target)
        finally:
            scratch.unlink(missing_ok=True)
        return target

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Manifest:
        """Read one, and check all of it."""
        return _Reader(Path(path)).read()


def digest(path: str | os.PathLike[str]) -> str:
    """What tells one artefact from another: its size, its head and its tail."""
    with Path(path).open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        found = hashlib.blake2b(f"{size} ".encode() + file.read(_END), digest_size=16)
        file.seek(max(0, size - _END))
        found.update(file.read(_END))
    return found.hexdigest()


def manifest_path(artefact: str | os.PathLike[str]) -> Path:
    """Where an artefact's manifest lies: `model.pt` has `model.taps.json`."""
    path = Path(artefact)
    return path.with_name(path.stem + SUFFIX)


def manifest_beside(artefact: str | os.PathLike[str]) -> Path | None:
    """The manifest that lies beside an artefact; the parts of one model share theirs.

    One that names other artefacts, such as `model.onnx` when this is `model.pt`, is not its own.
    """
    path = Path(artefact)
    stem, dot, number = path.stem.rpartition(".")
    names = [path.stem, stem] if dot and number.isdecimal() else [path.stem]
    for name in names:
        found = path.with_name(name + SUFFIX)
        if found.is_file():
            parts = Manifest.load(found).parts
            if not parts or path.name in [part.file for part in parts]:
                return found
    return None


def is_manifest(path: str | os.PathLike[str]) -> bool:
    """Whether a path is named as a manifest is."""
    return os.fspath(path).endswith(SUFFIX)


class _Reader:
    """Reads one file; every complaint names it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Manifest:
        try:
            size = must_be_regular(self.path).st_size
            if size > _LARGEST:
                raise self.wrong(f"it is {size} bytes long, more than the {_LARGEST} that we read")
            text = read_regular(self.path, _LARGEST).decode("utf-8")
        except OSError as error:
            raise TargetError(
                f"The manifest {str(self.path)!r} cannot be read: {error.strerror}."
            ) from error
        except UnicodeDecodeError as error:
            raise self.wrong("it is not text in UTF-8") from error
        try:
            data = plain(parse(text), "it")
        except ValueError as error:
            raise self.wrong(f"it is no JSON ({error})") from error
        return self.manifest(data)

    def manifest(self, data: Any) -> Manifest:
        if not isinstance(data, Mapping) or data.get("format") != "tensortap-manifest":
            raise self.wrong('it has no "format": "tensortap-manifest"')
        version = self.number(data, "version")
        if version > VERSION:
            raise OptionError(
                f"The manifest {str(self.path)!r} is of version {version}; this tensortap reads "
                f"up to version {VERSION}. Install a newer tensortap."
            )
        made = Manifest(
            model=self.text(data, "model"),
            entries=tuple(self.entry(item) for item in self.many(data, "entries")),
            output=tuple(self.leaf(item) for item in self.many(data, "output")),
            inputs=self.texts(data, "inputs"),
            notes=self.texts(data, "notes"),
            parts=tuple(self.part(item) for item in self.many(data, "parts")),
            plain=None if data.get("plain") is None else self.file(data, "plain"),
            structure=self.structure(self.object(data.get("structure", {}), "structure")),
            version=version,
        )
        self.check(made)
        return made

    def check(self, made: Manifest) -> None:
        calls: dict[tuple[str, str, str], int] = {}
        for entry in made.entries:
            key = (entry.layer, entry.port, entry.leaf)
            if entry.call < calls.get(key, 0):
                raise self.wrong(f"the calls of the layer {entry.layer!r} are out of order")
            calls[key] = entry.call + 1
        if not made.parts:
            return
        held = [layer for part in made.parts for layer in part.layers]
        if len(held) != len(set(held)) or set(held) != set(made.layers):
            raise self.wrong("its parts do not hold each of its layers once")

    def entry(self, data: Any) -> Entry:
        item = self.object(data, "entries")
        port = self.text(item, "port")
        if port != "output":
            raise self.wrong(f"an entry has the port {port!r}, expected 'output'")
        dtype = self.text(item, "dtype")
        torch_dtype(dtype, f"The manifest {str(self.path)!r}")
        sizes = self.many(item, "shape", most=64)
        if not all(n is None or (isinstance(n, int) and _whole(n)) for n in sizes):
            raise self.wrong(f"an entry has the shape {sizes!r}")
        return Entry(
            layer=self.text(item, "layer"),
            type=self.text(item, "type"),
            leaf=self.text(item, "leaf"),
            call=self.number(item, "call"),
            shape=tuple(sizes),
            dtype=dtype,
            port=port,
            provenance=self.provenance(item),
        )

    def provenance(self, item: Mapping[str, Any]) -> Provenance:
        given = item.get("provenance", "hook")
        for known in PROVENANCES:
            if given == known:
                return known
        raise self.wrong(f"an entry has the provenance {_short(given)}")

    def leaf(self, data: Any) -> OutputLeaf:
        item = self.object(data, "output")
        tensor = item.get("tensor")
        if not isinstance(tensor, bool):
            raise self.wrong(f"'tensor' is {tensor!r}, expected true or false")
        return OutputLeaf(self.text(item, "leaf"), tensor)

    def part(self, data: Any) -> Part:
        item = self.object(data, "parts")
        return Part(self.file(item, "file"), self.texts(item, "layers"), self.text(item, "digest"))

    def structure(self, item: Mapping[str, Any]) -> Structure:
        ends = {
            key: None if item.get(key) is None else self.text(item, key)
            for key in ("embedding", "final_norm")
        }
        return Structure(blocks=self.texts(item, "blocks"), **ends)

    def object(self, data: Any, where: str) -> Mapping[str, Any]:
        if not isinstance(data, Mapping):
            raise self.wrong(f"an item of {where!r} is no object")
        return data

    def many(self, data: Mapping[str, Any], key: str, most: int = _MOST) -> list[Any]:
        value = data.get(key, [])
        if not isinstance(value, list) or len(value) > most:
            raise self.wrong(f"{key!r} is no list of at most {most}")
        return value

    def texts(self, data: Mapping[str, Any], key: str) -> tuple[str, ...]:
        return tuple(self.text({key: item}, key) for item in self.many(data, key))

    def text(self, data: Mapping[str, Any], key: str) -> str:
        value = data.get(key)
        if not isinstance(value, str) or len(value) > _LONGEST:
            raise self.wrong(f"{key!r} is {_short(value)}, expected text")
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise self.wrong(f"{key!r} is {_short(value)}, which UTF-8 has no bytes for")
        return value

    def number(self, data: Mapping[str, Any], key: str) -> int:
        value = data.get(key)
        if not isinstance(value, int) or not _whole(value):
            raise self.wrong(f"{key!r} is {_short(value)}, expected a whole number")
        return value

    def file(self, data: Mapping[str, Any], key: str) -> str:
        """The name of a file beside the manifest: never a path that leads elsewhere."""
        name = self.text(data, key)
        if not name or name in (".", "..") or any(c in name for c in "/\\\0:"):
            raise self.wrong(f"{key!r} is {name!r}, expected the name of a file beside it")
        return name

    def wrong(self, why: str) -> TargetError:
        return TargetError(
            f"The manifest {str(self.path)!r} cannot be used: {why}. It is written by "
            "`tensortap instrument`, or by wrapped.manifest.save(path)."
        )


def _whole(value: int) -> bool:
    return not isinstance(value, bool) and 0 <= value < 1 << 53


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
