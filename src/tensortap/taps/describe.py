"""What the manifest says of a model, its inputs and the machine: what one looks at first when two
runs differ."""

from __future__ import annotations

import hashlib
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
from .leaves import flatten
from .plain import is_plain

__all__ = [
    "GRID",
    "InputLog",
    "describe_environment",
    "describe_module",
    "device_of",
    "parameter_dtypes",
    "rank",
]

GRID = "tensortap_grid"
"""The attribute of a layer in a quantised mode that says what its weight is worth: `int4`."""
_MOST_IDS = 1 << 16
_MOST_BATCHES = 64
_ROUNDED = (torch.float32, torch.bfloat16, torch.float16)


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


class InputLog:
    """Remembers what went into the model: a digest a batch, and the token ids of the first."""

    def __init__(self) -> None:
        self.digests: list[str] = []
        self.values: list[str] = []  # the same without the arguments' names, in no order
        self.rounded: dict[str, list[str]] = {}  # the same with all floats in one narrower dtype
        self.floats: set[str] = set()
        self.input_ids: Any = None
        self._last: tuple[int, int] | None = None

    def see(
        self, moment: tuple[int, int], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """The model's first call in a step; later ones (generation) are its own doing."""
        if moment == self._last or len(self.digests) >= _MOST_BATCHES:
            return
        self._last = moment
        leaves = [
            pair
            for key, item in (*enumerate(args), *sorted(kwargs.items()))
            for pair in flatten(item, f"[{key!r}]")
        ]
        try:
            self.digests.append(self._digest(leaves))
        except (RuntimeError, NotImplementedError, TypeError):  # inputs that cannot be read
            self.digests.append("unknown")

    def _digest(self, leaves: list[tuple[str, torch.Tensor | None]]) -> str:
        digest = hashlib.blake2b(digest_size=16)
        values = []
        for leaf, tensor in leaves:
            if tensor is not None:
                form, content = f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}", _bytes(tensor)
                digest.update(f"{leaf} {form}".encode())
                digest.update(content)
                value = hashlib.blake2b(form.encode(), digest_size=16)
                value.update(content)
                values.append(value.hexdigest())
                self._keep_ids(leaf, tensor)
        self.values.append(" ".join(sorted(values)))
        tensors = [tensor for _, tensor in leaves if tensor is not None]
        floats = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
        self.floats |= {dtype_name(dtype) for dtype in floats}
        for dtype in _ROUNDED if floats else ():
            self.rounded.setdefault(dtype_name(dtype), []).append(_rounded(leaves, dtype))
        return digest.hexdigest()

    def _keep_ids(self, leaf: str, tensor: torch.Tensor) -> None:
        wanted = leaf in ("['input_ids']", "[0]") and tensor.dtype in (torch.int64, torch.int32)
        if self.input_ids is None and wanted and tensor.numel() <= _MOST_IDS and tensor.dim() <= 2:
            self.input_ids = tensor.tolist()

    def to_dict(self) -> dict[str, Any]:
        whole = hashlib.blake2b("".join(self.digests).encode(), digest_size=16).hexdigest()
        return {
            "digest": whole if self.digests else None,
            "batches": self.digests,
            "values": hashlib.blake2b(repr(self.values).encode(), digest_size=16).hexdigest(),
            "input_ids": self.input_ids,
            "floats": sorted(self.floats),
            "rounded": {
                name: hashlib.blake2b("".join(digests).encode(), digest_size=16).hexdigest()
                for name, digests in self.rounded.items()
            },
        }


def _rounded(leaves: list[tuple[str, torch.Tensor | None]], dtype: torch.dtype) -> str:
    """A digest of inputs as a cast to this dtype leaves them: a mode in it is given just these."""
    digest = hashlib.blake2b(digest_size=16)
    for leaf, tensor in leaves:
        if tensor is not None:
            cast = tensor.detach().to(dtype) if tensor.is_floating_point() else tensor
            digest.update(f"{leaf} {dtype_name(cast.dtype)} {tuple(cast.shape)}".encode())
            digest.update(_bytes(cast))
    return digest.hexdigest()


def _bytes(tensor: torch.Tensor) -> Any:
    """The values of an input; of one that is no plain memory (sparse, meta) the shape must do."""
    if not is_plain(tensor) or tensor.numel() == 0:
        return b""
    plain = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().data
