"""Whether what a file holds is what a model takes: argument by argument, in one sentence.

A compiled model says what it takes, more or less; a module's forward has at least a signature.
What can be cast without losing a value is cast, and a note says so; nothing else is.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import OptionError
from ..taps.programs.base import Argument, Program
from .inputs_from import Given
from .target import Batch

__all__ = ["Takes", "fit"]

_NUMBERED = (
    " Numbers are positions: what the model calls these arguments was lost when it was compiled, "
    "so a file gives them by position, as '0', '1', …."
)


@dataclass(frozen=True)
class Takes:
    """What a model takes; `more` by name, or `more_by_position`, than it says.

    `floating` is what a number without a dtype of its own becomes, where nothing is declared.
    `by_name`: what is given by position is handed over by name, which a compiled model takes even
    where its inputs were nested.
    """

    arguments: tuple[Argument, ...] = ()
    more: bool = False
    more_by_position: bool = False
    floating: torch.dtype = torch.float32
    by_name: bool = False

    @classmethod
    def of(cls, model: Any) -> Takes:
        """As far as the model says so."""
        if isinstance(model, nn.Module) and not isinstance(model, torch.jit.ScriptModule):
            return _signature(model)
        if not isinstance(model, Program):
            return _of_function(model if callable(model) else None, torch.float32)
        floats = [d for d in map(_dtype, model.describe().get("dtypes", ())) if _is_float(d)]
        floating = floats[0] if len(floats) == 1 and floats[0] is not None else torch.float32
        if model.arguments is None:
            return cls(more=True, more_by_position=True, floating=floating)
        return cls(tuple(model.arguments), floating=floating, by_name=True)

    def __str__(self) -> str:
        told = ", ".join(_told(argument) for argument in self.arguments[:12])
        more = ", …" if len(self.arguments) > 12 else ""
        if not told:
            return "It takes nothing."
        numbered = any(argument.name.partition(".")[0].isdecimal() for argument in self.arguments)
        return f"It takes {told}{more}.{_NUMBERED if numbered else ''}"


def _dtype(name: object) -> torch.dtype | None:
    found = getattr(torch, str(name).removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else None


def _is_float(dtype: torch.dtype | None) -> bool:
    return dtype is not None and dtype.is_floating_point


def _signature(model: nn.Module) -> Takes:
    while isinstance(getattr(model, "_orig_mod", None), nn.Module):
        model = model._orig_mod  # type: ignore[assignment]
    floats = {p.dtype for p in model.parameters() if p.is_floating_point()}
    floating = floats.pop() if len(floats) == 1 else torch.float32
    return _of_function(model.forward, floating)


def _of_function(function: Any, floating: torch.dtype) -> Takes:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return Takes(more=True, more_by_position=True, floating=floating)
    kinds = inspect.Parameter
    named = [p for p in parameters if p.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)]
    return Takes(
        tuple(Argument(p.name, required=p.default is kinds.empty) for p in named),
        more=any(p.kind is kinds.VAR_KEYWORD for p in parameters),
        more_by_position=any(p.kind is kinds.VAR_POSITIONAL for p in parameters),
        floating=floating,
    )


@dataclass
class _Fit:
    """What was found out on the way."""

    takes: Takes
    given: Mapping[str, Given]
    args: dict[int, Any] = field(default_factory=dict)
    kwargs: dict[str, Any] = field(default_factory=dict)
    filled: dict[str, str] = field(default_factory=dict)  # the argument, and the key that gave it
    complaints: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def fit(
    given: Mapping[str, Given], takes: Takes, where: str, model: str
) -> tuple[Batch, list[str]]:
    """The arguments of one run, and what a user should know of how they came about."""
    found = _Fit(takes, given)
    names = [argument.name for argument in takes.arguments]
    for key, value in given.items():
        _place(found, key, value, names)
    missing = [a.name for a in takes.arguments if a.required and a.name not in found.filled]
    lacking = [f"{name!r} is missing" for name in missing]
    args = [found.args[index] for index in sorted(found.args)]
    if takes.by_name or sorted(found.args) != list(range(len(args))):
        if not all(index < len(names) for index in found.args):
            gap = next(index for index in range(len(args) + 1) if index not in found.args)
            lacking.append(f"position {gap} is missing")
        found.kwargs |= {names[i]: v for i, v in found.args.items() if i < len(names)}
        args = []
    complaints = [*lacking, *found.complaints]
    if complaints:
        about = f" {takes}" if not (takes.more and not takes.arguments) else ""
        raise OptionError(f"{where} does not fit {model}: {'; '.join(complaints)}.{about}")
    return Batch(tuple(args), found.kwargs), [f"{where}: {text}" for text in found.notes]


def _place(found: _Fit, key: str, given: Given, names: Sequence[str]) -> None:
    takes = found.takes
    position = int(key) if key.isdecimal() and key not in names and len(key) < 6 else None
    if position is not None and position < len(names):
        argument = takes.arguments[position]
    elif position is not None:
        argument = Argument(key)
        if not takes.more_by_position:
            found.complaints.append(
                f"there is no position {position}, the last is {len(names) - 1}"
            )
            return
    elif key in names:
        argument = takes.arguments[names.index(key)]
    else:
        argument = Argument(key)
        near = _near(key, names, found.given, strict=takes.more)
        if near or not takes.more:
            hint = f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""
            found.complaints.append(f"{key!r} is unknown{hint}")
            return
        if names:
            found.notes.append(f"'{key}' is none of the names of its forward: **kwargs takes it.")
    if argument.name in found.filled:
        other = found.filled[argument.name]
        found.complaints.append(f"{argument.name!r} is given twice, as {other!r} and as {key!r}")
        return
    found.filled[argument.name] = key
    value = _typed(found, argument, given)
    if isinstance(value, Tensor):
        _check_shape(found, argument, value)
    if position is None:
        found.kwargs[key] = value
    else:
        found.args[position] = value


def _near(key: str, names: Sequence[str], given: Mapping[str, Given], strict: bool) -> list[str]:
    """Names like this one; where any name is taken, only a slip of the pen for one not given."""
    if strict:
        names = [name for name in names if name not in given]
    return difflib.get_close_matches(key, names, n=2, cutoff=0.85 if strict else 0.5)


def _typed(found: _Fit, argument: Argument, given: Given) -> Any:
    """The value in the dtype that is declared, or as it is, with a complaint."""
    value, wanted = given.value, argument.dtype
    if not isinstance(value, Tensor):
        if wanted is None:
            return value
        value = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    if not given.typed:
        return _from_numbers(found, argument, value)
    if wanted is None:
        if given.wide and found.takes.floating == torch.float32 and found.takes.arguments:
            found.notes.append(f"'{argument.name}' is float64 and was cast to float32.")
            return value.to(torch.float32)
        return value
    if value.dtype == wanted:
        return value
    if given.wide and wanted == torch.float32:
        found.notes.append(f"'{argument.name}' is float64 and was cast to float32.")
        return value.to(wanted)
    if _same_sort(value.dtype, wanted) and _exact(value, wanted):
        found.notes.append(
            f"'{argument.name}' is {_name(value.dtype)} and was cast to {_name(wanted)}, every "
            "value kept."
        )
        return value.to(wanted)
    found.complaints.append(f"{argument.name!r} is {_name(value.dtype)}, expected {_name(wanted)}")
    return value


def _from_numbers(found: _Fit, argument: Argument, value: Tensor) -> Tensor:
    """Numbers of a text have no dtype: they become what is declared, if they can be that."""
    wanted = argument.dtype
    if wanted is None:
        return value.to(found.takes.floating) if value.is_floating_point() else value
    if value.is_floating_point() and (wanted.is_floating_point or wanted.is_complex):
        return value.to(wanted)  # a decimal number is rounded, whatever it becomes
    if not value.numel() or _exact(value, wanted):
        return value.to(wanted)
    odd = value.reshape(-1)[_changed(value, wanted)][0].item()
    found.complaints.append(f"{argument.name!r} holds {odd}, expected {_name(wanted)}")
    return value


def _same_sort(given: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether a cast may keep every value: among whole numbers, or to a wider float."""
    if given.is_floating_point and wanted.is_floating_point:
        return torch.finfo(wanted).bits > torch.finfo(given).bits
    odd = (torch.bool,)
    plain = not (given.is_floating_point or given.is_complex or given in odd)
    return plain and not (wanted.is_floating_point or wanted.is_complex or wanted in odd)


