"""`tap.instrument`: a model whose layers' outputs are outputs of its own, for any compiler.

What a compiler makes of a model may be a black box, but it returns what the model returns. So the
wrapper's forward returns `(output, taps)`, and its manifest says which tap is which layer's.

- The wrapper has the model's own signature: compilers look at it.
- Hooks are on the model only while the wrapper runs. Dynamo cannot trace that they are put on, so
  there they are put on while it traces, and stay, without effect on the model by itself, until
  `remove()`: its guards look at them.
- What hooks hear lies in an object that is no list of the module's: non-strict export puts copies
  in the place of lists, and every later run would return no taps, silently.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ...errors import OptionError
from ...recording.dtypes import dtype_name
from ...selection import select, structure
from ...selection.sites import unwrap
from ..fused import find_fused
from ..leaves import flatten
from ..listener import Listener
from ..programs.opaque.manifest import Entry, Manifest, OutputLeaf
from .signature import forward_like, parameter_names

__all__ = ["Instrumented", "instrument"]

_ROOT = "The root has no tap: what it returns is the output itself."


@dataclass(frozen=True)
class _Layer:
    name: str
    type: str
    module: nn.Module


class _Recorder:
    """What the hooks have heard in the run in hand, and the manifest of the last one."""

    def __init__(self, layers: Sequence[_Layer]) -> None:
        self.layers = tuple(layers)
        self.taps: list[torch.Tensor] | None = None
        self.heard: list[tuple[int, str, int]] = []  # layer, leaf, number of the finished call
        self.finished = 0
        self.handles: list[RemovableHandle] = []
        self.kept = False
        self.entries: tuple[Entry, ...] | None = None
        self.output: tuple[OutputLeaf, ...] = ()

    def begin(self) -> None:
        self.taps, self.heard, self.finished = [], [], 0

    def hear(self, index: int, output: Any) -> None:
        taps = self.taps
        if taps is None:
            return  # the model runs by itself
        for leaf, tensor in flatten(output):
            if tensor is not None:
                taps.append(tensor.clone())
                self.heard.append((index, leaf, self.finished))
        self.finished += 1

    def end(self) -> tuple[torch.Tensor, ...]:
        taps = tuple(self.taps or ())
        self.taps = None
        return taps

    def attach(self) -> None:
        if not self.handles:
            self.handles = [
                layer.module.register_forward_hook(_hook(self, index))
                for index, layer in enumerate(self.layers)
            ]

    def detach(self) -> None:
        handles, self.handles = self.handles, []
        for handle in handles:
            handle.remove()

    def learn(
        self,
        heard: Sequence[tuple[int, str, int]],
        kinds: Sequence[tuple[tuple[int | None, ...], str]],
        output: Sequence[tuple[str, bool]],
    ) -> None:
        """Make the manifest of a run."""
        counts: dict[int, int] = {}
        calls: dict[int, int] = {}
        entries: list[Entry] = []
        for (index, leaf, finished), (shape, dtype) in zip(heard, kinds, strict=True):
            if finished not in calls:
                calls[finished] = counts.get(index, 0)
                counts[index] = calls[finished] + 1
            layer = self.layers[index]
            entries.append(Entry(layer.name, layer.type, leaf, calls[finished], shape, dtype))
        self.entries = tuple(entries)
        self.output = tuple(OutputLeaf(leaf, tensor) for leaf, tensor in output)


def _hook(recorder: _Recorder, index: int) -> Listener:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        recorder.hear(index, output)

    return Listener(hook)


# Dynamo runs these while it traces; it hands over constants alone, so recorders have numbers.
_RECORDERS: weakref.WeakValueDictionary[int, _Recorder] = weakref.WeakValueDictionary()


def _attach_while_tracing(key: int) -> int:
    recorder = _RECORDERS[key]
    recorder.kept = True
    recorder.attach()
    return 0


def _learn_while_tracing(key: int, heard: Any, kinds: Any, output: Any) -> int:
    unknown = [((None,) * rank, name) for rank, name in kinds]
    _RECORDERS[key].learn(heard, unknown, output)
    return 0


_at_tracing: Any = torch.compiler.assume_constant_result  # untyped in torch
_at_tracing(_attach_while_tracing)
_at_tracing(_learn_while_tracing)


class Instrumented(nn.Module):
    """A model that returns `(output, taps)`; see `instrument`."""

    def __init__(self, model: nn.Module, layers: str | Sequence[str], *, default: bool) -> None:
        super().__init__()
        self.model = model
        self.training = model.training
        selection = select(model, layers, default_fallback=default)
        self.notes: tuple[str, ...] = tuple(selection.notes)
        chosen = [_Layer(site.name, site.type, site.module) for site in selection.layers]
        self._selected = layers
        self._recorder = _Recorder(self._fit(chosen))
        self._key = id(self._recorder)
        _RECORDERS[self._key] = self._recorder

    def _fit(self, layers: list[_Layer]) -> list[_Layer]:
        """The layers that can be tapped, and notes on the others."""
        kept = [layer for layer in layers if layer.name]
        scripted = [x.name for x in kept if isinstance(x.module, torch.jit.ScriptModule)]
        kept = [layer for layer in kept if layer.name not in scripted]
        notes = []
        if scripted:
            notes.append(
                f"{len(scripted)} selected layers are TorchScript, which takes no hooks, and have "
                f"no taps: {', '.join(map(repr, scripted[:4]))}."
            )
        if not kept:
            raise OptionError(
                f"None of the selected layers of {type(self.model).__name__} can have a tap. "
                f"{' '.join(notes or [_ROOT])} Select others, such as 'leaves'."
            )
        fused = find_fused(self.model)
        inside = [layer.name for layer in kept if id(layer.module) in fused]
        if inside:
            notes.append(
                f"{len(inside)} layers lie inside nn.TransformerEncoderLayer "
                f"({', '.join(map(repr, inside[:4]))}), which leaves its fused path while it has "
                "taps: the last bits may differ from the model's without them."
            )
        if len(kept) + len(scripted) < len(layers):
            notes.append(_ROOT)
        self.notes = (*self.notes, *notes)
        return kept

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers with taps, in module order."""
        return tuple(layer.name for layer in self._recorder.layers)

    @property
    def manifest(self) -> Manifest:
        """Which tap is which layer's, as the last run, trace or export had it."""
        recorder = self._recorder
        if recorder.entries is None:
            raise OptionError(
                "The manifest is not known yet: which layers run, and how often, shows when the "
                "instrumented model runs. Run, trace or export it once."
            )
        return Manifest(
            model=_class_name(self.model),
            entries=recorder.entries,
            output=recorder.output,
            inputs=parameter_names(self.model),
            notes=(
                *(text for text in self.notes if text != _ROOT),
                *_silent(recorder),
                *_nones(recorder.output),
            ),
            structure=structure(self.model),
        )

    def __prepare_scriptable__(self) -> nn.Module:
        """What `torch.jit.script` asks for first: our forward has no source that it could read."""
        raise OptionError(
            "torch.jit.script cannot compile an instrumented model, whose forward is made while "
            "the program runs. Trace it: torch.jit.trace(wrapped, example)."
        )

    def remove(self) -> None:
        """Take off the hooks that stayed on the model after `torch.compile` or a strict export."""
        self._recorder.kept = False
        self._recorder.detach()

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder = self._recorder
        if torch.compiler.is_dynamo_compiling():
            _attach_while_tracing(self._key)
            recorder.begin()
            output = self.model(*args, **kwargs)
            heard = tuple(recorder.heard)
            taps = recorder.end()
            kinds = tuple((tap.dim(), str(tap.dtype)[6:]) for tap in taps)
            found = tuple((leaf, tensor is not None) for leaf, tensor in flatten(output))
            _learn_while_tracing(self._key, heard, kinds, found)
            return output, taps
        recorder.attach()
        recorder.begin()
        try:
            output = self.model(*args, **kwargs)
        finally:
            taps = recorder.end()
            if not recorder.kept:
                recorder.detach()
        with _not_traced():
            recorder.learn(
                recorder.heard,
                [(_sizes(tap), dtype_name(tap.dtype)) for tap in taps],
                [(leaf, tensor is not None) for leaf, tensor in flatten(output)],
            )
        return output, taps

    def __dir__(self) -> list[str]:
        """Without the manifest, as long as there is none: a trace reads all that it finds here."""
        names: Any = super().__dir__  # untyped in torch
        known = self._recorder.entries is not None
        return [name for name in names() if known or name != "manifest"]

    def __reduce__(self) -> tuple[Any, ...]:
        return instrument, (self.model, self._selected)

    def extra_repr(self) -> str:
        return f"taps on {len(self._recorder.layers)} layers"


