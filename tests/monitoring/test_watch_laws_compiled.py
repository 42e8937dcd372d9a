"""Laws of `tap.watch` inside torch.compile: whole graphs, one for every cadence, true values."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_watch_laws import ALL, InPlace, Odd, Shared
from torch import nn
from watch_truth import (
    Stack,
    adamw,
    assert_recorded,
    floats,
    ports,
    recorded,
    steps,
    train,
    truth,
)

import tensortap as tap

OLD = torch.__version__ < "2.12"

TOLERANCE = {"eager": 1e-6, "aot_eager": 1e-5, "inductor": 1e-4}


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "train"


def stack(depth: int = 2, **options: Any) -> Stack:
    torch.manual_seed(0)
    return Stack(depth, **options)


def compiled(model: nn.Module, backend: Any = "aot_eager") -> Any:
    return torch.compile(model, fullgraph=True, backend=backend)


class Counting:
    """A backend that counts the graphs that it is given."""

    def __init__(self) -> None:
        self.graphs: list[Any] = []

    def __call__(self, graph: Any, examples: Any) -> Any:
        self.graphs.append(graph)
        return graph.forward


# What it says is true.


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("micro", [1, 2])
def test_every_value_is_that_of_the_true_tensor(path: Path, backend: str, micro: int) -> None:
    model, data = stack(), floats(2, per_step=micro)
    wanted = truth(model, ["blocks.0", "blocks.1"], data)
    with tap.watch(model, path, every=1, **ALL) as watch:
        train(model, adamw(model), data, run=compiled(model, backend))
    assert watch.failure is None
    assert_recorded(path, wanted, TOLERANCE[backend])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("layers", [["blocks.0", "blocks.1"], ["blocks.0.inner", "blocks.1"]])
def test_checkpointed_layers_are_recorded_once(path: Path, backend: str, layers: list[str]) -> None:
    model, data = stack(reentrant=False), floats(2)
    wanted = truth(model, layers, data)
    with tap.watch(model, path, layers=layers, every=1, **ALL) as watch:
        train(model, adamw(model), data, run=compiled(model, backend))
    assert watch.failure is None
    assert_recorded(path, wanted, TOLERANCE[backend])


def test_compiled_in_place_and_by_regions(tmp_path: Path) -> None:
    """model.compile(), and blocks compiled one by one, which many training scripts do."""
    for number, how in enumerate(("whole", "regions")):
        torch._dynamo.reset()
        model, data = stack(), floats(2)
        wanted = truth(model, ["blocks.0", "blocks.1"], data)
        path = tmp_path / str(number)
        if how == "whole":
            model.compile(fullgraph=True, backend="aot_eager")
        else:
            for block in model.blocks:
                block.compile(fullgraph=True, backend="aot_eager")
        with tap.watch(model, path, every=1, **ALL) as watch:
            train(model, adamw(model), data)
        assert watch.failure is None
        assert_recorded(path, wanted, TOLERANCE["aot_eager"])


def test_the_compiled_wrapper_is_watched_under_the_models_own_names(path: Path) -> None:
    model, data = stack(), floats(2)
    wanted = truth(model, ["blocks.0", "blocks.1"], data)
    run = compiled(model)
    with tap.watch(run, path, every=1, **ALL):
        train(model, adamw(model), data, run=run)
    assert_recorded(path, wanted, TOLERANCE["aot_eager"])


def test_a_model_that_ran_compiled_before_is_heard(path: Path) -> None:
    model, data = stack(), floats(2)
    run = compiled(model)
    run(data[0][0]).sum().backward()
    model.zero_grad()
    wanted = truth(model, ["blocks.0", "blocks.1"], data)
    with tap.watch(run, path, every=1, **ALL):
        train(model, adamw(model), data, run=run)
    assert_recorded(path, wanted, TOLERANCE["aot_eager"])


def test_nested_outputs_have_a_record_a_leaf(path: Path) -> None:
    torch.manual_seed(0)
    model, data = Odd(), floats(1)
    names = ["pair", "table", "nothing", "made"]
    twin = copy.deepcopy(model)
    eager = path.with_name("eager")
    for one, where, run in ((twin, eager, None), (model, path, compiled(model))):
        with tap.watch(one, where, layers=names, every=1, params=False):
            train(one, adamw(one), data, run=run)
    own, wanted = recorded(path), recorded(eager)
    assert set(own) == set(wanted)
    for place, record in wanted.items():
        assert own[place].summary.l2 == pytest.approx(record.summary.l2, rel=1e-5)


def test_a_shared_layer_is_recorded_call_by_call(path: Path) -> None:
    torch.manual_seed(0)
    model, data = Shared(), floats(2)
    wanted = truth(model, ["one", "last"], data)
    with tap.watch(model, path, layers=["one", "last"], every=1, **ALL):
        train(model, adamw(model), data, run=compiled(model))
    assert_recorded(path, wanted, TOLERANCE["aot_eager"])


@pytest.mark.skipif(OLD, reason="torch 2.11 traces no gradient hook of what is written in place")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_what_is_done_in_place_afterwards_is_not_recorded(path: Path, backend: str) -> None:
    torch.manual_seed(0)
    model, data = InPlace(), floats(2)
    wanted = truth(model, ["a", "b"], data)
    with tap.watch(model, path, layers=["a", "b"], every=1, params=False):
        train(model, adamw(model), data, run=compiled(model, backend))
    assert_recorded(path, ports(wanted, "output", "grad_output", "grad_param"), TOLERANCE[backend])


def test_evaluation_between_steps_is_no_part_of_training(path: Path) -> None:
    model, data = stack(), floats(3)
    wanted = truth(model, ["blocks.0", "blocks.1"], data)
    run = compiled(model)

    def evaluate() -> None:
        model.eval()
        run(data[0][0])
        with torch.no_grad():
            run(data[1][0])
        model.train()
        with torch.no_grad():
            run(data[2][0])

    with tap.watch(model, path, every=1, **ALL):
        train(model, adamw(model), data, run=run, before_step=evaluate, after_step=evaluate)
    assert_recorded(path, wanted, TOLERANCE["aot_eager"])


def test_copies_of_one_class_are_told_apart(tmp_path: Path) -> None:
    """Dynamo shares graphs between instances and does not look at hooks when it does."""
    plain, data = stack(), floats(2)
    first, second = copy.deepcopy(plain), copy.deepcopy(plain)
    with torch.no_grad():
        for parameter in second.parameters():
            parameter *= 1.5
    layers = ["blocks.0", "blocks.1"]
    wanted = {"a": truth(first, layers, data), "b": truth(second, layers, data)}
    runs = {id(model): compiled(model) for model in (plain, first, second)}
    train(plain, adamw(plain), floats(1), run=runs[id(plain)])
    with (
        tap.watch(first, tmp_path / "a", every=1, **ALL),
        tap.watch(second, tmp_path / "b", every=1, **ALL),
    ):
        optimizers = {id(model): adamw(model) for model in (plain, first, second)}
        for step in data:
            for model in (first, plain, second):
                train(model, optimizers[id(model)], [step], run=runs[id(model)])
    for name in wanted:
        assert_recorded(tmp_path / name, wanted[name], TOLERANCE["aot_eager"])


@pytest.mark.parametrize("wrapped", [False, True])
def test_blocks_that_are_compiled_one_by_one(path: Path, wrapped: bool) -> None:
    """More blocks of one class than dynamo allows graphs: each is heard under its own name."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4)) for _ in range(12)))
    x, norms = torch.randn(3, 4), []
    with torch.no_grad():
        y = x
        for block in net:
            y = block(y)
            norms.append(tap.summarize(y).l2)
    before = torch._dynamo.config.recompile_limit
    for index, block in enumerate(net):
        if wrapped:
            net[index] = torch.compile(block, fullgraph=True, backend="aot_eager")
        else:
            block.compile(fullgraph=True, backend="aot_eager")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    layers = [str(index) for index in range(12)]
    with tap.watch(net, path, layers=layers, every=1, params=False) as watch:
        for _ in range(2):
            net(x).square().mean().backward()
            optimizer.step()
    assert watch.failure is None
    run = tap.open(path)
    for index, norm in enumerate(norms):
        found = [r for r in run[str(index)].records if r.port == "output"]
        assert [r.summary.l2 for r in found] == pytest.approx([norm, norm], rel=1e-5)
        assert sum(r.port == "grad_output" for r in run[str(index)].records) == 2
    assert torch._dynamo.config.recompile_limit == before


