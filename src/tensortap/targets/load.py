"""Loading a target by its name on the command line, in a mode."""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..errors import OptionError, TargetError
from ..taps.programs.base import Options as ProgramOptions
from .artefacts import check_usable, is_artefact, load_artefact, with_inputs
from .casting import cast_target, unheeded
from .importing import Found, call, finding
from .inputs_from import SUFFIXES as INPUT_SUFFIXES
from .modes.builtin import CASTS, apply_mode, is_builtin
from .modes.declared import meaning, project_of
from .modes.project import ModeTable
from .modes.sparing import check_not_spoilt, collect, spared
from .options import arguments, given, parse_dtype, takes
from .target import Batch, Target, describe, is_model

__all__ = ["load_target"]

_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)


def load_target(
    spec: str | Callable[..., Any],
    options: Mapping[str, Any] | None = None,
    sets: Sequence[str] = (),
    *,
    prompts: Sequence[str] = (),
    input_ids: str | os.PathLike[str] | None = None,
    inputs_from: Sequence[str | os.PathLike[str]] = (),
    compiled: ProgramOptions | None = None,
    plan: bool = False,
    calib: int | None = None,
) -> Target:
    """Turn `file.py:function`, `package.module:function`, `hf:DIR` or a model file into a Target.

    `inputs_from` are files with the inputs of a batch each, in place of the target's own;
    `compiled` says more about a compiled model; a `plan` of a model file needs no inputs. The
    function, which may also be given itself, gets the options by name and returns a Target or
    `(model, inputs)`. Its file's folder (for a package, the working directory) can be imported
    from until it returns. A `dtype` that it does not take is applied to what it returns, and so is
    a built-in `mode` that it does not know; `calib` is on how many batches that is calibrated.
    """
    values = given(options or {}, sets)
    table = _table(spec, values)
    notes: tuple[str, ...] = ()
    if table is not None:
        overruled = [key for key in table.options if key in values]
        notes = tuple(
            f"The mode '{table.name}' of {table.file} has {key} = {table.options[key]!r}; what was "
            f"given on the command line counts: {values[key]}."
            for key in overruled
        )
        values = {**table.options, **values}
        calib = table.calib if calib is None else calib
        spec = spec if table.target is None or not isinstance(spec, str) else table.spec(spec)
    target = _load(
        spec,
        values,
        table,
        prompts=prompts,
        input_ids=input_ids,
        inputs_from=inputs_from,
        compiled=compiled,
        plan=plan,
        calib=calib,
    )
    if table is not None:
        target = replace(target, mode=table.name)
    return replace(target, notes=(*notes, *target.notes)) if notes else target


def _table(spec: str | Callable[..., Any], values: Mapping[str, Any]) -> ModeTable | None:
    mode = values.get("mode")
    return None if mode is None else project_of(spec).modes.get(str(mode))


def _load(
    spec: str | Callable[..., Any],
    values: dict[str, Any],
    table: ModeTable | None,
    *,
    prompts: Sequence[str],
    input_ids: str | os.PathLike[str] | None,
    inputs_from: Sequence[str | os.PathLike[str]],
    compiled: ProgramOptions | None,
    plan: bool,
    calib: int | None,
) -> Target:
    if isinstance(spec, str) and is_artefact(spec):
        if table is not None:
            values.pop("mode", None)  # which file it is is all that the mode means
        return load_artefact(
            spec,
            values,
            prompts=prompts,
            input_ids=input_ids,
            inputs_from=inputs_from,
            options=compiled,
            plan=plan,
        )
    if isinstance(spec, str) and spec.startswith("hf:"):
        target = _checkpoint(spec, values, table, prompts, input_ids, inputs_from, calib)
        check_usable(target, compiled or ProgramOptions())
        return target
    if prompts or input_ids is not None:
        option = "--prompt" if prompts else "--input-ids"
        raise OptionError(
            f"{option} is for hf:DIR targets; the function of {spec!r} makes its own inputs. "
            "Hand values to it with --set key=value."
        )
    with finding(spec) as found:
        return _built(found, values, table, inputs_from, compiled, calib)


