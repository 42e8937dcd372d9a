"""A TorchScript model, scripted or traced, whose modules still have their names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ....errors import TargetError
from ....recording.dtypes import dtype_name
from ...leaves import flatten
from ..base import Argument, HeardCall, Leaves, Place, Provenance, Run, loose_leaves
from ..diverting import divert_forward
from .arguments import arguments_of, bound
from .graphs import Linear
from .state import state_of
from .surgery import UNUSED, Site, Surgeon
from .tree import Node, Tree

__all__ = ["ScriptProgram", "described", "detached", "function_of", "the_call"]

_UNCALLED = "the compiled model never calls it"
_CONTAINERS = {"ModuleList", "ModuleDict", "ParameterList", "ParameterDict"}


class ScriptProgram:
    """Layers by the names of a model's submodules."""

    runtime = "torchscript"
    exact = True
    absent = (
        "The TorchScript model has no module of this name: it stood under another name when the "
        "model was compiled, or was not part of it."
    )

    def __init__(self, module: Any, file: str | None = None) -> None:
        self._module = module
        self._file = file
        self._forward = module._c._get_method("forward")
        self.notes: list[str] = []
        self._tree = Tree(module._c)
        learnt = self._learn()
        joined = self._tree.join(learnt.traced)
        if joined:
            learnt = self._learn()
        self.notes += [*joined, *learnt.notes]
        if module._c._get_forward_hooks() or module._c._get_forward_pre_hooks():
            self.notes.append(
                "The TorchScript model has hooks of its own: they run when it is called, not "
                "when a recording runs it by itself (rec.run)."
            )
        self.places: Sequence[Place] = _places(self._tree, learnt)
        self.arguments: Sequence[Argument] | None = arguments_of(self._forward)
        self._found = learnt.found
        self._state = state_of(self._tree)

    def _learn(self) -> Surgeon:
        surgeon = Surgeon(self._tree, None)
        _graph_of(surgeon)
        return surgeon

    @property
    def weights(self) -> dict[str, tuple[int, ...]]:
        """The parameters' shapes, by name."""
        return {name: tuple(tensor.shape) for name, tensor in self._tree.weights().items()}

    @property
    def stateful(self) -> str | None:
        """Why the model must not run more often than its user runs it."""
        return self._state.stateful

    def keep(self) -> Callable[[], None]:
        """Keep what a run changes; the returned function puts it back."""
        return self._state.keep()

    def tapped(
        self, layers: Sequence[str], *, inputs: bool, linears: Sequence[str]
    ) -> Callable[[tuple[Any, ...], Mapping[str, Any]], Run]:
        surgeon = Surgeon(self._tree, frozenset(layers), inputs, frozenset(linears))
        function = function_of(_graph_of(surgeon))
        sites = tuple(surgeon.sites)

        def run(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Run:
            given = bound(self._forward, args, kwargs)
            if given is None:
                self.plain(args, kwargs)  # it says better than we what is wrong
                raise TargetError("The TorchScript model does not take these arguments.")
            output, taps = function(self._module, *given)
            return Run(output, _calls(taps, sites))

        return run

    def plain(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        given = bound(self._forward, args, kwargs)
        return self._forward(*args, **kwargs) if given is None else self._forward(*given)

    def linears(self) -> Mapping[str, tuple[torch.Tensor, torch.Tensor | None]]:
        found: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}
        for name, linear in self._found.items():
            if linear is not None and (pair := self._weights(linear)) is not None:
                found[name] = pair
        return found

    def _weights(self, linear: Linear) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        weight = self._tensor(linear.weight)
        bias = None if linear.bias is None else self._tensor(linear.bias)
        if weight is None or not weight.is_floating_point() or weight.dim() != 2:
            return None
        if linear.weight in self._state.names:  # behind the run it is no more what it was in it
            return None
        return weight, bias

    def _tensor(self, name: str) -> torch.Tensor | None:
        path, _, attribute = name.rpartition(".")
        node = self._tree.root.find(tuple(path.split(".")) if path else ())
        value = node.cpp.getattr(attribute) if node and node.cpp.hasattr(attribute) else None
        return value if isinstance(value, torch.Tensor) else None

    def describe(self) -> dict[str, Any]:
        return described(
            self.runtime, self._tree.root.type, self._tree.weights().values(), self._file
        )

    def divert(
        self, call: Callable[[tuple[Any, ...], Mapping[str, Any]], Any]
    ) -> Callable[[], None] | None:
        return the_call(self._module, call)


def the_call(
    module: Any, call: Callable[[tuple[Any, ...], Mapping[str, Any]], Any]
) -> Callable[[], None] | None:
    """Let calls of a ScriptModule come to `call`: what stands in the instance is found first."""
    if not isinstance(module, torch.nn.Module):
        return None
    return divert_forward(vars(module), call)


def described(
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


def _graph_of(surgeon: Surgeon) -> Any:
    try:
        return surgeon.graph()
    except (AttributeError, RuntimeError) as error:
        raise TargetError(_cannot(error)) from error


def function_of(graph: Any) -> Any:
    """A function that runs a graph; the calls for it are torch's private ones."""
    try:
        return torch._C._create_function_from_graph("tapped", graph)
    except (AttributeError, RuntimeError) as error:
        raise TargetError(_cannot(error)) from error


def _cannot(error: BaseException) -> str:
    return (
        f"torch {torch.__version__} cannot put taps into the graph of this TorchScript model "
        f"({_first_line(error)}). Record it op by op with --runtime ops, or with another torch."
    )


def _calls(taps: Sequence[tuple[int, tuple[Any, ...]]], sites: Sequence[Site]) -> list[HeardCall]:
    """What was heard, call by call: what came in waits for the call to end."""
    calls: list[HeardCall] = []
    entered: dict[str, list[Leaves]] = {}
    operands: dict[str, torch.Tensor] = {}
    for number, values in taps:
        site = sites[number]
        name = site.node.name
        if site.what == "enter":
            tensors = [tensor for _, tensor in flatten(values) if tensor is not None]
            entered.setdefault(name, []).append(detached(loose_leaves(tensors)))
        elif site.what == "operand":
            operands[name] = values[0].detach()
        else:
            waiting = entered.get(name)
            inputs = waiting.pop() if waiting else ()
            calls.append(
                HeardCall(name, detached(_outputs(site, values)), inputs, operands.pop(name, None))
            )
    return calls


def _outputs(site: Site, values: tuple[Any, ...]) -> Leaves:
    if site.passage is None:
        return flatten(values[0]) if values else ()
    passage = site.passage
    made = [
        index
        for index in passage.order
        if (flags := passage.flags[index]) is None or not all(values[flag] for flag in flags)
    ]
    if not made and passage.pure:
        made = list(passage.order[:1])
    return loose_leaves([values[index] for index in made])


def detached(leaves: Leaves) -> Leaves:
    """Without the graph of autograd, and in plain memory."""
    return [(leaf, None if tensor is None else _plain(tensor)) for leaf, tensor in leaves]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_dense() if tensor.is_mkldnn else tensor


def _places(tree: Tree, learnt: Surgeon) -> list[Place]:
    """Every module, in the order in which first calls end; what is never called by its parent.

    Lists of modules are no layers: nothing can call them.
    """
    order = list(dict.fromkeys(node.name for node in learnt.finished))
    called = set(order)
    nodes = {node.name: node for node in tree.nodes()}
    heard = {site.node.name for site in learnt.sites if site.what == "exit"}
    before: dict[str, list[Node]] = {}
    for node in nodes.values():
        if node.name and node.name not in called and node.type not in _CONTAINERS:
            before.setdefault(_holder(node.name, called), []).append(node)
    found: list[Place] = []
    for name in [*order, ""]:
        found += [
            Place(n.name, n.type, gone=learnt.lost.get(n.name, _UNCALLED))
            for n in reversed(before.get(name, []))
        ]
        node = nodes.get(name, tree.root)
        if not name:
            found.append(Place("", node.type, "hook"))
        else:
            gone = None if name in heard else learnt.lost.get(name, UNUSED)
            known: Provenance = "inferred" if name in learnt.doubted else "scope"
            found.append(Place(name, node.type, known, gone=learnt.missed.get(name, gone)))
    return found


def _holder(name: str, called: set[str]) -> str:
    while name:
        name = name.rpartition(".")[0]
        if name in called:
            return name
    return ""


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0][:200]
