"""What a run would record, found without running: the model on tensors that have shapes alone."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._pytree import tree_map_only

from ..selection.sites import Site, unwrap
from .isolation import kept_attributes, random_devices
from .leaves import flatten, flatten_call

__all__ = ["Plan", "PlannedRow", "calls_without_running", "rehearsing", "shapes_without_running"]

_REHEARSING: ContextVar[bool] = ContextVar("rehearsing", default=False)


@dataclass(frozen=True)
class PlannedRow:
    """One tensor that a run would record; shape, dtype and nbytes are None where unknown."""

    layer: str
    type: str
    port: str
    leaf: str = ""
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    nbytes: int | None = None
    call: int = 0


@dataclass(frozen=True)
class Plan:
    """The rows of one batch, in the order of execution, those of unknown shape last."""

    rows: tuple[PlannedRow, ...]
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """The bytes that are known of; a tensor that is recorded twice is stored once."""
        return sum(row.nbytes or 0 for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "nbytes": self.nbytes}


def rehearsing() -> bool:
    """Whether a model runs here for its calls and shapes alone, and nobody will see a value.

    One that loops over thousands of steps may then take fewer. That its tensors have no values
    is not the same: an export runs on such ones too, and keeps every step.
    """
    return not torch.compiler.is_compiling() and _REHEARSING.get()


def shapes_without_running(
    model: nn.Module,
    batch: Any,
    sites: Sequence[Site],
    inputs: bool = False,
    outputs: bool = True,
    run: Callable[[Any, Any], Any] | None = None,
) -> Plan:
    """The tensors that recording one batch would give, with nothing computed.

    The model runs on fake tensors, its weights too, and is put back as it was: values, flags,
    attributes and random state. Where that cannot work, because the model looks at values
    (`.item()`, `nonzero`) or runs code that is not torch's, the rest is listed without shapes, and
    a note says why.
    """
    listener = _Listener(inputs, outputs)
    notes: tuple[str, ...] = ()
    model = unwrap(model)
    try:
        with _untouched(model), FakeTensorMode(allow_non_fake_inputs=True) as fake:
            args, kwargs = tree_map_only(
                torch.Tensor, fake.from_tensor, (batch.args, dict(batch.kwargs))
            )
            _swap_weights(model, fake)
            for site in sites:
                site.module.register_forward_hook(listener.hook(site), with_kwargs=True)
            if run is None:
                model(*args, **kwargs)
            else:
                run(model, replace(batch, args=args, kwargs=kwargs))
    except Exception as error:  # a user's model can raise anything when it meets a fake tensor
        notes = (f"Not all shapes are known without running: {_reason(error)}",)
    ports = ["input"] * inputs + ["output"] * outputs
    silent = [site for site in sites if not listener.calls[site.name]]
    if silent and not notes:
        names = ", ".join(repr(site.name) for site in silent[:3])
        notes = (
            f"{len(silent)} of the selected layers are not called by the model, or not through "
            f"their __call__: {names}{', …' if len(silent) > 3 else ''}.",
        )
    unknown = [PlannedRow(site.name, site.type, port) for site in silent for port in ports]
    return Plan((*listener.rows, *unknown), notes)


def calls_without_running(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], sites: Sequence[Site]
) -> tuple[dict[str, int], str | None]:
    """How often each of these layers would run, or the reason why that is not known.

    Nobody's hooks are called: this is a rehearsal, and the user's hooks count real calls.
    """
    calls: Counter[str] = Counter()
    model = unwrap(model)
    try:
        with _untouched(model), FakeTensorMode(allow_non_fake_inputs=True) as fake:
            args, kwargs = tree_map_only(torch.Tensor, fake.from_tensor, (args, dict(kwargs)))
            _swap_weights(model, fake)
            for module in model.modules():
                module._forward_hooks.clear()
                module._forward_pre_hooks.clear()
            for site in sites:
                site.module.register_forward_hook(
                    lambda module, args, output, name=site.name: calls.update([name])
                )
            model(*args, **kwargs)
    except Exception as error:  # a user's model can raise anything when it meets a fake tensor
        return {}, _reason(error)
    return dict(calls), None


class _Listener:
    def __init__(self, inputs: bool, outputs: bool) -> None:
        self.rows: list[PlannedRow] = []
        self.calls: Counter[str] = Counter()
        self._inputs, self._outputs = inputs, outputs

    def hook(self, site: Site) -> Callable[..., None]:
        def listen(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            call = self.calls[site.name]
            self.calls[site.name] += 1
            ports = []
            if self._inputs:
                ports.append(("input", flatten_call(module, args, kwargs)))
            if self._outputs:
                ports.append(("output", flatten(output)))
            self.rows += [
                _row(site, port, leaf, tensor, call)
                for port, leaves in ports
                for leaf, tensor in leaves
                if tensor is not None
            ]

        return listen


def _row(site: Site, port: str, leaf: str, tensor: torch.Tensor, call: int) -> PlannedRow:
    return PlannedRow(
        site.name,
        site.type,
        port,
        leaf,
        tuple(int(size) for size in tensor.shape),
        str(tensor.dtype).removeprefix("torch."),
        tensor.numel() * tensor.element_size(),
        call,
    )


def _swap_weights(model: nn.Module, fake: FakeTensorMode) -> None:
    for module in model.modules():
        stores: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for store in stores:
            for name, tensor in store.items():
                if tensor is not None:
                    store[name] = fake.from_tensor(tensor)


@contextlib.contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """A rehearsal: it puts back every module's attributes, hooks and weights, and random state."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")  # prints what we put in a note
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    token = _REHEARSING.set(True)
    with (
        torch.random.fork_rng(devices=random_devices()),
        torch.no_grad(),
        torch.compiler.set_stance("force_eager"),
        kept_attributes(model),
    ):
        try:
            yield
        finally:
            _REHEARSING.reset(token)
            logger.setLevel(level)


def _reason(error: Exception) -> str:
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return f"the model looks at values ({str(error).removesuffix('.default')})."
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip() if lines else 'no message'}"
