"""Which modes a target has: beside its function, in a TOML file, or built in.

A mode is handed to the target's function when the function knows it. A built-in one that it does
not know is made of the model that the function returns.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...errors import OptionError, TargetError
from ..artefacts import is_artefact
from ..importing import Found, finding, folder_of
from ..options import takes
from .builtin import GROUPS, is_builtin, unavailable
from .project import ModeTable, Project, read_project

__all__ = ["Declared", "Meaning", "declared", "folder_name", "meaning", "mode_names", "project_of"]

_UNSAFE = re.compile(r"[^A-Za-z0-9._+=,@-]")


@dataclass(frozen=True)
class Meaning:
    """What a mode comes to: what the function is given, and what is made of its model."""

    given: str | None = None
    builtin: str | None = None


@dataclass(frozen=True)
class Declared:
    """The modes and groups of a target, as far as they are known without running it.

    `listed`: those in MODES, None where the function takes a mode and does not say which.
    """

    spec: str
    listed: tuple[str, ...] | None
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    project: Project = field(default_factory=Project)
    builtin: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """Every mode that is written down, in order."""
        return tuple(dict.fromkeys((*(self.listed or ()), *self.project.modes)))

    def knows(self, name: str) -> bool:
        """Whether this is a mode of the target."""
        return (
            name in self.names
            or (self.builtin and is_builtin(name))
            or (self.listed is None and name not in self.groups and name not in GROUPS)
        )

    def group(self, name: str) -> tuple[str, ...] | None:
        """The modes of a group; a target that declares no modes has the built-in groups."""
        own = {**self.groups, **self.project.groups}
        if name in own:
            return own[name]
        if name == "all" and self.names:
            return self.names
        if self.names or self.listed is None or not self.builtin:
            return None
        return GROUPS.get(name)


def mode_names(
    target: str | Callable[..., Any],
    wanted: Sequence[str],
    *,
    device: str | None = None,
    note: Callable[[str], None] | None = None,
) -> tuple[str, ...]:
    """Modes, comma lists and groups as the modes they stand for, in order, each once.

    A built-in mode of a group that cannot run here is left out, and `note` is told why; one that
    is named is not.
    """
    if not wanted or not all(isinstance(text, str) for text in wanted):
        raise OptionError(
            f"The modes are {list(wanted)!r}, expected names or groups, such as 'fp32,int8'."
        )
    known = declared(target)
    found: dict[str, None] = {}
    for word in [piece.strip() for text in wanted for piece in text.split(",")]:
        if not word:
            raise OptionError(f"A mode has no name in {', '.join(map(repr, wanted))}.")
        members = None if word in known.names else known.group(word)
        if members is None:
            if not known.knows(word):
                raise OptionError(_unknown(known, word))
            found[word] = None
            continue
        for name in members:
            why = _cannot(known, name, device)
            if why is None:
                found[name] = None
            elif note is not None:
                why = why.replace(f"The mode {name!r}", "it", 1)
                note(f"The mode '{name}' of the group '{word}' is left out: {why}")
    if not found:
        raise OptionError(f"There is no mode in {', '.join(map(repr, wanted))} that can run here.")
    return tuple(found)


def declared(target: str | Callable[..., Any]) -> Declared:
    """The modes of a target; imports its function, and does not call it."""
    if isinstance(target, str) and (is_artefact(target) or target.startswith("hf:")):
        project = read_project([Path.cwd()])
        known = Declared(target, (), {}, project, builtin=target.startswith("hf:"))
    else:
        with finding(target) as found:
            known = _beside(found, project_of(target))
    for group, names in {**known.groups, **known.project.groups}.items():
        for name in names:
            if not known.knows(name):
                raise OptionError(
                    f"The mode group '{group}' has an unknown mode. {_unknown(known, name)}"
                )
    return known


def project_of(target: str | Callable[..., Any]) -> Project:
    """The TOML file beside a target's file, else that in the working directory."""
    if not isinstance(target, str):
        return Project()
    aside = is_artefact(target) or target.startswith("hf:")
    return read_project(dict.fromkeys([*([] if aside else [folder_of(target)]), Path.cwd()]))


