"""Notices that a model has another module where a heard one was.

A user may swap a layer while it is heard: a head for another task, a quantised twin. What runs
under the name then is the new module, and that one has no hook.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..selection.sites import unwrap

__all__ = ["Replaced", "replaced_note"]

_WRAPPED = "_orig_mod"
_MOST_NAMED = 6


class Replaced:
    """The ways from a model to some of its modules, and whether they still lead there."""

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        self._model = model
        self._names = list(names)
        self._holders: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self._modules: list[Any] = []  # what stands in each holder under its key
        self._walk()

    def changed(self) -> bool:
        """Whether any module on the way was replaced; asked once a forward, so it is quick."""
        return list(map(dict.get, self._holders, self._keys)) != self._modules

    def now(self) -> dict[str, nn.Module]:
        """The modules that stand under the names now; those that are gone are left out."""
        return self._walk()

    def _walk(self) -> dict[str, nn.Module]:
        found: dict[str, nn.Module] = {}
        edges: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
        for name in self._names:
            at: nn.Module | None = self._model
            for part in name.split(".") if name else ():
                if isinstance(at, torch.jit.ScriptModule):  # whose parts stay what they are
                    at = None
                if at is not None:
                    held: dict[str, Any] = _inside(at, edges)._modules
                    at = held.get(part)
                    edges[id(held), part] = (held, part, at)
            if at is not None:
                found[name] = unwrap(at)
        self._holders = [held for held, _, _ in edges.values()]
        self._keys = [name for _, name, _ in edges.values()]
        self._modules = [module for _, _, module in edges.values()]
        return found


def _inside(
    module: nn.Module, edges: dict[tuple[int, str], tuple[dict[str, Any], str, Any]]
) -> nn.Module:
    """The module that `torch.compile` wrapped, the way to which counts as well."""
    while module._modules.get(_WRAPPED) is not None:
        held: dict[str, Any] = module._modules
        edges[id(held), _WRAPPED] = (held, _WRAPPED, held[_WRAPPED])
        module = held[_WRAPPED]
    return module


def replaced_note(names: Iterable[str]) -> str:
    """That layers were replaced, for the notes of a recording."""
    known = list(names)
    shown = ", ".join(f"'{name}'" for name in known[:_MOST_NAMED])
    more = f" and {len(known) - _MOST_NAMED} more" if len(known) > _MOST_NAMED else ""
    what = "A layer was" if len(known) == 1 else f"{len(known)} layers were"
    return f"{what} replaced while the model was heard: {shown}{more}. The new one is heard since."