def instrument(model: nn.Module, layers: str | Sequence[str] = "blocks") -> Instrumented:
    """A module that runs the model and returns `(output, taps)`.

    `taps` is a flat tuple of copies of the selected layers' outputs, in the order of `.manifest`:
    as calls finish, then leaf by leaf. Its forward has the model's own signature. Compile it with
    anything, save the manifest beside what comes out, and record that with `manifest=`.
    """
    if isinstance(model, torch.jit.ScriptModule) or not isinstance(model, nn.Module):
        what = "TorchScript" if isinstance(model, nn.Module) else type(model).__name__
        raise OptionError(
            f"Only a torch.nn.Module can be instrumented, got {what}. What is compiled already is "
            "recorded as it is: tap.record(model, path)."
        )
    if isinstance(model, Instrumented):
        raise OptionError("The model is instrumented already. Instrument wrapped.model instead.")
    plain = unwrap(model)
    kind = type("Instrumented", (Instrumented,), {"forward": forward_like(plain)})
    kind.__module__ = __name__
    made: Instrumented = kind(plain, layers, default=layers == "blocks")
    if plain is not model:
        made.notes += ("The model was compiled; the one inside, which is not, is instrumented.",)
    return made


def _class_name(model: nn.Module) -> str:
    return f"{type(model).__module__}.{type(model).__qualname__}"


def _silent(recorder: _Recorder) -> list[str]:
    heard = {entry.layer for entry in recorder.entries or ()}
    silent = [layer.name for layer in recorder.layers if layer.name not in heard]
    if not silent:
        return []
    shown = ", ".join(map(repr, silent[:4])) + (", …" if len(silent) > 4 else "")
    return [f"{len(silent)} selected layers returned no tensor in this run: {shown}."]


def _nones(output: Sequence[OutputLeaf]) -> list[str]:
    return [
        f"The model's own output{' at ' + leaf.leaf if leaf.leaf else ''} is None in this run."
        for leaf in output
        if not leaf.tensor and leaf.leaf in ("", ".logits", "['logits']")
    ]


def _sizes(tensor: torch.Tensor) -> tuple[int | None, ...]:
    return tuple(size if type(size) is int else None for size in tensor.shape)


@contextmanager
def _not_traced() -> Iterator[None]:
    """Look at shapes without `torch.jit.trace` taking it for a part of the model."""
    native: Any = torch._C  # the setter is untyped
    state = native._get_tracing_state()
    if state is None:
        yield
        return
    native._set_tracing_state(None)
    try:
        yield
    finally:
        native._set_tracing_state(state)