def _changed(value: Tensor, wanted: torch.dtype) -> Tensor:
    """Which values another dtype would change."""
    wide = torch.float64 if value.is_floating_point() else torch.int64
    there = value.to(wanted)
    back = there.to(wide)
    changed = back != value.to(wide)
    if not value.is_floating_point() and wide != value.dtype:  # uint64 beyond int64 has no other
        changed |= value.to(wide) < 0 if _unsigned(value.dtype) else False
    if _unsigned(wanted):
        changed |= value.to(wide) < 0
    return changed.reshape(-1)


def _exact(value: Tensor, wanted: torch.dtype) -> bool:
    return not bool(_changed(value, wanted).any())


def _unsigned(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool) and not (
        dtype.is_signed
    )


def _check_shape(found: _Fit, argument: Argument, value: Tensor) -> None:
    wanted = argument.shape
    if wanted is None:
        return
    got = tuple(value.shape)
    if len(got) != len(wanted):
        found.complaints.append(
            f"{argument.name!r} has {_axes(len(got))} ({_shape(got)}), expected "
            f"{len(wanted)} ({_shape(wanted)})"
        )
    elif any(size is not None and size != here for size, here in zip(wanted, got, strict=True)):
        found.complaints.append(f"{argument.name!r} is {_shape(got)}, expected {_shape(wanted)}")


def _axes(count: int) -> str:
    return f"{count} {'axis' if count == 1 else 'axes'}"


def _shape(sizes: Sequence[int | None]) -> str:
    return " x ".join("?" if size is None else str(size) for size in sizes) or "one number"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _told(argument: Argument) -> str:
    parts = [] if argument.dtype is None else [_name(argument.dtype)]
    parts += [] if argument.shape is None else [_shape(argument.shape)]
    about = f" ({', '.join(parts)})" if parts else ""
    return f"{argument.name}{about}" if argument.required else f"[{argument.name}{about}]"
