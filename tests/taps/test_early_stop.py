"""Capturing a first layer costs one layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tensortap as tap
from support import Net


@pytest.fixture
def ran(net: Net) -> list[str]:
    """The names of modules that ran, as they start."""
    names: list[str] = []
    for name, module in net.named_modules():
        module.register_forward_pre_hook(lambda m, a, n=name: names.append(n))
    return names


def test_the_model_stops_behind_the_last_selected_layer(net: Net, ids, tmp_path, ran) -> None:
    full = net(ids)
    expected = tap.record(net, tmp_path / "full", layers="all")
    with expected as rec:
        assert torch.equal(rec.run(ids), full)
    ran.clear()
    with tap.record(net, tmp_path / "r", layers=["blocks.0"], inputs=True) as rec:
        assert rec.run(ids, early_stop=True) is None
    assert "blocks.0" in ran and "blocks.1" not in ran and "head" not in ran
    run = tap.open(tmp_path / "r")
    assert run.status == "complete"
    assert run.manifest.selection["stopped_behind"] == "blocks.0"
    assert torch.equal(run["blocks.0"].output, tap.open(tmp_path / "full")["blocks.0"].output)


def test_every_batch_stops_anew(net: Net, ids, tmp_path, ran) -> None:
    with tap.record(net, tmp_path / "r", layers="first") as rec:
        for _ in range(3):
            rec.run(ids, early_stop=True)
            rec.step()
    assert [r.batch for r in tap.open(tmp_path / "r").records] == [0, 1, 2]
    assert "head" not in ran


def test_without_early_stop_the_model_runs_on(net: Net, ids, tmp_path, ran) -> None:
    with tap.record(net, tmp_path / "r", layers="first") as rec:
        assert rec.run(ids) is not None
    assert "head" in ran


def test_a_shared_layer_is_heard_to_its_last_call(tmp_path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(2, 2)
            self.b = self.a

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x))

    with tap.record(Tied(), tmp_path / "r", layers="a") as rec:
        assert rec.run(torch.ones(1, 2), early_stop=True) is not None
    assert len(tap.open(tmp_path / "r").records) == 2


def test_gradients_need_the_whole_model(net: Net, ids, tmp_path) -> None:
    with tap.record(net, tmp_path / "r", layers="first", grads=True) as rec:
        rec.run(ids, early_stop=True).sum().backward()
    assert len(tap.open(tmp_path / "r")["blocks.0"].port("grad_output")) == 1


def test_a_bare_except_for_exceptions_does_not_hold_the_stop_up(tmp_path) -> None:
    class Swallows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.after = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                x = self.layer(x)
            except Exception:
                self.after += 1
            self.after += 1
            return x

    model = Swallows()
    with tap.record(model, tmp_path / "r", layers="layer") as rec:
        rec.run(torch.ones(1, 2), early_stop=True)
    assert model.after == 0
