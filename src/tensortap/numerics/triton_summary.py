"""Summary rows on CUDA: one launch a tensor, or one for many. The kernels: triton_kernels.py.

float32, float16, bfloat16, the two common float8 and complex of these are read here, in whatever
order they lie in memory; the rest is left to device.py, which alone imports this module, since
that needs Triton.

A launch through Triton's own front door costs the host some 40 us, most of it to find out which
kernel is meant; so kernels are kept, and called by address. Device -1 is Triton's interpreter.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from tensortap.numerics import triton_kernels as kernels
from tensortap.numerics.layout import first_elements
from tensortap.numerics.summary import FIRST, WIDTH
from tensortap.numerics.triton_kernels import FORMATS, PARTIAL, Format

__all__ = ["accumulate", "accumulate_many"]

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.parameter.Buffer)
_LANES, _WARPS = 512, 8
_PER_SM = 4  # programs: more cost middling tensors more than they bring large ones
_MOST = 1 << 14  # programs of a launch for many tensors


def accumulate(tensor: torch.Tensor, row: torch.Tensor) -> bool:
    """Merge a CUDA tensor into its row; False, having done nothing, if it is not one to read here.

    While a graph is captured, a kernel must not be compiled: then only what ran before is used.
    """
    index = tensor.get_device()
    seen = _readable(tensor)
    if seen is None or _BROKEN or not _is_row(row, index):
        return False
    values, head, form = seen
    size, address = values.numel(), values.data_ptr()
    if not size:
        return True
    if index >= 0 and index != torch.cuda.current_device():
        with torch.cuda.device(index):
            return accumulate(tensor, row)
    capturing = _capturing(index)
    variant = ("one", index, form, not address % 16, size < 1 << 31)
    if capturing and variant not in _KERNELS:
        return False
    tile = _LANES * (128 // form.bits)
    tiles = -(-size // (tile * _most_programs(index)))
    programs = -(-size // (tile * tiles))
    parts, counters = _scratch(index, programs, 1, fresh=capturing)
    return _launch(
        kernels.accumulate_one, variant, programs, form,
        values, head, row, parts, programs, counters, size, tiles,
    )  # fmt: skip


def accumulate_many(tensors: Sequence[torch.Tensor], rows: torch.Tensor) -> Sequence[int]:
    """Merge tensors into their rows, a launch for each dtype; returns which are still to do."""
    index = rows.get_device()
    whole = rows.is_contiguous() and _is_row(rows[:1], index) and not _BROKEN
    if not whole or _capturing(index):  # a graph would read the table after it is gone
        return range(len(tensors))
    if index >= 0 and index != torch.cuda.current_device():
        with torch.cuda.device(index):
            return accumulate_many(tensors, rows)
    groups, left = _plan(index, tensors)
    for group in groups:
        parts, counters = _scratch(index, group.programs, len(group.numbers), fresh=False)
        variant = ("many", index, group.form, True, True)
        done = not _BROKEN and _launch(
            kernels.accumulate_many, variant, group.programs, group.form,
            group.table, rows, parts, group.programs, counters, group.tiles,
        )  # fmt: skip
        if not done:
            left = [*left, *group.numbers]
    return left


_Variant = tuple[str, int, Format, bool, bool]
_KERNELS: dict[_Variant, Any] = {}
_BROKEN: list[Exception] = []


def _launch(jit: Any, variant: _Variant, programs: int, form: Format, *args: Any) -> bool:
    """Run a kernel on the current stream: the one kept for this variant, or a new one.

    False if it did not run: Triton may be installed where it cannot work, as without a C compiler
    or on a GPU it does not know. That is said once, and torch does the work from then on.
    """
    kernel = _KERNELS.get(variant)
    try:
        if kernel is None:
            options = {"LANES": _LANES, "F": form, "num_warps": _WARPS}
            _KERNELS[variant] = jit[(programs,)](*args, **options)
        else:
            plain = [arg if type(arg) is int else arg.data_ptr() for arg in args]
            kernel[(programs, 1, 1)](*plain, _LANES, form, stream=_stream(variant[1]))
    except Exception as error:
        _BROKEN.append(error)
        why = str(error).partition("\n")[0]
        warnings.warn(
            f"Triton could not run a summary ({type(error).__name__}: {why}). "
            "Torch does it instead: the same numbers, more slowly.",
            RuntimeWarning,
            stacklevel=3,
        )
        return False
    return True


def _is_row(row: torch.Tensor, index: int) -> bool:
    return (
        row.get_device() == index
        and row.dtype is torch.float64
        and row.numel() == WIDTH
        and row.is_contiguous()
    )


def _capturing(index: int) -> bool:
    return index >= 0 and torch.cuda.is_current_stream_capturing()


def _readable(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Format] | None:
    """The elements in the order of memory, a tensor that starts with the first ones, the format.

    The order does not matter to a summary, so a dense tensor is read as it lies.
    """
    if type(tensor) not in _PLAIN_TYPES or tensor.layout is not torch.strided or tensor.is_neg():
        return None
    values = tensor
    if tensor.is_complex():
        if tensor.is_conj():
            return None
        values = torch.view_as_real(tensor.detach())
    form = FORMATS.get(values.dtype)
    if form is None:
        return None
    if form.bits == 8:
        values = values.detach().view(torch.uint8)
    if values.is_contiguous():
        return values, values, form
    values = values.detach()
    dense = values.permute(sorted(range(values.dim()), key=values.stride, reverse=True))
    if not dense.is_contiguous():
        return None
    return dense, first_elements(values, FIRST).contiguous(), form


@cache
def _most_programs(index: int) -> int:
    if index < 0:
        return 4
    return _PER_SM * int(torch.cuda.get_device_properties(index).multi_processor_count)


def _stream(index: int) -> int:
    """The current stream's address, without the object around it."""
    return int(torch._C._cuda_getCurrentRawStream(index)) if index >= 0 else 0


