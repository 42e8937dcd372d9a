"""What a model writes while it is recorded: the tokens of `generate`, and the logits of each step.

A step of generation is a call of the model, so its layers have the calls 0, 1, … of the batch. The
`generate` of the model, and of the models inside it, is heard where the user calls it; what it
returns goes back untouched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..recording.dtypes import dtype_name
from ..recording.schema import Site
from .listener import Listener
from .plain import is_plain
from .sink import Sink

__all__ = ["LOGITS", "Decode", "Generations"]

LOGITS = ".logits"
"""The leaf of the root's output that holds the logits of the token to come."""

_MOST_IDS = 1 << 16
_WHOLE = (torch.int64, torch.int32)

Decode = Callable[[list[int]], str]


@dataclass(eq=False)
class _Running:
    """One call of `generate` that has not returned."""

    epoch: int
    batch: int
    before: int  # steps of the same batch that earlier calls made
    steps: int = 0
    inner: bool = False  # a model inside it generates, and has the steps


class _Heard:
    """Stands for the `generate` of a model; a copy of the model, or a saved one, has its own."""

    def __init__(
        self, generations: Generations, module: nn.Module, generate: Callable[..., Any]
    ) -> None:
        self.generations = generations
        self._module = module
        self._generate = generate
        functools.update_wrapper(self, generate)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.generations.heard(self._module, self._generate, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, "generate")  # which is the class's: nothing of ours


class Generations:
    """Hears every `generate` of a model; `found` has a dict for the manifest of each."""

    def __init__(self, model: Any, on_trouble: Callable[[Exception], None]) -> None:
        self.found: list[dict[str, Any]] = []
        self.decode: Decode | None = None
        self._on_trouble = on_trouble
        self._modules: list[nn.Module] = []
        if isinstance(model, nn.Module):
            named = (module for module in model.modules())
            self._modules = [m for m in named if callable(getattr(type(m), "generate", None))]
        self._sink: Sink | None = None
        self._keeps_logits = True
        self._running: list[_Running] = []
        self._steps: dict[tuple[int, int], int] = {}
        self._sites: dict[Any, int] = {}

    def attach(self, sink: Sink, *, logits: bool) -> None:
        """Begin to hear; `logits`: keep those of each step, where nothing else does."""
        self._sink, self._keeps_logits = sink, logits
        for module in self._modules:
            if "generate" not in vars(module):  # the user's own stand-in stays as it is
                module.generate = _Heard(self, module, module.generate)  # type: ignore[assignment,arg-type]

    def detach(self) -> None:
        for module in self._modules:
            heard = vars(module).get("generate")
            if isinstance(heard, _Heard) and heard.generations is self:
                del module.generate
        self._sink = None

    def heard(
        self,
        module: nn.Module,
        generate: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Let a model generate, and keep what it wrote."""
        sink = self._sink
        if sink is None:
            return generate(*args, **kwargs)
        moment = (sink.epoch, sink.batch)
        running = _Running(*moment, self._steps.get(moment, 0))
        for outer in self._running:
            outer.inner = True
        self._running.append(running)
        hook = module.register_forward_hook(Listener(functools.partial(self._stepped, running)))
        try:
            result = generate(*args, **kwargs)
        finally:
            hook.remove()
            self._running.remove(running)
        self._steps[moment] = self._steps.get(moment, 0) + running.steps
        try:
            if running.steps and not running.inner:
                self.found.append(self._described(module, running, args, kwargs, result))
        except Exception as error:  # ours, and not the model's
            self._on_trouble(error)
        return result

    def _stepped(self, running: _Running, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or running.inner or self._sink is None:
            return
        at = running.before + running.steps
        running.steps += 1
        logits = output.get("logits") if isinstance(output, Mapping) else None
        logits = getattr(output, "logits", None) if logits is None else logits
        if not self._keeps_logits or not isinstance(logits, torch.Tensor) or logits.dim() != 3:
            return
        if not is_plain(logits):
            return
        try:
            self._keep(self._sink, running, at, logits[:, -1:].detach())
        except Exception as error:
            self._on_trouble(error)

    def _keep(self, sink: Sink, running: _Running, step: int, logits: torch.Tensor) -> None:
        key = (logits.shape, logits.dtype, logits.device)
        site = self._sites.get(key)
        if site is None:
            shape, device = tuple(logits.shape), str(logits.device)
            made = Site("", "output", LOGITS, None, "", shape, dtype_name(logits.dtype), device)
            site = self._sites[key] = sink.writer.site(made)
        moment = (sink.next_order(), running.epoch, running.batch, step)
        sink.writer.line(site, moment, sink.writer.take(logits))

    def _described(
        self,
        module: nn.Module,
        running: _Running,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: Any,
    ) -> dict[str, Any]:
        config = kwargs.get("generation_config") or getattr(module, "generation_config", None)
        beams = _option("num_beams", kwargs, config) or 1
        found: dict[str, Any] = {
            "epoch": running.epoch,
            "batch": running.batch,
            "before": running.before,
            "steps": running.steps,
            "sampled": bool(_option("do_sample", kwargs, config)),
            "beams": int(beams),
            "prompt": None,
            "prompt_length": None,
            "tokens": None,
            "pieces": None,
            "text": None,
        }
        given = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
        prompt = given if _is_ids(given) else None
        sequences = result if isinstance(result, torch.Tensor) else _item(result, "sequences")
        if prompt is not None:
            found["prompt_length"] = prompt.shape[1]
            found["prompt"] = prompt.tolist() if prompt.numel() <= _MOST_IDS else None
        if not _is_ids(sequences) or sequences.numel() > _MOST_IDS:
            return found
        start = _start(sequences, prompt, running.steps)
        tokens: list[list[int]] = sequences[:, start:].tolist()
        found["tokens"] = tokens
        if self.decode is not None:
            decode = self.decode
            found["text"] = [decode(row) for row in tokens]
            found["pieces"] = [[decode([token]) for token in row] for row in tokens]
        return found


def _start(sequences: torch.Tensor, prompt: torch.Tensor | None, steps: int) -> int:
    """Where the new tokens begin: a decoder alone returns the prompt before them."""
    if prompt is not None and sequences.shape[0] % prompt.shape[0] == 0:
        length = prompt.shape[1]
        copies = prompt.repeat_interleave(sequences.shape[0] // prompt.shape[0], dim=0)
        if sequences.shape[1] > length and torch.equal(sequences[:, :length], copies):
            return length
    return max(0, sequences.shape[1] - steps)


def _is_ids(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 2 and value.dtype in _WHOLE


def _item(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _option(name: str, kwargs: Mapping[str, Any], config: Any) -> Any:
    return kwargs[name] if name in kwargs else getattr(config, name, None)
