"""Parameters, their gradients, and what a step did to them.

Gradients are read when the optimizer is about to step: after accumulation, unscaling and clipping,
which is what the optimizer sees. An update is the parameter behind the step minus the one before
it: exactly, from a copy that is made when such a step begins, or over a fixed sample of the
elements where there is no room for a second copy of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from ..recording.dtypes import dtype_name
from ..recording.schema import Port, Site
from ..selection import select
from ..selection.sites import sites
from ..taps.plain import is_plain, plain_parts
from ..taps.unseen import unseen

__all__ = ["Parameters", "Updates"]

Updates = Literal["exact", "sampled"]
TakeMany = Callable[[Sequence[tuple[Site, torch.Tensor]]], object]
_SAMPLE = 1 << 14
_DENSE_LIMIT = 1 << 28


@dataclass(eq=False)
class _Parameter:
    layer: str
    type: str
    module: nn.Module
    name: str
    before: torch.Tensor | None = None

    @property
    def leaf(self) -> str:
        return f".{self.name}"

    @property
    def values(self) -> torch.Tensor | None:
        """What the module holds now: a parameter may be replaced while training."""
        return self.module._parameters.get(self.name)


class Parameters:
    """The parameters of a model, or of some of its layers."""

    def __init__(
        self, model: nn.Module, layers: bool | str | Sequence[str], take: TakeMany
    ) -> None:
        self._take_many = take
        self._parameters = list(_parameters(model, layers))
        self._sites: dict[Any, Site] = {}
        self.sharded = False
        self._taken: set[tuple[int, Port]] = set()
        self.unheard: dict[tuple[str, str], str] = {}

    def __len__(self) -> int:
        return len(self._parameters)

    @property
    def layers(self) -> list[str]:
        """The layers that own them."""
        return list(dict.fromkeys(parameter.layer for parameter in self._parameters))

    def begin(self) -> None:
        """A step begins: nothing of it was taken yet."""
        self._taken.clear()

    def at_hand(self) -> Iterator[tuple[Site, torch.Tensor]]:
        """The tensors that are there now: values, gradients, and the updates that were taken."""
        for parameter in self._parameters:
            found: list[tuple[Port, torch.Tensor | None]] = [
                ("grad_param", _grad(parameter.values)),
                ("param", parameter.values),
                ("update", parameter.before),
            ]
            for port, tensor in found:
                known = port != "update" or (id(parameter), port) in self._taken
                if known and tensor is not None and is_plain(tensor):
                    yield self._site(parameter, port, tensor, sampled=port == "update"), tensor

    def take_values(self, of: Collection[int] | None) -> None:
        """The parameters of these ids, or all; those that were taken in this step are not again."""
        self._take(((p, p.values) for p in self._of(of)), "param")

    def take_grads(self, of: Collection[int] | None) -> None:
        """Gradients in the order in which a backward pass makes them, as far as that is known."""
        backwards = list(self._of(of))[::-1]
        self._take(((p, _grad(p.values)) for p in backwards), "grad_param")

    def remember(self, how: Updates, of: Collection[int] | None) -> None:
        """Copy what is there now, to know afterwards what a step did. The copies stay in place."""
        with unseen(), torch.no_grad():
            for parameter in self._of(of):
                whole = parameter.values
                values = _local(whole)
                if whole is None or values is None or not whole.requires_grad:
                    parameter.before = None
                    continue
                now = values if how == "exact" else _sample(values)
                if parameter.before is None or parameter.before.shape != now.shape:
                    parameter.before = torch.empty_like(now)
                parameter.before.copy_(now)

    def take_updates(self, how: Updates, of: Collection[int] | None) -> None:
        """What the step did; `remember` came before it."""
        found: list[tuple[Site, torch.Tensor]] = []
        with unseen(), torch.no_grad():
            for parameter in self._of(of):
                values, before = _local(parameter.values), parameter.before
                if values is None or before is None or (id(parameter), "update") in self._taken:
                    continue
                now = values if how == "exact" else _sample(values)
                if now.shape == before.shape:
                    torch.sub(now, before, out=before)
                    found.append((self._site(parameter, "update", before, sampled=True), before))
                    self._taken.add((id(parameter), "update"))
            self._take_many(found)

    def _of(self, ids: Collection[int] | None) -> Iterator[_Parameter]:
        for parameter in self._parameters:
            if ids is None or id(parameter.values) in ids:
                yield parameter

    def forget(self) -> None:
        """Give the copies back."""
        for parameter in self._parameters:
            parameter.before = None

    def _take(self, tensors: Iterable[tuple[_Parameter, torch.Tensor | None]], port: Port) -> None:
        found: list[tuple[Site, torch.Tensor]] = []
        with unseen(), torch.no_grad():
            for parameter, tensor in tensors:
                if tensor is None or (id(parameter), port) in self._taken:
                    continue
                self._taken.add((id(parameter), port))
                if is_plain(tensor):
                    found.append((self._site(parameter, port, tensor), tensor))
                    continue
                self.sharded = self.sharded or hasattr(tensor, "to_local")
                try:
                    for tail, part in plain_parts(tensor, _DENSE_LIMIT):
                        found.append((self._site(parameter, port, part, tail), part))
                except Exception as error:  # of a kind that has no values to look at
                    key = (parameter.layer, parameter.leaf)
                    self.unheard[key] = str(error).split("\n", 1)[0]
            self._take_many(found)

    def _site(
        self,
        parameter: _Parameter,
        port: Port,
        tensor: torch.Tensor,
        tail: str = "",
        *,
        sampled: bool = False,
    ) -> Site:
        """Where a tensor stands. That of a sample has the shape of what it was taken from."""
        if sampled:
            whole = _local(parameter.values)
            shape = tensor.shape if whole is None else whole.shape
        else:
            shape = tensor.shape
        key = (id(parameter), port, tail, shape, tensor.dtype, tensor.device)
        site = self._sites.get(key)
        if site is None:
            site = self._sites[key] = Site(
                parameter.layer,
                port,
                parameter.leaf + tail,
                None,
                parameter.type,
                tuple(shape),
                dtype_name(tensor.dtype),
                str(tensor.device),
            )
        return site


def _parameters(model: nn.Module, layers: bool | str | Sequence[str]) -> Iterator[_Parameter]:
    """Each parameter once, under the layer that owns it."""
    everywhere = isinstance(layers, bool)
    wanted = [] if everywhere else [layer.name for layer in select(model, layers).layers]  # type: ignore[arg-type]
    seen: set[int] = set()
    for site in sites(model):
        inside = everywhere or any(
            not name or site.name == name or site.name.startswith(f"{name}.") for name in wanted
        )
        if not inside:
            continue
        for name, values in site.module._parameters.items():
            if values is not None and id(values) not in seen:
                seen.add(id(values))
                yield _Parameter(site.name, site.type, site.module, name)


def _grad(values: torch.Tensor | None) -> torch.Tensor | None:
    return None if values is None else values.grad


def _local(values: torch.Tensor | None) -> torch.Tensor | None:
    """The plain memory behind a parameter; None where there is none."""
    if values is None or is_plain(values):
        return values
    if hasattr(values, "to_local"):
        local = values.to_local()
        return local if is_plain(local) else None
    return None


def _sample(values: torch.Tensor) -> torch.Tensor:
    """At most 16384 elements, evenly spread in the order of memory, always the same ones."""
    flat = values.reshape(-1) if values.is_contiguous() else values.contiguous().reshape(-1)
    stride = max(1, -(-flat.numel() // _SAMPLE))
    return flat[::stride]
