"""What we can only call: its outputs are all that there is, and a manifest names them.

Without a manifest the one layer is the root. With one, the artefact was instrumented before it was
compiled: the last of its outputs are the taps. Any runtime's own artefact may be such a one; it is
then run as it is, and the manifest knows better than the graph what its layers are called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ....errors import OptionError, TargetError
from ....recording.schema import Structure
from ...describe import describe_module
from ..base import Argument, Options, Place, Program, Run, Runner
from ..using import check_used
from .manifest import Manifest, Part, digest, is_manifest
from .output import as_tensors, divide, heard

__all__ = ["KIND", "OpaqueProgram", "open_with_manifest", "with_names"]

Call = Callable[[tuple[Any, ...], Mapping[str, Any]], Any]

_NO_TWIN = (
    "Whether its taps change the model's own output was not checked: the manifest names no "
    "artefact without taps, or it does not lie beside it (tensortap instrument --plain)."
)

_OUTPUTS = (
    "This model gives away its outputs alone: they are recorded as the root ''. To see inside, "
    "instrument it before it is compiled (tensortap instrument, docs/compiled.md)."
)
_NAMED = "an instrumented model, whose manifest has the names"


class OpaqueProgram:
    """A compiled model that can be called, and no more."""

    def __init__(
        self,
        call: Call,
        manifest: Manifest | None = None,
        *,
        runtime: str = "opaque",
        where: str = "The artefact",
        described: Mapping[str, Any] | None = None,
        arguments: Sequence[Argument] | None = None,
        notes: Sequence[str] = (),
        twin: Call | None = None,
        nameless: str = _OUTPUTS,
        self_check: bool = True,
    ) -> None:
        self.runtime = runtime
        self.manifest = manifest
        self.arguments = arguments
        self.where = where
        self.notes: list[str] = list(notes)
        self.untapped = twin is not None
        self.exact = runtime in ("torchscript", "export")
        self._call = call
        self._twin = twin
        self._described = dict(described or {})
        self.places: Sequence[Place] = (*_places(manifest), Place("", provenance="hook"))
        self.preferred = () if manifest is None else (*manifest.layers, "")
        self.structure = Structure() if manifest is None else manifest.structure
        if manifest is None:
            self.absent = (
                "This model gives away its outputs alone: it was not instrumented before it was "
                "compiled, or its manifest was not given."
            )
            self.nameless = nameless
            self.notes.append(nameless)
            return
        self.absent = "The artefact was instrumented without a tap on this layer."
        unchecked = self_check and not self.untapped
        self.notes += [*manifest.notes, *((_NO_TWIN,) if unchecked else ())]

    def tapped(self, layers: Sequence[str], *, inputs: bool, linears: Sequence[str]) -> Runner:
        def run(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Run:
            output, taps = self.taps(args, kwargs)
            entries = self.manifest.entries if self.manifest is not None else ()
            return Run(output, heard(list(zip(entries, taps, strict=True)), layers))

        return run

    def taps(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, list[torch.Tensor]]:
        """One run: the model's own output, and every tap in the order of the manifest."""
        result = self._call(args, kwargs)
        if self.manifest is None:
            return as_tensors(result), []
        return divide(result, self.manifest, self.where)

    def plain(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self._twin is not None:
            return self._twin(args, kwargs)
        return self.taps(args, kwargs)[0]

    def linears(self) -> Mapping[str, tuple[torch.Tensor, torch.Tensor | None]]:
        return {}

    def describe(self) -> dict[str, Any]:
        described = {"parameters": 0, "dtypes": {}, **self._described, "runtime": self.runtime}
        if self.manifest is not None:
            described["class"] = self.manifest.model
            described["instrumented"] = True
        return described

    def divert(self, call: Call) -> Callable[[], None] | None:
        return None


def _places(manifest: Manifest | None) -> list[Place]:
    found: dict[str, Place] = {}
    for entry in manifest.entries if manifest is not None else ():
        found.setdefault(entry.layer, Place(entry.layer, entry.type, entry.provenance))
    return list(found.values())


def open_with_manifest(path: Path, manifest: Path | None, options: Options) -> Program:
    """The program of an instrumented artefact, or of several that are one model.

    `path` is the artefact, one of the parts of a split model, or the manifest itself.
    """
    if manifest is None:
        if not is_manifest(path):
            raise OptionError(f"'{path}' needs the manifest that was written with it.")
        manifest = path
    check_used(options, {"custom_ops"}, _NAMED)
    loaded = Manifest.load(manifest)
    plainly = replace(options, manifest=None)
    parts = loaded.parts
    if is_manifest(path):
        if not parts:
            raise TargetError(
                f"The manifest '{manifest}' does not say which artefact it belongs to. Record the "
                "artefact, and name the manifest with --manifest."
            )
        paths = {part: manifest.parent / part.file for part in parts}
    elif len(parts) > 1:
        paths = {part: path.parent / part.file for part in parts}
        if path.name not in [part.file for part in parts]:
            raise TargetError(
                f"'{path}' is none of the {len(parts)} artefacts of the manifest '{manifest}': "
                f"they are {', '.join(repr(part.file) for part in parts[:4])}."
            )
    else:
        paths = dict.fromkeys(parts, path)
    twin = _twin(manifest, loaded, plainly)
    if not paths:
        return _open(path, loaded, plainly, twin)
    for part, place in paths.items():
        _check_file(part, place, manifest)
    opened = [_open(paths[part], loaded.of(part.layers), plainly, twin) for part in parts]
    if len(opened) == 1:
        return opened[0]
    from .split import SplitProgram

    return SplitProgram(loaded, opened)


def _check_file(part: Part, path: Path, manifest: Path) -> None:
    if not path.is_file():
        raise TargetError(
            f"'{path}', which the manifest '{manifest}' names, does not exist. The artefacts of a "
            "manifest lie beside it."
        )
    if digest(path) != part.digest:
        raise TargetError(
            f"'{path}' was not made with the manifest '{manifest}': it is another file than the "
            f"one that was written with it as {part.file!r}. Write both anew with "
            "`tensortap instrument`, or leave the manifest out."
        )


def _open(path: Path, manifest: Manifest, options: Options, twin: Call | None) -> OpaqueProgram:
    from ..kinds import open_program

    inner = open_program(path, options)
    call, arguments = with_names(inner.plain, inner.arguments, manifest.inputs)
    return OpaqueProgram(
        call,
        manifest,
        runtime=inner.runtime,
        where=f"'{path}'",
        described=inner.describe(),
        arguments=arguments,
        twin=twin,
        self_check=options.self_check,
    )


def with_names(
    call: Call, arguments: Sequence[Argument] | None, names: Sequence[str]
) -> tuple[Call, Sequence[Argument] | None]:
    """Arguments by name, where an artefact knows only their positions and its manifest the rest."""
    heads = dict.fromkeys(argument.name.partition(".")[0] for argument in arguments or ())
    if not names or list(heads) != [str(index) for index in range(len(names))]:
        return call, arguments
    positions = dict(zip(names, heads, strict=True))

    def by_name(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        given = {}
        for key, value in kwargs.items():
            head, dot, tail = key.partition(".")
            given[positions.get(head, head) + dot + tail] = value
        return call(args, given)

    named = []
    for argument in arguments or ():
        head, dot, tail = argument.name.partition(".")
        named.append(replace(argument, name=names[int(head)] + dot + tail))
    return by_name, named


def _twin(path: Path, manifest: Manifest, options: Options) -> Call | None:
    """The model without taps that a manifest names, where it lies beside it."""
    from ..kinds import open_program

    file = None if manifest.plain is None else path.with_name(manifest.plain)
    if file is None or not file.is_file():
        return None
    inner, own, where = open_program(file, options), manifest.of(()), f"'{file}'"
    run, _ = with_names(inner.plain, inner.arguments, manifest.inputs)
    return lambda args, kwargs: divide(run(args, kwargs), own, where)[0]


class _Kind:
    """Anything that can be called; asked last."""

    name = "opaque"
    suffixes: tuple[str, ...] = ()
    uses = frozenset({"weights", "names_from", "custom_ops"})  # `program` itself looks further

    def accepts(self, model: object) -> bool:
        return callable(model) or _runtime_of(model) is not None

    def recognises(self, path: Path) -> bool:
        return False

    def program(self, model: Any, options: Options) -> Program:
        if isinstance(model, Path):
            if options.manifest is not None or is_manifest(model):
                return open_with_manifest(model, options.manifest, replace(options, runtime=None))
            raise OptionError(
                f"'{model}' cannot be run as an opaque model: that takes something that can be "
                "called. Open it in Python, and hand it to tap.record(model, path, manifest=…)."
            )
        manifest = None if options.manifest is None else Manifest.load(options.manifest)
        if manifest is not None and len(manifest.parts) > 1:
            raise OptionError(
                f"The manifest '{options.manifest}' is of {len(manifest.parts)} artefacts, and one "
                "object was given. Record the manifest's own path instead."
            )
        where = f"This {type(model).__qualname__}"
        runtime = _runtime_of(model)
        if runtime is None:
            check_used(options, (), "what can only be called")
        else:
            check_used(options, runtime.uses & {"custom_ops"}, _NAMED)
            inner: Program = runtime.program(model, replace(options, manifest=None))
            return OpaqueProgram(
                inner.plain,
                manifest,
                runtime=inner.runtime,
                where=where,
                described=inner.describe(),
                arguments=inner.arguments,
                self_check=options.self_check,
            )
        return OpaqueProgram(
            lambda args, kwargs: model(*args, **kwargs),
            manifest,
            where=where,
            described=_described(model),
            self_check=options.self_check,
        )


def _runtime_of(model: object) -> Any:
    """How other runtimes' objects are run; a module, whatever is in it, is run by calling it."""
    from ..kinds import kind_of

    return None if isinstance(model, nn.Module) else kind_of(model)


def _described(model: Any) -> dict[str, Any]:
    if isinstance(model, nn.Module) and not isinstance(model, torch.jit.ScriptModule):
        return describe_module(model)
    kind = type(model)
    described: dict[str, Any] = {"class": f"{kind.__module__}.{kind.__qualname__}"}
    if isinstance(model, nn.Module):
        described["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    return described


KIND = _Kind()
