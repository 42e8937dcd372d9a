"""Gradients that are zero but for rounding, and what an optimizer makes of them, are no bugs."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import tensortap as tap


class Attention(nn.Module):
    """The bias of its keys has no effect: the softmax takes it away."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(1, 2) / 5.6
        return x + self.o(scores.softmax(-1) @ self.v(x))


def train(path: Path, scale: float = 1.0, seed: int = 0, **options: bool) -> tap.Recording:
    torch.manual_seed(seed)
    model = nn.Sequential(Attention(), Attention(), nn.Linear(32, 8))
    x = torch.randn(8, 16, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
    with tap.watch(model, path, layers="all", every=1, grads=True, params=True, updates=True):
        for _ in range(5):
            optimizer.zero_grad()
            (model(x) ** 2).mean().backward()
            with torch.no_grad():
                model[0].v.bias.grad.mul_(scale)
            optimizer.step()
    return tap.open(path)


def test_two_kernels_of_one_optimizer(tmp_path: Path) -> None:
    for seed in range(2):
        left = train(tmp_path / f"a{seed}", seed=seed, foreach=True)
        right = train(tmp_path / f"b{seed}", seed=seed, fused=True)
        result = tap.compare(left, right)
        bad = [(row.layer, row.why) for row in result.layers if row.verdict == "diverged"]
        assert result.same, bad[:3]
        part = next(p for p in result["0.k"].parts if p.port == "grad_param" and p.leaf == ".bias")
        assert part.verdict == "within"


def test_a_gradient_that_is_not_zero_is_judged_as_before(tmp_path: Path) -> None:
    left = train(tmp_path / "a", foreach=True)
    right = train(tmp_path / "b", scale=1.001, foreach=True)
    result = tap.compare(left, right)
    parts = {(p.port, p.leaf): p.verdict for p in result["0.v"].parts}
    assert parts["grad_param", ".bias"] == "diverged"
