"""Recording changes no bit of what the model computes, and leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tap
from support import Net


def train_step(model: nn.Module, ids: torch.Tensor) -> dict[str, Any]:
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    output = model(ids)
    loss = (output * torch.randn_like(output)).sum()
    loss.backward()
    return {
        "output": output.detach(),
        "grads": [p.grad.clone() for p in model.parameters()],
        "random": torch.get_rng_state(),
        "training": [m.training for m in model.modules()],
    }


@pytest.mark.parametrize("keep", ["tensors", "summary"])
@pytest.mark.parametrize("training", [False, True])
def test_outputs_gradients_random_state_and_flags_are_bit_identical(
    net: Net, ids, tmp_path, keep: str, training: bool
) -> None:
    net.train(training)
    before = train_step(net, ids)
    with tap.record(
        net, tmp_path / "r", layers="all", inputs=True, grads=True, keep=keep, histograms=True
    ) as rec:
        during = train_step(net, ids)
    assert rec.failure is None
    after = train_step(net, ids)
    for other in (during, after):
        assert torch.equal(before["output"], other["output"])
        assert all(torch.equal(a, b) for a, b in zip(before["grads"], other["grads"], strict=True))
        assert torch.equal(before["random"], other["random"])
        assert before["training"] == other["training"]


def test_fan_out_gradients_are_bit_identical(tmp_path) -> None:
    """Several consumers of one tensor: the order in which their gradients add up must not move."""

    class FanOut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(32, 32) for _ in range(7)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum((part(x) * (10.0**i) for i, part in enumerate(self.parts)), x)

    torch.manual_seed(0)
    model = FanOut()
    x = torch.randn(16, 32)

    def grad() -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        model(leaf * 1.5).square().sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    plain = grad()
    with tap.record(model, tmp_path / "r", layers="all", inputs=True, grads=True):
        assert torch.equal(plain, grad())


def hooks_of(model: nn.Module) -> list[list[int]]:
    return [
        list(hooks)
        for module in model.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    ]


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_hooks_go_away_on_every_exit_and_others_stay(net: Net, ids, tmp_path, error) -> None:
    net.head.register_forward_hook(lambda m, a, out: None)
    net.register_forward_pre_hook(lambda m, a: None)
    before = hooks_of(net)
    try:
        with tap.record(net, tmp_path / "r", layers="all", inputs=True, grads=True):
            net(ids).sum().backward()
            if error is not None:
                raise error("stop")
    except (ValueError, KeyboardInterrupt):
        pass
    assert hooks_of(net) == before
    status = tap.open(tmp_path / "r").status
    assert status == ("complete" if error is None else "failed")


def test_a_model_that_raises_keeps_its_error_and_what_was_recorded(tmp_path) -> None:
    class Breaks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError("in the model")

    model = nn.Sequential(nn.Linear(2, 2), Breaks())
    with pytest.raises(ZeroDivisionError, match="in the model"):
        with tap.record(model, tmp_path / "r", layers="all", inputs=True):
            model(torch.ones(1, 2))
    run = tap.open(tmp_path / "r")
    assert run.status == "failed"
    assert any("ZeroDivisionError" in note for note in run.notes)
    assert torch.equal(run["1"].input, run["0"].output)
    assert run["1"].port("output") == []


def test_no_hook_of_ours_is_left_on_a_live_graph(net: Net, ids, tmp_path) -> None:
    with tap.record(net, tmp_path / "r", layers="all", grads=True):
        loss = net(ids).sum()
    loss.backward()
    assert all(r.port == "output" for r in tap.open(tmp_path / "r").records)


def test_dispatch_and_function_modes_of_the_user_see_nothing_of_us(net: Net, ids, tmp_path) -> None:
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    class CountFunctions(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.seen.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    def count() -> tuple[list[str], list[str]]:
        with torch.no_grad(), CountFunctions() as functions, Count() as ops:
            net(ids)
        return ops.seen, functions.seen

    plain = count()
    with tap.record(net, tmp_path / "r", layers="all", inputs=True) as rec:
        assert count() == plain
    assert rec.failure is None


@pytest.mark.parametrize("layers", ["blocks", "all"])
def test_fused_encoder_layers_stay_fused(tmp_path, layers: str) -> None:
    """A hook inside nn.TransformerEncoderLayer would switch its fused path off."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = nn.TransformerEncoder(layer, 3).eval()
    x = torch.randn(2, 33, 64)
    with torch.no_grad():
        plain = model(x)
        with tap.record(model, tmp_path / "r", layers=layers, inputs=True) as rec:
            assert torch.equal(model(x), plain)
    assert rec.failure is None
    run = tap.open(tmp_path / "r")
    assert torch.equal(run["layers.2"].output, plain)
    assert torch.equal(run["layers.1"].input, run["layers.0"].output)
    assert any("fused" in note for note in run.notes) == (layers == "all")


def test_encoder_layers_in_training_are_heard_to_the_last_module(tmp_path) -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    x = torch.randn(2, 3, 8)
    torch.manual_seed(3)
    plain = model(x)
    torch.manual_seed(3)
    with tap.record(model, tmp_path / "r", layers="all"):
        assert torch.equal(model(x), plain)
    assert "layers.1.linear2" in tap.open(tmp_path / "r").layers


def test_a_root_that_is_fused_stays_fused(tmp_path) -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    x, mask = torch.randn(2, 9, 64), torch.zeros(2, 9, dtype=torch.bool)
    mask[0, 5:] = True
    with torch.no_grad():
        plain = model(x, src_key_padding_mask=mask)
        with tap.record(model, tmp_path / "r", layers="all") as rec:
            assert torch.equal(model(x, src_key_padding_mask=mask), plain)
    run = tap.open(tmp_path / "r")
    assert run.layers == [""] and torch.equal(run[""].output, plain)
    assert any("fused" in note for note in rec.notes)


def test_a_copy_made_while_recording_is_not_recorded_and_saving_works(tmp_path) -> None:
    import copy

    model = nn.Sequential(nn.Linear(2, 2))
    with tap.record(model, tmp_path / "r", layers="all", inputs=True) as rec:
        twin = copy.deepcopy(model)
        twin(torch.ones(1, 2))
        torch.save(model, tmp_path / "model.pt")
        model(torch.ones(1, 2))
    assert rec.failure is None
    assert [r.call for r in tap.open(tmp_path / "r")["0"].port("output")] == [0]
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(loaded(torch.ones(1, 2)), model(torch.ones(1, 2)))


def test_scripted_children_are_heard_and_nothing_is_left_behind(tmp_path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))
    before = dict(vars(model[1]))
    with tap.record(model, tmp_path / "r", layers="all", inputs=True):
        output = model(torch.ones(1, 2))
    run = tap.open(tmp_path / "r")
    assert run.layers == ["0", "1", ""]
    assert torch.equal(run["1"].output, output)
    assert vars(model[1]) == before
    assert not model[0]._forward_hooks
