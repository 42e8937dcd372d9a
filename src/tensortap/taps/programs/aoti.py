"""AOTInductor: a package that is compiled already, or an exported program that is compiled for us.

A package holds code and weights; of layers it knows nothing, so its outputs are all there is,
unless it was instrumented and a manifest names them. An exported program still knows its layers:
with `--runtime aoti` it is compiled with taps in it, and once without, to compare the two.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ...errors import OptionError, TargetError
from .base import Argument, Options, Place, Run, Runner
from .exported.arguments import Binder
from .exported.files import aoti_damage, holds_aoti
from .exported.kind import KIND as EXPORT
from .exported.kind import ExportProgram, open_exported
from .exported.listen import Listening
from .exported.tapped import example_of, exported_again
from .opaque.program import OpaqueProgram
from .quiet import quietly
from .using import check_used

__all__ = ["KIND", "AotiProgram"]

_BRANCH = (
    "it runs in a branch of torch.cond, and what a branch makes cannot leave code that is compiled"
)

_NAMELESS = (
    "A package of AOTInductor gives away its outputs alone: they are recorded as the root ''. To "
    "see inside, record the exported program (.pt2) that it was compiled from with --runtime aoti, "
    "or instrument it before it is compiled (tensortap instrument, docs/compiled.md)."
)
_PACKAGE = "a package of AOTInductor, which holds no layers to name"


class AotiProgram:
    """An exported program that AOTInductor compiles when it is first run."""

    runtime = "aoti"
    exact = False  # values that must leave a fused kernel may make it another kernel

    def __init__(self, source: ExportProgram) -> None:
        self.source = source
        self.absent = source.absent
        self.arguments: Sequence[Argument] | None = source.arguments
        self.notes: list[str] = [
            *source.notes,
            "AOTInductor compiles the program with its taps, and once without to check the two.",
        ]
        outside = {plan.layer for plan in source.calls}
        inside = {plan.layer for plan in source.all_calls} - outside
        self.places: Sequence[Place] = [
            replace(place, gone=_BRANCH) if place.name in inside else place
            for place in source.places
        ]
        self._folder = tempfile.TemporaryDirectory(prefix="tensortap-aoti-")
        self._count = 0
        self._plain: Callable[..., Any] | None = None
        self._last: tuple[Any, Runner] | None = None

    def tapped(self, layers: Sequence[str], *, inputs: bool, linears: Sequence[str]) -> Runner:
        key = (frozenset(layers), inputs)
        if self._last is not None:
            (known, operands), runner = self._last
            if known == key and set(linears) <= operands:  # compiling again would gain nothing
                return runner
        listening = Listening(
            self.source.module,
            self.source.calls,
            {},
            layers=set(layers),
            inputs=inputs,
            linears=set(linears),
        )
        compiled: list[Callable[..., Any]] = []

        def run(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Run:
            args, kwargs = self.source.bind(args, kwargs)
            if not compiled:
                compiled.append(self._compile(listening.module, args, kwargs))
            output, taps = compiled[0](*args, **kwargs)
            return Run(output, listening.heard(taps))

        self._last = ((key, set(linears)), run)
        return run

    def plain(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        args, kwargs = self.source.bind(args, kwargs)
        if self._plain is None:
            self._plain = self._compile(self.source.module, args, kwargs)
        return self._plain(*args, **kwargs)

    def _compile(
        self, module: fx.GraphModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Callable[..., Any]:
        inductor: Any = torch._inductor
        example = example_of(self.source) or (args, dict(kwargs))
        self._count += 1
        path = Path(self._folder.name) / f"{self._count}.pt2"
        try:
            with torch.no_grad(), quietly():
                again = exported_again(self.source, module, *example)
                inductor.aoti_compile_and_package(again, package_path=str(path))
                return _loaded(path)
        except Exception as error:
            words = next((x.strip() for x in str(error).splitlines() if x.strip()), repr(error))
            raise TargetError(
                f"AOTInductor cannot compile this program: {words} "
                "It needs a C++ compiler; record with --runtime export to do without."
            ) from error

    def linears(self) -> Mapping[str, tuple[torch.Tensor, torch.Tensor | None]]:
        return self.source.linears()

    @property
    def weights(self) -> Mapping[str, tuple[int, ...]]:
        return self.source.weights

    def describe(self) -> dict[str, Any]:
        return {**self.source.describe(), "runtime": self.runtime}

    def divert(
        self, call: Callable[[tuple[Any, ...], Mapping[str, Any]], Any]
    ) -> Callable[[], None] | None:
        return self.source.divert(call)


class _Kind:
    name = "aoti"
    suffixes: tuple[str, ...] = (".pt2",)
    uses = frozenset({"names_from"})  # of an exported program; a package has no use for any

    def accepts(self, model: object) -> bool:
        return type(model).__name__ == "AOTICompiledModel" or EXPORT.accepts(model)

    def recognises(self, path: Path) -> bool:
        return holds_aoti(path)

    def program(self, model: Any, options: Options) -> AotiProgram | OpaqueProgram:
        if isinstance(model, str | Path) and holds_aoti(Path(model)):
            check_used(options, (), _PACKAGE)
            return _package(Path(model))
        if type(model).__name__ == "AOTICompiledModel":
            check_used(options, (), _PACKAGE)
            return _opaque(model, "The package", {"class": "torch.AOTICompiledModel"})
        return AotiProgram(open_exported(model, options))


KIND = _Kind()


def _package(path: Path) -> OpaqueProgram:
    damage = aoti_damage(path)
    if damage is not None:
        raise TargetError(
            f"The AOTInductor package '{path}' cannot be loaded: {damage} Compile it again, or "
            "copy it again from where it was compiled."
        )
    try:
        with quietly():
            model = _loaded(path)
    except Exception as error:
        words = next((x.strip() for x in str(error).splitlines() if x.strip()), repr(error))
        raise TargetError(
            f"The AOTInductor package '{path}' cannot be loaded: {words} It runs on the kind of "
            "machine that it was compiled for."
        ) from error
    return _opaque(model, f"'{path}'", {"class": "torch.AOTICompiledModel", "file": str(path)})


def _opaque(model: Any, where: str, described: dict[str, Any]) -> OpaqueProgram:
    binder = _binder(model, where)

    def call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if binder is not None:
            args, kwargs = binder.bind(args, kwargs)
        try:
            return model(*args, **kwargs)
        except (TypeError, ValueError, AssertionError) as error:
            raise OptionError(f"{where} does not take these inputs: {error}") from error

    described["torch"] = str(torch.__version__)
    return OpaqueProgram(
        call,
        runtime="aoti",
        where=where,
        described=described,
        arguments=binder.arguments if binder is not None else None,
        nameless=_NAMELESS,
    )


def _binder(model: Any, where: str) -> Binder | None:
    """What a package says of its arguments: how many, how nested, and the names of keywords."""
    try:
        spec = pytree.treespec_loads(model.loader.get_call_spec()[0])
        return Binder.of_spec(spec, where)
    except Exception:  # another torch's package, or types that are not registered here
        return None


def _loaded(path: Path) -> Callable[..., Any]:
    inductor: Any = torch._inductor
    model: Callable[..., Any] = inductor.aoti_load_package(str(path))
    return model
