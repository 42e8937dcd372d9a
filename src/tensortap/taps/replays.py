"""Learns when CUDA graphs are captured and replayed, while somebody listens.

What a CUDA graph replays runs no Python: a hook is called once, when the graph is captured, and
never again. So the three methods of `torch.cuda.CUDAGraph` that everybody goes through (a program's
own graphs, `make_graphed_callables`, `torch.compile(mode="reduce-overhead")`) are wrapped as long
as a recording is open. That tells which graph a hook was captured in, and each replay as it comes:
k replays are k calls, in order, and none has to be counted on the device.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..recording.device_table import cuda_in_use

__all__ = ["Onlooker", "capturing", "listen", "silence"]

_METHODS = ("capture_begin", "capture_end", "replay")


class Onlooker(Protocol):
    """Is told what happens to CUDA graphs. Must not raise, must not wait for the device."""

    def begins(self, graph: Any) -> None:
        """This graph is about to be captured, by this thread."""
        ...

    def ends(self, graph: Any) -> None:
        """All that this graph holds has been captured; it still is being captured."""
        ...

    def replayed(self, graph: Any) -> None:
        """This graph was launched once more, on the current stream."""
        ...


_ONLOOKERS: list[Onlooker] = []
_LOCK = threading.Lock()
_BEFORE: dict[str, Callable[..., Any]] = {}
_NOW: list[object] = []  # whose wrappers tell; those that somebody else has wrapped stay in place


def capturing() -> bool:
    """Whether the current stream is being captured: nothing may wait, and nothing runs yet."""
    return cuda_in_use() and torch.cuda.is_current_stream_capturing()


def listen(onlooker: Onlooker) -> None:
    """Tell this one from now on."""
    cuda: Any = torch.backends.cuda  # untyped in torch
    with _LOCK:
        _ONLOOKERS.append(onlooker)
        if len(_ONLOOKERS) == 1 and cuda.is_built():
            _wrap(torch.cuda.CUDAGraph)


def silence(onlooker: Onlooker) -> None:
    """Tell it no more. With the last one torch's methods are its own again."""
    with _LOCK:
        if onlooker not in _ONLOOKERS:
            return
        _ONLOOKERS.remove(onlooker)
        if not _ONLOOKERS:
            _unwrap(torch.cuda.CUDAGraph)


def _wrap(kind: Any) -> None:
    token = object()
    _NOW[:] = [token]
    for name in _METHODS:
        method = kind.__dict__.get(name)
        if method is not None:
            _BEFORE[name] = method
            setattr(kind, name, _wrapped(name, method, token))


def _unwrap(kind: Any) -> None:
    for name, method in _BEFORE.items():
        if getattr(kind.__dict__.get(name), "__wrapped__", None) is method:
            setattr(kind, name, method)  # else another wrapped ours: it passes everything on
    _BEFORE.clear()
    _NOW.clear()


def _wrapped(name: str, method: Callable[..., Any], token: object) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapper(graph: Any, *args: Any, **kwargs: Any) -> Any:
        onlookers = list(_ONLOOKERS) if token in _NOW else []
        if name == "replay":
            result = method(graph, *args, **kwargs)
            for onlooker in onlookers:
                onlooker.replayed(graph)
            return result
        for onlooker in onlookers:
            if name == "capture_begin":
                onlooker.begins(graph)
            else:
                onlooker.ends(graph)
        return method(graph, *args, **kwargs)

    return wrapper
