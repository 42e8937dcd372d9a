"""Opens a recording and looks things up in it, lazily.

Opening reads the segments' headers; a tensor's bytes are mapped when they are asked for. What a
crash left behind is opened too, and said in `notes`.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import gc
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..errors import DamagedError, NotARecordingError, RecordingError, SelectionError
from ..numerics import summarize
from ..numerics.histogram import Histogram
from ..numerics.summary import Summary
from .dtypes import from_bytes, torch_dtype
from .kinds import parse
from .owner import in_words
from .schema import (
    LARGEST_MANIFEST,
    MANIFEST,
    PROVENANCES,
    SKETCHES,
    Manifest,
    Port,
    Provenance,
    Status,
)
from .segment import RawRow, Segment, read_segment, sorted_rows, tensor_id
from .store import LocalStore, Store, open_store

if TYPE_CHECKING:
    from .health import Finding, Limits

__all__ = ["Layer", "Record", "Recording", "open", "read_manifest"]

_SEGMENT = re.compile(r"segment-r\d{3,}-\d{6,}\.safetensors")


def open(path: str | os.PathLike[str], *, partial: bool = False) -> Recording:
    """Open the recording in a folder; `partial` leaves damaged segments out and says so."""
    store = open_store(path)
    for _ in range(5):
        # segments may be joined under our eyes
        with contextlib.suppress(FileNotFoundError), undisturbed():
            try:
                return _open(store, partial)
            except FileNotFoundError:
                raise
            except OSError as error:
                where = error.filename or store.url
                raise RecordingError(f"Cannot read {where}: {error.strerror or error}.") from None
    raise RecordingError(f"{store.url} changes faster than it can be read. Try again.")


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """While many small objects are made that stay: looking for garbage among them takes longer."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _open(store: Store, partial: bool) -> Recording:
    names = store.names()
    if MANIFEST not in names:
        raise NotARecordingError(_nothing_there(store, names))
    manifest = read_manifest(store)
    segments: list[Segment] = []
    damaged: list[DamagedError] = []
    for name in names:
        if not _SEGMENT.fullmatch(name):
            continue
        try:
            segments.append(read_segment(store, name))
        except DamagedError as error:
            damaged.append(error)
        except FileNotFoundError:
            raise
        except OSError as error:
            reason = error.strerror or error
            damaged.append(DamagedError(f"{store.url}/{name} cannot be read: {reason}."))
    merged = {name for segment in segments for name in segment.merged}
    segments = [segment for segment in segments if segment.name not in merged]
    if damaged and not partial:
        raise DamagedError(_damage(damaged, segments))
    return Recording(store, manifest, segments, [str(error) for error in damaged])


def read_manifest(store: Store) -> Manifest:
    """The manifest of a recording, checked; a FileNotFoundError where there is none."""
    where = f"{store.url}/{MANIFEST}"
    try:
        data = parse(store.read_text(MANIFEST, LARGEST_MANIFEST))
    except ValueError as error:
        raise DamagedError(f"{where} is corrupt: it is not JSON ({error}).") from None
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RecordingError(f"Cannot read {where}: {error.strerror or error}.") from None
    return Manifest.from_dict(data, where)


def _nothing_there(store: Store, names: list[str]) -> str:
    if not names and Path(store.url).exists() and not Path(store.url).is_dir():
        return f"{store.url} is not a folder, and a recording is one."
    if not names:
        return f"There is no recording at {store.url}: the folder does not exist or is empty."
    inner = [name for name in names if MANIFEST in open_store(f"{store.url}/{name}").names()]
    if inner:
        return (
            f"{store.url} holds recordings, but is none itself. Name one of them: "
            f"{', '.join(inner[:8])}."
        )
    if any(name.endswith((".pt", ".npy", ".npz")) for name in names):
        return (
            f"{store.url} is no recording but a tree of tensor files. Turn it into one first: "
            f"tensortap import {store.url} -o FOLDER"
        )
    return f"{store.url} is no recording: it has no {MANIFEST}."


