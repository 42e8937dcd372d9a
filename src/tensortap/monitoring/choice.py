"""Which layers, epochs and batches to record: document 004's arguments, checked."""

from __future__ import annotations

import difflib
import operator
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from ..errors import OptionError, SelectionError
from ..selection import select
from ..selection.patterns import WORDS
from ..selection.sites import Site, is_called, sites

__all__ = [
    "Chosen",
    "check_options",
    "choose_layers",
    "uncompiled",
    "whole_number",
    "whole_numbers",
]

RecordType = Literal["single", "epoch_full"]

_KNOWN = ("alias", "record_type", "leaf")
_TYPES = ("single", "epoch_full")
_PATTERN = re.compile(r"[*?{\[,]|^(re|type):")
_STEP = re.compile(r"\[(-?\d+)\]|\.([^\W\d]\w*)|\['([^']*)'\]|\[\"([^\"]*)\"\]")


@dataclass(frozen=True)
class Chosen:
    """One layer to monitor, and how."""

    layer: str
    module: nn.Module = field(repr=False)
    type: str = ""
    alias: str | None = None
    record_type: RecordType = "single"
    leaf: tuple[str | int, ...] = ()

    @property
    def key(self) -> str:
        """Under what it is found: its alias, or its name without one."""
        return self.layer if self.alias is None else self.alias

    @property
    def single(self) -> bool:
        return self.record_type == "single"


def choose_layers(model: nn.Module, layers_to_monitor: Any) -> tuple[Chosen, ...]:
    """The layers that a list or a dict of the document names, in the order of the model."""
    entries = _entries(layers_to_monitor)
    places = sites(model)
    by_name = {name: place for place in places for name in place.names}
    exact: dict[str, Chosen] = {}
    matched: dict[str, Chosen] = {}
    dropped: set[str] = set()
    missing: list[str] = []
    if all(text.startswith("!") and text not in by_name for text in entries):
        entries = {"all": Settings(), **entries}
    for text, settings in entries.items():
        name = uncompiled(text)
        place = by_name.get(name)
        if place is not None and is_called(place.module):
            exact[name] = settings.applied(name, place)
            continue
        found = _matching(model, text, place is not None)
        if found is None:
            missing.append(text)
        elif text.startswith("!"):
            dropped.update(site.name for site in found)
        else:
            for site in found:
                matched.setdefault(site.name, settings.applied(site.name, site))
    if missing:
        raise OptionError(_missing(missing, by_name))
    chosen = [one for name, one in (matched | exact).items() if name not in dropped]
    if not chosen:
        raise OptionError(
            "layers_to_monitor leaves no layer: what it excludes is all that it names."
        )
    order = {name: index for index, name in enumerate(by_name)}
    chosen.sort(key=lambda one: order[one.layer])
    _check(chosen)
    return tuple(chosen)


def uncompiled(name: str) -> str:
    """A name without what `torch.compile` adds to it."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


@dataclass(frozen=True)
class Settings:
    """What a layer's entry says."""

    alias: str | None = None
    record_type: RecordType = "single"
    leaf: tuple[str | int, ...] = ()

    def applied(self, name: str, place: Site) -> Chosen:
        return Chosen(name, place.module, place.type, self.alias, self.record_type, self.leaf)


def _entries(given: Any) -> dict[str, Settings]:
    """A list or a dict as a dict; the type of everything is looked at."""
    if isinstance(given, str):
        given = [given]
    if isinstance(given, Mapping):
        found = {_name(name): _settings(name, config) for name, config in given.items()}
    elif isinstance(given, Iterable):
        found = {_name(name): Settings() for name in given}
    else:
        raise OptionError(
            "layers_to_monitor must be a list of layer names, or a dict from layer names to "
            f"{{'alias': …, 'record_type': …}}, got {given!r}."
        )
    if not found:
        raise OptionError("layers_to_monitor is empty: name at least one layer.")
    return found


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise OptionError(f"A layer in layers_to_monitor must be a name (text), got {name!r}.")
    return name


def _settings(name: Any, config: Any) -> Settings:
    where = f"layers_to_monitor[{name!r}]"
    if config is None:
        return Settings()
    if not isinstance(config, Mapping):
        raise OptionError(
            f"{where} must be a dict such as {{'alias': 'attention', 'record_type': 'single'}}, "
            f"got {config!r}."
        )
    unknown = [key for key in config if key not in _KNOWN]
    if unknown:
        named = ", ".join(repr(key) for key in unknown)
        raise OptionError(
            f"{where} has an unknown key: {named}. Known keys: "
            f"{', '.join(repr(key) for key in _KNOWN)}."
        )
    alias, kind = config.get("alias"), config.get("record_type", "single")
    if alias is not None and not (isinstance(alias, str) and alias):
        raise OptionError(f"The alias in {where} must be a text or None, got {alias!r}.")
    if kind not in _TYPES:
        raise OptionError(
            f"Unknown record_type {kind!r} in {where}: expected 'single' (the batches in "
            "batch_indices) or 'epoch_full' (every batch of an epoch)."
        )
    return Settings(alias, kind, _steps(config.get("leaf"), where))


