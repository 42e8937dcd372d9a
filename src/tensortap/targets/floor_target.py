"""The target of a floor run, loaded in this process: to see what its layers make alone."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from torch import nn

from ..errors import TapError, TargetError
from ..recording.reader import Recording
from .modes.request import Request
from .modes.surroundings import Surroundings, begin_from
from .running import Settings
from .target import Target

__all__ = ["FloorTarget", "load_floor_target", "target_named"]

_NUMBERS = ("seq-len", "samples", "seed", "generate", "calib")
_WORDS = ("mode", "device", "dtype", "input-ids")
_LISTS = ("set", "prompt", "inputs-from")
_SWITCHES = ("perturb", "eval")


@dataclass(frozen=True)
class FloorTarget:
    """A target, and whether its layers are to be given inputs that are moved by roundings."""

    target: Target
    perturb: bool


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise TargetError(f"The command that made the floor cannot be read: {message}.")


def target_named(recording: Recording) -> str:
    """The target that a recording says it was made from; empty where it does not."""
    words = shlex.split(recording.manifest.selection.get("command") or "")
    return words[2] if words[:2] == ["tensortap", "record"] and len(words) > 2 else ""


def load_floor_target(recording: Recording) -> FloorTarget:
    """Load what a floor was recorded from; the state of this process is as it was afterwards."""
    words = shlex.split(recording.manifest.selection.get("command") or "")
    if not target_named(recording):
        raise TargetError(f"{recording.path} does not say which target it was recorded from.")
    found = _parser().parse_args(words[2:])
    options = {
        name: value
        for name in ("seq_len", "samples", "device", "dtype", "seed", "generate")
        if (value := getattr(found, name)) is not None
    }
    request = Request(
        found.target,
        Settings(),
        options=options,
        sets=tuple(found.set),
        prompts=tuple(found.prompt),
        input_ids=None if found.input_ids is None else Path(found.input_ids),
        inputs_from=tuple(Path(item) for item in found.inputs_from),
        calib=found.calib,
    )
    start = Surroundings.now()
    try:
        begin_from(found.seed)
        target = request.load(found.mode)
    except TapError as error:
        raise TargetError(f"The floor's target cannot be loaded: {error}") from error
    finally:
        start.restore()
    if not isinstance(target.model, nn.Module):
        raise TargetError("The floor's target is not an eager model.")
    if found.eval:
        target.model.eval()
    return FloorTarget(target, found.perturb)


def _parser() -> _Parser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("target")
    for name in _NUMBERS:
        parser.add_argument(f"--{name}", type=int)
    for name in _WORDS:
        parser.add_argument(f"--{name}")
    for name in _LISTS:
        parser.add_argument(f"--{name}", action="append", default=[])
    for name in _SWITCHES:
        parser.add_argument(f"--{name}", action="store_true")
    return parser
