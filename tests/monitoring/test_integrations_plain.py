"""The plain loop: epochs told, outputs saved, everything closed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tap
from support import Net
from tensortap.errors import OptionError
from tensortap.monitoring.integrations import loop

BATCHES = list(torch.randint(0, 16, (3, 2, 4), generator=torch.Generator().manual_seed(1)))


def records(run: tap.Recording, **wanted: str) -> list[tap.Record]:
    return [r for r in run.records if all(getattr(r, k) == v for k, v in wanted.items())]


def hooks(module: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules())


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    return Net(blocks=2)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    loss_of(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_watch_and_a_monitor_are_told_where_training_is(model, tmp_path) -> None:
    before = hooks(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = tap.watch(model, tmp_path / "run", every=1)
    layers = {"blocks.0": {"record_type": "epoch_full"}, "blocks.1": None}
    monitor = tap.Monitor(model, layers, [2], str(tmp_path / "seen"), batch_indices=[1])
    places = []
    with loop(BATCHES, epochs=range(1, 3), watch=watch, monitor=monitor) as batches:
        for epoch, batch_idx, batch in batches:
            places.append((epoch, batch_idx))
            step(model, optimizer, batch)
    assert places == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]
    assert hooks(model) == before and monitor.closed
    watched, seen = tap.open(tmp_path / "run"), tap.open(tmp_path / "seen")
    found = records(watched, layer="blocks.0", port="output")
    assert [(r.epoch, r.batch) for r in found] == [(1, 0), (1, 1), (1, 2), (2, 3), (2, 4), (2, 5)]
    assert [(r.epoch, r.batch) for r in records(seen, layer="blocks.1")] == [(2, 1)]
    assert len(records(seen, layer="blocks.0")) == 3
    assert len(list((tmp_path / "seen").rglob("*.pt"))) == 2  # one epoch, one batch


def test_an_exception_closes_both(model, tmp_path) -> None:
    before = hooks(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = tap.watch(model, tmp_path / "run", every=1)
    monitor = tap.Monitor(model, ["blocks.0"], [0], str(tmp_path / "seen"), batch_indices=[0, 1])
    with pytest.raises(RuntimeError, match="cursed"):
        with loop(BATCHES, watch=watch, monitor=monitor) as batches:
            for _, batch_idx, batch in batches:
                if batch_idx == 1:
                    raise RuntimeError("cursed")
                step(model, optimizer, batch)
    assert hooks(model) == before and monitor.closed
    for folder in ("run", "seen"):
        run = tap.open(tmp_path / folder)
        assert run.status == "failed"
        assert run.manifest.failure == "training raised RuntimeError: cursed"
    assert len(list((tmp_path / "seen").rglob("*.pt"))) == 1


def test_without_with_nothing_is_closed(model, tmp_path) -> None:
    with tap.watch(model, tmp_path / "run", every=1) as watch:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for epochs in (range(1), range(1, 2)):
            for _, _, batch in loop(BATCHES, epochs=epochs, watch=watch):
                step(model, optimizer, batch)
    found = records(tap.open(tmp_path / "run"), layer="blocks.0", port="output")
    assert [(r.epoch, r.batch) for r in found] == [(s // 3, s) for s in range(6)]
    assert list(loop("ab", epochs=2)) == [(0, 0, "a"), (0, 1, "b"), (1, 0, "a"), (1, 1, "b")]


@pytest.mark.parametrize("epochs", [-1, True])
def test_epochs_must_be_a_number(epochs: Any) -> None:
    with pytest.raises(OptionError, match="number of epochs"):
        loop(BATCHES, epochs=epochs)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("kind", ["sgd", "lbfgs"])
def test_gradients_made_inside_an_optimizers_step_are_seen(
    model, tmp_path, kind: str, named: bool
) -> None:
    """A closure runs forward and backward behind the hook that says that a step begins."""
    optimizer: torch.optim.Optimizer
    if kind == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    norms: list[float] = []
    with tap.watch(model, tmp_path / "run", every=1, updates=True) as watch:
        for batch in BATCHES:
            first: list[float] = []

            def closure(batch: torch.Tensor = batch, first: list[float] = first) -> Any:
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()
                first.append(math.hypot(*(p.grad.norm().item() for p in model.parameters())))
                return loss

            result = optimizer.step(closure=closure) if named else optimizer.step(closure)
            assert result.requires_grad
            norms.append(first[0])
    assert watch.failure is None
    run = tap.open(tmp_path / "run")
    found = [
        math.hypot(*(r.summary.l2 for r in records(run, port="grad_param") if r.batch == number))
        for number in range(3)
    ]
    assert found == pytest.approx(norms, rel=1e-5)
    updates = records(run, port="update")
    assert {r.batch for r in updates} == {0, 1, 2}
    assert any(r.summary.l2 > 0 for r in updates)


# What the page says of a step


def scaled(model: nn.Module, path: Any, optimizer: torch.optim.Optimizer, bad: int = -1) -> Any:
    """Three passes with a GradScaler, one of which overflows; the parameters' true gradients."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    norms = []
    with tap.watch(model, path, every=1, rules=()):
        for number, batch in enumerate(BATCHES):
            loss = loss_of(model, batch)
            scaler.scale(loss * (math.inf if number == bad else 1)).backward()
            grad = model.head.weight.grad
            norms.append(grad.norm().item() / scaler.get_scale())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return norms