def _steps(leaf: Any, where: str) -> tuple[str | int, ...]:
    """`"[0]"`, `".logits"`, `"[0]['mask']"` or 0 as steps into an output."""
    if leaf is None or leaf == "":
        return ()
    if isinstance(leaf, int) and not isinstance(leaf, bool):
        return (leaf,)
    steps: list[str | int] = []
    at = 0
    while isinstance(leaf, str) and at < len(leaf) and (match := _STEP.match(leaf, at)):
        number = match.group(1)
        steps.append(int(number) if number else next(g for g in match.groups()[1:] if g))
        at = match.end()
    if not steps or at < len(leaf):
        raise OptionError(
            f"The leaf in {where} must say which item of the output to keep, such as '[0]', "
            f"'.logits' or the number 0, got {leaf!r}."
        )
    return tuple(steps)


def _matching(model: nn.Module, text: str, container: bool) -> list[Site] | None:
    """The layers that a pattern names; None where it is no pattern, or matches nothing."""
    pattern = text.removeprefix("!").strip()
    if not (container or text.startswith("!") or pattern in WORDS or _PATTERN.search(pattern)):
        return None
    try:
        return list(select(model, pattern).layers)
    except SelectionError as error:
        if str(error).startswith("No layer"):
            return None
        raise OptionError(f"layers_to_monitor: {error}") from None


def _missing(missing: list[str], by_name: Mapping[str, Site]) -> str:
    text = (
        "The following layers specified in 'layers_to_monitor' do not exist in the model: "
        f"{missing}. Available layers: {list(by_name)}."
    )
    near = [
        guess[0] for name in missing if (guess := difflib.get_close_matches(name, by_name, n=1))
    ]
    return f"{text} Near names: {', '.join(map(repr, dict.fromkeys(near)))}." if near else text


def _check(chosen: list[Chosen]) -> None:
    seen: dict[str, Chosen] = {}
    for one in sorted(chosen, key=lambda one: one.alias is None):
        other = seen.setdefault(one.key, one)
        if other is not one:
            raise OptionError(f"Duplicate alias '{one.key}' in layers_to_monitor.")
        if isinstance(one.module, torch.jit.ScriptModule):
            raise OptionError(
                f"The layer '{one.layer}' is TorchScript, which takes no hooks, so it cannot be "
                "monitored. Monitor a layer around it, or the model before it is scripted."
            )


def whole_numbers(name: str, given: Any) -> tuple[int, ...]:
    """A list of whole numbers from 0, as they are given."""
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise OptionError(f"{name} must be a list of whole numbers, got {given!r}.")
    return tuple(whole_number(f"{name} must hold", value) for value in given)


def whole_number(what: str, value: Any, least: int = 0) -> int:
    """A whole number; numpy's and one-element tensors are welcome, bools are none."""
    if not isinstance(value, bool) and not (
        isinstance(value, torch.Tensor) and value.dtype is torch.bool
    ):
        try:
            number = operator.index(value)
        except (TypeError, ValueError, RuntimeError):
            number = -1
        if number >= least:
            return number
    many = "hold" in what
    kind = f"whole numbers from {least}" if many else f"a whole number from {least}"
    raise OptionError(f"{what if many else what + ' must be'} {kind}, got {value!r}.")


def with_single(chosen: Iterable[Chosen]) -> list[str]:
    """The names of the layers that need batch_indices."""
    return [one.layer for one in chosen if one.single]


def described(one: Chosen) -> dict[str, Any]:
    """What the manifest says of a layer."""
    leaf = "".join(f"[{s}]" if isinstance(s, int) else f".{s}" for s in one.leaf)
    return {"alias": one.alias, "record_type": one.record_type, "leaf": leaf or None}


def check_options(output_dir: Any, save_format: Any, condition: Any, keep: Any) -> None:
    """The other arguments of a Monitor."""
    if not isinstance(output_dir, str | os.PathLike) or not str(output_dir):
        raise OptionError(f"output_dir must be the path of a folder, got {output_dir!r}.")
    if "://" in str(output_dir):
        raise OptionError(f"output_dir must be a folder on this machine, got {output_dir!r}.")
    if save_format not in ("pt", "npy"):
        raise OptionError(f"save_format must be 'pt' or 'npy', got {save_format!r}.")
    if condition is not None and not callable(condition):
        raise OptionError(f"condition must be a function of (layer, output), got {condition!r}.")
    if keep not in ("tensors", "summary"):
        raise OptionError(f"keep must be 'tensors' or 'summary', got {keep!r}.")
