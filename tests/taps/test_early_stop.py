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
        rec.run(torch.ones(1, 2), early_stop=True)
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


def test_a_layer_that_a_loop_calls_again_is_heard_to_its_last_call(tmp_path) -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.head = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
            self.forwards = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.forwards += 1
            for _ in range(3):
                x = self.a(self.b(x))
            return self.head(self.a(x))

    model = Loop()
    heads: list[int] = []
    model.head.register_forward_hook(lambda *_: heads.append(1))
    with tap.record(model, tmp_path / "r", layers=["a", "b"]) as rec:
        for _ in range(2):
            assert rec.run(torch.ones(1, 2), early_stop=True) is None
            rec.step()
    run = tap.open(tmp_path / "r")
    assert [r.call for r in run["a"].records] == [0, 1, 2, 3] * 2
    assert len(run["b"].records) == 6
    assert heads == []
    assert model.forwards == 2, "a rehearsal must leave the model as it was"


def test_a_model_that_looks_at_values_runs_to_its_end(tmp_path) -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            while x.sum().item() < 10:
                x = self.layer(x).abs() + x + 1
            return x

    with tap.record(Looks(), tmp_path / "r", layers="layer") as rec:
        assert rec.run(torch.zeros(1, 2), early_stop=True) is not None
    assert len(tap.open(tmp_path / "r").records) > 1
    assert any("cannot be told beforehand" in note for note in rec.notes)
