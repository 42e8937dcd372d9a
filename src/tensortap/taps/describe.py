"""What the manifest says of a model, its inputs and the machine: what one looks at first when two
runs differ."""

from __future__ import annotations

import os
import platform
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from ..recording.dtypes import dtype_name
from .grids import GRID, grids_of

__all__ = [
    "describe_environment",
    "describe_module",
    "device_of",
    "parameter_dtypes",
    "rank",
]


def describe_module(model: nn.Module) -> dict[str, Any]:
    """Class, parameters, dtypes and config of a model."""
    model = model._modules.get("_orig_mod") or model
    dtypes = parameter_dtypes(model)
    described: dict[str, Any] = {
        "class": f"{_module_name(type(model))}.{type(model).__qualname__}",
        "parameters": sum(dtypes.values()),
        "dtypes": dict(dtypes),
        "training": model.training,
        "compiled": any("_orig_mod" in m._modules for m in model.modules()),
    }
    grids = grids_of(model)
    if grids:
        described["grids"] = grids
    config = getattr(model, "config", None)
    to_dict = getattr(config, "to_dict", None)
    if callable(to_dict):
        described["config"] = jsonable(to_dict())
    elif isinstance(config, Mapping):
        described["config"] = jsonable(config)
    return described


def parameter_dtypes(model: nn.Module) -> Counter[str]:
    """How many parameters of a model are of each kind of number.

    A quantised weight says that it is float32 and holds int8; one that is only rounded to a grid
    holds floats. Both count as what they are worth: int8, fake int4.
    """
    dtypes: Counter[str] = Counter()
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if isinstance(parameter, UninitializedParameter):
                continue
            grid = vars(module).get(GRID) if name == "weight" else None
            inner = getattr(parameter, "qdata", parameter)
            held = inner.dtype if isinstance(inner, torch.Tensor) else parameter.dtype
            dtypes[grid or dtype_name(held)] += parameter.numel()
    return dtypes


def _module_name(kind: type) -> str:
    """The module a class comes from; for a target's file, the name of the file."""
    module = sys.modules.get(kind.__module__)
    source = getattr(module, "__file__", None)
    return Path(source).stem if kind.__module__.startswith("_") and source else kind.__module__


def jsonable(value: Any) -> Any:
    """The same with what JSON cannot hold turned into text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [jsonable(item) for item in value]
    return str(value)


def device_of(model: nn.Module) -> str:
    """The device of the first parameter or buffer."""
    for tensor in (*model.parameters(), *model.buffers()):
        return str(tensor.device)
    return "cpu"


def rank() -> int:
    """The number of this process among those that train together; 0 when it is alone."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return 0


def describe_environment() -> dict[str, Any]:
    """The settings that change numbers."""
    cuda = torch.cuda.is_available()
    return {
        "platform": platform.platform(),
        "machine": platform.machine(),
        "python": sys.version.split()[0],
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": matmul_precision(),
        "cuda": torch.version.cuda if cuda else None,
        "cudnn": _cudnn() if cuda else None,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "rank": int(os.environ.get("RANK", "0")),
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
    }


def matmul_precision() -> str:
    """How float32 matrices are multiplied: "highest", "high", "medium"; "ieee" or "tf32" where that
    was said through torch's newer setting, as transformers does: the older one then refuses."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return str(torch.backends.cuda.matmul.fp32_precision)


def _cudnn() -> int | None:
    version: Any = torch.backends.cudnn.version  # untyped in torch
    return int(version() or 0) or None
