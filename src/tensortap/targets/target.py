"""A target: a model with its inputs, whatever made it and whatever runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..errors import TargetError
from ..taps.programs.base import Program

__all__ = ["Batch", "Target", "describe", "is_model", "register_model_check", "to_batches"]

_EXPECTED = (
    "a tensor, a tuple of arguments, a dict of keyword arguments, or a list of those, one a batch"
)
_model_checks: list[Callable[[object], bool]] = []


def register_model_check(accepts: Callable[[object], bool]) -> None:
    """Let targets hold another runtime's models: those that `accepts` says yes to."""
    _model_checks.append(accepts)


@dataclass(frozen=True)
class Batch:
    """The arguments of one run of the model."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """What is run: a model and its inputs.

    `inputs` is a tensor, a tuple of arguments, a dict of keyword arguments, or a list of those,
    one a batch; `batches` is the same in one form. `run` replaces `model(*args, **kwargs)`,
    for instance by `generate`. `prompt`, `config` and `notes` are for the recording's manifest
    and for the user's eye. `decode` turns the tokens that `generate` writes into text.
    """

    model: Any
    inputs: Any = field(repr=False)
    mode: str | None = None
    name: str = ""
    prompt: list[str] | None = None
    run: Callable[[Any, Batch], Any] | None = None
    config: dict[str, Any] | None = field(default=None, repr=False)
    notes: tuple[str, ...] = ()
    decode: Callable[[list[int]], str] | None = field(default=None, repr=False)
    batches: tuple[Batch, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not is_model(self.model):
            raise TargetError(
                f"The target's model is {describe(self.model)}, expected a torch.nn.Module, a "
                "compiled model, or an object that holds one."
            )
        if self.run is not None and not callable(self.run):
            raise TargetError(
                f"The target's run is {describe(self.run)}, expected a function of the model "
                "and a Batch."
            )
        object.__setattr__(self, "batches", to_batches(self.inputs))

    def __call__(self, batch: Batch) -> Any:
        """Run the model on one batch."""
        if self.run is not None:
            return self.run(self.model, batch)
        if isinstance(self.model, Program):
            return self.model.plain(batch.args, batch.kwargs)
        return self.model(*batch.args, **batch.kwargs)


def is_model(model: object) -> bool:
    """Whether something is a model, or an object that holds one or can be called as one."""
    if isinstance(model, nn.Module | Program) or any(ask(model) for ask in _model_checks):
        return True
    if isinstance(model, type | str | bytes | int | float | tuple | list | dict | Tensor | None):
        return False
    if callable(model):
        return True
    from ..taps.inside import find_parts
    from ..taps.programs.kinds import kind_of

    return kind_of(model) is not None or bool(find_parts(model))


def to_batches(inputs: object) -> tuple[Batch, ...]:
    """Bring the forms that a user may give inputs in to one."""
    if not isinstance(inputs, list):
        return (_batch(inputs, "The target's inputs are"),)
    if not inputs:
        raise TargetError(f"The target's inputs are an empty list, expected {_EXPECTED}.")
    return tuple(
        _batch(item, f"Item {index} of the target's inputs is") for index, item in enumerate(inputs)
    )


def _batch(item: object, where: str) -> Batch:
    if isinstance(item, Batch):
        return item
    if isinstance(item, Tensor):
        return Batch(args=(item,))
    if isinstance(item, tuple):
        return Batch(args=item)
    if isinstance(item, Mapping):
        for key in item:
            if not isinstance(key, str):
                raise TargetError(
                    f"{where} a dict with the key {key!r}; keyword arguments have names, so every "
                    "key has to be a str."
                )
        return Batch(kwargs=dict(item))
    raise TargetError(f"{where} {describe(item)}, expected {_EXPECTED}.")


def describe(value: object) -> str:
    """What a value is, short enough for a sentence."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    kind = type(value).__name__
    if isinstance(value, tuple | list | dict):
        inside = ", ".join(type(item).__name__ for item in list(value)[:4])
        more = ", …" if len(value) > 4 else ""
        return f"a {kind} of {len(value)} ({inside}{more})" if value else f"an empty {kind}"
    if isinstance(value, str | int | float):
        text = repr(value)
        return f"the {kind} {text if len(text) <= 40 else text[:37] + '…'}"
    return f"{'an' if kind[:1].lower() in 'aeiou' else 'a'} {kind}"
