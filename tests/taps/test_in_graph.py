"""Summaries made inside compiled graphs: whole graphs, the eager model's numbers, every call."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tap
from support import Net
from tensortap.taps import replays


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def compiled(model: nn.Module, backend: Any = "aot_eager") -> Any:
    return torch.compile(model, fullgraph=True, backend=backend)


def record(model: Any, path: Path, *calls: Any, **options: Any) -> tap.Recording:
    options = {"layers": "all", "keep": "summary", **options}
    with torch.no_grad(), tap.record(model, path, **options) as rec:
        for call in calls:
            model(*call) if isinstance(call, tuple) else model(call)
            rec.step()
    assert rec.failure is None
    return tap.open(path)


def assert_same(found: tap.Recording, wanted: tap.Recording, rel: float = 1e-5) -> None:
    """The same records at the same moments in the same order, with the same numbers."""

    def places(run: tap.Recording) -> list[Any]:
        records = sorted(run.records, key=lambda r: r.order)
        return [(r.layer, r.port, r.leaf, r.batch, r.call, r.shape, r.dtype) for r in records]

    assert places(found) == places(wanted)
    by_order = [sorted(run.records, key=lambda r: r.order) for run in (found, wanted)]
    for own, other in zip(*by_order, strict=True):
        for name in ("count", "nan", "zeros"):
            assert getattr(own.summary, name) == getattr(other.summary, name), own
        for name in ("mean", "std", "min", "max", "absmax", "l2"):
            value = getattr(other.summary, name)
            assert getattr(own.summary, name) == pytest.approx(value, rel=rel, abs=rel), own
        assert own.summary.first == pytest.approx(other.summary.first, rel=rel, abs=rel)


@pytest.mark.parametrize(
    ("backend", "inputs"), [("eager", False), ("aot_eager", True), ("inductor", True)]
)
def test_the_numbers_are_those_of_the_eager_model(
    net: Net, ids: torch.Tensor, tmp_path: Path, backend: str, inputs: bool
) -> None:
    batches = [ids, ids.flip(0), ids]
    eager = record(net, tmp_path / "eager", *batches, inputs=inputs)
    plain = net(ids)
    run = compiled(net, backend)
    own = record(run, tmp_path / "own", *batches, inputs=inputs)
    assert_same(own, eager)
    assert not torch._dynamo.utils.counters["graph_break"]
    if backend != "inductor":
        assert torch.equal(plain, net(ids))
    assert any("summed up inside the graph" in note for note in own.manifest.notes)


def test_the_model_computes_what_it_computed(net: Net, ids: torch.Tensor, tmp_path: Path) -> None:
    with torch.no_grad():
        plain = compiled(net)(ids)
        torch._dynamo.reset()
        run = compiled(net)
        with tap.record(run, tmp_path / "run", layers="all", keep="summary", inputs=True):
            during = run(ids)
        after = run(ids)
    assert torch.equal(plain, during) and torch.equal(plain, after)


def test_nothing_is_handed_out_of_the_graph(net: Net, ids: torch.Tensor, tmp_path: Path) -> None:
    outputs = []

    def backend(graph: Any, examples: Any) -> Any:
        (last,) = (node for node in graph.graph.nodes if node.op == "output")
        outputs.append(len(last.args[0]))
        return graph.forward

    run = compiled(net, backend)
    record(run, tmp_path / "run", ids)
    assert sum(outputs) == 1  # the hook of the whole model stands in a graph of its own


class Twice(nn.Module):
    """Calls a layer twice, with other shapes, and gives nested things away."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.split = Split()

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor | None = None) -> torch.Tensor:
        x = self.one(x)
        x = self.one(torch.cat([x, x]))
        parts = self.split(b=x, a=scale)
        return parts["left"] + parts["right"][1]


class Split(nn.Module):
    def forward(self, a: torch.Tensor | None, b: torch.Tensor) -> dict[str, Any]:
        return {"left": b.abs(), "right": (None, b * (2 if a is None else a)), "name": "x"}