def _damage(damaged: list[DamagedError], segments: list[Segment]) -> str:
    layers = {segment.sites[row[0]].layer for segment in segments for row in segment.rows}
    rest = (
        f"{len(segments)} of {len(segments) + len(damaged)} segments are whole, with "
        f"{sum(len(s.rows) for s in segments)} records of {len(layers)} layers"
    )
    return f"{damaged[0]} {rest}: read them with --partial (tap.open(path, partial=True))."


def _places(lengths: Sequence[tuple[int, int]]) -> dict[int, slice]:
    """Where each row's stretch lies, among stretches one behind the other."""
    places, at = {}, 0
    for row, length in lengths:
        places[row] = slice(at, at + length)
        at += length
    return places


def _skipped_in_words(skipped: list[dict[str, Any]]) -> list[str]:
    """A sentence a reason, with the places it holds for."""
    places: dict[str, list[str]] = {}
    for item in skipped:
        leaf = f" {item['leaf']}" if item.get("leaf") else ""
        where = f"{item.get('port')}{leaf} of '{item.get('layer')}'"
        places.setdefault(str(item.get("reason")), []).append(where)
    return [
        f"Not recorded ({reason}): {', '.join(where[:6])}"
        + (f" and {len(where) - 6} more places." if len(where) > 6 else ".")
        for reason, where in places.items()
    ]


