"""Options for a target: from `--dtype bf16` and `--set key=value` to a function's arguments."""

from __future__ import annotations

import enum
import inspect
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import OptionError, TargetError

__all__ = ["DTYPES", "arguments", "given", "missing_cuda", "parse_device", "parse_dtype", "takes"]

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
    "half": torch.float16,
    "float": torch.float32,
    "double": torch.float64,
}


def parse_dtype(text: str) -> torch.dtype:
    """A floating-point dtype by its long or short name."""
    name = text.strip().lower().removeprefix("torch.")
    if name not in DTYPES:
        raise OptionError(
            f"{text!r} is no dtype that is known here. Known are {', '.join(DTYPES)}."
        )
    return DTYPES[name]


def parse_device(text: str, instead: str = "") -> torch.device:
    """A device that is there; `instead` says what to do without it."""
    try:
        device = torch.device(text)
    except RuntimeError as error:
        known = "torch knows no such device. Name cpu, cuda, or cuda:1 for the second GPU."
        raise OptionError(_unusable(text, known, instead)) from error
    missing = missing_cuda(device) if device.type == "cuda" else ""
    if missing:
        raise OptionError(_unusable(text, missing, instead))
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        said = str(error).strip().split(". ")[0].splitlines()[0].rstrip(".")
        reason = f"torch {torch.__version__} says: {said}."
        raise OptionError(_unusable(text, reason, instead)) from error
    return device


def _unusable(text: str, reason: str, instead: str) -> str:
    return " ".join(
        part for part in (f"The device {text!r} cannot be used here: {reason}", instead) if part
    )


def missing_cuda(device: torch.device) -> str:
    """Why there is no such CUDA device, and what to do; empty where there is."""
    if torch.version.cuda is None and torch.version.hip is None:
        return (
            f"torch {torch.__version__} is built without CUDA. Install a CUDA build of torch "
            "(https://pytorch.org/get-started)."
        )
    if not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} is built for CUDA, but finds no GPU. See whether "
            "nvidia-smi lists one, and whether CUDA_VISIBLE_DEVICES hides it."
        )
    count = torch.cuda.device_count()
    if device.index is not None and device.index >= count:
        names = ", ".join(f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(count))
        return f"there {'is' if count == 1 else 'are'} only {names}."
    return ""


def given(options: Mapping[str, Any], sets: Sequence[str]) -> dict[str, Any]:
    """What the user gave, by name; None is an option left out, and `--set` values stay text."""
    values = {key: value for key, value in options.items() if value is not None}
    for text in sets:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key.isidentifier():
            raise OptionError(f"--set {text!r} is not of the form key=value, such as heads=8.")
        if key in values:
            raise OptionError(f"The option {key!r} is given twice, the second time as {text!r}.")
        values[key] = _Text(value)
    return values


class _Text(str):
    """The value of a `--set`, which may become something else than a string."""


def arguments(
    function: Callable[..., Any], values: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """Fit the user's values to a function's parameters, each by its annotation.

    Text becomes what the annotation says: a parameter annotated as `torch.dtype` gets a dtype,
    and so does one without an annotation whose default is a dtype; one annotated as `str`, or not
    at all, gets `--dtype` as it was typed. A `--set` value without an annotation is read as JSON
    when it is JSON, and is a string otherwise.
    """
    try:
        parameters = dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {key: _literal(value) for key, value in values.items()}
    kinds = inspect.Parameter
    named = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    }
    takes_all = any(parameter.kind is kinds.VAR_KEYWORD for parameter in parameters.values())
    takes = ", ".join(named) or "no options"
    unknown = [key for key in values if key not in named]
    if unknown and not takes_all:
        raise OptionError(f"{where} does not take {_and(unknown)}. It takes {takes}.")
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is kinds.empty
        and parameter.kind not in (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL)
        and name not in values
    ]
    if missing:
        raise TargetError(
            f"{where} needs {_and(missing)}, which {'is' if len(missing) == 1 else 'are'} not "
            f"given. Give {'it' if len(missing) == 1 else 'them'} with "
            f"{' '.join(f'--set {name}=…' for name in missing)}, or a default."
        )
    hints = {**_kinds_of_defaults(named), **_hints(function)}
    return {key: _fit(key, value, hints.get(key), where) for key, value in values.items()}


