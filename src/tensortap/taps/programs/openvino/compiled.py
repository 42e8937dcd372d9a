"""OpenVINO models that are already compiled: what they return is all that they give away."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..base import Argument, Place, Run, Runner
from .names import best_name

__all__ = ["CompiledProgram"]


class CompiledProgram:
    """An `openvino.CompiledModel` that some object holds and calls in its own way."""

    runtime = "openvino"
    untapped = False  # there are no taps that a run without them could be compared with
    places: Sequence[Place] = (Place("", provenance="hook"),)
    arguments: Sequence[Argument] | None = None
    absent = "A compiled OpenVINO model gives away its outputs alone."

    def __init__(self, model: Any) -> None:
        self._model = model
        self._returned: Any = None
        self.notes: list[str] = []

    def tapped(self, layers: Sequence[str], *, inputs: bool, linears: Sequence[str]) -> Runner:
        return lambda args, kwargs: Run(self.plain(args, kwargs), ())

    def plain(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        returned = self._returned = self._model(*args, **kwargs)
        found: dict[str, torch.Tensor] = {}
        for index, port in enumerate(self._model.outputs):
            name = best_name(port.get_names()) or f"output{index}"
            array = np.array(returned[index])
            if port.get_element_type().get_type_name() == "bf16":
                found[name] = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
            else:
                found[name] = torch.from_numpy(array)
        return next(iter(found.values())) if len(found) == 1 else found

    def returned(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What the model itself returned while `call` ran it: its holder knows no other form."""
        call(args, kwargs)
        found, self._returned = self._returned, None
        return found

    def linears(self) -> Mapping[str, tuple[torch.Tensor, torch.Tensor | None]]:
        return {}

    def describe(self) -> dict[str, Any]:
        import openvino

        return {
            "class": "openvino.CompiledModel",
            "parameters": 0,
            "dtypes": {},
            "runtime": self.runtime,
            "openvino": openvino.__version__,
        }

    def divert(
        self, call: Callable[[tuple[Any, ...], Mapping[str, Any]], Any]
    ) -> Callable[[], None] | None:
        return None
