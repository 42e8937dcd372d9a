"""Laws of `tap.watch` in loops that are not the plain one: closures, scalers, several backwards."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from watch_truth import (
    Stack,
    adamw,
    assert_recorded,
    assert_same,
    floats,
    ports,
    recorded,
    steps,
    tokens,
    train,
    truth,
)

import tensortap as tap
from forked_commands import Commands

ALL: dict[str, Any] = {"grads": True, "params": True, "updates": True}
BLOCKS = ["blocks.0", "blocks.1"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "train"


def stack(depth: int = 2, **options: Any) -> Stack:
    torch.manual_seed(0)
    return Stack(depth, **options)


def compiled(function: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_records_stand_in_the_order_of_execution(path: Path, how: str) -> None:
    model = stack()
    run = compiled(model) if how == "compiled" else None
    with tap.watch(model, path, every=1, **ALL):
        train(model, adamw(model), floats(1, per_step=2), run=run)
    records = tap.open(path).records
    own = [(r.layer, r.port, r.call) for r in records if r.layer in BLOCKS]
    once = [
        ("blocks.0", "output"),
        ("blocks.1", "output"),
        ("blocks.1", "grad_output"),
        ("blocks.0", "grad_output"),
    ]
    assert own == [(*place, call) for call in (0, 1) for place in once]
    rest = [r.port for r in records if r.layer not in BLOCKS]
    assert set(rest[:6]) == {"grad_param"}
    assert set(rest[6:]) == {"param", "update"}


def test_the_optimizer_calls_the_model(path: Path) -> None:
    """LBFGS: each evaluation is a call of one step."""
    model, ((x,), *_) = stack(), floats(1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    with tap.watch(model, path, every=1, **ALL) as watch:
        for _ in range(2):
            optimizer.step(closure)
        assert watch.batch == 2
    own = recorded(path)
    assert {(batch, call) for layer, port, _, batch, call in own if port == "grad_output"} == {
        (batch, call) for batch in (0, 1) for call in (0, 1, 2)
    }


def test_a_scaler_that_skips_a_step(path: Path) -> None:
    model = stack()
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with (
        pytest.warns(tap.TapWarning, match=r"Inf.*grad_output of 'blocks\.1', call 0 of 2"),
        tap.watch(model, path, every=1, params=False) as watch,
    ):
        for number, (x,) in enumerate(floats(4)):
            loss = model(x).square().mean()
            scaler.scale(loss * float("inf") if number == 1 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert watch.batch == 3  # the optimizer stepped three times
    assert {(b, c) for _, port, _, b, c in recorded(path) if port == "output"} == {
        (0, 0),
        (1, 0),
        (1, 1),
        (2, 0),
    }


class NestedCheckpoints(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def outer(x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
            return x

        return checkpoint(outer, self.first(x), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_inside_checkpoints(path: Path, reentrant: bool) -> None:
    torch.manual_seed(0)
    model, data = NestedCheckpoints(2, reentrant=reentrant), floats(2)
    layers = [*BLOCKS, "blocks.0.inner"]
    wanted = truth(model, layers, data)
    with tap.watch(model, path, layers=layers, every=1, **ALL):
        train(model, adamw(model), data)
    assert_recorded(path, wanted)


@pytest.mark.parametrize("how", ["eager", "reentrant", "compiled"])
@pytest.mark.parametrize("together", [True, False])
def test_two_forwards_before_their_backwards(path: Path, how: str, together: bool) -> None:
    """Two views, a generator and its judge: the passes of one step cross."""
    model, ((a, b),) = stack(reentrant=True if how == "reentrant" else None), floats(1, per_step=2)
    run = compiled(model) if how == "compiled" else model
    optimizer = adamw(model)
    with tap.watch(model, path, every=1, params=False) as watch:
        first, second = run(a).sum(), 100 * run(b).sum()
        if together:
            (first + second).backward()
        else:
            second.backward()
            first.backward()
        optimizer.step()
    assert watch.failure is None
    own = recorded(path)
    for call, scale in ((0, 1.0), (1, 100.0)):
        summary = own["blocks.1", "grad_output", "", 0, call].summary
        assert summary.min == summary.max == scale


def test_backwards_in_the_order_of_their_forwards(path: Path) -> None:
    model, ((a, b),) = stack(), floats(1, per_step=2)
    optimizer = adamw(model)
    with tap.watch(model, path, every=1, params=False):
        first, second = model(a).sum(), 100 * model(b).sum()
        first.backward()
        second.backward()
        optimizer.step()
    own = recorded(path)
    assert own["blocks.1", "grad_output", "", 0, 0].summary.max == 1
    assert own["blocks.1", "grad_output", "", 0, 1].summary.max == 100


def test_two_backwards_over_one_graph(path: Path) -> None:
    """The gradients of both are there, each at a place of its own."""
    model, ((x,),) = stack(), floats(1)
    optimizer = adamw(model)
    with tap.watch(model, path, every=1, params=False):
        out = model(x).sum()
        out.backward(retain_graph=True)
        (5 * out).backward()
        optimizer.step()
    own = recorded(path)
    assert own["blocks.1", "grad_output", "", 0, 0].summary.max == 1
    assert own["blocks.1", "grad_output", "", 0, 1].summary.max == 5
    assert ("blocks.1", "output", "", 0, 1) not in own


def test_a_penalty_on_gradients(path: Path) -> None:
    ends = []
    for watched in (False, True):
        model, data = stack(), floats(2)
        optimizer = adamw(model)
        watch = tap.watch(model, path, every=1, **ALL) if watched else None
        for (batch,) in data:
            x = batch.clone().requires_grad_()
            loss = model(x).square().mean()
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            (loss + grad.square().sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        if watch is not None:
            watch.close()
            assert watch.failure is None
        ends.append([p.detach() for p in model.parameters()])
    for a, b in zip(*ends, strict=True):
        assert torch.equal(a, b)
    assert ("blocks.1", "grad_output", "", 1, 0) in recorded(path)


@pytest.mark.skipif(
    torch.__version__ < "2.12", reason="torch 2.11 loses a size in autograd_function_apply"
)
def test_compiled_with_sizes_that_change(path: Path) -> None:
    model, dice = stack(), torch.Generator().manual_seed(1)
    data = [[torch.randn(size, 6, generator=dice)] for size in (4, 7, 9, 4, 3)]
    wanted = truth(model, BLOCKS, data)
    with tap.watch(model, path, every=1, **ALL):
        train(model, adamw(model), data, run=compiled(model))
    assert_recorded(path, wanted, 1e-5)


def test_a_compiled_function_around_the_model(path: Path) -> None:
    model, data = stack(), floats(3)
    wanted = truth(model, BLOCKS, data)
    loss_of = compiled(lambda x: model(x).square().mean())
    optimizer = adamw(model)
    with tap.watch(model, path, every=1, **ALL):
        for (x,) in data:
            loss_of(x).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_recorded(path, wanted, 1e-5)


def test_a_compiled_optimizer(path: Path) -> None:
    model, data = stack(), floats(2)
    wanted = truth(model, BLOCKS, data)
    optimizer = adamw(model)
    torch._dynamo.reset()
    step = torch.compile(lambda: optimizer.step(), backend="aot_eager")
    with tap.watch(model, path, every=1, **ALL) as watch:
        for (x,) in data:
            model(x).square().mean().backward()
            step()
            optimizer.zero_grad()
    assert watch.failure is None
    assert_recorded(path, wanted, 1e-4)


def test_forwards_in_threads(path: Path) -> None:
    model = stack()
    optimizer = adamw(model)
    with tap.watch(model, path, every=1, params=False) as watch:
        for step in floats(3, per_step=4):
            threads = [threading.Thread(target=lambda x=x: model(x).sum().backward()) for x in step]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            optimizer.step()
            optimizer.zero_grad()
    assert watch.failure is None
    calls = [place for place in recorded(path) if place[:2] == ("blocks.1", "output")]
    assert len(calls) == 12


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 4, sparse=True)
        self.head = nn.Linear(4, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(ids))


def test_a_sparse_gradient(path: Path) -> None:
    torch.manual_seed(0)
    model = Embedded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dense: list[torch.Tensor] = []

    def keep() -> None:
        assert model.embedding.weight.grad is not None
        dense.append(model.embedding.weight.grad.to_dense())

    with tap.watch(model, path, layers="leaves", every=1, **ALL) as watch:
        train(model, optimizer, tokens(1), before_step=keep)
    assert watch.failure is None
    summary = recorded(path)["embedding", "grad_param", ".weight", 0, 0].summary
    assert summary.l2 == pytest.approx(dense[0].norm().item(), rel=1e-5)


class Kind(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> Any:
        x = x * self.weight
        return self.make(x), x


class Kinds(nn.Module):
    """Outputs of every kind beside the one that goes on."""

    def __init__(self) -> None:
        super().__init__()
        makers = [
            lambda x: x.argmax(-1),
            lambda x: x > 0,
            lambda x: x.to(torch.complex64),
            lambda x: x[:0],
            lambda x: x.t(),
            lambda x: x.half(),
            lambda x: x.sum(),
            lambda x: x[:, ::2],
        ]
        self.blocks = nn.ModuleList([Kind(make) for make in makers])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            _, x = block(x)
        return x


def test_outputs_of_every_kind(path: Path) -> None:
    torch.manual_seed(0)
    model, ((x,),) = Kinds(), floats(1)
    made = [block.make(x * 1) for block in model.blocks]
    with tap.watch(model, path, every=1, params=False) as watch:
        train(model, adamw(model), [[x]])
    assert watch.failure is None
    own = recorded(path)
    for number, tensor in enumerate(made):
        record = own[f"blocks.{number}", "output", "[0]", 0, 0]
        assert record.shape == tuple(tensor.shape)
        assert_same(record.summary, tensor, number, 1e-6)


def test_parameters_that_are_replaced(path: Path) -> None:
    """load_state_dict(assign=True), or layers that are wrapped after the watch began."""
    model, data = stack(), floats(3)
    optimizer = adamw(model)
    with tap.watch(model, path, every=1, **ALL):
        train(model, optimizer, data[:1])
        fresh = {name: torch.full_like(value, 0.5) for name, value in model.state_dict().items()}
        model.load_state_dict(fresh, assign=True)
        optimizer = adamw(model)
        wanted = truth(model, BLOCKS, data[1:])
        train(model, optimizer, data[1:])
    own = recorded(path)
    for (layer, port, leaf, batch, call), tensor in ports(
        wanted, "param", "grad_param", "update"
    ).items():
        place = (layer, port, leaf, batch + 1, call)
        assert_same(own[place].summary, tensor, place, 1e-12)


def test_transforms_of_functions_do_not_end_a_watch(path: Path) -> None:
    """Per-sample gradients between steps: nothing to read there, and training is watched on."""
    from torch.func import functional_call, grad, vmap

    model, data = stack(), floats(3)
    wanted = truth(model, BLOCKS, data)
    values = {name: value.detach() for name, value in model.named_parameters()}

    def loss_of(parameters: Any, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = functional_call(model, parameters, (x,))
        return out.square().mean()

    def per_sample() -> None:
        vmap(grad(loss_of), in_dims=(None, 0))(values, data[0][0])

    with tap.watch(model, path, every=1, **ALL) as watch:
        train(model, adamw(model), data, after_step=per_sample)
    assert watch.failure is None
    own = recorded(path)
    for place, tensor in wanted.items():
        if place[1] in ("param", "grad_param", "update"):
            assert_same(own[place].summary, tensor, place, 1e-12)
    assert ("blocks.1", "grad_output", "", 2, 0) in own


SCRIPT = """
import os, torch, tensortap as tap
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def train(steps):
    for _ in range(steps):
        model(torch.randn(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
watch = tap.watch(model, PATH, layers="leaves", every=1)
train(3)
"""
CHILD = """
child = os.fork()
if child == 0:
    raise SystemExit(0)
os.waitpid(child, 0)
train(2)
watch.close()
"""


@pytest.mark.parametrize(
    ("end", "code", "status", "count"),
    [
        ("", 0, "complete", 3),
        (CHILD, 0, "complete", 5),
        ("raise ValueError('out of data')", 1, "failed", 3),
    ],
    ids=["nobody closes it", "a child ends", "it raises"],
)
def test_how_processes_end(
    path: Path, end: str, code: int, status: str, count: int, forked: Commands
) -> None:
    done = forked.python(f"PATH = {str(path)!r}\n{SCRIPT}\n{end}")
    assert done.code == code, done.stderr
    run = tap.open(path)
    assert run.manifest.status == status
    assert steps(path) == list(range(count))