def meaning(found: Found, mode: str, table: ModeTable | None) -> Meaning:
    """What a mode, or the TOML table of that name, comes to for this function."""
    known = _beside(found, Project())
    wanted = mode if table is None or table.mode is None else table.mode
    named = table is None or table.mode is not None or table.bare
    if known.listed is None and not wanted.startswith("fake:"):
        return Meaning(given=wanted)
    if wanted in (known.listed or ()):
        return Meaning(given=wanted)
    if not named:
        return Meaning()  # its options are what it is
    if is_builtin(wanted):
        return Meaning(builtin=wanted)
    raise OptionError(_unknown(known, wanted))


def folder_name(mode: str) -> str:
    """The folder of a mode's recording: its name, without what is no good in a path."""
    name = _UNSAFE.sub("-", mode)
    if not name.strip("."):
        raise OptionError(f"{mode!r} is no name for a mode.")
    return name


def _beside(found: Found, project: Project) -> Declared:
    """What MODES and MODE_GROUPS beside a function say."""
    home = sys.modules.get(getattr(found.function, "__module__", None) or "")
    spaces = [vars(module) for module in (found.module, home) if module is not None]
    modes = next((space["MODES"] for space in spaces if "MODES" in space), None)
    groups: Any = next((space["MODE_GROUPS"] for space in spaces if "MODE_GROUPS" in space), {})
    if modes is None:
        listed: tuple[str, ...] | None = None if takes(found.function, "mode") else ()
    else:
        listed = _names(modes, "MODES", found.spec)
        if not takes(found.function, "mode"):
            raise TargetError(
                f"MODES stands beside {found.spec!r}, which does not take 'mode'. Give the "
                "function a parameter 'mode'."
            )
    if not isinstance(groups, Mapping):
        raise TargetError(
            f"MODE_GROUPS beside {found.spec!r} is {groups!r}, expected a dict of names."
        )
    named = {
        str(name): _names(members, f"MODE_GROUPS[{name!r}]", found.spec)
        for name, members in groups.items()
    }
    return Declared(found.spec, listed, named, project)


def _names(value: object, what: str, spec: str) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TargetError(f"{what} beside {spec!r} is {value!r}, expected names in a tuple.")
    names = tuple(value)
    for name in names:
        if not isinstance(name, str) or not name or "," in name or name != name.strip():
            raise TargetError(
                f"{what} beside {spec!r} holds {name!r}, expected names without ',' and without "
                "spaces around them."
            )
    return names


def _cannot(known: Declared, name: str, device: str | None) -> str | None:
    """Why a mode of a group cannot run here; only of a built-in one can this be known."""
    if name in known.names or known.listed is None or not is_builtin(name):
        return None
    return unavailable(name, torch.device(device or "cpu"))


def _unknown(known: Declared, word: str) -> str:
    own = {**known.groups, **known.project.groups}
    groups = [*own, *(["all"] if known.names and "all" not in own else [])]
    if not known.names and known.listed is not None and known.builtin:
        groups = list(dict.fromkeys((*own, *GROUPS)))
    builtin = [*GROUPS["all"], "fp64"] if known.builtin else []
    near = difflib.get_close_matches(word, [*known.names, *groups, *builtin], n=1)
    sentence = f"{known.spec!r} has no mode {word!r}."
    if word in groups:
        sentence += f" It is a mode group, of several modes: --modes {word}."
    elif near:
        sentence += f" Did you mean {near[0]!r}?"
    if known.listed is None:
        return sentence + (
            " It takes any mode and does not say which it has: write MODES and MODE_GROUPS beside "
            "the function, or name the modes."
        )
    if known.names:
        sentence += f" Its modes are {', '.join(known.names)}."
    elif not known.builtin:
        return sentence + (
            " A compiled model has one mode, as it was compiled. Name others in a tensortap.toml: "
            '[modes.NAME] with target = "FILE".'
        )
    if groups:
        sentence += f" Groups: {', '.join(groups)}."
    return sentence + f" Built in: {', '.join(builtin)}."
