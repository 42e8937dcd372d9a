"""Running ONNX Runtime on torch tensors: sessions, what goes in, what comes out."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ....errors import TargetError
from .files import Loaded, require
from .values import from_runtime, to_runtime

__all__ = ["open_session", "reason", "run_names", "run_session"]

_LIMIT = 2**31 - 2**20  # of a protobuf message


def open_session(
    loaded: Loaded,
    libraries: Sequence[Path],
    *,
    like: Any = None,
    whole: bool = False,
    fused: bool = True,
) -> Any:
    """A session of a model; `like` another session in providers and level of optimisation.

    `whole`: the model is that of its file, unchanged, which can then be read from there. Without
    `fused` every node is run as it stands in the graph.
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
    if not fused:
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
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
        raise TargetError(f"ONNX Runtime does not take {loaded.name}: {reason(error)}.") from error


def run_session(session: Any, names: Sequence[str], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Run a session: the values of these names, tensors as torch tensors of their own memory."""
    _, runtime = require()
    kinds = {item.name: str(item.type) for item in session.get_outputs()}
    others = [name for name in names if not _is_held(kinds.get(name, "tensor"))]
    tensors = [name for name in names if name not in others]
    found: dict[str, Any] = {}
    try:
        feed = {name: to_runtime(runtime, value) for name, value in inputs.items()}
        plain = all(isinstance(value, runtime.OrtValue) for value in feed.values())
        if not plain or (others and not any(_is_foreign(kinds[name]) for name in tensors)):
            tensors, others = [], list(names)
        if tensors:
            found.update(zip(tensors, session.run_with_ort_values(tensors, feed), strict=True))
        if others or not names:
            run = runtime.InferenceSession.run
            found.update(zip(others, run(session, others, feed), strict=True))
    except TargetError:
        raise
    except Exception as error:
        raise TargetError(f"ONNX Runtime could not run the model: {reason(error)}.") from error
    return {name: from_runtime(found[name]) for name in names}


def _is_held(kind: str) -> bool:
    """Whether values of this type come as ONNX Runtime holds them, not as numpy does."""
    return kind.startswith("tensor") and kind != "tensor(string)"


def _is_foreign(kind: str) -> bool:
    """Whether numpy has no numbers of this type."""
    return "float8" in kind or "bfloat16" in kind


_PLACE = re.compile(
    r"/onnxruntime_src/\S+:\d+\s+"  # the file, and the function in it
    r"(?:(?:[\w:<>,&*~]+ )*?\S*onnxruntime::[^()]*\((?:[^()]|\([^()]*\))*\)"
    r"(?:::<lambda\((?:[^()]|\([^()]*\))*\)>)?(?: const)?(?: \[with [^\]]*\])?\s+)?"
)
_CODE = re.compile(r"\[ONNXRuntimeError\] : \d+ : (\w+) : ")
_LONGEST = 1000


def reason(error: BaseException) -> str:
    """What ONNX Runtime says, without its own places in C++; of very long words the end counts."""
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    text = _CODE.sub(r"\1: ", _PLACE.sub("", text))
    text = text.strip().rstrip(".") or type(error).__name__
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST // 4]} … {text[-_LONGEST * 3 // 4 :]}"


def run_names(session: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of InferenceSession.run by name, however they were given."""
    _, runtime = require()
    bound = inspect.signature(runtime.InferenceSession.run).bind(session, *args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)