def _checkpoint(
    spec: str,
    values: dict[str, Any],
    table: ModeTable | None,
    prompts: Sequence[str],
    input_ids: str | os.PathLike[str] | None,
    inputs_from: Sequence[str | os.PathLike[str]],
    calib: int | None,
) -> Target:
    from .hf import load_checkpoint

    if table is not None:
        values["mode"] = table.mode or (table.name if table.bare else None)
    mode = values.get("mode")
    _check_dtype(mode, values)
    values = {key: value for key, value in values.items() if value is not None}
    target = load_checkpoint(
        spec, values, prompts=prompts, input_ids=input_ids, inputs_from=inputs_from
    )
    if mode is None or str(mode) in CASTS or not is_builtin(str(mode)):
        return target  # cast when it was loaded, or a name and nothing more
    return apply_mode(target, str(mode), calib=calib)


def _built(
    found: Found,
    values: dict[str, Any],
    table: ModeTable | None,
    inputs_from: Sequence[str | os.PathLike[str]],
    compiled: ProgramOptions | None,
    calib: int | None,
) -> Target:
    """What a function builds, with what it does not do itself done behind it."""
    function, spec = found.function, found.spec
    mode = values.pop("mode", None)
    means = None if mode is None else meaning(found, str(mode), table)
    if means is not None and means.given is not None:
        values = {"mode": means.given if str(mode) != means.given else mode, **values}
    elif means is not None:
        _check_dtype(means.builtin, values)
    dtype = None if takes(function, "dtype") else values.pop("dtype", None)
    if isinstance(dtype, str):
        dtype = parse_dtype(dtype)
    notes = _seeded(function, values, spec)
    keywords = arguments(function, values, f"The target {spec!r}")
    target = _to_target(call(found, keywords), spec, mode, with_files=bool(inputs_from))
    target = replace(target, notes=(*target.notes, *notes)) if notes else target
    check_usable(target, compiled or ProgramOptions())
    check_not_spoilt(target, spec)
    if inputs_from:
        target = with_inputs(target, inputs_from, compiled)
    why, builtin = "takes no dtype", None if means is None else means.builtin
    if dtype is None and not takes(function, "dtype", by_name=True):  # it went into **options
        why, dtype = "leaves the dtype aside", unheeded(target, values.get("dtype"))
    if dtype is None and builtin is None:
        return target
    target = spared(target, f"the mode {mode!r}" if dtype is None else f"--dtype {dtype}")
    collect(target.model)
    if dtype is not None:
        target = cast_target(target, dtype, spec, why)
    return target if builtin is None else apply_mode(target, builtin, calib=calib)


def _seeded(function: Callable[..., Any], values: dict[str, Any], spec: str) -> list[str]:
    """Seed torch for a function that takes no seed; values lose it."""
    seed = values.get("seed")
    if not isinstance(seed, int) or isinstance(seed, bool) or takes(function, "seed"):
        return []
    del values["seed"]
    torch.manual_seed(seed)
    return [
        f"The function of {spec!r} takes no seed: torch was seeded with {seed} before it was "
        "called. A seed that it sets itself counts more."
    ]


def _check_dtype(mode: object, values: Mapping[str, Any]) -> None:
    """A mode that is a dtype, and another dtype beside it, cannot both be meant."""
    dtype = values.get("dtype")
    if dtype is None or str(mode) not in CASTS:
        return
    asked = parse_dtype(dtype) if isinstance(dtype, str) else dtype
    if asked != CASTS[str(mode)]:
        raise OptionError(f"--mode {mode} and --dtype {dtype} are not the same. Give one of them.")


def _to_target(result: object, spec: str, mode: object, *, with_files: bool) -> Target:
    """What a function returned as a target; a model alone is one where files give its inputs."""
    if isinstance(result, Target):
        target = result
    elif isinstance(result, tuple) and len(result) == 2:
        try:
            target = Target(*result)
        except TargetError as error:
            raise TargetError(
                f"The target {spec!r} returned something else than a target. {error}"
            ) from error
    elif is_model(result) and not isinstance(result, _FUNCTIONS):
        if not with_files:
            raise TargetError(
                f"The target {spec!r} gives a model ({type(result).__name__}) and no inputs. Give "
                f"--inputs-from FILE ({', '.join(INPUT_SUFFIXES)}), or return (model, inputs)."
            )
        target = Target(result, Batch())
    else:
        raise TargetError(
            f"The target {spec!r} returned {describe(result)}, expected a tensortap.Target or "
            "(model, inputs)."
        )
    if target.mode is None and mode is not None:
        target = replace(target, mode=str(mode))
    return target if target.name else replace(target, name=spec)
