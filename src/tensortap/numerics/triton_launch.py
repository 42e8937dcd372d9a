"""Launching compiled Triton kernels with as little Python as there can be.

A launch through Triton's own front door costs the host some 40 us, most of it to find out which
kernel is meant, and through a compiled kernel some 10. At the bottom is a C function that wants
numbers: called with those, a launch costs what the driver takes. Its arguments are Triton's own
affair and differ from version to version, so it is used where they are known.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]

__all__ = ["INTERPRETED", "Entry", "Handle", "entry", "handle_of"]

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0", "false")

# What to call, and what stands before the kernel's arguments:
# call(programs, 1, 1, stream, *front, *arguments).
Entry = tuple[Callable[..., Any], tuple[Any, ...]]


class Handle(NamedTuple):
    """A kernel as the CUDA driver knows it."""

    function: int
    threads: int  # of a program
    shared: int  # bytes of shared memory


_HANDLES: dict[int, Handle] = {}
_KNOWN = ("3.5.", "3.6.")  # their C launcher: the function, two flags, two scratches, the hooks


def entry(jit: Any, programs: int, stream: int, arguments: list[Any], **options: Any) -> Entry:
    """Compile a kernel by launching it on these arguments (tensors), and find its quickest way in.

    Every way is tried at once, on the same arguments; so the launch must bear to be repeated. What
    the quick ways are given afterwards are addresses in place of tensors.
    """
    kernel = jit[(programs,)](*arguments, **options)
    if INTERPRETED:
        return (lambda n, _y, _z, _stream, *args: jit[(n,)](*args)), ()
    _remember(kernel)
    plain = [x.data_ptr() if hasattr(x, "data_ptr") else x for x in arguments]
    for call, front in _ways(kernel):
        try:
            call(programs, 1, 1, stream, *front, *plain)
        except (TypeError, ValueError, AttributeError, SystemError):
            continue
        return call, front
    return (lambda n, y, z, stream, *args: kernel[(n, y, z)](*args, stream=stream)), ()


def handle_of(way: Entry) -> Handle | None:
    """What to launch without Triton; None for a kernel that wants more than its arguments."""
    return _HANDLES.get(way[1][0]) if way[1] else None


def _remember(kernel: Any) -> None:
    about = kernel.metadata
    wants = ("num_ctas", "launch_cooperative_grid", "global_scratch_size", "profile_scratch_size")
    if tuple(int(getattr(about, name, 0) or 0) for name in wants) in ((1, 0, 0, 0), (0, 0, 0, 0)):
        threads, shared = 32 * int(about.num_warps), int(about.shared)
        _HANDLES[kernel.function] = Handle(kernel.function, threads, shared)


def _ways(kernel: Any) -> list[Entry]:
    """The quick ways into a kernel that this version of Triton may have, the quickest first."""
    run = kernel.run
    found: list[Entry] = []
    function, packed = kernel.function, kernel.packed_metadata
    scratch = getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1)
    if triton.__version__.startswith(_KNOWN) and hasattr(run, "launch_pdl") and not scratch:
        flags = (run.launch_cooperative_grid, run.launch_pdl)
        found.append((run.launch, (function, *flags, None, None, packed, None, None, None)))
    return [*found, (run, (function, packed, None, None, None))]
