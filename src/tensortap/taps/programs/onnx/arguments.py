"""What an ONNX model takes, and the inputs of a call as it takes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ....errors import OptionError
from ..base import Argument
from .values import DTYPES, from_numpy, spelled

__all__ = ["OnnxArgument", "arguments_of", "fed"]

_TEXT = 8  # onnx.TensorProto.STRING


@dataclass(frozen=True)
class OnnxArgument(Argument):
    """An input of an ONNX model. `form` is `tensor`, `text`, `sequence`, or what else it is."""

    form: str = "tensor"
    optional: bool = False  # the model can be told that it is not there


def arguments_of(model: Any) -> list[OnnxArgument]:
    """What the model takes. An input with a default may be left out; old files list weights so."""
    graph = model.graph
    defaults = {tensor.name for tensor in graph.initializer}
    found = []
    for value in graph.input:
        if value.name in defaults and model.ir_version < 4:
            continue
        kind = value.type
        optional = kind.WhichOneof("value") == "optional_type"
        if optional:
            kind = kind.optional_type.elem_type
        sequence = kind.WhichOneof("value") == "sequence_type"
        held = kind.sequence_type.elem_type if sequence else kind
        tensor, shape = held.tensor_type, None
        if tensor.HasField("shape") and not sequence:
            shape = tuple(
                size.dim_value if size.HasField("dim_value") and size.dim_value >= 0 else None
                for size in tensor.shape.dim
            )
        form = "sequence" if sequence else "tensor"
        if spelled(held) is not None:
            form = "text" if tensor.elem_type == _TEXT and not sequence else spelled(held) or ""
        required = value.name not in defaults and not optional
        found.append(
            OnnxArgument(value.name, DTYPES.get(tensor.elem_type), shape, required, form, optional)
        )
    return found


def fed(
    arguments: Sequence[Argument], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The value of each input; what does not fit is said, input by input."""
    given = _by_name(arguments, args, kwargs)
    declared = {argument.name: argument for argument in arguments}
    wrong = []
    result: dict[str, Any] = {}
    for argument in arguments:
        if argument.name not in given:
            if argument.required:
                wrong.append(f"'{argument.name}' ({_spelled(argument)}) is missing")
            elif getattr(argument, "optional", False):
                result[argument.name] = None
            continue
        try:
            value = _value(given[argument.name], argument)
        except (TypeError, ValueError, RuntimeError) as error:
            wrong.append(f"'{argument.name}' is no {_wanted(argument)}: {_line(error)}")
            continue
        for item in value if isinstance(value, list) else [value]:
            why = _misfit(item, argument) if isinstance(item, torch.Tensor) else None
            if why:
                wrong.append(f"'{argument.name}' {why}")
                break
        result[argument.name] = value
    unknown = [name for name in given if name not in declared]
    wrong += [f"'{name}' is no input of the model" for name in unknown]
    if wrong:
        takes = ", ".join(f"{a.name} ({_spelled(a)})" for a in arguments)
        raise OptionError(
            f"The inputs do not fit the ONNX model: {'; '.join(wrong)}. It takes {takes or '-'}."
        )
    return result


def _by_name(
    arguments: Sequence[Argument], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    names = [argument.name for argument in arguments]
    given: dict[str, Any] = {}
    for key, value in kwargs.items():
        if value is None and key not in names:
            continue
        if key in names or not isinstance(value, Mapping | tuple | list):
            given[key] = value
            continue
        leaves = list(_leaves(value))
        own = [name for name in names if name.startswith(key) and name not in kwargs]
        if len(own) != len(leaves):
            raise OptionError(
                f"The input '{key}' holds {len(leaves)} tensors, and the ONNX model has "
                f"{len(own)} inputs whose names begin so ({', '.join(own) or 'none'}). Give each "
                f"by its own name: {', '.join(names)}."
            )
        given.update(zip(own, leaves, strict=True))
    free = [argument for argument in arguments if argument.name not in given]
    leaves = []
    for item in args:
        at = free[len(leaves)] if len(leaves) < len(free) else None
        whole = at is not None and _form(at) in ("sequence", "text")
        leaves += [item] if whole else _leaves(item)
    if len(leaves) > len(free):
        raise OptionError(
            f"{len(leaves)} inputs were given by position, and the ONNX model takes {len(free)}"
            f"{' more' if given else ''}: {', '.join(a.name for a in free) or 'none'}."
        )
    given.update(zip((argument.name for argument in free), leaves, strict=False))
    return {name: value for name, value in given.items() if value is not None}


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _form(argument: Argument) -> str:
    return str(getattr(argument, "form", "tensor"))


def _value(value: Any, argument: Argument) -> Any:
    """A tensor, a list of tensors, or an array of text, as the argument wants it."""
    form = _form(argument)
    if form == "sequence":
        if not isinstance(value, list | tuple):
            raise TypeError(f"got a {type(value).__name__}")
        return [_tensor(item, argument) for item in value]
    if form == "text":
        array = np.asarray(value, dtype=object)
        if not all(isinstance(item, str | bytes) for item in array.reshape(-1)):
            raise TypeError(f"got a {type(value).__name__} of other things than text")
        return array
    if form != "tensor":
        raise TypeError(f"the model takes {form}")
    return _tensor(value, argument)


def _tensor(value: Any, argument: Argument) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        tensor = value.detach()
    elif isinstance(value, np.ndarray | np.generic):
        tensor = from_numpy(value)
    elif isinstance(value, bool | int | float):
        tensor = torch.tensor(value, dtype=argument.dtype)
    else:
        raise TypeError(f"got a {type(value).__name__}")
    return tensor.cpu().contiguous()


def _misfit(tensor: torch.Tensor, argument: Argument) -> str | None:
    if argument.dtype is not None and tensor.dtype != argument.dtype:
        return f"is {_name(tensor.dtype)}, and the model takes {_name(argument.dtype)}"
    if argument.shape is None:
        return None
    pairs = zip(tensor.shape, argument.shape, strict=False)
    if len(argument.shape) != tensor.dim() or any(
        want not in (None, 0, size) for size, want in pairs
    ):
        return f"has the shape {list(tensor.shape)}, and the model takes {_sizes(argument)}"
    return None


def _wanted(argument: Argument) -> str:
    form = _form(argument)
    if form == "text":
        return "array of text"
    return "sequence of tensors" if form == "sequence" else "tensor"


def _spelled(argument: Argument) -> str:
    form = _form(argument)
    held = _name(argument.dtype) if argument.dtype else "any type"
    if form == "sequence":
        found = f"a sequence of {held} tensors"
    elif form in ("tensor", "text"):
        found = f"{held if form == 'tensor' else form} {_sizes(argument)}"
    else:
        found = form
    return f"{found}, or None" if getattr(argument, "optional", False) else found


def _sizes(argument: Argument) -> str:
    if argument.shape is None:
        return "of any shape"
    return "[" + ", ".join("?" if size is None else str(size) for size in argument.shape) + "]"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".")[:300] if lines else type(error).__name__
