"""Gradients come from tensor hooks, belong to the call that made the tensor, and survive
in-place activations and both kinds of activation checkpointing."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tensortap as tap
from support import Net


def retained(model: nn.Module, x: torch.Tensor, names: list[str]) -> dict[str, torch.Tensor]:
    """The gradients of layer outputs by `retain_grad`, on a model without in-place operations."""
    kept: dict[str, torch.Tensor] = {}

    def keep(name: str):
        def hook(module, args, out):
            out.retain_grad()
            kept[name] = out

        return hook

    handles = [model.get_submodule(n).register_forward_hook(keep(n)) for n in names]
    model(x).square().sum().backward()
    for handle in handles:
        handle.remove()
    return {name: out.grad for name, out in kept.items()}


def test_grad_output_is_what_autograd_gives(recorded) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    x = torch.randn(3, 4)
    expected = retained(model, x, ["0", "1", "2"])
    run = recorded(model, call=lambda: model(x).square().sum().backward(), grads=True)
    for name, grad in expected.items():
        assert torch.equal(run[name].grad_output, grad), name


def test_grad_input_of_a_chain_is_the_grad_output_before_it(recorded) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    x = torch.randn(3, 4)
    run = recorded(model, call=lambda: model(x).sum().backward(), grads=True, inputs=True)
    assert torch.equal(run["2"].grad_input, run["1"].grad_output)


def test_in_place_activations_do_not_raise_and_give_the_gradient_before_them(recorded) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(4, 8)
    inplace = nn.Sequential(linear, nn.ReLU(inplace=True), nn.Linear(8, 1))
    plain = nn.Sequential(linear, nn.ReLU(), inplace[2])
    x = torch.randn(3, 4)
    expected = retained(plain, x, ["0", "1", "2"])
    run = recorded(inplace, call=lambda: inplace(x).square().sum().backward(), grads=True)
    for name, grad in expected.items():
        assert torch.equal(run[name].grad_output, grad), name


def test_gradient_accumulation_keeps_each_call_apart(net: Net, ids, tmp_path) -> None:
    with tap.record(net, tmp_path / "r", layers="head", grads=True) as rec:
        for shift in range(2):
            (net(ids + shift) * (shift + 1)).sum().backward()
        rec.step()
        net(ids).sum().backward()
    grads = tap.open(tmp_path / "r")["head"].port("grad_output")
    assert [(g.batch, g.call) for g in grads] == [(0, 0), (0, 1), (1, 0)]
    assert [g.tensor().flatten()[0].item() for g in grads] == [1.0, 2.0, 1.0]


def test_a_backward_after_the_step_belongs_to_its_forward(net: Net, ids, tmp_path) -> None:
    with tap.record(net, tmp_path / "r", layers="head", grads=True) as rec:
        loss = net(ids).sum()
        rec.step()
        loss.backward()
    (grad,) = tap.open(tmp_path / "r")["head"].port("grad_output")
    assert grad.batch == 0


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_recomputes_but_makes_no_new_record(recorded, reentrant: bool) -> None:
    torch.manual_seed(0)
    model = Checkpointed(reentrant)
    plain = Checkpointed(None)
    plain.load_state_dict(model.state_dict())
    x = torch.randn(2, 4, requires_grad=True)
    options = {"grads": True, "layers": "re:blocks.*"}
    run = recorded(model, call=lambda: model(x).square().sum().backward(), **options)
    expected = recorded(plain, call=lambda: plain(x).square().sum().backward(), **options)
    for name in expected.layers:
        assert len(run[name].port("output")) == 1
        assert torch.equal(run[name].output, expected[name].output)
        assert len(run[name].port("grad_output")) == 1
        assert torch.equal(run[name].grad_output, expected[name].grad_output)
