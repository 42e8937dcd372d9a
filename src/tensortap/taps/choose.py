"""Which tap listens to a model: told by what the model is, unless the user says."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from ..errors import OptionError
from .base import Ports, Tap, registered
from .eager import EagerTap
from .inside import InsideTap, find_parts
from .programs.base import Options, is_program
from .programs.kinds import kind_of, open_program
from .programs.tap import ProgramTap

__all__ = ["choose_tap"]


def choose_tap(
    model: Any, layers: Any, ports: Ports, *, default: bool, options: Options | None = None
) -> Tap:
    """The tap for a model: eager, compiled, a file of one, or an object that holds some."""
    options = options or Options()
    for factory in registered():
        if factory.accepts(model):
            return factory(model, layers, ports, default=default)
    if (
        is_program(model)
        or isinstance(model, str | os.PathLike)
        or options.manifest
        or options.runtime
    ):
        if options.runtime != "eager":
            program = open_program(model, options)
            return ProgramTap(program, layers, ports, default=default, options=options)
    elif kind_of(model) is not None:
        program = open_program(model, options)
        return ProgramTap(program, layers, ports, default=default, options=options)
    return _eager(model, layers, ports, default, options)


def _eager(model: Any, layers: Any, ports: Ports, default: bool, options: Options) -> Tap:
    eager = isinstance(model, nn.Module) and not isinstance(model, torch.jit.ScriptModule)
    parts = [] if options.runtime == "eager" else find_parts(model)
    if parts:
        return InsideTap(model, parts, layers, ports, default=default, options=options)
    if eager:
        _only_for_compiled(options)
        return EagerTap(model, layers, ports, default=default)
    if callable(model):
        program = open_program(model, options)
        return ProgramTap(program, layers, ports, default=default, options=options)
    raise OptionError(
        f"Cannot record a {type(model).__module__}.{type(model).__qualname__}: expected a "
        "torch.nn.Module, a compiled model (TorchScript, an exported program, ONNX Runtime, "
        "OpenVINO) or its file, a Python object that holds one, or anything that can be called."
    )


def _only_for_compiled(options: Options) -> None:
    """An option that an eager model has no use for is a mistake, and not to be passed over."""
    given = {
        "manifest": options.manifest,
        "weights": options.weights,
        "names_from": options.names_from,
        "custom_ops": options.custom_ops,
    }
    for name, value in given.items():
        if value:
            raise OptionError(
                f"{name} is for models that are already compiled, and this one is an eager module, "
                "whose layers have their own names. Leave it out."
            )
