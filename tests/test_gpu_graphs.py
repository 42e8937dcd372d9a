"""Recording inside CUDA graphs: by hand, and by torch.compile; each replay is a call."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tap

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    """Writes into what its layers returned, behind the hooks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        y.relu_()
        z = self.down(y)
        if not torch.is_grad_enabled():
            y.zero_()
        return z.add_(x)


class Stack(nn.Module):
    def __init__(self, blocks: int = 3, width: int = 64) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def stack(**options: Any) -> Stack:
    torch.manual_seed(0)
    return Stack(**options).cuda().eval()


def batches(count: int, rows: int = 32) -> list[torch.Tensor]:
    made = torch.Generator(device="cuda").manual_seed(1)
    return [torch.randn(rows, 64, device="cuda", generator=made) for _ in range(count)]


def eager(model: nn.Module, path: Path, data: list[torch.Tensor], **options: Any) -> tap.Recording:
    with torch.no_grad(), tap.record(model, path, **{"layers": "all", **options}) as rec:
        for batch in data:
            model(batch)
            rec.step()
    assert rec.failure is None
    return tap.open(path)


def assert_same(found: tap.Recording, wanted: tap.Recording, rel: float = 1e-4) -> None:
    records = [sorted(run.records, key=lambda r: r.order) for run in (found, wanted)]
    places = [[(r.layer, r.port, r.leaf, r.batch, r.call, r.shape) for r in x] for x in records]
    assert places[0] == places[1]
    for own, other in zip(*records, strict=True):
        where = (own.layer, own.port, own.batch)
        assert own.summary.count == other.summary.count, where
        for name in ("mean", "std", "absmax", "l2"):
            value = getattr(other.summary, name)
            assert getattr(own.summary, name) == pytest.approx(value, rel=rel, abs=1e-5), where
        if other.stored:
            torch.testing.assert_close(own.tensor(), other.tensor(), rtol=1e-3, atol=1e-4)


# By hand.


