"""Running ONNX Runtime on torch tensors: sessions, what goes in, what comes out."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ....errors import OptionError, TargetError
from ..base import Argument
from .files import Loaded, require

__all__ = ["DTYPES", "arguments_of", "fed", "open_session", "run_session"]

# By the numbers of onnx.TensorProto.DataType.
DTYPES: dict[int, torch.dtype] = {
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 4: torch.uint16, 5: torch.int16,
    6: torch.int32, 7: torch.int64, 9: torch.bool, 10: torch.float16, 11: torch.float64,
    12: torch.uint32, 13: torch.uint64, 14: torch.complex64, 15: torch.complex128,
    16: torch.bfloat16, 17: torch.float8_e4m3fn, 18: torch.float8_e4m3fnuz,
    19: torch.float8_e5m2, 20: torch.float8_e5m2fnuz,
}  # fmt: skip
_NUMBERS = {dtype: number for number, dtype in DTYPES.items()}
_BYTES = {torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz}
_LIMIT = 2**31 - 2**20  # of a protobuf message


def open_session(
    loaded: Loaded, libraries: Sequence[Path], *, like: Any = None, whole: bool = False
) -> Any:
    """A session of a model; `like` another session in providers and level of optimisation.

    `whole`: the model is that of its file, unchanged, which can then be read from there.
    """
    _, runtime = require()
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # an error is raised, and need not be logged as well
    options.intra_op_num_threads = torch.get_num_threads()
    providers = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    providers = [name for name in providers if name in runtime.get_available_providers()]
    if like is not None:
        theirs = like.get_session_options()
        options.graph_optimization_level = theirs.graph_optimization_level
        options.intra_op_num_threads = theirs.intra_op_num_threads
        options.inter_op_num_threads = theirs.inter_op_num_threads
        options.execution_mode = theirs.execution_mode
        providers = list(like.get_providers())
    if loaded.folder is not None:
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(loaded.folder)
        )
    source: Any = str(loaded.file) if whole and loaded.file is not None else None
    try:
        for library in libraries:
            options.register_custom_ops_library(str(library.resolve()))
        if source is None:
            if loaded.model.ByteSize() > _LIMIT:
                raise TargetError(
                    f"{loaded.name} is larger than 2 GB, which ONNX allows with weights in files "
                    "beside it alone. Save it with save_as_external_data=True and give its path."
                )
            source = loaded.model.SerializeToString()
        return runtime.InferenceSession(source, options, providers=providers)
    except TargetError:
        raise
    except Exception as error:  # ONNX Runtime has a class of errors for each of its codes
        raise TargetError(f"ONNX Runtime does not take {loaded.name}: {_line(error)}.") from error


def arguments_of(model: Any) -> list[Argument]:
    """What the model takes. An input with a default may be left out; old files list weights so."""
    graph = model.graph
    defaults = {tensor.name for tensor in graph.initializer}
    found = []
    for value in graph.input:
        if value.name in defaults and model.ir_version < 4:
            continue
        tensor = value.type.tensor_type
        shape = None
        if tensor.HasField("shape"):
            shape = tuple(
                size.dim_value if size.HasField("dim_value") else None for size in tensor.shape.dim
            )
        dtype = DTYPES.get(tensor.elem_type)
        found.append(Argument(value.name, dtype, shape, required=value.name not in defaults))
    return found


def fed(
    arguments: Sequence[Argument], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """The tensor of each input; what does not fit is said, input by input."""
    given = _by_name(arguments, args, kwargs)
    declared = {argument.name: argument for argument in arguments}
    wrong = []
    result: dict[str, torch.Tensor] = {}
    for argument in arguments:
        if argument.name not in given:
            if argument.required:
                wrong.append(f"'{argument.name}' ({_spelled(argument)}) is missing")
            continue
        try:
            tensor = _tensor(given[argument.name], argument)
        except (TypeError, ValueError, RuntimeError) as error:
            wrong.append(f"'{argument.name}' is no tensor: {_line(error)}")
            continue
        why = _misfit(tensor, argument)
        if why:
            wrong.append(f"'{argument.name}' {why}")
        result[argument.name] = tensor
    unknown = [name for name in given if name not in declared]
    wrong += [f"'{name}' is no input of the model" for name in unknown]
    if wrong:
        takes = ", ".join(f"{a.name} ({_spelled(a)})" for a in arguments)
        raise OptionError(
            f"The inputs do not fit the ONNX model: {'; '.join(wrong)}. It takes {takes or '-'}."
        )
    return result


def run_session(
    session: Any, names: Sequence[str], inputs: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """Run a session: the values of these names, as torch tensors of their own memory."""
    _, runtime = require()
    kinds = {item.name: item.type for item in session.get_outputs()}
    try:
        feed = {name: _ort_value(runtime, tensor) for name, tensor in inputs.items()}
        if all(kinds.get(name, "tensor").startswith("tensor") for name in names):
            found = session.run_with_ort_values(list(names), feed)
            return {name: _torch(value) for name, value in zip(names, found, strict=True)}
        plain = {name: tensor.numpy() for name, tensor in inputs.items()}
        values = runtime.InferenceSession.run(session, list(names), plain)
    except TargetError:
        raise
    except Exception as error:
        raise TargetError(f"ONNX Runtime could not run the model: {_line(error)}.") from error
    return {name: _any(value) for name, value in zip(names, values, strict=True)}


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
    free = [name for name in names if name not in given]
    leaves = [leaf for item in args for leaf in _leaves(item)]
    if len(leaves) > len(free):
        raise OptionError(
            f"{len(leaves)} inputs were given by position, and the ONNX model takes {len(free)}"
            f"{' more' if given else ''}: {', '.join(free) or 'none'}."
        )
    given.update(zip(free, leaves, strict=False))
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


def _tensor(value: Any, argument: Argument) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        tensor = value.detach()
    elif isinstance(value, np.ndarray):
        tensor = torch.from_numpy(np.ascontiguousarray(value))
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


def _spelled(argument: Argument) -> str:
    return f"{_name(argument.dtype) if argument.dtype else 'any type'} {_sizes(argument)}"


def _sizes(argument: Argument) -> str:
    if argument.shape is None:
        return "of any shape"
    return "[" + ", ".join("?" if size is None else str(size) for size in argument.shape) + "]"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _ort_value(runtime: Any, tensor: torch.Tensor) -> Any:
    if tensor.dtype in (torch.bfloat16, *_BYTES):
        raw = tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.uint8).numpy()
        raw = raw.view(np.uint16) if tensor.dtype == torch.bfloat16 else raw
        return runtime.OrtValue.ortvalue_from_numpy_with_onnx_type(raw, _NUMBERS[tensor.dtype])
    return runtime.OrtValue.ortvalue_from_numpy(tensor.numpy())


def _torch(value: Any) -> torch.Tensor:
    """A value of ONNX Runtime's as a tensor; it is the value's memory, which nobody else has."""
    if not value.has_value():
        raise TargetError("The ONNX model returned an output without a value.")
    dtype = DTYPES.get(value.element_type())
    if dtype is None:
        raise TargetError(f"The ONNX model made a {value.data_type()}, which torch does not have.")
    if dtype is torch.bfloat16:
        return torch.utils.dlpack.from_dlpack(value._ortvalue)
    found = torch.from_numpy(value.numpy())
    return found.view(dtype) if dtype in _BYTES else found


def _any(value: Any) -> Any:
    return (
        torch.from_numpy(value)
        if isinstance(value, np.ndarray) and value.dtype != object
        else value
    )


def run_names(session: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of InferenceSession.run by name, however they were given."""
    _, runtime = require()
    bound = inspect.signature(runtime.InferenceSession.run).bind(session, *args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".")[:400] if lines else type(error).__name__
