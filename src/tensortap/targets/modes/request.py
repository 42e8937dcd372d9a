"""What is asked for when modes are recorded: the target, its options, and how to record.

From it come the target of each mode, the command that chooses it again, and what the manifest
keeps so that `--resume` knows a recording again.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ...recording.schema import MANIFEST
from ..importing import finding
from ..load import load_target
from ..running import Settings
from ..target import Target
from .declared import project_of
from .files import digests, option_files, target_files
from .project import ModeTable

__all__ = ["Request", "command_of"]

_FLAGS = ("seq_len", "samples", "device", "dtype", "seed", "generate")


@dataclass(frozen=True)
class Request:
    """A target with its options, the same for every mode."""

    target: str | Callable[..., Any]
    settings: Settings = field(default_factory=Settings)
    options: Mapping[str, Any] = field(default_factory=dict)
    sets: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    input_ids: Path | None = None
    inputs_from: tuple[Path, ...] = ()
    calib: int | None = None

    def load(self, mode: str | None, *, plan: bool = False) -> Target:
        """The target in one mode; a `plan` of a compiled model needs no inputs."""
        return load_target(
            self.target,
            {"mode": mode, **self.options},
            self.sets,
            prompts=self.prompts,
            input_ids=self.input_ids,
            inputs_from=self.inputs_from,
            compiled=self.settings.compiled,
            plan=plan,
            calib=self.calib,
        )

    def seed(self, mode: str | None) -> int | None:
        """The seed that was given, by the user or by the mode's table."""
        table = self.table(mode)
        found = self.options.get("seed", None if table is None else table.options.get("seed"))
        return found if isinstance(found, int) and not isinstance(found, bool) else None

    def table(self, mode: str | None) -> ModeTable | None:
        """What a `tensortap.toml` says of a mode."""
        return None if mode is None else project_of(self.target).modes.get(mode)

    @property
    def device(self) -> str | None:
        """The device that was given, if torch knows it; if not, the function will say so."""
        given = self.options.get("device")
        if given is None:
            return None
        try:
            return str(torch.device(given))
        except (RuntimeError, TypeError, ValueError):
            return None

    def unused(self, modes: Sequence[str | None]) -> list[str]:
        """What was given and has no part in any of these modes."""
        if self.calib is None:
            return []
        tables = [self.table(mode) for mode in modes]
        named = [*modes, *(table.mode for table in tables if table is not None)]
        if any(name is not None and name.startswith("fake:") for name in named):
            return []
        return ["--calib is for the built-in fake: modes, and there is none here."]

    def settled(self, mode: str | None) -> Settings:
        """The settings of one mode's recording."""
        return replace(self.settings, command=self.command(mode), made_with=self.made_with(mode))

    @property
    def name(self) -> str:
        """The target as it is called: what was typed, or where the function comes from."""
        if isinstance(self.target, str):
            return self.target
        with finding(self.target) as found:
            return found.spec

    def command(self, mode: str | None) -> str | None:
        """What chooses this target again on the command line; a function has no such line."""
        if not isinstance(self.target, str):
            return None
        compiled = self.settings.compiled
        named = {key: value for key, value in self.options.items() if key in _FLAGS}
        others = [f"{key}={value}" for key, value in self.options.items() if key not in _FLAGS]
        words = command_of(
            self.target,
            {
                "--mode": mode,
                **{f"--{key.replace('_', '-')}": named.get(key) for key in _FLAGS},
                "--input-ids": self.input_ids,
                "--set": [*self.sets, *others],
                "--prompt": self.prompts,
                "--inputs-from": self.inputs_from,
                "--calib": self.calib,
                "--perturb": self.settings.perturb,
                "--eval": self.settings.eval,
                "--runtime": compiled.runtime,
                "--manifest": compiled.manifest,
                "--weights": compiled.weights,
                "--names-from": compiled.names_from,
                "--accept-inferred": compiled.accept_inferred,
                "--no-self-check": not compiled.self_check,
                "--custom-ops": compiled.custom_ops,
            },
        )
        return shlex.join(words)

    def made_with(self, mode: str | None) -> dict[str, Any]:
        """All that the numbers of a recording depend on, as far as it was said; JSON."""
        settings = self.settings
        table = self.table(mode)
        compiled = {k: v for k, v in asdict(settings.compiled).items() if v and k != "self_check"}
        made = {
            "target": self.name,
            "mode": mode,
            "options": {**self.options},
            "set": self.sets,
            "prompts": self.prompts,
            "calib": self.calib,
            "mode_table": None if table is None else _table(table),
            "layers": settings.layers or ("blocks",),
            "inputs": settings.inputs,
            "outputs": settings.outputs,
            "grads": settings.grads,
            "keep": settings.keep,
            "histograms": settings.histograms,
            "eval": settings.eval or None,
            "early_stop": settings.early_stop,
            "perturb": settings.perturb or None,
            "compiled": compiled,
            "self_check": settings.compiled.self_check,
            "against": settings.against,
            "judged_by": {
                name: getattr(settings, name)
                for name in ("stop", "full", "floor", "rules", "maps", "preset")
                if getattr(settings, name)
            },
            "files": self._files(table),
        }
        return {key: _plain(value) for key, value in made.items() if value not in (None, (), {})}

    def _files(self, table: ModeTable | None) -> dict[str, dict[str, str]]:
        """The digests of the files that the numbers come from."""
        target, compiled = self.target, self.settings.compiled
        options = self.options
        if table is not None:
            options = {**table.options, **self.options}
            target = table.spec(target) if isinstance(target, str) else target
        named = {
            "input_ids": self.input_ids,
            **{f"inputs_from {number}": path for number, path in enumerate(self.inputs_from)},
            "manifest": compiled.manifest,
            "weights": compiled.weights,
            "names_from": compiled.names_from,
            "against": _recorded(self.settings.against),
            "floor": _recorded(self.settings.floor),
            **{f"custom_ops {number}": path for number, path in enumerate(compiled.custom_ops)},
        }
        return digests(
            {
                "target": target_files(target),
                **{what: [Path(path)] for what, path in named.items() if path is not None},
                **option_files(options, self.sets),
            }
        )


def command_of(target: str, options: Mapping[str, Any]) -> list[str]:
    """What chooses this target again, ready to be run: options by flag, lists repeated."""
    words = ["tensortap", "record", target]
    for flag, value in options.items():
        if value is True:
            words.append(flag)
        elif isinstance(value, list | tuple):
            words += [word for item in value for word in (flag, str(item))]
        elif value is not None and value is not False:
            words += [flag, str(value)]
    return words


def _table(table: ModeTable) -> dict[str, Any]:
    found = {"mode": table.mode, "target": table.target, "calib": table.calib, **table.options}
    return {key: value for key, value in found.items() if value is not None}


def _recorded(path: str | None) -> Path | None:
    """The file that is written anew with a recording; one at a URL is known by its address."""
    return None if path is None else Path(path) / MANIFEST


def _plain(value: Any) -> Any:
    """A value as JSON has it; what JSON does not know is told by how it is written."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str | os.PathLike):
        return str(os.fspath(value))
    text = repr(value)
    return text if len(text) <= 200 else hashlib.sha256(text.encode()).hexdigest()[:16]
