"""What went into the model: a digest of every batch, to know two runs on the same inputs by.

Inputs on a GPU are copied without waiting for them: small ones on the device, to be fetched when
somebody asks, large ones to the host, to be looked at when they have arrived.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..recording.device_table import cuda_in_use
from ..recording.dtypes import dtype_name
from .leaves import flatten
from .plain import is_plain

__all__ = ["InputLog"]

_MOST_IDS = 1 << 16
_MOST_BATCHES = 64
_SMALL = 1 << 20  # bytes of an input that is kept on its device
_ROUNDED = (torch.float32, torch.bfloat16, torch.float16)

_Leaves = list[tuple[str, torch.Tensor | None]]


@dataclass(eq=False)
class _Batch:
    """Inputs on their way to the host."""

    leaves: _Leaves
    events: list[Any]
    there: bool = False  # whether some of it is still on a device
    lost: bool = False  # the device failed before all of it was here

    def arrived(self) -> bool:
        """Whether nobody need wait for it; what is lost will not come."""
        return not self.there and self._ask(lambda event: bool(event.query()))

    def wait(self) -> None:
        self._ask(lambda event: event.synchronize() is None)

    def _ask(self, question: Callable[[Any], bool]) -> bool:
        try:
            return all(question(event) for event in self.events)
        except RuntimeError:  # a device that has failed: whoever runs on it is told by torch
            if not self.lost:  # torch ends the process when such a device's memory is given back
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.leaves))
            self.lost = True
            return True


class InputLog:
    """Remembers what went into the model: a digest a batch, and the token ids of the first."""

    def __init__(self) -> None:
        self.digests: list[str] = []
        self.values: list[str] = []  # the same without the arguments' names, in no order
        self.rounded: dict[str, list[str]] = {}  # the same with all floats in one narrower dtype
        self.floats: set[str] = set()
        self.input_ids: Any = None
        self._last: tuple[int, int] | None = None
        self._coming: list[_Batch] = []
        self._seen = 0
        self._lock = threading.Lock()

    def see(
        self, moment: tuple[int, int], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """The model's first call in a step; later ones (generation) are its own doing."""
        with self._lock:
            if moment == self._last or self._seen >= _MOST_BATCHES or _capturing():
                return
            self._last = moment
            self._seen += 1
            self._see(args, kwargs)

    def _see(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        leaves = [
            pair
            for key, item in (*enumerate(args), *sorted(kwargs.items()))
            for pair in flatten(item, f"[{key!r}]")
        ]
        self._coming.append(_fetched(leaves, waits=bool(self._coming)))
        while self._coming and self._coming[0].arrived():
            self._take(self._coming.pop(0))

    def settle(self) -> None:
        """Take what is still on its way."""
        with self._lock:
            coming, self._coming = self._coming, []
            for batch in coming:
                batch.wait()
                self._take(batch)

    def _take(self, batch: _Batch) -> None:
        if batch.lost:
            self.digests.append("unknown")
            return
        try:
            self.digests.append(self._digest(batch.leaves))
        except (RuntimeError, NotImplementedError, TypeError):  # inputs that cannot be read
            self.digests.append("unknown")

    def _digest(self, leaves: _Leaves) -> str:
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
        self.settle()
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


def _rounded(leaves: _Leaves, dtype: torch.dtype) -> str:
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


def _fetched(leaves: _Leaves, *, waits: bool) -> _Batch:
    """The same leaves on the host; those of a GPU arrive later, and the others are kept for them.

    With `waits` there are others before them.
    """
    sizes = [t.nbytes for _, t in leaves if t is not None and t.is_cuda and is_plain(t)]
    waits = waits or bool(sizes)
    there = bool(sizes) and max(sizes) <= _SMALL
    fetched: _Leaves = []
    events: dict[torch.device, Any] = {}
    with torch.inference_mode(False), torch.no_grad():
        for leaf, tensor in leaves:
            if tensor is not None and is_plain(tensor):
                if tensor.is_cuda:
                    events[tensor.device] = None
                if tensor.is_cuda and not there:
                    tensor = _pinned(tensor)
                elif waits:
                    tensor = tensor.detach().clone()
            fetched.append((leaf, tensor))
        for device in events:
            make: Any = torch.cuda.Event  # untyped in torch
            events[device] = make()
            events[device].record(torch.cuda.current_stream(device))
    return _Batch(fetched, list(events.values()), there)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return host.copy_(tensor.detach(), non_blocking=True)


def _capturing() -> bool:
    """Whether a CUDA graph is captured, into which no copy of ours belongs."""
    return cuda_in_use() and torch.cuda.is_current_stream_capturing()
