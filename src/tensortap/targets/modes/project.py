"""`tensortap.toml`: the modes of a target, written down beside it.

[modes.half]                # a mode, by the name that --mode takes
mode = "bf16"               # what it is: a mode of the target, or a built-in one
groups = ["essential"]      # the mode groups that it is in
device = "cuda"             # options, as on the command line: dtype, device, seq_len,
set = { heads = 8 }         #   samples, seed, calib, and set for all others
target = "int8.onnx"        # or another target altogether, from this file's folder

[mode_groups]
quick = ["fp32", "half"]
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import OptionError
from ...regular_files import read_regular

__all__ = ["FILE", "ModeTable", "Project", "read_project"]

_LARGEST = 4 << 20  # bytes
FILE = "tensortap.toml"
_OPTIONS: dict[str, type] = {
    "dtype": str,
    "device": str,
    "seq_len": int,
    "samples": int,
    "seed": int,
}
_KEYS: dict[str, type] = {
    **_OPTIONS,
    "mode": str,
    "target": str,
    "description": str,
    "calib": int,
    "groups": list,
    "set": dict,
}
_KINDS = {str: "text", int: "a whole number", list: "a list of names", dict: "a table"}


@dataclass(frozen=True)
class ModeTable:
    """One `[modes.NAME]` table."""

    name: str
    file: Path
    mode: str | None = None
    target: str | None = None
    description: str = ""
    calib: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def bare(self) -> bool:
        """Whether the name is all that it says, so that the name must mean something itself."""
        return self.target is None and not self.options

    def spec(self, spec: str) -> str:
        """The target of this mode; a file is looked for from the folder of the TOML file."""
        if self.target is None:
            return spec
        place, colon, name = self.target.rpartition(":")
        if place == "hf":
            return f"hf:{self._beside(name)}"
        if colon and not place.endswith(".py") and "/" not in place:
            return self.target  # package.module:function
        return f"{self._beside(place)}:{name}" if colon else str(self._beside(self.target))

    def _beside(self, path: str) -> Path:
        return self.file.parent / Path(path).expanduser()


@dataclass(frozen=True)
class Project:
    """What a `tensortap.toml` declares; empty where there is none."""

    file: Path | None = None
    modes: dict[str, ModeTable] = field(default_factory=dict)
    groups: dict[str, tuple[str, ...]] = field(default_factory=dict)


def read_project(folders: Iterable[Path]) -> Project:
    """The file in the first of these folders that has one."""
    for folder in folders:
        file = folder / FILE
        if file.is_file():
            return _project(file)
    return Project()


def _project(file: Path) -> Project:
    toml: Any
    try:
        toml = importlib.import_module("tomllib")
    except ModuleNotFoundError:  # Python 3.10
        toml = importlib.import_module("tomli")
    try:
        data = toml.loads(read_regular(file, _LARGEST).decode("utf-8"))
    except RecursionError:
        raise OptionError(f"{file} is nested too deeply.") from None
    except (toml.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"{file} is no TOML file: {error}") from None
    except OSError as error:
        raise OptionError(f"{file} cannot be read: {error.strerror or error}.") from None
    _check_keys(data, ("modes", "mode_groups"), f"{file}")
    modes, groups = data.get("modes", {}), data.get("mode_groups", {})
    for what, value in (("modes", modes), ("mode_groups", groups)):
        if not isinstance(value, dict):
            raise OptionError(f"'{what}' in {file} is {value!r}, expected a table.")
    for name in (*modes, *groups):
        if not name or "," in name or name != name.strip():
            raise OptionError(
                f"{file} has a mode or group {name!r}, expected a name without ',' and without "
                "spaces around it."
            )
    tables = {name: _table(name, table, file) for name, table in modes.items()}
    found = {
        name: list(_names(names, f"[mode_groups] {name}", file)) for name, names in groups.items()
    }
    for name, table in modes.items():
        for group in _names(table.get("groups", []), f"groups of [modes.{name}]", file):
            members = found.setdefault(group, [])
            if name not in members:
                members.append(name)
    return Project(file, tables, {name: tuple(members) for name, members in found.items()})


def _table(name: str, table: object, file: Path) -> ModeTable:
    where = f"[modes.{name}] in {file}"
    if not isinstance(table, dict):
        raise OptionError(f"{where} is {table!r}, expected a table: write [modes.{name}].")
    _check_keys(table, _KEYS, where)
    for key, value in table.items():
        kind = _KEYS[key]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise OptionError(f"'{key}' of {where} is {value!r}, expected {_KINDS[kind]}.")
    more = table.get("set", {})
    doubled = sorted(set(more) & set(_KEYS))
    if doubled:
        raise OptionError(f"'{doubled[0]}' of {where} stands in 'set': write it without.")
    return ModeTable(
        name=name,
        file=file,
        mode=table.get("mode"),
        target=table.get("target"),
        description=table.get("description", ""),
        calib=table.get("calib"),
        options={**{key: table[key] for key in _OPTIONS if key in table}, **more},
    )


def _check_keys(data: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    known = list(known)
    for key in data:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            raise OptionError(f"{where} has the key '{key}'; known are {', '.join(known)}.{hint}")


def _names(value: object, what: str, file: Path) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise OptionError(f"{what} in {file} is {value!r}, expected a list of names.")
    return tuple(value)