@pytest.mark.parametrize("inputs", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_layer_that_is_called_twice_has_two_records(
    tmp_path: Path, backend: str, inputs: bool
) -> None:
    torch.manual_seed(0)
    model, x = Twice().eval(), torch.randn(3, 4)
    calls = [(x,), (x + 1,)]
    eager = record(model, tmp_path / "eager", *calls, inputs=inputs)
    own = record(compiled(model, backend), tmp_path / "own", *calls, inputs=inputs)
    assert [(r.call, r.shape) for r in own["one"].port("output")][:2] == [(0, (3, 4)), (1, (6, 4))]
    assert_same(own, eager)
    assert own.manifest.skipped == eager.manifest.skipped


def test_keyword_arguments_come_in_the_order_of_the_signature(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Twice().eval(), torch.randn(3, 4)

    def run(model: Any, path: Path) -> tap.Recording:
        with torch.no_grad(), tap.record(model, path, layers="all", keep="summary", inputs=True):
            model(x, scale=torch.full((6, 4), 3.0))
        return tap.open(path)

    own = run(compiled(model), tmp_path / "own")
    assert_same(own, run(model, tmp_path / "eager"))
    assert [r.leaf for r in own["split"].port("input")] == ["['a']", "['b']"]


@pytest.mark.parametrize("wrapped", [False, True])
def test_blocks_that_are_compiled_one_by_one(tmp_path: Path, wrapped: bool) -> None:
    """More blocks of one class than dynamo allows graphs: each is heard under its own name."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(12))).eval()
    x = torch.randn(3, 4)
    before = torch._dynamo.config.recompile_limit
    eager = record(net, tmp_path / "eager", x, x * 2)
    for index, block in enumerate(net):
        if wrapped:
            net[index] = torch.compile(block, fullgraph=True, backend="aot_eager")
        else:
            block.compile(fullgraph=True, backend="aot_eager")
    assert_same(record(net, tmp_path / "own", x, x * 2), eager)
    assert torch._dynamo.config.recompile_limit == before


def test_other_shapes_compile_anew_and_are_heard(
    net: Net, ids: torch.Tensor, tmp_path: Path
) -> None:
    batches = [ids, ids[:1], ids[:, :3], ids, ids[:1, :2]]
    eager = record(net, tmp_path / "eager", *batches)
    assert_same(record(compiled(net), tmp_path / "own", *batches), eager)


def test_eager_layers_between_compiled_ones_keep_their_place(
    net: Net, ids: torch.Tensor, tmp_path: Path
) -> None:
    eager = record(net, tmp_path / "eager", ids, ids)
    net.blocks[0].compile(fullgraph=True, backend="aot_eager")
    net.blocks[2].compile(fullgraph=True, backend="aot_eager")
    assert_same(record(net, tmp_path / "own", ids, ids), eager)


def test_calls_within_a_step_are_numbered(net: Net, ids: torch.Tensor, tmp_path: Path) -> None:
    run = compiled(net)
    with torch.no_grad(), tap.record(run, tmp_path / "run", layers="all", keep="summary") as rec:
        run(ids)
        run(ids)
        rec.flush()
        assert {r.call for r in tap.open(tmp_path / "run", partial=True).records} == {0, 1}
        rec.step()
        run(ids)
    heard = [(r.batch, r.call) for r in tap.open(tmp_path / "run")["head"].records]
    assert heard == [(0, 0), (0, 1), (1, 0)]


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        y.mul_(3).add_(1)
        z = self.b(y)
        z.relu_()
        return z.zero_()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_what_is_written_behind_the_hook_is_not_recorded(tmp_path: Path, backend: str) -> None:
    torch.manual_seed(0)
    model, x = InPlace().eval(), torch.randn(3, 4)
    eager = record(model, tmp_path / "eager", x, layers=["a", "b"])
    own = record(compiled(model, backend), tmp_path / "own", x, layers=["a", "b"])
    assert own["b"].records[0].summary.absmax > 0
    assert_same(own, eager)


class Breaks(nn.Module):
    """Looks at its values as it runs, so that its graph breaks in the middle of a call."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.a(x)
            x = self.b(x) * 0.5 if bool(x.sum() > 0) else x - 1
        return x


@pytest.mark.parametrize("inputs", [False, True])
def test_a_graph_that_breaks_keeps_calls_and_numbers(tmp_path: Path, inputs: bool) -> None:
    torch.manual_seed(0)
    model, x = Breaks().eval(), torch.randn(4, 4)
    eager = record(model, tmp_path / "eager", x, x, inputs=inputs)
    own = record(torch.compile(model, backend="eager"), tmp_path / "own", x, x, inputs=inputs)
    found, wanted = (
        {(r.layer, r.port, r.batch, r.call): r.summary.l2 for r in run.records}
        for run in (own, eager)
    )
    assert found == pytest.approx(wanted)


def test_training_is_heard_once_and_changes_nothing(tmp_path: Path) -> None:
    """With gradients, and a block that is computed again on the way back."""
    from torch.utils.checkpoint import checkpoint

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = checkpoint(self.a, x, use_reentrant=False)
            return self.b(torch.tanh(y))

    x = torch.randn(3, 4)
    ends = []
    for recorded in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Again()
        run = compiled(model)
        if recorded:
            with tap.record(run, tmp_path / "run", layers="all", keep="summary") as rec:
                run(x).square().mean().backward()
            assert rec.failure is None
        else:
            run(x).square().mean().backward()
        ends.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    assert [r.call for r in tap.open(tmp_path / "run")["a"].port("output")] == [0]


def test_a_model_that_is_compiled_while_it_is_recorded(
    net: Net, ids: torch.Tensor, tmp_path: Path
) -> None:
    eager = record(net, tmp_path / "eager", ids, ids)
    with torch.no_grad(), tap.record(net, tmp_path / "own", layers="all", keep="summary") as rec:
        run = compiled(net)
        for _ in range(2):
            run(ids)
            rec.step()
    own = tap.open(tmp_path / "own")
    assert {r.layer for r in own.records} == {r.layer for r in eager.records}
    assert own["head"].records[1].summary.l2 == pytest.approx(eager["head"].records[1].summary.l2)


@pytest.mark.parametrize("keep", ["tensors", "sketch"])
def test_values_of_a_model_compiled_in_place_are_those_of_each_call(
    net: Net, ids: torch.Tensor, tmp_path: Path, keep: Any
) -> None:
    """Its own hooks are in its graph: what a run leaves behind is taken at once, since another
    compiled model may share its memory."""
    batches = [ids, ids.flip(0), ids]
    eager = record(net, tmp_path / "eager", *batches, keep=keep)
    net.compile(fullgraph=True, backend="aot_eager")
    before = net._compiled_call_impl
    heard = []
    path = tmp_path / "own"
    with torch.no_grad(), tap.record(net, path, layers="all", keep=keep) as rec:
        for batch in batches:
            net(batch)
            heard.append(len(rec.tap._compiled))
            rec.step()
    assert net._compiled_call_impl is before and max(heard) == 0
    own = tap.open(path)
    assert_same(own, eager)


def test_graphs_of_torch_are_its_own_again(net: Net, ids: torch.Tensor, tmp_path: Path) -> None:
    method = torch.cuda.CUDAGraph.replay
    with tap.record(net, tmp_path / "a", keep="summary"):
        net(ids)
    assert torch.cuda.CUDAGraph.replay is method
    assert not replays._ONLOOKERS


def test_what_compiles_is_loaded_only_where_something_is_compiled(tmp_path: Path) -> None:
    code = """
import sys
import torch
import tensortap as tap

model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.ones(2, 4)
out = sys.argv[1]
for inputs in (False, True):
    with tap.record(model, f"{out}/{inputs}", layers="all", keep="summary", inputs=inputs) as rec:
        model(x)
        rec.step()
    assert rec.failure is None
print(sorted({"torch._dynamo", "torch._inductor", "triton"} & set(sys.modules)))
with tap.record(model, f"{out}/late", layers="all", keep="summary") as rec:
    run = torch.compile(model, backend="eager", fullgraph=True)
    run(x)
    run(x)
assert rec.failure is None
print(sorted((r.layer, r.call) for r in tap.open(f"{out}/late").records))
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    loaded, late = done.stdout.splitlines() or (done.stderr, "")
    assert loaded == "[]"
    assert late == str([(name, call) for name in ("", "0", "1") for call in (0, 1)])


def test_a_thread_leaves_the_runs_of_others_alone(tmp_path: Path) -> None:
    """One waits between the two tensors of a call while another runs the same graph."""
    half_way, go_on = threading.Event(), threading.Event()

    class Slow(torch.fx.Interpreter):
        heard = 0

        def run_node(self, node: torch.fx.Node) -> Any:
            found = super().run_node(node)
            if threading.current_thread().name == "slow" and "tensortap" in str(node.target):
                self.heard += 1
                if self.heard == 1:
                    half_way.set()
                    assert go_on.wait(20)
            return found

    def backend(graph: torch.fx.GraphModule, example: Any) -> Any:
        return lambda *args: Slow(graph).run(*args)

    model = Split()
    run = compiled(model, backend)
    with torch.no_grad(), tap.record(run, tmp_path / "run", layers="all", keep="summary") as rec:
        run(None, torch.ones(2, 8))
        slow = threading.Thread(target=lambda: run(None, torch.full((2, 8), 2.0)), name="slow")
        slow.start()
        assert half_way.wait(20)
        run(None, torch.full((2, 8), 3.0))
        rec.flush()
        go_on.set()
        slow.join()
    assert rec.failure is None
    calls: dict[tuple[str, int], set[str]] = {}
    for found in tap.open(tmp_path / "run").records:
        leaves = calls.setdefault((found.layer, found.call), set())
        assert found.leaf not in leaves
        leaves.add(found.leaf)
    expected = {name: leaves for (name, call), leaves in calls.items() if call == 0}
    assert any(len(leaves) > 1 for leaves in expected.values())
    assert calls == {(name, call): expected[name] for name in expected for call in range(3)}


@pytest.mark.parametrize("inputs", [False, True])
def test_threads_lose_no_call(tmp_path: Path, inputs: bool) -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    run, before = compiled(model, "eager"), sys.getswitchinterval()

    def some() -> None:
        for _ in range(40):
            run(torch.ones(2, 16))

    with tap.record(run, tmp_path / "run", keep="summary", inputs=inputs) as rec:
        run(torch.ones(2, 16))
        threads = [threading.Thread(target=some) for _ in range(3)]
        sys.setswitchinterval(1e-5)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(before)
    assert rec.failure is None
    outputs = [(r.layer, r.call) for r in tap.open(tmp_path / "run").records if r.port == "output"]
    names = {name for name, _ in outputs}
    assert len(names) >= 8
    assert sorted(outputs) == [(name, call) for name in sorted(names) for call in range(121)]