# One graph, whole, for every cadence.


@pytest.mark.parametrize(
    ("within", "graphs"),
    [
        (["first", "blocks.*", "blocks.*.inner"], 1),
        ("all", 2),  # the whole model is a layer too, and its own hook stands outside its graph
    ],
)
def test_one_graph_for_every_cadence(path: Path, within: Any, graphs: int) -> None:
    model, backend = stack(), Counting()
    run, optimizer = compiled(model, backend), adamw(model)
    with tap.watch(model, path, every=3, within=within, **ALL) as watch:
        train(model, optimizer, floats(7), run=run)  # 0, 3, 6
        watch.set(every=1)
        train(model, optimizer, floats(2), run=run)  # 7, 8
        watch.set(every=1000, rules=())
        train(model, optimizer, floats(2), run=run)
        watch.set(layers=["first", "blocks.1.inner"], every=1, grads=False)
        train(model, optimizer, floats(2), run=run)  # 11, 12
        watch.set(outputs=False, grads=True, params=False, updates=False)
        train(model, optimizer, floats(1), run=run)  # 13
    assert len(backend.graphs) == graphs
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == graphs
    assert steps(path) == [0, 3, 6, 7, 8, 11, 12, 13]
    own = recorded(path)
    heard = {place[0] for place in own if place[1] == "output" and place[3] >= 11}
    assert heard == {"first", "blocks.1.inner"}
    assert {place[1] for place in own if place[3] == 13} == {"grad_output", "grad_param"}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_no_recompilation_behind_autograd(path: Path, backend: str) -> None:
    model = stack()
    run, optimizer = compiled(model, backend), adamw(model)
    with tap.watch(model, path, every=2, **ALL) as watch:
        train(model, optimizer, floats(5), run=run)
        watch.set(every=1)
        train(model, optimizer, floats(3), run=run)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1
    assert counters["aot_autograd"]["total"] == 1
    assert not counters["graph_break"]


