"""Taps in a model that was exported already: its graph still says which layer made what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...errors import SelectionError, TargetError
from ...recording.dtypes import dtype_name
from ...selection import select
from ..leaves import flatten
from ..programs.base import Options
from ..programs.exported.kind import ExportProgram, open_exported
from ..programs.exported.tapped import Tapped, example_of, exported_again, tapped_program
from ..programs.opaque.manifest import Entry, Manifest, OutputLeaf
from ..programs.skeleton import skeleton
from .formats import compile_export, told

__all__ = ["ExportSource"]

_Exported = tuple[Any, Any, Sequence[torch.Tensor], Manifest]
"""(exported program, output, taps, manifest)"""


class ExportSource:
    """A `.pt2` file, compiled on the inputs that it was exported with."""

    comparable = True

    def __init__(self, path: Path, layers: str | Sequence[str]) -> None:
        self._program = open_exported(path, Options())
        example = example_of(self._program)
        if example is None:
            raise TargetError(
                f"'{path}' holds no example inputs, so it cannot be compiled again with taps. "
                "Export the model again, or instrument the model that it was made from."
            )
        self.args: tuple[Any, ...] = example[0]
        self.kwargs: Mapping[str, Any] = example[1]
        self._layers = self._chosen(layers)
        self._made: tuple[set[str], _Exported] | None = None

    def _chosen(self, layers: str | Sequence[str]) -> list[str]:
        tree = skeleton(list(self._program.places), self._program.weights)
        selection = select(tree, layers, default_fallback=layers == "blocks")
        self._notes = list(selection.notes)
        there = {place.name: place for place in self._program.places if place.name}
        chosen = [name for name in selection.names if name in there]
        sure = [
            name
            for name in chosen
            if there[name].gone is None and there[name].provenance != "inferred"
        ]
        if not sure:
            raise SelectionError(
                "None of the selected layers has a value in the exported program. Select others; "
                "`tensortap record FILE --plan --layers all` lists them."
            )
        return sure

    def run(self) -> tuple[Any, Sequence[torch.Tensor], Manifest]:
        _, output, taps, manifest = self._tapped(self._layers)
        return output, taps, manifest

    def compile(self, layers: Sequence[str], path: Path, form: str) -> Manifest:
        export, _, _, manifest = self._tapped(layers)
        compile_export(export, self.args, self.kwargs, path, form, manifest)
        return manifest

    def compile_bare(self, path: Path, form: str, manifest: Manifest) -> None:
        program, args, kwargs = self._program, self.args, self.kwargs
        export = told("pt2", lambda: exported_again(program, program.module, args, kwargs))
        compile_export(export, args, kwargs, path, form, manifest)

    def _tapped(self, layers: Sequence[str]) -> _Exported:
        """The program with these taps, exported again, and one run of it; made once."""
        if self._made is None or self._made[0] != set(layers):
            self._made = set(layers), self._export(layers)
        return self._made[1]

    def _export(self, layers: Sequence[str]) -> _Exported:
        module, tapped = tapped_program(self._program, layers)
        export = told("pt2", lambda: exported_again(self._program, module, self.args, self.kwargs))
        output, taps = told("run", lambda: export.module()(*self.args, **self.kwargs))
        return export, output, taps, self._manifest(output, taps, tapped)

    def _manifest(
        self, output: Any, taps: Sequence[torch.Tensor], tapped: Sequence[Tapped]
    ) -> Manifest:
        program: ExportProgram = self._program
        return Manifest(
            model=str(program.describe().get("class", "")),
            entries=tuple(
                Entry(
                    layer=known.layer,
                    type=known.type,
                    leaf=known.leaf,
                    call=known.call,
                    shape=tuple(tap.shape),
                    dtype=dtype_name(tap.dtype),
                    provenance=known.provenance,
                )
                for known, tap in zip(tapped, taps, strict=True)
            ),
            output=tuple(OutputLeaf(leaf, t is not None) for leaf, t in flatten(output)),
            inputs=tuple(argument.name for argument in program.arguments or ()),
            notes=tuple(dict.fromkeys([*self._notes, *program.notes])),
        )
