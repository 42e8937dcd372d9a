"""Laws of `tap.watch` when something goes wrong: NaN is named, rules act, training lives."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from watch_truth import Stack, adamw, assert_same, floats, recorded, steps, train

import tensortap as tap

NAN = float("nan")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "train"


class Poison(torch.autograd.Function):
    """Identity whose gradient is NaN in one element when it is told so."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bad: bool) -> torch.Tensor:
        ctx.bad = bad
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.bad:
            grad = grad.clone()
            grad[0, 0] = NAN
        return grad, None


class Planted(Stack):
    """NaN in the output of layer `layer`, forward or in the backward pass alone, at one step."""

    def __init__(self, layer: int, at: int, backward: bool = False, depth: int = 4) -> None:
        super().__init__(depth)
        self.plan = (layer, at, backward)
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer, at, backward = self.plan
        now = self.passes == at
        self.passes += self.training
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            if number == layer and not backward and now:
                x = x.clone()
                x[1, 2] = NAN
            x = block(x)
            if number == layer and backward:
                x = Poison.apply(x, now)
        return x


def planted(*args: Any, **options: Any) -> Planted:
    torch.manual_seed(0)
    return Planted(*args, **options)


def finite(model: nn.Module) -> bool:
    return all(bool(torch.isfinite(p).all()) for p in model.parameters())


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("every", [1, 10])
def test_the_first_bad_layer_forward_is_named_at_its_step(
    path: Path, layer: int, every: int
) -> None:
    model = planted(layer, 7)
    with (
        pytest.warns(tap.TapWarning, match=rf"Step 7.*blocks\.{layer}'"),
        tap.watch(model, path, every=every, ring=4) as watch,
    ):
        train(model, adamw(model), floats(8))
    alarm = watch.alarms[0]
    assert (alarm.layer, alarm.port, alarm.batch) == (f"blocks.{layer}", "output", 7)
    assert f"blocks.{layer}" in alarm.text and "7" in alarm.text
    assert steps(path) == (list(range(8)) if every == 1 else [0, 3, 4, 5, 6, 7])
    own = recorded(path)
    assert own[f"blocks.{layer}", "output", "", 7, 0].summary.nan > 0
    assert own[f"blocks.{layer}", "output", "", 6, 0].summary.nan == 0


def test_the_first_bad_layer_backward_is_named_at_its_step(path: Path) -> None:
    model = planted(1, 5, backward=True)
    with (
        pytest.warns(tap.TapWarning, match=r"Step 5.*blocks\.1'"),
        tap.watch(model, path, every=100, ring=2) as watch,
    ):
        train(model, adamw(model), floats(6))
    alarm = watch.alarms[0]
    assert (alarm.layer, alarm.port, alarm.batch) == ("blocks.1", "grad_output", 5)
    own = recorded(path)
    assert own["blocks.1", "output", "", 5, 0].summary.nan == 0  # forward all was well
    assert own["blocks.2", "grad_output", "", 5, 0].summary.nan == 0
    assert own["blocks.1", "grad_output", "", 5, 0].summary.nan == 1
    assert steps(path) == [0, 3, 4, 5]


def test_an_infinity_is_bad_too(path: Path) -> None:
    model = planted(9, 9)
    with torch.no_grad():
        model.blocks[2].inner.weight[0, 0] = float("inf")
    with (
        pytest.warns(tap.TapWarning),
        tap.watch(model, path, layers=["blocks.2.inner", "blocks.2"], every=1) as watch,
    ):
        train(model, adamw(model), floats(1))
    alarm = watch.alarms[0]
    assert (alarm.layer, alarm.batch) == ("blocks.2.inner", 0)


def test_a_nan_in_a_micro_batch_names_the_call(path: Path) -> None:
    model = planted(1, 3)  # the second micro-batch of step 1
    with pytest.warns(tap.TapWarning), tap.watch(model, path, every=1) as watch:
        train(model, adamw(model), floats(2, per_step=2))
    alarm = watch.alarms[0]
    assert (alarm.layer, alarm.batch, alarm.call) == ("blocks.1", 1, 1)


@pytest.mark.parametrize("backward", [False, True])
def test_raise_comes_before_the_weights_are_damaged(path: Path, backward: bool) -> None:
    model = planted(2, 3, backward=backward)
    optimizer = adamw(model)
    data = floats(6)
    kept: list[torch.Tensor] = []

    def keep() -> None:
        kept[:] = [p.detach().clone() for p in model.parameters()]

    with (
        pytest.raises(tap.TapError, match=r"Step 3.*blocks\.2'"),
        tap.watch(model, path, every=100, rules="nan -> raise", ring=2),
    ):
        train(model, optimizer, data, after_step=keep)
    assert finite(model)
    for before, now in zip(kept, model.parameters(), strict=True):
        assert torch.equal(before, now)
    for state in optimizer.state.values():
        assert all(torch.isfinite(v).all() for v in state.values() if isinstance(v, torch.Tensor))
    assert steps(path) == [0, 1, 2, 3]
    assert recorded(path)["blocks.2", "grad_output", "", 3, 0].summary.nan > 0


