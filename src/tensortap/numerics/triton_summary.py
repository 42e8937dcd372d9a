"""Summary rows on CUDA: one launch a tensor, or one for many. The kernels: triton_kernels.py.

The common floats but float64, complex of these, integers and bool are read here, in whatever order
they lie in memory; the rest is left to device.py, which alone imports this module, since that needs
Triton. Device -1 is Triton's interpreter.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from tensortap.numerics import triton_kernels as kernels
from tensortap.numerics.giving_up import warn_of
from tensortap.numerics.layout import first_elements
from tensortap.numerics.summary import FIRST, WIDTH
from tensortap.numerics.triton_formats import FORMATS, Format
from tensortap.numerics.triton_kernels import GROUP, PARTIAL, WIDE
from tensortap.numerics.triton_launch import INTERPRETED, Entry, entry, handle_of

__all__ = [
    "Bare",
    "Lean",
    "Scratch",
    "accumulate",
    "accumulate_many",
    "bare",
    "knows",
    "lean",
    "leave",
    "room_of",
    "scratch",
    "settle",
    "warm",
]

Scratch = tuple[torch.Tensor, torch.Tensor]  # partials, and counters that are 0 between launches

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.parameter.Buffer)
_LANES, _WARPS = 128, 4
_REGISTERS = 72  # what the loop needs: more would leave fewer programs at a time on a processor
_PER_SM = 7  # programs: as many as run at a time, so that none is left over
_MOST = 1 << 13  # programs of a launch for many tensors


def accumulate(
    tensor: torch.Tensor, row: torch.Tensor, merge: bool = True, scratch: Scratch | None = None
) -> bool:
    """Merge a CUDA tensor into its row, or fill the row with it; in a scratch that is given.

    False, having done nothing, if it is not one to read here. While a graph is captured, a kernel
    must not be compiled: then only what ran before is used (see `warm`).
    """
    index = tensor.get_device()
    seen = _readable(tensor)
    if seen is None or _BROKEN or not _is_row(row, index):
        return False
    values, head, form = seen
    size = values.numel()
    if not size:
        return merge
    if index >= 0 and index != torch.cuda.current_device():
        with torch.cuda.device(index):
            return accumulate(tensor, row, merge, scratch)
    capturing = _capturing(index)
    variant = ("one", index, form, not values.data_ptr() % 16, merge)
    way = _way(variant, capturing)
    if way is None:
        return False
    programs, chunks = _shares(index, form, size)
    if scratch is None:
        scratch = _own_scratch(index, programs) if capturing else _scratch(index)
    parts, counters = scratch
    other = 0 if head is values else head.data_ptr()
    call, front = way
    call(
        programs, 1, 1, _stream(index), *front, _at(parts), _at(counters), size, chunks, other,
        _LANES, form, _packed(index, form), merge, _at(values), _at(row),
    )  # fmt: skip
    return True


def accumulate_many(
    tensors: Sequence[torch.Tensor], rows: torch.Tensor, merge: bool = True
) -> Sequence[int]:
    """Merge tensors into their rows, or fill these, a launch for each dtype.

    Returns which are still to do.
    """
    index = rows.get_device()
    whole = rows.is_contiguous() and _is_row(rows[:1], index) and not _BROKEN
    if not whole or _capturing(index):  # a graph would read the table after it is gone
        return range(len(tensors))
    if index >= 0 and index != torch.cuda.current_device():
        with torch.cuda.device(index):
            return accumulate_many(tensors, rows, merge)
    groups, left = _plan(index, tensors)
    if merge:
        left = [i for i in left if tensors[i].numel()]
    for group in groups:
        way = _way(("many", index, group.form, True, merge), False)
        if way is None:
            left = [*left, *group.numbers]
            continue
        parts, counters = _wide_scratch(index, group.programs, len(group.numbers))
        call, front = way
        call(
            group.programs, 1, 1, _stream(index), *front, _at(parts), _at(counters), group.chunks,
            _LANES, group.form, _packed(index, group.form), merge, _at(group.table), _at(rows),
        )  # fmt: skip
    return left


class Lean(NamedTuple):
    """`launch(parts, address, row)`, everything else bound, and how many bytes of parts it wants.

    It leaves a row behind that `settle` completes, the parts being as they were left.
    """

    launch: Callable[[int, int, int], Any]
    room: int


class Bare(NamedTuple):
    """The same for the driver itself: the kernel's arguments as (bytes, value), and which of them
    are the addresses of the parts, of the tensor and of the row."""

    function: int
    programs: int
    threads: int
    shared: int
    values: tuple[tuple[int, int], ...]
    parts: int
    x: int
    row: int


def lean(tensor: torch.Tensor, stream: int) -> Lean | None:
    """The bound launch for tensors like this one, whatever they hold.

    For any contiguous tensor of this size, dtype and device at an address that 16 divides, on this
    stream, while the device is the current one. No argument is looked at. None where the tensor is
    not one to read here, or a graph is being captured.
    """
    found = _prepared(tensor)
    if found is None:
        return None
    (call, front), programs, chunks, size, form = found
    packed = _packed(tensor.get_device(), form)
    launch = partial(
        call, programs, 1, 1, stream, *front, size, chunks, _LANES, form, packed
    )  # fmt: skip
    return Lean(launch, room_of(programs))


def bare(tensor: torch.Tensor) -> Bare | None:
    """The same for the driver itself; None also where Triton does not say how."""
    found = _prepared(tensor)
    handle = None if found is None else handle_of(found[0])
    if found is None or handle is None:
        return None
    _, programs, chunks, size, _ = found
    values = ((8, size), (4, chunks), (8, 0), (8, 0), (8, 0))
    return Bare(handle.function, programs, handle.threads, handle.shared, values, 2, 3, 4)


def _prepared(tensor: torch.Tensor) -> tuple[Entry, int, int, int, Format] | None:
    """The kernel that leaves rows of such tensors, its programs, chunks of each, and elements."""
    index = tensor.get_device()
    known = tensor.is_contiguous() and not tensor.is_complex()  # whose next one may be a conjugate
    seen = _readable(tensor) if known else None
    if seen is None or index < 0 or _BROKEN or _capturing(index) or not tensor.numel():
        return None
    form, size = seen[2], seen[0].numel()
    with torch.cuda.device(index):
        ways = _way(("leave", index, form, True, False), False), _settling(index)
    if ways[0] is None or ways[1] is None:
        return None
    return ways[0], *_shares(index, form, size), size, form


def room_of(programs: int) -> int:
    """The bytes of a tensor's partials, and of those of its groups."""
    return (programs + -(-programs // GROUP)) * PARTIAL * 8


def leave(tensor: torch.Tensor, row: torch.Tensor, parts: torch.Tensor) -> int:
    """Leave a row of a contiguous tensor behind; the bytes of `parts` that it takes.

    0, having done nothing, where that is not for here, or the parts are too small.
    """
    index = tensor.get_device()
    seen = _readable(tensor) if tensor.is_contiguous() else None
    if seen is None or _BROKEN or not _is_row(row, index) or not tensor.numel():
        return 0
    values, _, form = seen
    capturing = _capturing(index)
    if values.data_ptr() % 16 or parts.get_device() != index or _settling(index, capturing) is None:
        return 0
    way = _way(("leave", index, form, True, False), capturing)
    programs, chunks = _shares(index, form, values.numel())
    room = room_of(programs)
    if way is None or room > parts.nbytes or (index >= 0 and index != torch.cuda.current_device()):
        return 0
    call, front = way
    call(
        programs, 1, 1, _stream(index), *front, values.numel(), chunks, _LANES, form,
        _packed(index, form), _at(parts), _at(values), _at(row),
    )  # fmt: skip
    return room


def settle(rows: torch.Tensor) -> None:
    """Complete the rows that were left; the others stay as they are. On the current stream."""
    index = rows.get_device()
    if not len(rows):
        return
    with _on(index):
        way = _settling(index, _capturing(index))
        if way is None:  # whoever leaves a row has asked for this kernel
            raise RuntimeError("there is no kernel to settle rows with")
        call, front = way
        call(len(rows), 1, 1, _stream(index), *front, _at(rows))


def _settling(index: int, capturing: bool = False) -> Entry | None:
    form = FORMATS[torch.float32]  # any: rows are all alike
    return _way(("settle", index, form, True, False), capturing)


def knows(dtype: torch.dtype) -> bool:
    """Whether there are kernels for a dtype, and nothing has shown that they do not work."""
    return not _BROKEN and dtype.to_real() in FORMATS


def warm(dtype: torch.dtype, device: torch.device) -> bool:
    """Compile what `accumulate` needs for a dtype, as must be before a graph is captured."""
    form = FORMATS.get(dtype.to_real())
    if form is None or _BROKEN:
        return False
    index = _index(device)
    ways = [
        _way(("one", index, form, aligned, merge), False)
        for aligned in (True, False)
        for merge in (True, False)
    ]
    ways += [_way(("leave", index, form, True, False), False), _settling(index)]
    return None not in ways


def scratch(device: torch.device) -> Scratch:
    """Room for one launch at a time, for a graph that is to keep it."""
    index = _index(device)
    return _own_scratch(index, _most_programs(index))


_Variant = tuple[str, int, Format, bool, bool]
_KERNELS: dict[_Variant, Entry] = {}
_BROKEN: list[Exception] = []


def _way(variant: _Variant, capturing: bool) -> Entry | None:
    """How to launch a variant of a kernel, which is compiled where it was not yet.

    None if it cannot be, which is said once; torch does the work from then on.
    """
    way = _KERNELS.get(variant)
    if way is None and not capturing and not _BROKEN:
        try:
            way = _KERNELS[variant] = _compiled(variant)
        except Exception as error:
            _BROKEN.append(error)
            warn_of("run a summary", error, stacklevel=4)
    return way


def _compiled(variant: _Variant) -> Entry:
    """A kernel, compiled by summing up a tensor of one element."""
    kind, index, form, aligned, merge = variant
    device = torch.device("cuda", index) if index >= 0 else torch.device("cpu")
    with torch.inference_mode(False), torch.no_grad(), _on(index):
        row = torch.zeros(1, WIDTH, dtype=torch.float64, device=device)
        raw = torch.zeros(64, dtype=torch.uint8, device=device).view(form.torch)
        one = raw if aligned else raw[1:]
        parts, counters = _own_scratch(index, 1)
        ways = (_LANES, form, _packed(index, form), merge)
        args: list[Any]
        if kind == "settle":
            jit, args = kernels.settle, [row]
        elif kind == "leave":
            jit, args = kernels.leave, [1, 1, *ways[:3], parts, one, row]
        elif kind == "one":
            jit, args = kernels.accumulate_one, [parts, counters, 1, 1, 0, *ways, one, row]
        else:
            table = [0, one.data_ptr(), 1, 0, 1, 0]
            entries = torch.tensor(table, device="cpu")
            if index >= 0:
                entries = entries.pin_memory().to(device, non_blocking=True)
            jit, args = kernels.accumulate_many, [parts, counters, 1, *ways, entries, row]
        return entry(jit, 1, _stream(index), args, num_warps=_WARPS, maxnreg=_REGISTERS)


def _on(index: int) -> Any:
    return torch.cuda.device(index) if index >= 0 else nullcontext()


def _at(tensor: torch.Tensor) -> Any:
    """A tensor as a kernel gets it: by its address; the interpreter wants to see it."""
    return tensor if INTERPRETED else tensor.data_ptr()


def _shares(index: int, form: Format, size: int) -> tuple[int, int]:
    """How many programs read a tensor of this size, and how many chunks each of them.

    What is left to do once everything is read grows with the number of programs; so they are as
    many as can run at a time only where there is enough to read.
    """
    chunk = _LANES * form.steps * form.each
    total, most = -(-size // chunk), _most_programs(index)
    if total <= 3 * most:
        most = min(most, WIDE)
    elif total <= 9 * most:
        most = max(1, most * 4 // 7)
    chunks = -(-total // most)
    return -(-total // chunks), chunks


@cache
def _packed(index: int, form: Format) -> bool:
    """Whether the device has the instructions for two halves at once."""
    return (
        index >= 0 and form.half is not None and torch.cuda.get_device_capability(index) >= (9, 0)
    )


def _is_row(row: torch.Tensor, index: int) -> bool:
    return (
        row.get_device() == index
        and row.dtype is torch.float64
        and row.numel() == WIDTH
        and row.is_contiguous()
    )


def _index(device: torch.device) -> int:
    if device.type == "cpu":
        return -1
    return torch.cuda.current_device() if device.index is None else device.index


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
    if form.torch is not values.dtype:
        values = values.detach().view(form.torch)
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
    count = int(torch.cuda.get_device_properties(index).multi_processor_count)
    return min(_PER_SM * count, GROUP * GROUP)  # of which groups are made, and of these one


def _stream(index: int) -> int:
    """The current stream's address, without the object around it."""
    return int(torch._C._cuda_getCurrentRawStream(index)) if index >= 0 else 0


_SCRATCH: dict[tuple[int, int], Scratch] = {}
_WIDE_SCRATCH: dict[tuple[int, int], Scratch] = {}


def _scratch(index: int, stream: int | None = None) -> Scratch:
    """Room for the partials of a tensor, and a counter that is 0 between launches.

    The last program sees to that. Kept for the stream, since launches on one do not overlap, and
    forever, since its address is bound into launches.
    """
    key = (index, _stream(index) if stream is None else stream)
    kept = _SCRATCH.get(key)
    if kept is None:
        there: Any = nullcontext()
        if key[1] != _stream(index):
            other: Any = torch.cuda.ExternalStream
            there = torch.cuda.stream(other(key[1], torch.device("cuda", index)))
        with there:
            made = _own_scratch(index, _most_programs(index))
        kept = _SCRATCH.setdefault(key, made)  # the first one stays, if two threads come at once
    return kept


def _wide_scratch(index: int, programs: int, tensors: int) -> Scratch:
    """The same for many tensors, as large as was ever wanted on this stream."""
    key = (index, _stream(index))
    kept = _WIDE_SCRATCH.get(key)
    if kept is None or kept[0].numel() < _room(programs, tensors) * PARTIAL:
        kept = _own_scratch(index, max(programs, 1 << 12), max(tensors, 1 << 10))
        _WIDE_SCRATCH[key] = kept
    return kept


def _own_scratch(index: int, programs: int, tensors: int = 1) -> Scratch:
    """A graph may be replayed on any stream beside any other, so a captured launch has its own."""
    device = torch.device("cuda", index) if index >= 0 else torch.device("cpu")
    room = _room(programs, tensors)
    with torch.inference_mode(False):
        return (
            torch.empty(room * PARTIAL, dtype=torch.float64, device=device),
            torch.zeros(room, dtype=torch.int32, device=device),
        )


def _room(programs: int, tensors: int) -> int:
    """Partials of programs and of their groups: one in so many, and two more a tensor."""
    return programs + programs // GROUP + 2 * tensors


@dataclass(frozen=True, eq=False)
class _Group:
    """Tensors of one format that share a launch."""

    form: Format
    table: torch.Tensor
    programs: int
    chunks: int
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
        with suppress(KeyError):  # where another thread has dropped it meanwhile
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
        else:
            left.append(i)
    found = [_group(index, form, some) for form, some in members.items()], left
    _PLANS[key] = found
    if len(_PLANS) > _PLANS_KEPT:
        _PLANS.popitem(last=False)
    return found


def _group(index: int, form: Format, members: list[tuple[int, int, int]]) -> _Group:
    """What the kernel reads: each program's tensor, then each tensor's address, size, first
    program, number of programs and row.
    """
    chunk = _LANES * form.steps * form.each
    address, size, row = np.array(members, dtype=np.int64).T
    chunks = -(-int(size.sum()) // (chunk * _MOST))
    chunks = max(chunks, -(-int(size.max()) // (chunk * GROUP * GROUP)))
    programs = -(-size // (chunk * chunks))
    first = np.cumsum(programs) - programs
    owner = np.repeat(np.arange(len(members)), programs)
    entries = np.stack([address, size, first, programs, row], axis=1)
    table = torch.from_numpy(np.concatenate([owner, entries.ravel()]))
    if index >= 0:  # from pinned memory, a copy is only enqueued
        table = table.pin_memory().to(torch.device("cuda", index), non_blocking=True)
    return _Group(form, table, len(owner), chunks, row.tolist())