@pytest.mark.skipif(OLD, reason="torch 2.11 puts nodes of its own beside a gradient hook's")
def test_no_more_nodes_than_taps(path: Path) -> None:
    """The graph is the plain one and a call for each tap, forward and backward."""

    def nodes(model: nn.Module, watched: bool) -> int:
        torch._dynamo.reset()
        backend = Counting()
        run = compiled(model, backend)
        data = floats(1)
        if watched:
            with tap.watch(model, path, every=1, params=False):
                train(model, adamw(model), data, run=run)
        else:
            train(model, adamw(model), data, run=run)
        (graph,) = backend.graphs
        kinds = ("call_function", "call_method", "call_module")
        return sum(node.op in kinds for node in graph.graph.nodes)

    plain = nodes(stack(2), False)
    own = nodes(stack(2), True)
    assert 0 < own - plain <= 2 * 4


# Nothing changes.


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_training_is_the_same(path: Path, backend: str) -> None:
    """Dropout inside the graph: the random state is where it would be, and so are the weights."""
    ends = []
    for watched in (False, True):
        torch._dynamo.reset()
        model, data = stack(), floats(4)
        for block in model.blocks:
            block.drop.p = 0.3
        optimizer = adamw(model)
        run = compiled(model, backend)
        torch.manual_seed(5)
        if watched:
            with tap.watch(model, path, every=2, **ALL):
                train(model, optimizer, data, run=run)
        else:
            train(model, optimizer, data, run=run)
        ends.append(([p.detach().clone() for p in model.parameters()], torch.get_rng_state()))
    (plain, state), (own, own_state) = ends
    assert torch.equal(state, own_state)
    for a, b in zip(plain, own, strict=True):
        if backend == "inductor":  # another graph may be fused in another way
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(a, b)


def test_a_closed_watch_hears_nothing_and_the_compiled_model_runs_on(path: Path) -> None:
    model = stack()
    run, optimizer = compiled(model), adamw(model)
    with tap.watch(model, path, every=1):
        train(model, optimizer, floats(2), run=run)
    train(model, optimizer, floats(3), run=run)
    assert steps(path) == [0, 1]


def test_a_nan_is_named_at_its_step(path: Path) -> None:
    model, data = stack(3), floats(6)
    run, optimizer = compiled(model), adamw(model)
    with pytest.warns(tap.TapWarning, match=r"blocks\.1"):
        watch = tap.watch(model, path, every=100, ring=3)
        train(model, optimizer, data[:5], run=run)
        with torch.no_grad():
            model.blocks[1].inner.bias[2] = float("nan")
        train(model, optimizer, data[5:], run=run)
        watch.close()
    alarm = watch.alarms[0]
    assert (alarm.layer, alarm.port, alarm.batch) == ("blocks.1", "output", 5)
    assert steps(path) == [0, 2, 3, 4, 5]


def test_compiled_autograd_gets_its_gradients(path: Path) -> None:
    """A hook that returns nothing would be taken for no gradient at all."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(3, 4)
    with (
        tap.watch(net, path, layers="leaves", every=1) as watch,
        torch._dynamo.config.patch(compiled_autograd=True),
    ):
        step = torch.compile(lambda: net(x).square().mean().backward(), backend="aot_eager")
        for _ in range(2):
            optimizer.zero_grad()
            step()
            optimizer.step()
    assert watch.failure is None
    found = [r.batch for r in tap.open(path)["0"].records if r.port == "grad_output"]
    assert found == [0, 1]