def capture(model: nn.Module, x: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    torch.randn(2, 2, device="cuda").mm(torch.randn(2, 2, device="cuda"))  # cuBLAS must be there
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(x)
    return graph, out


OPTIONS: list[dict[str, Any]] = [
    {"keep": "summary"},
    {"keep": "summary", "inputs": True},
    {"keep": "summary", "histograms": True},
    {"keep": "sketch"},
    {"keep": "tensors"},
    {"keep": "tensors", "inputs": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_graph_captured_by_hand_is_recorded_at_each_replay(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    model, data = stack(), batches(12)
    wanted = eager(model, tmp_path / "eager", data, **options)
    x = data[0].clone()
    with torch.no_grad(), tap.record(model, tmp_path / "own", layers="all", **options) as rec:
        graph, out = capture(model, x)
        plain = [model.head.weight.new_zeros(0)]
        for batch in data:
            x.copy_(batch)
            graph.replay()
            plain.append(out.clone())
            rec.step()
    assert rec.failure is None
    own = tap.open(tmp_path / "own")
    assert_same(own, wanted)
    assert any("A CUDA graph was captured" in note for note in own.manifest.notes)
    with torch.no_grad():
        for batch, got in zip(data, plain[1:], strict=True):
            torch.testing.assert_close(model(batch), got)


def test_replays_within_a_step_are_calls_and_the_capture_is_none(tmp_path: Path) -> None:
    model, data = stack(), batches(4)
    x = data[0].clone()
    with torch.no_grad(), tap.record(model, tmp_path / "r", layers="all", keep="summary") as rec:
        graph, _ = capture(model, x)
        rec.step()  # nothing ran
        for batch in data[:3]:
            x.copy_(batch)
            graph.replay()
        model(data[3])  # and one that is no graph
        rec.flush()
    own = tap.open(tmp_path / "r")
    assert [(r.batch, r.call) for r in own["head"].records] == [(1, i) for i in range(4)]
    for record, batch in zip(own["blocks.0.up"].records, data, strict=True):
        with torch.no_grad():
            expected = tap.summarize(model.blocks[0].up(batch))
        assert record.summary.l2 == pytest.approx(expected.l2, rel=1e-4)


def test_nobody_waits_and_the_graph_lives_on(tmp_path: Path) -> None:
    """The device is far behind the host; the graph is replayed when its recording is closed."""
    model, data = stack(), batches(6)
    x = data[0].clone()
    with torch.no_grad():
        path = tmp_path / "r"
        with tap.record(model, path, layers="all", keep="summary") as rec:
            graph, out = capture(model, x)
            graph.replay()
            rec.step()
            torch.cuda.synchronize()
            torch.cuda._sleep(200_000_000)
            torch.cuda.set_sync_debug_mode("error")
            try:
                for batch in data:
                    x.copy_(batch)
                    graph.replay()
                    rec.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        del rec
        gc.collect()
        torch.cuda.empty_cache()
        others = [torch.zeros(1 << 20, device="cuda") for _ in range(64)]
        for batch in data:
            x.copy_(batch)
            graph.replay()
            torch.testing.assert_close(out, model(batch))
        assert all(not other.any() for other in others)
    own = tap.open(path)
    assert [r.batch for r in own["head"].records] == list(range(7))
    for record, batch in zip(own["blocks.0.up"].records, [data[0], *data], strict=True):
        expected = tap.summarize(
            torch.nn.functional.linear(batch, *model.blocks[0].up.parameters())
        )
        assert record.summary.l2 == pytest.approx(expected.l2, rel=1e-4)


@pytest.mark.parametrize("keep", ["summary", "tensors"])
def test_a_capture_while_the_writer_is_busy(tmp_path: Path, keep: Any) -> None:
    """A capture fails if another thread of ours calls what CUDA forbids meanwhile."""
    model, data = stack(blocks=8, width=64), batches(3, rows=4096)
    x = data[0].clone()
    graphs = []
    with torch.no_grad(), tap.record(model, tmp_path / "r", layers="all", keep=keep) as rec:
        for _ in range(8):
            for batch in data:
                model(batch)
                rec.step()
            graphs.append(capture(model, x))
            graphs[-1][0].replay()
            rec.step()
    assert rec.failure is None
    assert len(tap.open(tmp_path / "r")["head"].records) == 32


def test_a_graph_from_before_is_named(tmp_path: Path) -> None:
    model, data = stack(), batches(1)
    with torch.no_grad():
        model(data[0])
        graph, _ = capture(model, data[0])
        with tap.record(model, tmp_path / "r", layers="all", keep="summary") as rec:
            graph.replay()
    assert any("captured before this recording" in note for note in rec.notes)


def test_against_a_reference(tmp_path: Path) -> None:
    model, data = stack(), batches(3)
    eager(model, tmp_path / "eager", data)
    x = data[0].clone()
    path = tmp_path / "own"
    with (
        torch.no_grad(),
        tap.record(model, path, layers="all", against=tmp_path / "eager", preset="device") as rec,
    ):
        graph, _ = capture(model, x)
        for batch in data:
            x.copy_(batch)
            graph.replay()
            rec.step()
    assert rec.failure is None and rec.comparison.same


class Slices(nn.Module):
    """Gives away what does not lie side by side, or begins somewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.rest, self.whole = (nn.Identity() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        self.even(x[:, ::2])
        self.rest(x.reshape(-1)[1:])
        return self.whole((x * 100).to(torch.int64))


def test_values_of_any_kind(tmp_path: Path) -> None:
    model, data = Slices(), batches(3)
    wanted = eager(model, tmp_path / "eager", data, keep="summary")
    x = data[0].clone()
    path = tmp_path / "own"
    with torch.no_grad(), tap.record(model, path, layers="all", keep="summary") as rec:
        graph, _ = capture(model, x)
        for batch in data:
            x.copy_(batch)
            graph.replay()
            rec.step()
    assert rec.failure is None
    own = tap.open(path)
    assert own.manifest.skipped == wanted.manifest.skipped
    assert_same(own, wanted)


def test_graphed_callables(tmp_path: Path) -> None:
    model, data = stack(), batches(3)
    wanted = eager(model, tmp_path / "eager", data, keep="summary", layers="blocks.1.*")
    with tap.record(model, tmp_path / "own", layers="blocks.1.*", keep="summary") as rec:
        sample = data[0].clone().requires_grad_()
        model.blocks[1] = torch.cuda.make_graphed_callables(model.blocks[1], (sample,))
        rec.step()  # its warm-up
        for batch in data:
            model(batch.requires_grad_())
            rec.step()
    assert rec.failure is None
    own = tap.open(tmp_path / "own")
    heard = [r.summary.l2 for r in own["blocks.1.up"].records if r.batch > 0]
    assert heard == pytest.approx([r.summary.l2 for r in wanted["blocks.1.up"].records], rel=1e-4)


# By torch.compile.


MODES = [None, "reduce-overhead"]


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[1], OPTIONS[4]], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_compiled(tmp_path: Path, mode: str | None, options: dict[str, Any]) -> None:
    model, data = stack(), batches(7)
    wanted = eager(model, tmp_path / "eager", data, **options)
    run = torch.compile(model, fullgraph=True, mode=mode)
    outs = []
    with torch.no_grad(), tap.record(run, tmp_path / "own", layers="all", **options) as rec:
        for batch in data:
            outs.append(run(batch).clone())
            rec.step()
        graphs = 0 if rec.tap._captures is None else rec.tap._captures._captured
    assert rec.failure is None
    assert not torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    if mode is not None and options["keep"] == "summary":
        assert graphs > 0
    assert_same(tap.open(tmp_path / "own"), wanted)
    with torch.no_grad():
        for batch, out in zip(data, outs, strict=True):
            torch.testing.assert_close(model(batch), out, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("keep", ["summary", "tensors"])
@pytest.mark.parametrize("how", ["wrapped", "in place", "regions"])
def test_calls_in_one_step_are_told_apart(tmp_path: Path, how: str, keep: Any) -> None:
    """As in generation: many calls before rec.step(), each overwrites what the last one left."""
    model, data = stack(), batches(8)
    names = [f"blocks.{i}" for i in range(3)]
    wanted: dict[tuple[str, int], float] = {}
    with torch.no_grad():
        for call, batch in enumerate(data):
            x = batch
            for index, block in enumerate(model.blocks):
                x = block(x)
                wanted[(f"blocks.{index}", call)] = tap.summarize(x).l2
    run: Any = model
    if how == "wrapped":
        run = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    elif how == "in place":
        model.compile(fullgraph=True, mode="reduce-overhead")
    else:
        for block in model.blocks:
            block.compile(fullgraph=True, mode="reduce-overhead")
    with torch.no_grad(), tap.record(run, tmp_path / "r", layers=names, keep=keep) as rec:
        for batch in data:
            torch.compiler.cudagraph_mark_step_begin()
            run(batch)
    assert rec.failure is None
    own = tap.open(tmp_path / "r")
    assert not own.manifest.skipped
    found = {(r.layer, r.call): r.summary.l2 for r in own.records}
    assert found == pytest.approx(wanted, rel=1e-4)


def test_compiled_other_shapes_and_nobody_waits(tmp_path: Path) -> None:
    model = stack()
    data = [*batches(4), *batches(4, rows=16), *batches(4)]
    wanted = eager(model, tmp_path / "eager", data, keep="summary")
    run = torch.compile(model, fullgraph=True, mode="reduce-overhead", dynamic=False)
    with torch.no_grad(), tap.record(run, tmp_path / "own", layers="all", keep="summary") as rec:
        for index, batch in enumerate(data):
            if index == 8:
                torch.cuda.synchronize()
                torch.cuda._sleep(200_000_000)
                torch.cuda.set_sync_debug_mode("error")
            run(batch)
            rec.step()
        torch.cuda.set_sync_debug_mode("default")
    assert rec.failure is None
    assert_same(tap.open(tmp_path / "own"), wanted)


def test_a_compiled_model_captured_by_hand(tmp_path: Path) -> None:
    model, data = stack(), batches(4)
    for keep in ("summary", "tensors"):
        torch._dynamo.reset()
        wanted = eager(model, tmp_path / f"eager-{keep}", data, keep=keep)
        run = torch.compile(model, fullgraph=True)
        x = data[0].clone()
        path = tmp_path / keep
        with torch.no_grad(), tap.record(run, path, layers="all", keep=keep) as rec:
            run(x)
            rec.step()
            graph, _ = capture(run, x)
            rec.moment(batch=0)
            for index, batch in enumerate(data):
                rec.moment(batch=10 + index)
                x.copy_(batch)
                graph.replay()
        assert rec.failure is None
        own = tap.open(path)
        heard = [r.summary.l2 for r in own["blocks.1.up"].records if r.batch >= 10]
        expected = [r.summary.l2 for r in wanted["blocks.1.up"].records]
        assert heard == pytest.approx(expected, rel=1e-4)


def test_training_under_reduce_overhead(tmp_path: Path) -> None:
    model, data = stack(), batches(6)
    model.train()
    run = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    wanted = eager(model, tmp_path / "eager", data, keep="summary")
    with tap.record(run, tmp_path / "own", layers="all", keep="summary") as rec:
        for batch in data:
            optimizer.zero_grad()
            run(batch).square().mean().backward()
            optimizer.step()
            rec.step()
    assert rec.failure is None
    assert_same(tap.open(tmp_path / "own"), wanted)


def test_a_capture_that_fails_ends_no_recording(tmp_path: Path) -> None:
    model, (first, second) = stack(), batches(2)
    wanted = eager(model, tmp_path / "eager", [first, second], keep="summary")
    with torch.no_grad(), tap.record(model, tmp_path / "own", layers="all", keep="summary") as rec:
        model(first)
        rec.step()
        with pytest.raises(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
            model(second).sum().item()  # nothing may be read back while it is captured
        model(second)  # so the program goes on without
    assert rec.failure is None
    assert_same(tap.open(tmp_path / "own"), wanted)


def test_rows_are_left_and_settled_inside_a_graph(tmp_path: Path) -> None:
    """Also where no eager forward came before, which would have compiled the kernels."""
    model, (first, second) = stack(), batches(2)
    wanted = eager(model, tmp_path / "eager", [first, second], keep="summary")
    triton_summary = pytest.importorskip("tensortap.numerics.triton_summary")
    triton_summary._KERNELS.clear()
    with torch.no_grad(), tap.record(model, tmp_path / "own", layers="all", keep="summary") as rec:
        static = first.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(static)
        (found,) = rec.tap._captures._graphs.values()  # type: ignore[attr-defined]
        assert found.settled == found.rows > 0 and found.parts is not None
        for batch in (first, second):
            static.copy_(batch)
            graph.replay()
            rec.step()
    assert rec.failure is None
    assert_same(tap.open(tmp_path / "own"), wanted)


def test_two_compiled_models_in_turn(tmp_path: Path) -> None:
    """CUDA graphs of one tree share their memory: the other model's run writes over ours."""
    model, data = stack(), batches(6)
    wanted = eager(model, tmp_path / "eager", data, keep="tensors")
    run = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    other = torch.compile(stack(), fullgraph=True, mode="reduce-overhead")
    with torch.no_grad(), tap.record(run, tmp_path / "own", layers="all", keep="tensors") as rec:
        for batch in data:
            run(batch)
            other(batch.flip(0))
            rec.step()
    assert rec.failure is None
    assert_same(tap.open(tmp_path / "own"), wanted)
