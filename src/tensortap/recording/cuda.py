"""The few things that are asked of CUDA, behind one name.

torch's own calls are untyped, and a machine without a device can have none of them: whatever else
is done with tensors of a device is plain Python, and is tested without one by putting something
else in place of `Cuda`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..numerics.device import has_kernels

__all__ = ["Cuda", "relax_captures"]

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: pinned for every device
# No such call, or no context in this thread: the runtime makes one. Whatever else the driver says
# is final: the runtime would say the same, and leave an error for the model's next kernel to find.
_NOT_HERE = (-1, 3, 201)
_COPY = (ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)  # source, bytes, stream


class Cuda:
    """Streams, events and memory of the CUDA devices."""

    def __init__(self) -> None:
        self._within: Callable[..., int] | None = None
        self._to_host: Callable[..., int] | None = None
        self._register: Callable[..., int] | None = None
        self._unregister: Callable[..., int] | None = None

    def is_here(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on such a device."""
        return tensor.is_cuda

    def capturing(self) -> bool:
        """Whether what is launched now goes into a graph, and nothing runs."""
        return bool(torch._C._cuda_isCurrentStreamCapturing())

    def use(self, device: int) -> None:
        """Make a device this thread's own."""
        torch.cuda.set_device(device)

    def stream_key(self, device: int) -> int:
        """The device's current stream, as quickly as it can be told from others."""
        return int(torch._C._cuda_getCurrentRawStream(device))

    def current(self, device: torch.device) -> Any:
        return torch.cuda.current_stream(device)

    def stream(self, device: torch.device) -> Any:
        make: Any = torch.cuda.Stream
        return make(device)

    def event(self) -> Any:
        """An event for the host: who waits for it gives the processor away.

        No more than 56 may be under way (measured on an H200): the next one holds the host up.
        """
        make: Any = torch.cuda.Event
        return make(blocking=True)

    def mark(self) -> Any:
        """An event for streams alone, of which there may be any number."""
        make: Any = torch.cuda.Event
        return make()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def empty(self, nbytes: int, device: torch.device) -> torch.Tensor | None:
        """Memory of the device; None where there is no more."""
        try:
            with torch.inference_mode(False):  # so that it may be written in any mode later
                return torch.empty(nbytes, dtype=torch.uint8, device=device)
        except torch.cuda.OutOfMemoryError:
            return None

    def copy(self, target: int, tensor: torch.Tensor, nbytes: int, stream: int) -> bool:
        """Copy a contiguous tensor of the current device, on this stream, by the driver alone.

        It is what `copy_` comes down to, in a third of the time. False, with nothing done, where
        it is for torch to do.
        """
        if (
            not tensor.is_contiguous()
            or tensor.is_conj()
            or tensor.is_neg()
            or tensor.get_device() != torch._C._cuda_getDevice()
        ):
            return False
        if self._within is None:
            self._within = _driver("cuMemcpyDtoDAsync_v2", ctypes.c_uint64, *_COPY)
        return self._within(target, tensor.data_ptr(), nbytes, stream) == 0

    def sums_up(self, dtype: torch.dtype) -> bool:
        """Whether there are kernels that sum up tensors of this dtype."""
        return has_kernels(dtype)

    def pin(self, address: int, nbytes: int) -> str | None:
        """Let the device write to host memory by itself; why not, where it cannot."""
        if self._register is None:
            register = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
            self._register = _driver("cuMemHostRegister_v2", *register)
        code = self._register(address, nbytes, _PORTABLE)
        if code in _NOT_HERE:  # older torch keeps the GIL meanwhile
            try:
                cuda: Any = torch.cuda
                code = int(cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))
            except Exception as error:
                return f"{type(error).__name__}: {error}"
        return None if code == 0 else f"CUDA error {code}"

    def unpin(self, address: int) -> None:
        """Before the memory goes back to the system."""
        if self._unregister is None:
            self._unregister = _driver("cuMemHostUnregister", ctypes.c_void_p)
        if self._unregister(address) in _NOT_HERE:
            cuda: Any = torch.cuda
            cuda.cudart().cudaHostUnregister(address)

    def send(self, there: torch.Tensor, here: torch.Tensor, nbytes: int, stream: Any) -> None:
        """Copy the first bytes to pinned host memory, on this stream of their device."""
        if there.get_device() == torch._C._cuda_getDevice():
            if self._to_host is None:
                self._to_host = _driver("cuMemcpyDtoHAsync_v2", ctypes.c_void_p, *_COPY)
            if not self._to_host(here.data_ptr(), there.data_ptr(), nbytes, stream.cuda_stream):
                return
        with torch.no_grad(), self.on(stream):
            here[:nbytes].copy_(there[:nbytes], non_blocking=True)

    def used_by(self, memory: torch.Tensor, stream: Any) -> None:
        """Memory that is given back must not be given out before this stream is done with it."""
        memory.record_stream(stream)


def _driver(name: str, *arguments: Any) -> Callable[..., int]:
    """A call of the driver's, 0 if all is well."""
    try:  # which gives the GIL away: the driver may block, and what it waits for may need Python
        found = getattr(ctypes.CDLL("libcuda.so.1"), name)
    except (OSError, AttributeError):  # as on ROCm
        return lambda *arguments: -1
    found.argtypes = arguments
    found.restype = ctypes.c_int
    return found  # type: ignore[no-any-return]


def relax_captures() -> None:
    """Let this thread use CUDA while another one captures a graph.

    By default, a capture forbids calls that could disturb it to all threads, and is invalid if one
    is made. What we do concerns streams of our own.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))
    except (OSError, AttributeError):
        return
