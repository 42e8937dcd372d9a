"""The tree of document 000: one bare tensor a file, and what is known of them in metadata.pt.

    embedding_output.pt  layer_0_output.pt …  final_norm_output.pt  metadata.pt

Anyone reads it with `torch.load` alone. It is read back with `weights_only=True`, never otherwise.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...errors import LayoutError, RecordingError
from ..schema import Row
from .base import Entry, Exported, ExportOptions, Skipped, Tree, left_out
from .files import folder, inside, listing, safe_name, writing
from .naming import found_structure, in_order, plain, short_names
from .pickles import names_code

if TYPE_CHECKING:
    from ..reader import Record, Recording

__all__ = ["PtLayout"]

_SUFFIX = "_output.pt"
_METADATA = "metadata.pt"


class PtLayout:
    """Seed 000's tree."""

    name = "pt"

    def detect(self, source: Path) -> bool:
        return any(name.endswith(_SUFFIX) for name in listing(source))

    def export(self, recording: Recording, out: Path, options: ExportOptions) -> Exported:
        wanted = [recording.resolve(options.layer)] if options.layer else recording.layers
        chosen = [record for name in wanted if (record := _first_output(recording, name))]
        if not chosen:
            raise LayoutError(
                f"{recording.path} holds no output tensors of these layers, so there is nothing "
                "to export. Record with outputs and keep='tensors'."
            )
        short = short_names([record.layer for record in chosen], recording.manifest.structure)
        files = {layer: safe_name(name, "layer name") + _SUFFIX for layer, name in short.items()}
        _make_room(out, overwrite=options.overwrite)
        statistics: dict[str, Any] = {}
        skipped: list[Skipped] = []
        for index, record in enumerate(chosen):
            options.progress(index, len(chosen))
            try:
                tensor = record.tensor()
            except (RecordingError, RuntimeError) as error:
                skipped.append(Skipped(record.layer, str(error)))
                continue
            _save(out / files[record.layer], _own(tensor))
            statistics[short[record.layer]] = _statistics(record)
        if not statistics:
            raise LayoutError(f"Nothing could be exported. {skipped[0].reason}")
        _save(out / _METADATA, _metadata(recording, statistics))
        options.progress(len(chosen), len(chosen))
        lost = {item.layer for item in skipped}
        return Exported(
            path=str(out),
            layout=self.name,
            files=(*(files[r.layer] for r in chosen if r.layer not in lost), _METADATA),
            left_out=left_out(recording, chosen),
            skipped=tuple(skipped),
        )

    def read(self, source: Path) -> list[Tree]:
        files = {
            name.removesuffix(_SUFFIX): name for name in listing(source) if name.endswith(_SUFFIX)
        }
        if not files:
            raise LayoutError(f"There is nothing to import in {source}: no file *{_SUFFIX}.")
        metadata = _read_metadata(source)
        told = metadata.get("statistics")
        told = told if isinstance(told, Mapping) else {}
        by_file = {_file_stem(str(short)): short for short in told}
        layers: dict[str, str] = {}
        entries = []
        for order, stem in enumerate(in_order(files, list(by_file))):
            short = str(by_file.get(stem, stem))
            about = told.get(short)
            row = _row(short, about if isinstance(about, Mapping) else {}, order, layers)
            layers[short] = row.layer
            entries.append(Entry(row, _Loader(source, files[stem])))
        return [
            Tree(
                entries=tuple(entries),
                structure=found_structure(layers),
                inputs=_told_inputs(metadata),
                target=_told_target(metadata),
            )
        ]


def _first_output(recording: Recording, layer: str) -> Record | None:
    outputs = recording[layer].port("output")
    return next((record for record in outputs if record.stored and not record.rank), None)


