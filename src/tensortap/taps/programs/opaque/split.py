"""One model in several artefacts, each with taps on part of the layers.

A compiler may refuse as many outputs as a large model has layers. Every part is the whole model, so
all of them run on each batch; their taps are put back into the order in which the layers ran, and
their own outputs must agree, or they are not the same model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..base import Argument, Place, Run, Runner
from ..selfcheck import SelfCheck, check_output
from ..state import copied
from .manifest import Manifest
from .output import heard
from .program import Call, OpaqueProgram

__all__ = ["SplitProgram"]


class SplitProgram:
    """Several instrumented artefacts as one program."""

    def __init__(self, manifest: Manifest, parts: Sequence[OpaqueProgram]) -> None:
        first = parts[0]
        self.manifest = manifest
        self.parts = tuple(parts)
        self.runtime = first.runtime
        self.exact = first.exact
        self.untapped = first.untapped
        self.absent = first.absent
        self.preferred = (*manifest.layers, "")
        self.structure = manifest.structure
        self.arguments: Sequence[Argument] | None = first.arguments
        types = {place.name: place for part in parts for place in part.places}
        self.places: Sequence[Place] = [types[name] for name in (*manifest.layers, "")]
        self.notes: list[str] = [
            f"The model is in {len(parts)} artefacts with taps on part of the layers each; all of "
            "them run on every batch.",
            *first.notes,
        ]
        self._checks: dict[str, SelfCheck] = {}

    @property
    def self_checks(self) -> list[SelfCheck]:
        """That the parts' own outputs agree: of each part the worst run."""
        return list(self._checks.values())

    def tapped(self, layers: Sequence[str], *, inputs: bool, linears: Sequence[str]) -> Runner:
        wanted = set(layers)
        needed = [p for p in self.parts if any(place.name in wanted for place in p.places)]

        def run(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Run:
            return self._run(needed or [self.parts[0]], layers, args, kwargs)

        return run

    def _run(
        self,
        parts: Sequence[OpaqueProgram],
        layers: Sequence[str],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Run:
        asked = (args, dict(kwargs))
        given = [copied(asked) or asked for _ in parts[1:]]  # a model may write into its inputs
        state = torch.get_rng_state()
        output, taps = parts[0].taps(args, kwargs)
        found = dict(zip(_keys(parts[0]), taps, strict=True))
        for part, (again, named) in zip(parts[1:], given, strict=True):
            torch.set_rng_state(state)
            own, taps = part.taps(again, named)
            found.update(zip(_keys(part), taps, strict=True))
            self._compare(parts[0], part, output, own)
        pairs = [(e, found[key]) for e in self.manifest.entries if (key := _key(e)) in found]
        return Run(output, heard(pairs, layers))

    def _compare(self, first: OpaqueProgram, part: OpaqueProgram, output: Any, own: Any) -> None:
        check = check_output(output, own, exact=self.exact)
        known = self._checks.get(part.where)
        if known is not None and (not known.passed or check.passed):
            return
        text = (
            f"The model's own output is the same in {first.where} and in {part.where}."
            if check.passed
            else f"The model's own output differs between {first.where} and {part.where}, so they "
            f"are not parts of one model: {check.text}"
        )
        self._checks[part.where] = replace(check, check="parts", text=text)

    def plain(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return self.parts[0].plain(args, kwargs)

    def linears(self) -> Mapping[str, tuple[torch.Tensor, torch.Tensor | None]]:
        return {}

    def describe(self) -> dict[str, Any]:
        return {**self.parts[0].describe(), "parts": len(self.parts)}

    def divert(self, call: Call) -> Callable[[], None] | None:
        return None


def _key(entry: Any) -> tuple[str, str, int]:
    return entry.layer, entry.leaf, entry.call


def _keys(part: OpaqueProgram) -> list[tuple[str, str, int]]:
    return [_key(entry) for entry in part.manifest.entries] if part.manifest else []
