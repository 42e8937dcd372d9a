"""Launching compiled Triton kernels with as little Python as there can be.

A launch through Triton's own front door costs the host some 40 us, most of it to find out which
kernel is meant, and through a compiled kernel some 10. At the bottom is a C function that wants
numbers: called with those, a launch costs what the driver takes. Its arguments are Triton's own
affair and differ from version to version, so it is used where they are known.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]

__all__ = ["INTERPRETED", "Entry", "entry"]

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0", "false")

# What to call, and what stands before the kernel's arguments:
# call(programs, 1, 1, stream, *front, *arguments).
Entry = tuple[Callable[..., Any], tuple[Any, ...]]

_KNOWN = ("3.5.", "3.6.")  # their C launcher: the function, two flags, two scratches, the hooks


def entry(jit: Any, programs: int, stream: int, arguments: list[Any], **options: Any) -> Entry:
    """Compile a kernel by launching it on these arguments (tensors), and find its quickest way in.

    Every way is tried at once, on the same arguments; so the launch must bear to be repeated. What
    the quick ways are given afterwards are addresses in place of tensors.
    """
    kernel = jit[(programs,)](*arguments, **options)
    if INTERPRETED:
        return (lambda n, _y, _z, _stream, *args: jit[(n,)](*args)), ()
    plain = [x.data_ptr() if hasattr(x, "data_ptr") else x for x in arguments]
    for call, front in _ways(kernel):
        try:
            call(programs, 1, 1, stream, *front, *plain)
        except (TypeError, ValueError, AttributeError, SystemError):
            continue
        return call, front
    return (lambda n, y, z, stream, *args: kernel[(n, y, z)](*args, stream=stream)), ()


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
