"""Real runs that diverge, and healthy ones: what `check` says of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tensortap as tap
from tensortap.cli.main import main
from tensortap.recording.health import first_abnormal, first_bad

pytestmark = pytest.mark.filterwarnings("ignore::tensortap.taps.session.TapWarning")
Change = Callable[[nn.Module, torch.optim.Optimizer, int], object]
Batch = tuple[torch.Tensor, torch.Tensor]


class Chain(nn.Module):
    def __init__(self, depth: int = 4, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Linear(8, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.stem(x))
        for block in self.blocks:
            x = F.relu(block(x))
        return self.head(x)


def batch_of(random: torch.Generator, size: int = 32) -> Batch:
    x = torch.randn(size, 8, generator=random)
    return x, x[:, :1] * x[:, 1:2] + x[:, 2:3].sin()


def mse(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.mse_loss(model(batch[0]).float(), batch[1])


def train(
    path: Path,
    steps: int,
    lr: float = 0.02,
    *,
    adam: bool = False,
    change: Change = lambda model, optimizer, step: None,
    spoil: Callable[[int, torch.Tensor], torch.Tensor] = lambda step, x: x,
    loss_of: Callable[[nn.Module, Batch], torch.Tensor] = mse,
    log: Callable[[torch.Tensor, float], dict[str, Any]] = lambda loss, lr: {"loss": loss},
    schedule: Callable[[int], float] | None = None,
    micro: int = 1,
    seed: int = 0,
    size: int = 32,
    **options: Any,
) -> tap.Recording:
    torch.manual_seed(seed)
    model, random = Chain(), torch.Generator().manual_seed(seed + 1)
    kind = torch.optim.Adam if adam else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=lr)
    options = {"every": 1, "updates": True, "layers": "all", **options}
    with tap.watch(model, path, **options) as watch:
        for step in range(steps):
            change(model, optimizer, step)
            if schedule is not None:
                optimizer.param_groups[0]["lr"] = lr * schedule(step)
            optimizer.zero_grad()
            total = torch.zeros(())
            for _ in range(micro):
                x, y = batch_of(random, size)
                loss = loss_of(model, (spoil(step, x), y)) / micro
                torch.autograd.backward(loss)
                total += loss.detach()
            watch.log(**log(total, optimizer.param_groups[0]["lr"]))
            optimizer.step()
    return tap.open(path)


def faster(at: int, factor: float) -> Change:
    def change(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == at:
            optimizer.param_groups[0]["lr"] *= factor

    return change


def growing(since: int, factor: float) -> Change:
    def change(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step > since:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter *= factor

    return change


def in_half(model: nn.Module, batch: Batch) -> torch.Tensor:
    with torch.autocast("cpu", torch.float16):
        return mse(model, batch)


def entropy(model: nn.Module, batch: Batch) -> torch.Tensor:
    """A cross entropy with the logarithm of a probability that becomes zero."""
    right, p = (batch[0][:, :1] > 0).float(), torch.sigmoid(model(20 * batch[0]))
    return -(right * p.log() + (1 - right) * (1 - p).log()).mean()


def scale(at: int, factor: float) -> Callable[[int, torch.Tensor], torch.Tensor]:
    return lambda step, x: x * factor if step == at else x


DIVERGING: dict[str, tuple[dict[str, Any], range]] = {
    # what is done to the run, and the steps of which one must be named
    "rate": ({"steps": 60, "change": faster(30, 300)}, range(30, 33)),
    "rate, every tenth step": (
        {"steps": 90, "change": faster(55, 300), "every": 10},
        range(55, 58),
    ),
    "rate, nothing logged": (
        {"steps": 60, "change": faster(30, 300), "log": lambda loss, lr: {}},
        range(30, 33),
    ),
    "rate from the beginning": ({"steps": 30, "lr": 20.0}, range(1, 4)),
    "gradients": ({"steps": 60, "change": growing(25, 1.15)}, range(26, 33)),
    "slowly": ({"steps": 200, "change": growing(60, 1.03)}, range(65, 99)),
    "poisoned batch": ({"steps": 50, "spoil": scale(30, 1e5)}, range(30, 31)),
    "half precision": (
        {"steps": 60, "spoil": lambda step, x: x * 1.35**step, "loss_of": in_half},
        range(5, 24),
    ),
}


@pytest.mark.parametrize("name", DIVERGING)
def test_the_first_abnormal_step_before_the_nan_is_named(name: str, tmp_path: Path) -> None:
    made, steps = DIVERGING[name]
    findings = train(tmp_path, **made).check()
    abnormal, bad = first_abnormal(findings), first_bad(findings)
    assert abnormal is not None and bad is not None
    assert abnormal.severity == "error"
    assert abnormal.step[1] in steps, abnormal.text
    assert abnormal.step <= bad.step
    excursion = abnormal.excursion
    assert excursion is not None and excursion.value > 2 * excursion.usual
    assert not excursion.recovered


@pytest.mark.parametrize("name", ["a NaN in the batch", "log(0)"])
def test_what_came_out_of_the_blue_has_no_step_before(name: str, tmp_path: Path) -> None:
    if name == "log(0)":
        findings = train(tmp_path, 60, 3e-2, adam=True, loss_of=entropy).check()
    else:
        spoil = scale(30, math.nan)
        findings = train(tmp_path, 40, spoil=spoil).check()
    assert first_abnormal(findings) is None
    first = first_bad(findings)
    assert first is not None
    if name == "log(0)":  # the outputs are finite: it is the loss and not one of its gradients
        assert (first.layer, first.port) == ("loss", "scalar")
        assert first.text.endswith("Every output that was recorded at that step is finite.")
    else:
        assert (first.layer, first.port, first.step) == ("stem", "output", (0, 30))


def warm_up(step: int) -> float:
    return min(1.0, step / 20) * 0.5 * (1 + math.cos(math.pi * min(step, 150) / 150))


def restarts(step: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * (step % 40) / 40)) + 1e-4


def unfreeze(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    model.get_submodule("blocks").requires_grad_(step >= 60)


def with_rate(loss: torch.Tensor, lr: float) -> dict[str, Any]:
    return {"loss": loss, "lr": lr, "loss_scale": 2.0**16, "tokens": 1e6}


HEALTHY: dict[str, dict[str, Any]] = {
    "plain": {"steps": 120},
    "another seed": {"steps": 120, "seed": 3},
    "first steps": {"steps": 4},
    "warm-up and cosine": {
        "steps": 160,
        "lr": 1e-2,
        "adam": True,
        "schedule": warm_up,
        "log": with_rate,
    },
    "restarts": {"steps": 130, "lr": 1e-2, "adam": True, "schedule": restarts, "log": with_rate},
    "restarts, nothing logged": {
        "steps": 130,
        "lr": 1e-2,
        "adam": True,
        "schedule": restarts,
        "log": lambda loss, lr: {},
    },
    "accumulation": {"steps": 60, "micro": 4},
    "every tenth": {"steps": 150, "every": 10},
    "batches of two": {"steps": 150, "lr": 5e-3, "size": 2},
    "spikes": {"steps": 100, "spoil": lambda step, x: x * 2.5 if step % 30 == 29 else x},
    "unfrozen": {"steps": 120, "change": unfreeze},
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_is_left_alone(name: str, tmp_path: Path) -> None:
    findings = train(tmp_path, **HEALTHY[name]).check()
    assert first_abnormal(findings) is None, first_abnormal(findings)
    assert first_bad(findings) is None


def test_a_run_that_never_comes_back_is_unhealthy_without_a_nan(tmp_path: Path) -> None:
    """Adam normalises: a rate that is far too high ruins the model and nothing overflows."""
    findings = train(tmp_path, 150, 3e-3, adam=True, change=faster(80, 3000)).check()
    assert first_bad(findings) is None
    abnormal = first_abnormal(findings)
    assert abnormal is not None and abnormal.severity == "error"
    assert abnormal.step[1] in range(80, 83)
    assert "did not come back" in abnormal.text


def test_a_poisoned_batch_that_the_run_survives_is_a_warning(tmp_path: Path) -> None:
    findings = train(tmp_path, 80, 1e-3, adam=True, spoil=scale(40, 1e4)).check()
    abnormal = first_abnormal(findings)
    assert abnormal is not None and abnormal.severity == "warning"
    assert abnormal.step == (0, 40) and "It came back" in abnormal.text
    assert abnormal.layer == "stem"


def test_plain_recordings_of_many_steps(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, random = Chain(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    with tap.record(model, tmp_path / "run", layers="blocks", grads=True) as rec:
        for step in range(40):
            x, y = batch_of(random)
            optimizer.zero_grad()
            torch.autograd.backward(mse(model, (x * 1e6 if step == 25 else x, y)))
            optimizer.step()
            rec.step()
    findings = tap.open(tmp_path / "run").check()
    abnormal, bad = first_abnormal(findings), first_bad(findings)
    assert abnormal is not None and abnormal.step == (0, 25)
    assert bad is not None and bad.step == (0, 26)


def test_batches_that_do_not_follow_from_each_other_have_no_history(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Chain()
    with (
        tap.record(model, tmp_path / "run", layers="blocks", keep="summary") as rec,
        torch.no_grad(),
    ):
        for step in range(60):
            model(torch.randn(4, 8) * (1e3 if step >= 30 else 1.0))
            rec.step()
    assert first_abnormal(tap.open(tmp_path / "run").check()) is None


def test_a_monitor_shows_it_by_its_outputs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, random = Chain(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    monitor = tap.Monitor(model, ["blocks.3"], [1], tmp_path, batch_indices=list(range(60)))
    with monitor:
        monitor.set_epoch(1)
        for step in range(60):
            faster(30, 300)(model, optimizer, step)
            monitor.set_batch_idx(step)
            optimizer.zero_grad()
            torch.autograd.backward(mse(model, batch_of(random)))
            optimizer.step()
    findings = tap.open(tmp_path).check()
    abnormal, bad = first_abnormal(findings), first_bad(findings)
    assert bad is not None and abnormal is not None
    assert abnormal.step[1] in range(31, 34) and abnormal.port == "output"


def test_steps_that_a_scaler_skips_are_not_where_the_run_broke(tmp_path: Path) -> None:
    """Gradients overflow at first, the run goes on, and breaks much later for another reason."""

    def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
        loss = mse(model, batch)
        return loss if next(steps) else loss * math.inf

    steps = iter([0, 0, *[1] * 100])

    def skip(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        faster(50, 300)(model, optimizer, step)

    torch.manual_seed(0)
    model, random = Chain(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    with tap.watch(model, tmp_path, every=1, clock="manual") as watch:
        for step in range(80):
            skip(model, optimizer, step)
            optimizer.zero_grad()
            loss = loss_of(model, batch_of(random))
            torch.autograd.backward(loss)
            if step >= 2:
                optimizer.step()
                watch.log(loss=loss)
            watch.step()
    findings = tap.open(tmp_path).check()
    abnormal = first_abnormal(findings)
    assert abnormal is not None and abnormal.step[1] in range(50, 53)


def test_a_mask_that_is_always_infinite_is_not_the_first(tmp_path: Path) -> None:
    class Masked(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.mask = nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mask(torch.full((2, 2), -math.inf))
            return super().forward(x)

    model = Masked()
    with tap.record(model, tmp_path / "run", layers="all", keep="summary") as rec:
        for step in range(8):
            model(torch.full((2, 8), math.nan if step == 5 else 1.0))
            rec.step()
    first = first_bad(tap.open(tmp_path / "run").check())
    assert first is not None and (first.layer, first.step) == ("stem", (0, 5))


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, 60, change=faster(30, 300))
    with pytest.raises(SystemExit) as caught:
        main(["check", str(tmp_path)])
    out = capsys.readouterr().out
    assert caught.value.code == 1
    assert "First abnormal: at step 3" in out
    assert "First NaN or Inf: The output of 'blocks." in out
    assert out.count(" nan ") + out.count(" inf ") == 1, "NaN spreads: the first is listed alone"
    with pytest.raises(SystemExit):
        main(["check", str(tmp_path), "--json"])
    data = json.loads(capsys.readouterr().out)
    abnormal = data["first_abnormal"]
    assert abnormal["kind"] == "abnormal" and abnormal["moment"][1] in range(30, 33)
    numbers = abnormal["excursion"]
    assert numbers["quantity"] == "update" and numbers["value"] > numbers["most"] > numbers["usual"]
    assert data["first"]["moment"][1] > abnormal["moment"][1]
    assert (data["first"]["port"], data["first"]["leaf"]) == ("output", "")


def test_a_low_first_loss_is_not_where_a_run_broke(tmp_path: Path) -> None:
    """The first of a few noisy losses is low by chance; what breaks the run comes later."""
    losses = [1.8, 4.5, 5.3, 4.9, 5.1, 4.6, 5.0, 4.8, 5.2, 4.7, math.nan]
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with tap.watch(model, tmp_path / "run", every=1) as watch:
        for loss in losses:
            model(torch.ones(2, 4)).sum().backward()
            watch.log(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
    findings = tap.open(tmp_path / "run").check()
    assert first_abnormal(findings) is None
    bad = first_bad(findings)
    assert bad is not None and bad.step == (0, 10)
