"""Running an OpenVINO model, plain and with values inside as extra outputs.

An output's memory belongs to the request that ran, and its next run writes over it. Copying
everything out would cost as much as a small model; so values are handed out as they lie, and a
request runs again only when no one holds a value of its last run. For others there are more.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch

from ....errors import TargetError
from ..base import Argument, HeardCall, Run, loose_leaves
from .graph import Graph
from .layers import LayerCall
from .values import bind, from_openvino, to_openvino

__all__ = ["SETTINGS", "Engine", "Tapped"]

SETTINGS = {
    "INFERENCE_PRECISION_HINT": "f32",
    "EXECUTION_MODE_HINT": "ACCURACY",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
    "KV_CACHE_PRECISION": "f32",
    "PERFORMANCE_HINT": "LATENCY",
}
_KEPT = 3  # compiled copies of the model


class Engine:
    """Compiles copies of a model with these or those values as outputs, and runs them."""

    def __init__(
        self, model: Any, graph: Graph, declared: Sequence[Argument], outputs: Sequence[str]
    ) -> None:
        self._model = model
        self._graph = graph
        self._declared = declared
        self._outputs = outputs
        self._compiled: OrderedDict[tuple[str, ...], _Copy] = OrderedDict()
        self._state: dict[str, Any] = {}

    def plain(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Run:
        """The model as it is; its state stays where it was."""
        output, _ = self._run((), args, kwargs)
        return Run(output, ())

    def run(
        self, keys: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, dict[str, torch.Tensor]]:
        """The model with the values of these keys."""
        return self._run(keys, args, kwargs, go_on=True)

    def _run(
        self,
        keys: tuple[str, ...],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        go_on: bool = False,
    ) -> tuple[Any, dict[str, torch.Tensor]]:
        tensors = bind(self._declared, args, kwargs)
        copy = self._copy(keys)
        request = copy.free(stateful=self._graph.stateful)
        if self._graph.stateful:
            self._restore(request)
        # A shared tensor must live until the request has run.
        given = [to_openvino(tensor) for tensor in tensors]
        for index, tensor in enumerate(given):
            request.set_input_tensor(index, tensor)
        try:
            request.infer()
        except RuntimeError as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise TargetError(f"OpenVINO could not run the model: {lines[-1]}") from error
        if self._graph.stateful and go_on:
            self._remember(request)
        own = len(self._outputs)
        heard: dict[str, torch.Tensor] = {}
        arrays = []
        for offset, key in enumerate(keys):
            tensor, array = from_openvino(request.get_output_tensor(own + offset))
            heard[key] = tensor.clone() if self._graph.stateful else tensor
            arrays.append(array)
        copy.lend(request, arrays)
        results = [from_openvino(request.get_output_tensor(i))[0].clone() for i in range(own)]
        if own == 1:
            return results[0], heard
        return dict(zip(self._outputs, results, strict=True)), heard

    def _copy(self, keys: tuple[str, ...]) -> _Copy:
        if keys not in self._compiled:
            self._compiled[keys] = _Copy(self._model, self._graph, keys)
        self._compiled.move_to_end(keys)
        while len(self._compiled) > _KEPT:
            self._compiled.popitem(last=False)
        return self._compiled[keys]

    def _restore(self, request: Any) -> None:
        request.reset_state()
        for state in request.query_state():
            if state.name in self._state:
                state.state = self._state[state.name]

    def _remember(self, request: Any) -> None:
        import openvino

        self._state = {s.name: openvino.Tensor(s.state.data.copy()) for s in request.query_state()}


class _Copy:
    """A compiled copy of a model with more outputs, and its requests."""

    def __init__(self, model: Any, graph: Graph, keys: Sequence[str]) -> None:
        import openvino

        if keys:
            model = model.clone()
            ops = model.get_ordered_ops()
            nodes = {value.key: value for value in graph.values}
            ports = [ops[nodes[key].node].output(nodes[key].port) for key in keys]
            make: Any = openvino.opset13.result
            model.add_results([make(port) for port in ports])
        try:
            threads = {"INFERENCE_NUM_THREADS": torch.get_num_threads()}
            self._compiled = openvino.Core().compile_model(model, "CPU", {**SETTINGS, **threads})
        except RuntimeError as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise TargetError(f"OpenVINO cannot compile the model: {lines[-1]}") from error
        self._requests: list[tuple[Any, list[weakref.ref[Any]]]] = []

    def free(self, *, stateful: bool) -> Any:
        """A request whose last values no one holds any more."""
        for request, lent in self._requests:
            if stateful or all(ref() is None for ref in lent):
                return request
        request = self._compiled.create_infer_request()
        self._requests.append((request, []))
        return request

    def lend(self, request: Any, arrays: Sequence[Any]) -> None:
        for known, lent in self._requests:
            if known is request:
                lent[:] = [weakref.ref(array) for array in arrays]


class Tapped:
    """A model with taps on some calls: a Runner."""

    def __init__(
        self,
        engine: Engine,
        calls: Sequence[LayerCall],
        inputs: AbstractSet[str],
        operands: Mapping[str, Sequence[str]],
    ) -> None:
        self._engine = engine
        self._calls = calls
        self._inputs = inputs
        self._operands = operands
        keys: dict[str, None] = {}
        for call in calls:
            keys.update(dict.fromkeys(call.outputs))
            if call.layer in inputs:
                keys.update(dict.fromkeys(call.inputs))
        for many in operands.values():
            keys.update(dict.fromkeys(many))
        self._keys = tuple(keys)

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Run:
        output, heard = self._engine.run(self._keys, args, kwargs)
        return Run(output, [self._heard(call, heard) for call in self._calls])

    def _heard(self, call: LayerCall, heard: Mapping[str, torch.Tensor]) -> HeardCall:
        many = self._operands.get(call.layer, ())
        return HeardCall(
            call.layer,
            loose_leaves([heard[key] for key in call.outputs]),
            loose_leaves([heard[key] for key in call.inputs]) if call.layer in self._inputs else (),
            heard[many[call.number]] if call.number < len(many) else None,
        )