def _make_room(out: Path, *, overwrite: bool) -> None:
    """Leave no file of an older tree among the new ones, and touch nothing else."""
    folder(out)
    old = [name for name in listing(out) if name.endswith(_SUFFIX) or name == _METADATA]
    if old and not overwrite:
        raise LayoutError(
            f"{out} already holds a tree of .pt files. Choose another folder, or replace it with "
            "--overwrite."
        )
    for name in old:
        (out / name).unlink()


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without the rest of the memory it is a view of, which torch.save would write."""
    size = tensor.numel() * tensor.element_size()
    return tensor if tensor.untyped_storage().nbytes() == size else tensor.clone()


def _save(path: Path, value: object) -> None:
    with writing(path) as scratch:
        try:
            torch.save(value, scratch)
        except RuntimeError as error:  # torch's own file writer, when the disk is full
            raise LayoutError(f"Cannot write {path}: {error}") from None


def _statistics(record: Record) -> dict[str, Any]:
    summary = record.summary
    result: dict[str, Any] = {
        "shape": list(record.shape),
        "mean": summary.mean,
        "std": summary.std,
        "min": summary.min,
        "max": summary.max,
        "has_nan": summary.has_nan,
        "has_inf": summary.has_inf,
        "layer": record.layer,
        "leaf": record.leaf,
        "type": record.type,
    }
    return {**result, "alias": record.alias} if record.alias is not None else result


def _metadata(recording: Recording, statistics: dict[str, Any]) -> dict[str, Any]:
    """Exactly the four keys of document 000."""
    manifest = recording.manifest
    prompt = manifest.inputs.get("prompt")
    if isinstance(prompt, (list, tuple)):
        prompt = prompt[0] if prompt else None
    config = manifest.target.get("config") or {
        key: value for key, value in manifest.target.items() if key != "config"
    }
    return {
        "prompt": None if prompt is None else str(prompt),
        "input_ids": _ids(manifest.inputs.get("input_ids")),
        "statistics": statistics,
        "config": plain(config),
    }


def _ids(nested: object) -> torch.Tensor | None:
    """Token ids as a tensor; of batches that differ in length, the first."""
    if nested is None:
        return None
    try:
        return torch.tensor(nested, dtype=torch.int64)
    except (ValueError, TypeError, RuntimeError):
        return _ids(nested[0]) if isinstance(nested, list) and nested else None


def _file_stem(short: str) -> str:
    try:
        return safe_name(short, "layer name")
    except LayoutError:
        return short


def _row(short: str, about: Mapping[Any, Any], order: int, taken: Mapping[str, str]) -> Row:
    layer = about.get("layer")
    if not isinstance(layer, str) or layer in taken.values():
        layer = short
    alias = about.get("alias")
    if not isinstance(alias, str):
        alias = short if short != (layer or "root") else None
    leaf, kind = str(about.get("leaf") or ""), str(about.get("type") or "")
    return Row(layer, "output", leaf, alias, kind, order=order)


class _Loader:
    """Loads one tensor file when it is asked for."""

    def __init__(self, source: Path, name: str) -> None:
        self.source = source
        self.name = name

    def __call__(self) -> torch.Tensor:
        path = inside(self.source, self.name)
        value = _load(path)
        if not isinstance(value, torch.Tensor):
            raise LayoutError(f"{path} holds a {type(value).__name__}, expected a bare tensor.")
        if value.layout != torch.strided or value.is_quantized or value.device.type != "cpu":
            kind = "quantised" if value.is_quantized else f"{value.layout} {value.device.type}"
            raise LayoutError(
                f"{path} holds a {kind} tensor; expected a plain dense one. Save it again with "
                ".dequantize() or .to_dense()."
            )
        return value.detach()


def _load(path: Path) -> Any:
    """What a .pt file holds, without running anything in it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise LayoutError(f"Cannot read {path}: {error.strerror or error}.") from None
    except Exception:  # a file made to break the loader can raise anything
        if names_code(path):
            raise LayoutError(
                f"{path} holds Python code; tensortap never runs code from a file. "
                "Save plain tensors with torch.save."
            ) from None
        raise LayoutError(f"{path} is corrupt or no .pt file of torch.save.") from None


def _read_metadata(source: Path) -> Mapping[Any, Any]:
    if _METADATA not in listing(source):
        return {}
    value = _load(inside(source, _METADATA))
    if not isinstance(value, Mapping):
        raise LayoutError(
            f"{source / _METADATA} holds a {type(value).__name__}, expected a dictionary with the "
            "keys prompt, input_ids, statistics, config."
        )
    return value


def _told_inputs(metadata: Mapping[Any, Any]) -> dict[str, Any]:
    prompt, ids = metadata.get("prompt"), metadata.get("input_ids")
    return {
        "prompt": None
        if prompt is None
        else [prompt]
        if isinstance(prompt, str)
        else plain(prompt),
        "input_ids": plain(ids),
    }


def _told_target(metadata: Mapping[Any, Any]) -> dict[str, Any]:
    config = plain(metadata.get("config"))
    if not isinstance(config, dict):
        return {}
    architectures = config.get("architectures")
    name = config.get("class") or (architectures[0] if isinstance(architectures, list) else None)
    return {"config": config, **({"class": str(name)} if name else {})}