def test_loss_scaling_shows_in_gradients_of_outputs_alone(model, tmp_path) -> None:
    norms = scaled(model, tmp_path / "run", torch.optim.SGD(model.parameters(), lr=0.0))
    run = tap.open(tmp_path / "run")
    found = records(run, layer="head", port="grad_param", leaf=".weight")
    assert [r.summary.l2 for r in found] == pytest.approx(norms, rel=1e-5)
    outputs = records(run, layer="blocks.1", port="grad_output")
    torch.manual_seed(0)
    plain = Net(blocks=2)
    with tap.watch(plain, tmp_path / "plain", every=1):
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.0)
        for batch in BATCHES:
            step(plain, optimizer, batch)
    expected = records(tap.open(tmp_path / "plain"), layer="blocks.1", port="grad_output")
    assert [r.summary.l2 for r in outputs] == pytest.approx(
        [1024 * r.summary.l2 for r in expected], rel=1e-4
    )


def test_an_optimizer_that_unscales_by_itself_shows_scaled_gradients(model, tmp_path) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0, fused=True)
    norms = scaled(model, tmp_path / "run", optimizer)
    found = records(tap.open(tmp_path / "run"), layer="head", port="grad_param", leaf=".weight")
    assert [r.summary.l2 for r in found] == pytest.approx([1024 * n for n in norms], rel=1e-5)


def test_a_pass_that_a_scaler_skips_is_a_call_of_the_next_step(model, tmp_path) -> None:
    scaled(model, tmp_path / "run", torch.optim.SGD(model.parameters(), lr=0.1), bad=1)
    run = tap.open(tmp_path / "run")
    found = records(run, layer="blocks.1", port="grad_output")
    assert [(r.batch, r.call, r.summary.nan > 0) for r in found] == [
        (0, 0, False),
        (1, 0, True),
        (1, 1, False),
    ]
    gradients = records(run, layer="head", port="grad_param", leaf=".weight")
    assert [(r.batch, r.summary.nan) for r in gradients] == [(0, 0), (1, 0)]


def test_evaluation_is_not_watched(model, tmp_path) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tap.watch(model, tmp_path / "run", every=1):
        for batch in BATCHES:
            step(model, optimizer, batch)
            with torch.no_grad():
                model(batch)
            model.eval()(batch)
            model.train()
    found = records(tap.open(tmp_path / "run"), layer="blocks.0", port="output")
    assert [(r.batch, r.call) for r in found] == [(0, 0), (1, 0), (2, 0)]


def test_torchs_newer_precision_setting_is_read(model, tmp_path) -> None:
    """transformers uses it, and the older one raises from then on."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        with tap.watch(model, tmp_path / "run"):
            pass
    finally:
        matmul.fp32_precision = before
    environment = tap.open(tmp_path / "run").manifest.environment
    assert environment["float32_matmul_precision"] == "tf32"


def test_a_fault_of_ours_does_not_end_a_framework_s_training(model, tmp_path, monkeypatch) -> None:
    from tensortap.monitoring.integrations import companion

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(companion, "watch", fail)
    going_along = companion.Companion(tmp_path / "run", None, {})
    with pytest.warns(tap.TapWarning, match="RuntimeError: a fault of ours. Training runs on"):
        going_along.start(model)
    going_along.epoch(1)
    going_along.log({"loss": 1.0})
    going_along.close()
    assert going_along.watcher is None


def test_leaving_by_exit_zero_is_no_failure_of_a_loop(tmp_path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2))
    watch = tap.watch(net, tmp_path / "run", layers="leaves")
    with pytest.raises(SystemExit), loop([torch.ones(1, 2)], epochs=1, watch=watch):
        raise SystemExit(0)
    assert tap.open(tmp_path / "run").status == "complete"
