"""What all programs of TorchScript have in common: how they are called, described, put back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ....errors import TargetError
from ....recording.dtypes import dtype_name
from ..base import Argument, Leaves
from ..diverting import divert_forward
from .arguments import arguments_of, bound
from .state import State

__all__ = ["TorchScript", "cannot", "detached", "function_of"]


class TorchScript:
    """A module or a function of TorchScript; where its layers are is for those who inherit.

    `weights_now` are its parameters by name, whenever they are asked for.
    """

    runtime: str
    exact = True

    def __init__(
        self,
        model: Any,
        state: State,
        weights_now: Callable[[], Mapping[str, torch.Tensor]],
        file: str | None,
    ) -> None:
        self._model, self._state, self._file = model, state, file
        self._weights_now = weights_now
        self._is_function = isinstance(model, torch.jit.ScriptFunction)
        self._forward = model if self._is_function else model._c._get_method("forward")
        self._skip = 0 if self._is_function else 1
        self.arguments: Sequence[Argument] | None = arguments_of(self._forward, self._skip)

    @property
    def weights(self) -> dict[str, tuple[int, ...]]:
        """The parameters' shapes, by name."""
        return {name: tuple(tensor.shape) for name, tensor in self._weights_now().items()}

    @property
    def stateful(self) -> str | None:
        """Why the model must not run more often than its user runs it."""
        return self._state.stateful

    def keep(self) -> Callable[[], None]:
        """Keep what a run changes; the returned function puts it back."""
        return self._state.keep()

    def plain(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        given = bound(self._forward, args, kwargs, self._skip)
        return self._forward(*args, **kwargs) if given is None else self._forward(*given)

    def _heard(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What a function with taps returns in the model's place: its output, and theirs."""
        given = bound(self._forward, args, kwargs, self._skip)
        if given is None:
            self.plain(args, kwargs)  # it says better than we what is wrong
            raise TargetError("The TorchScript model does not take these arguments.")
        return function(*([] if self._is_function else [self._model]), *given)

    def describe(self) -> dict[str, Any]:
        name = "function" if self._is_function else str(self._model.original_name)
        return _described(self.runtime, name, self._weights_now().values(), self._file)

    def divert(
        self, call: Callable[[tuple[Any, ...], Mapping[str, Any]], Any]
    ) -> Callable[[], None] | None:
        """Let calls of the module come to `call`: what stands in the instance is found first."""
        if not isinstance(self._model, torch.nn.Module):
            return None
        return divert_forward(vars(self._model), call)


def _described(
    runtime: str, name: str, weights: Iterable[torch.Tensor], file: str | None
) -> dict[str, Any]:
    """For the manifest."""
    dtypes: Counter[str] = Counter()
    for tensor in weights:
        dtypes[dtype_name(tensor.dtype)] += tensor.numel()
    found: dict[str, Any] = {
        "class": name,
        "parameters": sum(dtypes.values()),
        "dtypes": dict(dtypes),
        "runtime": runtime,
        "torch": torch.__version__,
    }
    if file is not None:
        found["file"] = file
    return found


def function_of(graph: Any) -> Any:
    """A function that runs a graph; the calls for it are torch's private ones."""
    try:
        return torch._C._create_function_from_graph("tapped", graph)
    except (AttributeError, RuntimeError) as error:
        raise TargetError(cannot(error)) from error


def cannot(error: BaseException) -> str:
    """That this torch cannot do it, as a sentence."""
    return (
        f"torch {torch.__version__} cannot put taps into the graph of this TorchScript model "
        f"({_first_line(error)}). Record it op by op with --runtime ops, or with another torch."
    )


def detached(leaves: Leaves) -> Leaves:
    """Without the graph of autograd, and in plain memory."""
    return [(leaf, None if tensor is None else _plain(tensor)) for leaf, tensor in leaves]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_dense() if tensor.is_mkldnn else tensor


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0][:200]
