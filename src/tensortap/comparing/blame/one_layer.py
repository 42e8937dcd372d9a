"""One layer run alone on the reference's inputs, as it was called in the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...taps.isolation import unchanged
from ...taps.patching import (
    call_with,
    cast_like,
    leaves_of_call,
    match_leaves,
    put_call,
    why_not_put,
)
from .stage import Put, Stage, copied

__all__ = ["CapturedCall", "OneLayer", "capture"]


@dataclass(frozen=True)
class CapturedCall:
    """All that a call of a layer needs besides the reference's tensors."""

    batch: int
    call: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    calls: dict[str, int]
    random: torch.Tensor


@dataclass(eq=False)
class OneLayer(Stage):
    """One layer run alone on the reference's inputs, in the calls that were captured."""

    layer: str = ""
    captured: Sequence[CapturedCall] = ()

    @property
    def top(self) -> str:
        return self.layer

    def _play(self) -> None:
        module = self.modules[self.layer]
        where = Put(self.layer, "input")
        with unchanged(module), torch.compiler.set_stance("force_eager"):
            for captured in self.captured:
                self.batch = captured.batch
                self.calls = Counter(captured.calls)
                args, kwargs = copied((captured.args, captured.kwargs))
                leaves = self._inputs(module, where, captured.call, args, kwargs)
                more = self.absent(module, where, captured.call, args, kwargs)
                args, kwargs = put_call(module, args, kwargs, leaves)
                args, kwargs = call_with(module, args, kwargs, more)
                torch.set_rng_state(captured.random)
                module(*args, **kwargs)

    def _inputs(
        self,
        module: nn.Module,
        where: Put,
        call: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> dict[str, torch.Tensor]:
        own = leaves_of_call(module, args, kwargs)
        records = self.known.at(where.layer, "input", self.batch, call)
        names = match_leaves(module, own, records)
        return {
            leaf: cast_like(records[name].tensor(), own[leaf])
            for leaf, name in names.items()
            if own[leaf].shape == (0,)  # what `capture` left out
        }


def capture(
    stage: Stage,
    layer: str,
    call: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    calls: Mapping[str, int],
) -> CapturedCall:
    """Keep a call for later; tensors that the reference has are left out but for their kind.

    `calls` is how often each layer has been called in this batch before.
    """
    module = stage.modules[layer]
    own = leaves_of_call(module, args, kwargs)
    records = stage.known.at(layer, "input", stage.batch, call)
    empty = {
        leaf: own[leaf].new_empty(0)
        for leaf, name in match_leaves(module, own, records).items()
        if not why_not_put(records[name].tensor(), own[leaf])
    }
    args, kwargs = copied(put_call(module, args, kwargs, empty))
    counts = {**calls, layer: call}
    return CapturedCall(stage.batch, call, args, kwargs, counts, torch.get_rng_state())