def test_training_can_go_on_after_a_raise(path: Path) -> None:
    """A loop that skips the bad batch: the watch counts on."""
    model = planted(2, 3)
    optimizer = adamw(model)
    raised = 0
    with tap.watch(model, path, every=1, rules="nan -> raise") as watch:
        for step in floats(6):
            try:
                train(model, optimizer, [step])
            except tap.TapError:
                raised += 1
                optimizer.zero_grad()
    assert raised == 1
    assert watch.failure is None
    assert finite(model)
    assert set(steps(path)) >= {0, 1, 2, 3, 4, 5}


def test_a_rule_on_the_gradients_norm(path: Path) -> None:
    torch.manual_seed(0)
    model = Stack(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = floats(4)
    data[2][0] *= 1e4
    before: list[torch.Tensor] = []
    norms: list[float] = []

    def keep() -> None:
        norms.append(
            torch.linalg.vector_norm(
                torch.cat([p.grad.flatten().double() for p in model.parameters()])  # type: ignore[union-attr]
            ).item()
        )

    def after() -> None:
        before[:] = [p.detach().clone() for p in model.parameters()]

    with (
        pytest.raises(tap.TapError, match="grad_norm"),
        tap.watch(model, path, every=100, rules={"grad_norm > 1000": "raise"}) as watch,
    ):
        train(model, optimizer, data, before_step=keep, after_step=after)
    assert watch.alarms[0].batch == 2
    assert norms[0] < 1000 < norms[2]
    assert watch.alarms[0].value == pytest.approx(norms[2], rel=1e-6)
    for a, b in zip(before, model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_function_is_called_with_the_alarm(path: Path) -> None:
    model = planted(1, 2)
    heard: list[Any] = []
    with tap.watch(model, path, every=1, rules={"nan": heard.append}):
        train(model, adamw(model), floats(3))
    assert heard[0].layer == "blocks.1" and heard[0].batch == 2


def test_a_function_that_raises_does_not_stop_training(path: Path) -> None:
    model = planted(1, 1)

    def broken(alarm: Any) -> None:
        raise RuntimeError("my pager is off")

    with (
        pytest.warns(tap.TapWarning, match="my pager is off"),
        tap.watch(model, path, every=1, rules={"nan": broken}) as watch,
    ):
        train(model, adamw(model), floats(4))
    assert watch.batch == 4
    assert steps(path) == [0, 1, 2, 3]


def test_a_snapshot_keeps_the_tensors_of_that_step(path: Path) -> None:
    model = planted(1, 2)
    with (
        pytest.warns(tap.TapWarning),
        tap.watch(model, path, every=1, rules={"nan": "snapshot"}, params=False),
    ):
        train(model, adamw(model), floats(3))
    own = recorded(path)
    record = own["blocks.1", "output", "", 2, 0]
    assert record.stored
    assert record.tensor().isnan().sum() == record.summary.nan > 0
    assert_same(record.summary, record.tensor(), "blocks.1", 1e-12)
    assert not own["blocks.1", "output", "", 1, 0].stored


class BadSink:
    def __init__(self) -> None:
        self.logged = 0

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.logged += 1
        raise OSError("the network is down")

    def close(self) -> None:
        raise OSError("still down")


def test_a_sink_that_raises_does_not_stop_training(path: Path) -> None:
    torch.manual_seed(0)
    model, sink = Stack(2), BadSink()
    good: list[tuple[int, dict[str, float]]] = []
    with (
        pytest.warns(tap.TapWarning, match="the network is down"),
        tap.watch(
            model,
            path,
            every=1,
            sinks=[sink, lambda values, step: good.append((step, dict(values)))],
        ) as watch,
    ):
        train(model, adamw(model), floats(4))
    assert sink.logged == 1
    assert watch.failure is None
    assert steps(path) == [0, 1, 2, 3]
    assert [step for step, _ in good] == [0, 1, 2, 3]
    wanted = recorded(path)["blocks.0", "output", "", 3, 0].summary.rms
    assert good[3][1]["output/blocks.0/rms"] == pytest.approx(wanted)


def test_warnings_as_errors_do_not_stop_training(path: Path) -> None:
    model = planted(1, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with tap.watch(model, path, every=1) as watch:
            train(model, adamw(model), floats(3))
    assert watch.alarms[0].layer == "blocks.1"
    assert steps(path) == [0, 1, 2]


def test_a_full_disk_does_not_stop_training(tmp_path: Path) -> None:
    """/dev/full takes no byte: what goes wrong is said once, and training ends as it would."""
    torch.manual_seed(0)
    model, data = Stack(2), floats(4)
    folder = tmp_path / "train"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        watch = tap.watch(model, folder, every=1)
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
        folder.write_text("a file where the folder was")
        train(model, adamw(model), data)
        watch.close()
    assert finite(model)
    assert watch.failure is not None
    assert any(issubclass(one.category, tap.TapWarning) for one in said)
