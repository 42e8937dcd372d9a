"""ONNX files as strangers hand them over: what they refer to is looked at before it is read.

A model may keep its weights in files beside it, and says where in plain text. A path that leads out
of the model's folder would let a model read any file of the user, and operators of a library would
run any code: both are refused, before a runtime sees the model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....errors import MissingExtraError, OptionError, TargetError

__all__ = ["Loaded", "check_operators", "load", "nodes_of", "require", "tensors_of", "weight"]

_OWN_DOMAINS = re.compile(r"(ai\.onnx(\..+)?|com\.microsoft(\.(nchwc|experimental))?)?\Z")
_PURPOSE = "Recording an ONNX model"


@dataclass(frozen=True)
class Loaded:
    """A model whose references were checked; external weights are not in it, but in `folder`."""

    model: Any
    folder: Path | None = None
    file: Path | None = None

    @property
    def name(self) -> str:
        return f"'{self.file}'" if self.file is not None else "the ONNX model"


def require() -> tuple[Any, Any]:
    """The packages onnx and onnxruntime."""
    try:
        import onnx
    except ImportError:
        raise MissingExtraError("onnx", "onnx", _PURPOSE) from None
    try:
        import onnxruntime
    except ImportError:
        raise MissingExtraError("onnxruntime", "onnx", _PURPOSE) from None
    return onnx, onnxruntime


def load(path: Path) -> Loaded:
    """The model of a file, without the weights that lie in files beside it."""
    require()
    import onnx

    try:
        model = onnx.load_model(str(path), load_external_data=False)
    except OSError as error:
        raise TargetError(f"The ONNX file '{path}' cannot be read: {error}.") from error
    except Exception as error:  # protobuf has errors of its own, as many as it has backends
        raise TargetError(
            f"'{path}' is no ONNX model, or is damaged: {_line(error)}. Export it again."
        ) from error
    if not model.graph.node and not model.graph.output:
        raise TargetError(
            f"'{path}' is no ONNX model, or is damaged: it holds no graph. Export it again."
        )
    loaded = Loaded(model, path.resolve().parent, path)
    _check_references(loaded)
    return loaded


def of_object(model: Any, folder: Path | None = None) -> Loaded:
    """The model of a ModelProto that the user holds; it must hold its weights too."""
    loaded = Loaded(model, folder)
    if folder is None and any(_is_external(tensor) for tensor in tensors_of(model)):
        raise TargetError(
            "This ONNX model refers to weights in files beside it, and does not say where they "
            "are. Give the path of its file, or load it with its weights: onnx.load(path)."
        )
    _check_references(loaded)
    return loaded


def check_operators(loaded: Loaded, libraries: Sequence[Path]) -> None:
    """Refuse operators that are neither ONNX's nor ONNX Runtime's, unless a library is named."""
    for library in libraries:
        if not library.is_file():
            raise OptionError(f"The library of custom operators '{library}' does not exist.")
    if libraries:
        return
    model = loaded.model
    local = {(function.domain, function.name) for function in model.functions}
    foreign = {
        f"{node.domain}::{node.op_type}"
        for node in nodes_of(model)
        if not _OWN_DOMAINS.match(node.domain) and (node.domain, node.op_type) not in local
    }
    if foreign:
        names = sorted(foreign)
        more = ", …" if len(names) > 4 else ""
        raise TargetError(
            f"{loaded.name} uses operators of a library of its own ({', '.join(names[:4])}{more}). "
            "Such a library runs code of its own: if you trust it, name it with "
            "--custom-ops PATH (custom_ops=PATH)."
        )


def nodes_of(model: Any) -> Iterator[Any]:
    """Every node, also those of subgraphs and of functions."""
    stack = [*model.graph.node]
    for function in model.functions:
        stack += function.node
    while stack:
        node = stack.pop()
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                stack += attribute.g.node
            for graph in attribute.graphs:
                stack += graph.node


def tensors_of(message: Any) -> Iterator[Any]:
    """Every tensor that stands anywhere in a model: weights, attributes, sparse parts, training."""
    stack = [message]
    while stack:
        item = stack.pop()
        if item.DESCRIPTOR.name == "TensorProto":
            yield item
            continue
        for field, value in item.ListFields():
            if field.message_type is None:
                continue
            if hasattr(value, "DESCRIPTOR"):
                stack.append(value)
            else:
                stack.extend(value)


def weight(tensor: Any, folder: Path | None) -> Any:
    """A tensor of the model as a numpy array, read from beside the model where it lies there."""
    import onnx

    if _is_external(tensor):
        held = onnx.TensorProto()
        held.CopyFrom(tensor)
        onnx.external_data_helper.load_external_data_for_tensor(held, str(folder))
        tensor = held
    return onnx.numpy_helper.to_array(tensor)


def _is_external(tensor: Any) -> bool:
    return bool(tensor.data_location == tensor.EXTERNAL or len(tensor.external_data))


def _check_references(loaded: Loaded) -> None:
    sizes: dict[str, int] = {}
    for tensor in tensors_of(loaded.model):
        if _is_external(tensor):
            _check_reference(tensor, loaded, sizes)


def _check_reference(tensor: Any, loaded: Loaded, sizes: dict[str, int]) -> None:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    what = f"The weight '{tensor.name}' of {loaded.name}"
    location = entries.get("location", "")
    if location not in sizes:
        sizes[location] = _size_of(location, what, loaded)
    size = sizes[location]
    offset = _number(entries, "offset", what) or 0
    length = _number(entries, "length", what)
    needed = _bytes_of(tensor)
    if length is None:
        length = needed if needed is not None else max(size - offset, 0)
    if offset + length > size:
        raise TargetError(
            f"{what} is said to lie at bytes {offset} to {offset + length} of '{location}', which "
            f"has {size}: the file is truncated, or belongs to another model."
        )
    if needed is not None and length != needed:
        raise TargetError(
            f"{what} of shape {list(tensor.dims)} needs {needed} bytes, and '{location}' is said "
            f"to hold {length}: the model is damaged."
        )


def _size_of(location: str, what: str, loaded: Loaded) -> int:
    """The size of a file beside the model; refused where it is not beside it."""
    where = f"{what} lies in '{location}'"
    parts = re.split(r"[/\\]", location)
    outside = "Weights must lie in the model's own folder: the file is not read."
    if not location or "\0" in location:
        raise TargetError(f"{what} lies in a file without a name: the model is damaged.")
    if location.startswith(("/", "\\", "~")) or re.match(r"[A-Za-z]:", location):
        raise TargetError(f"{where}, an absolute path. {outside}")
    if ".." in parts:
        raise TargetError(f"{where}, which leads out of the model's folder. {outside}")
    folder = loaded.folder
    if folder is None:
        raise TargetError(f"{where}, and the model does not say in which folder that is.")
    path = (folder / location).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise TargetError(f"{where}, a link to '{path}', outside the model's folder. {outside}")
    if not path.is_file():
        raise TargetError(
            f"{where}, which is not there. Put the file beside the model, in '{folder}'."
        )
    found = path.stat()
    if found.st_nlink > 1:
        raise TargetError(
            f"{where}, a file with {found.st_nlink} names (hard links), which may be one from "
            "outside the model's folder: it is not read. Put a copy of it in its place."
        )
    return found.st_size


def _number(entries: Mapping[str, str], key: str, what: str) -> int | None:
    text = entries.get(key)
    if text is None or text == "":
        return None
    if not re.fullmatch(r"\d{1,18}", text):
        raise TargetError(f"{what} has the {key} '{text}': expected a number of bytes.")
    return int(text)


def _bytes_of(tensor: Any) -> int | None:
    """How many bytes a tensor takes, or None for types that this onnx does not know."""
    import onnx

    count = math.prod(tensor.dims)
    if any(size < 0 for size in tensor.dims):
        raise TargetError(f"The weight '{tensor.name}' has the shape {list(tensor.dims)}.")
    name = onnx.TensorProto.DataType.Name(tensor.data_type)
    bits = _BITS.get(name)
    return None if bits is None else (count * bits + 7) // 8


_BITS = {
    "FLOAT": 32, "DOUBLE": 64, "FLOAT16": 16, "BFLOAT16": 16, "INT8": 8, "UINT8": 8, "INT16": 16,
    "UINT16": 16, "INT32": 32, "UINT32": 32, "INT64": 64, "UINT64": 64, "BOOL": 8, "INT4": 4,
    "UINT4": 4, "FLOAT8E4M3FN": 8, "FLOAT8E4M3FNUZ": 8, "FLOAT8E5M2": 8, "FLOAT8E5M2FNUZ": 8,
    "COMPLEX64": 64, "COMPLEX128": 128,
}  # fmt: skip


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".")[:300] if lines else type(error).__name__