_SCRATCH: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}


def _scratch(
    index: int, programs: int, tensors: int, *, fresh: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for partials, and counters that are zero between launches: the last program sees to it.

    Kept for the current stream, since launches on one stream do not overlap. A graph may be
    replayed on any stream beside any other, so a captured launch gets its own.
    """
    key = (index, _stream(index))
    kept = None if fresh else _SCRATCH.get(key)
    if kept is not None and kept[0].numel() >= programs * PARTIAL and kept[1].numel() >= tensors:
        return kept
    device = torch.device("cuda", index) if index >= 0 else torch.device("cpu")
    if not fresh:
        programs, tensors = max(programs, _most_programs(index)), max(tensors, 256)
    with torch.inference_mode(False):
        scratch = (
            torch.empty(programs * PARTIAL, dtype=torch.float64, device=device),
            torch.zeros(tensors, dtype=torch.int32, device=device),
        )
    if not fresh:
        _SCRATCH[key] = scratch
    return scratch


@dataclass(frozen=True, eq=False)
class _Group:
    """Tensors of one format that share a launch."""

    form: Format
    table: torch.Tensor
    programs: int
    tiles: int
    numbers: list[int]  # of its tensors, among all


_PLANS: OrderedDict[Any, tuple[list[_Group], list[int]]] = OrderedDict()
_PLANS_KEPT = 16


def _plan(index: int, tensors: Sequence[torch.Tensor]) -> tuple[list[_Group], list[int]]:
    """The launches for these tensors, and which of them need their own.

    Kept for a few sets, since parameters lie where they lay a step ago, and gradients often do.
    """
    key = (
        index,
        _stream(index),
        *[(t.data_ptr(), t.numel(), t.dtype, t.is_contiguous(), type(t)) for t in tensors],
    )
    found = _PLANS.get(key)
    if found is not None:
        _PLANS.move_to_end(key)
        return found
    left: list[int] = []
    members: dict[Format, list[tuple[int, int, int]]] = {}
    for i, tensor in enumerate(tensors):
        seen = _readable(tensor) if tensor.is_contiguous() else None
        if seen is None or seen[0].data_ptr() % 16 or tensor.get_device() != index:
            left.append(i)
        elif size := seen[0].numel():
            members.setdefault(seen[2], []).append((seen[0].data_ptr(), size, i))
    found = [_group(index, form, some) for form, some in members.items()], left
    _PLANS[key] = found
    if len(_PLANS) > _PLANS_KEPT:
        _PLANS.popitem(last=False)
    return found


def _group(index: int, form: Format, members: list[tuple[int, int, int]]) -> _Group:
    """What the kernel reads: each program's tensor, then each tensor's address, size, first
    program, number of programs and row.
    """
    tile = _LANES * (128 // form.bits)
    address, size, row = np.array(members, dtype=np.int64).T
    tiles = max(4, -(-int(size.sum()) // (tile * _MOST)))
    programs = -(-size // (tile * tiles))
    first = np.cumsum(programs) - programs
    owner = np.repeat(np.arange(len(members)), programs)
    entries = np.stack([address, size, first, programs, row], axis=1)
    table = torch.from_numpy(np.concatenate([owner, entries.ravel()]))
    if index >= 0:  # from pinned memory, a copy is only enqueued
        table = table.pin_memory().to(torch.device("cuda", index), non_blocking=True)
    return _Group(form, table, len(owner), tiles, row.tolist())