def takes(function: Callable[..., Any], name: str, *, by_name: bool = False) -> bool:
    """Whether a function has a parameter of this name, or (not `by_name`) takes any."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return True
    kinds = inspect.Parameter
    rest = [parameter.kind is kinds.VAR_KEYWORD for parameter in parameters.values()]
    if any(rest) and not by_name:
        return True
    found = parameters.get(name)
    return found is not None and found.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)


def _and(names: Sequence[str]) -> str:
    return " and ".join(repr(name) for name in names)


def _kinds_of_defaults(parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """What torch's own kinds of defaults say as clearly as an annotation."""
    kinds = (torch.dtype, torch.device)
    return {
        name: type(parameter.default)
        for name, parameter in parameters.items()
        if isinstance(parameter.default, kinds)
    }


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    target = vars(function).get("__init__") if inspect.isclass(function) else function
    raw = dict(getattr(target, "__annotations__", {}))
    # One by one: a name that is imported for type checkers alone must not hide the others.
    space = {**vars(typing), "torch": torch, **getattr(target, "__globals__", {})}
    return {name: _resolve(hint, space) for name, hint in raw.items()}


def _resolve(hint: Any, space: dict[str, Any]) -> Any:
    """The type that an annotation names; None where it cannot be known here."""
    if not isinstance(hint, str):
        return hint
    try:
        return eval(hint, space)
    except (NameError, AttributeError, TypeError, SyntaxError):
        return None


def _fit(key: str, value: Any, hint: Any, where: str) -> Any:
    if not isinstance(value, str):
        return value
    text = str(value)
    if hint is None or hint is Any or hint is inspect.Parameter.empty:
        return _literal(value)
    try:
        return _convert(text, hint)
    except OptionError:
        raise
    except (ValueError, TypeError) as error:
        raise OptionError(f"{where} takes {key!r} as {_hint_name(hint)}, got {text!r}.") from error


def _literal(value: Any) -> Any:
    if not isinstance(value, _Text):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return str(value)


def _convert(text: str, hint: Any) -> Any:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(text, typing.get_args(hint))
    if origin is typing.Literal:
        return _choice(text, {str(item): item for item in typing.get_args(hint)})
    if origin is typing.Annotated:
        return _convert(text, typing.get_args(hint)[0])
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _choice(text, {member.name: member for member in hint})
    if hint is bool:
        words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        return _choice(text.lower(), words)
    if hint is torch.dtype:
        return parse_dtype(text)
    if hint is torch.device:
        return parse_device(text)
    if hint in (int, float, str, Path):
        return hint(text)
    value = _literal(_Text(text))
    container = origin or hint
    if container in (tuple, set, frozenset) and isinstance(value, list):
        return container(value)
    if isinstance(container, type) and container in (list, dict) and type(value) is not container:
        raise ValueError(text)
    return value


def _convert_union(text: str, members: Sequence[Any]) -> Any:
    if type(None) in members and text.lower() in ("none", "null"):
        return None
    first, *others = sorted(
        (member for member in members if member is not type(None)),
        key=lambda member: member is str,  # which takes anything, so it comes last
    )
    if not others:
        return _convert(text, first)
    try:
        return _convert(text, first)
    except (ValueError, TypeError):
        return _convert_union(text, others)


def _choice(text: str, choices: Mapping[str, Any]) -> Any:
    if text not in choices:
        raise OptionError(f"{text!r} is not one of {', '.join(choices)}.")
    return choices[text]


def _hint_name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