@dataclass(frozen=True)
class Record:
    """One tensor, or its summary, at one layer, port, leaf and moment."""

    layer: str
    alias: str | None
    port: Port
    leaf: str
    epoch: int
    batch: int
    call: int
    order: int
    type: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    rank: int
    provenance: Provenance
    _recording: Recording = field(repr=False, compare=False)
    _segment: Segment = field(repr=False, compare=False)
    _number: int = field(repr=False, compare=False)
    _summary_row: int = field(repr=False, compare=False)

    @property
    def stored(self) -> bool:
        """Whether the tensor itself was kept, not its summary alone."""
        return self._number >= 0

    @property
    def fleeting(self) -> bool:
        """Whether its tensor is there for a while alone, since nobody stores it."""
        return False

    @property
    def nbytes(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count * torch_dtype(self.dtype, self.layer).itemsize

    @property
    def tensor_id(self) -> str | None:
        """The name of the stored tensor; records of equal content share one."""
        return tensor_id(self.rank, self._number) if self.stored else None

    @property
    def summary(self) -> Summary:
        if self._summary_row < 0:
            wanted = bool(self._recording.manifest.selection.get("histograms"))
            return summarize(self.tensor(), histogram=wanted)
        histogram = self._recording._histogram(self._segment, self._summary_row)
        return Summary.from_row(self._segment.summaries()[self._summary_row].tolist(), histogram)

    def tensor(self) -> torch.Tensor:
        """The recorded tensor, memory-mapped; writing to it does not reach the disk."""
        if not self.stored:
            raise RecordingError(
                f"The {self.port} of layer '{self.layer}' was recorded as a summary alone "
                f"({self._recording._why_slim()}); there is no tensor. Record again with "
                "keep='tensors'."
            )
        return self._recording._load(self)

    @property
    def file(self) -> tuple[Path, int] | None:
        """The local file that holds the tensor, and the byte at which it starts in it.

        None where the recording does not lie on this machine, or the tensor was not kept.
        """
        return self._recording._file(self) if self.stored else None

    @property
    def sketch(self) -> np.ndarray[Any, Any] | None:
        """The sampled values that were kept in place of the tensor; None where there are none."""
        return self._recording._sketch(self._segment, self._summary_row)

    def to_dict(self) -> dict[str, Any]:
        """Where and when, and the summary, as JSON holds it."""
        names = "layer alias port leaf epoch batch call order type shape dtype device rank stored"
        return {
            **{name: getattr(self, name) for name in names.split()},
            "provenance": self.provenance,
            "summary": self.summary.to_dict(),
        }

    def where(self) -> str:
        """This record in words, for messages."""
        leaf = f" {self.leaf}" if self.leaf else ""
        when = f"batch {self.batch}, call {self.call}"
        when = f"epoch {self.epoch}, {when}" if self.epoch else when
        if self.port == "scalar":
            return f"scalar '{self.layer}', {when}"
        return f"{self.port}{leaf} of '{self.layer}', {when}"


@dataclass(frozen=True)
class Layer:
    """All records of one layer, in order."""

    name: str
    alias: str | None
    type: str
    order: int
    records: tuple[Record, ...] = field(repr=False)

    def port(self, port: Port) -> list[Record]:
        """The records of one port, in order."""
        return [record for record in self.records if record.port == port]

    def first(self, port: Port) -> Record:
        """The only or first record of a port."""
        for record in self.records:
            if record.port == port:
                return record
        ports = sorted({record.port for record in self.records})
        hint = {"input": "--inputs", "output": "outputs=True"}.get(port, "--grads")
        raise RecordingError(
            f"Layer '{self.name}' has no {port} in this recording, only: {', '.join(ports)}. "
            f"Record it with {hint}."
        )

    @property
    def provenance(self) -> Provenance:
        """How the layer's name is known: the least sure of what its records say."""
        known = {record.provenance for record in self.records}
        return max(known, key=PROVENANCES.index, default="hook")

    @property
    def output(self) -> torch.Tensor:
        return self.first("output").tensor()

    @property
    def input(self) -> torch.Tensor:
        return self.first("input").tensor()

    @property
    def grad_output(self) -> torch.Tensor:
        return self.first("grad_output").tensor()

    @property
    def grad_input(self) -> torch.Tensor:
        return self.first("grad_input").tensor()

    @property
    def summary(self) -> Summary:
        """The summary of the first output, or of whatever was recorded first."""
        outputs = self.port("output")
        return (outputs[0] if outputs else self.records[0]).summary


class Recording(Mapping[str, Layer]):
    """A recording on disk: layers by name, in order of execution."""

    def __init__(
        self, store: Store, manifest: Manifest, segments: list[Segment], damage: list[str]
    ) -> None:
        self.path = store.url
        self.manifest = manifest
        self._store = store
        self._segments = segments
        self._damage = damage
        self._holders = {name: segment for segment in segments for name in segment.tensors}
        rows: dict[str, list[tuple[Segment, RawRow]]] = {}
        for segment, row in sorted_rows(segments):
            rows.setdefault(segment.sites[row[0]].layer, []).append((segment, row))
        self._rows = rows
        self._layers: dict[str, Layer] = {}
        self._histogram_places: dict[str, dict[int, slice]] = {}
        self._sketch_places: dict[str, dict[int, slice]] = {}

    def limited(self, keep: Callable[[Segment, RawRow], bool]) -> Recording:
        """The same recording with only the records that `keep` says yes to."""
        view = Recording(self._store, self.manifest, self._segments, self._damage)
        rows = {
            layer: [pair for pair in pairs if keep(*pair)] for layer, pairs in view._rows.items()
        }
        view._rows = {layer: pairs for layer, pairs in rows.items() if pairs}
        return view

    @property
    def status(self) -> Status:
        return self.manifest.status

    @property
    def layers(self) -> list[str]:
        """The names of the layers, in order of execution."""
        return list(self._rows)

    @functools.cached_property
    def aliases(self) -> dict[str, str]:
        """Alias to layer name."""
        return {
            site.alias: site.layer
            for segment in self._segments
            for site in segment.sites
            if site.alias is not None
        }

    @functools.cached_property
    def records(self) -> list[Record]:
        """Every record, in order of execution."""
        with undisturbed():
            return sorted(
                (record for layer in self.values() for record in layer.records),
                key=lambda record: (record.rank, record.order),
            )

    @property
    def steps(self) -> list[tuple[int, int]]:
        """The (epoch, batch) pairs that were recorded, in order."""
        return sorted({(row[2], row[3]) for rows in self._rows.values() for _, row in rows})

    @property
    def nbytes(self) -> int:
        """The bytes that the recording takes on disk."""
        return sum(self._store.size(segment.name) for segment in self._segments)

    @property
    def damage(self) -> list[str]:
        """The segments that could not be read, each in a sentence."""
        return list(self._damage)

    @property
    def notes(self) -> list[str]:
        """What a reader should know before trusting the recording."""
        notes = list(self._damage) + list(self.manifest.notes)
        if self.status == "recording":
            notes.append(f"{in_words(self.manifest.writer)} segments are here.")
        if self.status == "failed":
            notes.append(f"The recording failed: {self.manifest.failure or 'no reason was kept'}.")
        return notes + _skipped_in_words(self.manifest.skipped)

    def resolve(self, name: str) -> str:
        """A layer's name from its name or alias; an unknown one gets its near names."""
        if name in self._rows:
            return name
        if name in self.aliases:
            return self.aliases[name]
        known = [*self._rows, *self.aliases]
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        hint = f"Did you mean {' or '.join(repr(n) for n in near)}? " if near else ""
        raise SelectionError(
            f"There is no layer '{name}' in {self.path}. {hint}"
            f"It has {len(self._rows)} layers: tensortap show {self.path}"
        )

    def check(self, limits: Limits | None = None) -> list[Finding]:
        """What is unhealthy in this recording."""
        from .health import check

        return check(self, limits)

    def __getitem__(self, name: str) -> Layer:
        name = self.resolve(name)
        layer = self._layers.get(name)
        if layer is None:
            layer = self._layers[name] = self._layer(name)
        return layer

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, name: object) -> bool:
        return name in self._rows or name in self.aliases

    def __repr__(self) -> str:
        return f"<Recording {self.path}: {len(self)} layers, {self.status}>"

    def _repr_html_(self) -> str:
        from .html import recording_table

        return recording_table(self)

    def _layer(self, name: str) -> Layer:
        with undisturbed():
            records = tuple(self._record(segment, row) for segment, row in self._rows[name])
        first = records[0]
        return Layer(name, first.alias, first.type, first.order, records)

    def _record(self, segment: Segment, row: RawRow) -> Record:
        site_index, order, epoch, batch, call, number, summary = row
        site = segment.sites[site_index]
        return Record(
            layer=site.layer,
            alias=site.alias,
            port=site.port,
            leaf=site.leaf,
            epoch=epoch,
            batch=batch,
            call=call,
            order=order,
            type=site.type,
            shape=site.shape,
            dtype=site.dtype,
            device=site.device,
            rank=segment.rank,
            provenance=site.provenance,
            _recording=self,
            _segment=segment,
            _number=number,
            _summary_row=summary,
        )

    def _load(self, record: Record) -> torch.Tensor:
        name = tensor_id(record.rank, record._number)
        holder = self._holders.get(name)
        if holder is None:
            raise DamagedError(
                f"The tensor {name} ({record.where()}) is in none of the segments of {self.path} "
                "that could be read."
            )
        where = f"{self.path}/{holder.name}"
        dtype = torch_dtype(record.dtype, where)
        data = holder.view(name)
        expected = record.nbytes
        if len(data) != expected:
            raise DamagedError(
                f"{where} is corrupt: {record.where()} should have {expected} bytes for "
                f"{record.dtype} {list(record.shape)}, {name} has {len(data)}."
            )
        return from_bytes(data, dtype, record.shape)

    def _file(self, record: Record) -> tuple[Path, int] | None:
        holder = self._holders.get(tensor_id(record.rank, record._number))
        if holder is None or not isinstance(holder.store, LocalStore):
            return None
        start = holder.tensors[tensor_id(record.rank, record._number)][2]
        return holder.store.root / holder.name, holder.data_start + start

    def _why_slim(self) -> str:
        """Why a record of this recording may be a summary alone."""
        selection = self.manifest.selection
        if selection.get("against"):
            return f"it agreed with {selection['against']}, which it was recorded against"
        return f"keep='{selection.get('keep', 'summary')}'"

    def _sketch(self, segment: Segment, row: int) -> np.ndarray[Any, Any] | None:
        places = self._sketch_places.get(segment.name)
        if places is None:
            places = self._sketch_places[segment.name] = _places(segment.sketches)
        if row not in places:
            return None
        found: np.ndarray[Any, Any] = segment.array(SKETCHES, "<f8")[places[row]]
        return found

    def _histogram(self, segment: Segment, row: int) -> Histogram | None:
        places = self._histogram_places.get(segment.name)
        if places is None:
            places = self._histogram_places[segment.name] = _places(segment.histograms)
        if row not in places:
            return None
        return segment.histogram(places[row])

    def to_dict(self) -> dict[str, Any]:
        return {"path": self.path, "manifest": self.manifest.to_dict(), "layers": self.layers}
