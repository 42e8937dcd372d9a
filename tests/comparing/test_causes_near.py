"""Causes that follow from what was made before: gates, activations, attention, pools, lookups."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tensortap as tap
from tensortap.comparing.causes import explain

Change = Callable[["Net"], object]


class Attention(nn.Module):
    """Heads of width 8 that share keys and values in twos; a causal mask, and one of padding."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.q_proj, self.o_proj = (nn.Linear(width, width) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(width, width // 2) for _ in range(2))
        self.scale, self.causal, self.padding, self.window = 8**-0.5, True, True, 0

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        q, k, v = (
            one(x).unflatten(-1, (-1, 8)).transpose(1, 2)
            for one in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        far = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        allowed = far >= 0 if self.causal else far > -math.inf
        if self.window:
            allowed = allowed & (far < self.window)
        if self.padding:
            allowed = allowed & real.bool()[:, None, None, :]
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=self.scale)
        made: Tensor = self.o_proj(heads.transpose(1, 2).flatten(2))
        return made


class Mlp(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, 48) for _ in range(2))
        self.down_proj = nn.Linear(48, width)
        self.act_fn = nn.SiLU()
        self.kind = "gated"

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        inner = {
            "gated": lambda: self.act_fn(gate) * up,
            "up alone": lambda: up,
            "no activation": lambda: gate * up,
            "exchanged": lambda: self.act_fn(up) * gate,
        }[self.kind]()
        made: Tensor = self.down_proj(inner)
        return made


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 32)
        self.attention, self.mlp, self.head = Attention(), Mlp(), nn.Linear(32, 10)
        self.pool = "mean"
        self.hash: Callable[[Tensor], Tensor] = lambda ids: ids

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = x + self.attention(x, attention_mask)
        x = self.mlp(x)
        pooled = x.mean(1) if self.pool == "mean" else x[:, 0]
        made: Tensor = self.head(pooled)
        return made


@pytest.fixture(scope="module")
def net() -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Net()
        for module in model.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=1.5 * module.in_features**-0.5)
    return model.eval().requires_grad_(False)


def make_inputs() -> dict[str, Tensor]:
    ids = torch.randint(1, 100, (3, 20), generator=torch.Generator().manual_seed(0))
    ids[0, :3] = 0
    mask = torch.ones_like(ids)
    mask[1, -6:] = 0
    return {"ids": ids, "attention_mask": mask}


def _set(layer: str, **values: object) -> Change:
    def change(model: Net) -> None:
        for name, value in values.items():
            setattr(model.get_submodule(layer), name, value)

    return change


def _ids(function: Callable[[Tensor], Tensor]) -> Change:
    def change(model: Net) -> None:
        table = model.embedding.weight
        model.embedding.forward = lambda ids: F.embedding(function(ids), table)  # type: ignore[method-assign]

    return change


def _zero_row(model: Net) -> None:
    model.embedding.weight[0] = 0


CASES: dict[str, tuple[Change, str, str]] = {
    "gate lost": (_set("mlp", kind="up alone"), "gate", "output = up_proj, where the reference is"),
    "no activation": (_set("mlp", kind="no activation"), "gate", "another gate"),
    "gate and up": (_set("mlp", kind="exchanged"), "source", "output = up_proj, where"),
    "relu": (_set("mlp", act_fn=nn.ReLU()), "function", "output = relu(the layer's input), where"),
    "leaky": (_set("mlp", act_fn=nn.LeakyReLU(0.2)), "function", "leaky_relu[0.2]"),
    "scale": (_set("attention", scale=1 / 8), "scale", "the scale 0.125 instead of 0.3536"),
    "causal mask lost": (_set("attention", causal=False), "mask", "the causal mask is lost"),
    "padding attended": (_set("attention", padding=False), "mask", "padding is attended"),
    "window": (_set("attention", window=5), "mask", "each token sees 5 tokens only"),
    "no mask": (_set("attention", causal=False, padding=False), "mask", "the mask is lost"),
    "pool": (_set("", pool="first"), "reduction", "output = the first token of mlp"),
    "smaller table": (_ids(lambda ids: ids % 40), "lookup", "id mod 40: the table has 40 rows"),
    "hash": (_ids(lambda ids: ids * 7 % 37), "lookup", "ids share a row"),
    "off by one": (_ids(lambda ids: (ids + 1).clamp(max=99)), "offset", "looked up as id + 1"),
    "clamped": (_ids(lambda ids: ids.clamp(max=60)), "lookup", "on all have one row, as"),
    "padding row": (_zero_row, "lookup", "the row of id 0 alone, which is zero"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_was_changed_is_said(name: str, net: Net, tmp_path: Path) -> None:
    change, kind, words = CASES[name]
    candidate = copy.deepcopy(net)
    with torch.no_grad():
        change(candidate)
    reference, other = record(net, tmp_path / "a"), record(candidate, tmp_path / "b")
    first = tap.compare(reference, other).first_divergence
    assert first is not None
    assert first.causes[0].kind == kind, first.causes
    assert words in first.causes[0].text.replace("'mlp'", "mlp")
    assert first.causes[0].explains > 0.99


@pytest.mark.parametrize("name", ["gate lost", "no activation", "scale", "padding attended"])
def test_blame_says_what_is_wrong_inside_of_the_culprit(
    name: str, net: Net, tmp_path: Path
) -> None:
    change, kind, words = CASES[name]
    candidate = copy.deepcopy(net)
    change(candidate)
    blame = tap.blame(record(net, tmp_path / "a"), candidate, make_inputs())
    assert blame.culprit in ("mlp", "attention")
    assert blame.causes[0].kind == kind
    assert words in blame.causes[0].text
    assert blame.causes[0].text.startswith(f"of the input of {blame.culprit}.")


@pytest.mark.parametrize("change", ["base", "pairing", "factor"])
def test_tables_of_rotary_positions(change: str) -> None:
    def tables(base: float = 1e4, factor: float = 1.0) -> Tensor:
        speed = base ** (-torch.arange(16) / 16)
        return torch.outer(factor * torch.arange(24), speed).cos()

    other = tables(5e5) if change == "base" else tables(factor=0.25 if change == "factor" else 1)
    doubled = other.repeat_interleave(2, -1) if change == "pairing" else other.repeat(1, 2)
    (cause,) = explain(tables().repeat(1, 2)[None], doubled[None])
    assert cause.kind == "rotary"
    assert {
        "base": "the base 500000, paired as halves, where the reference has the base 10000",
        "pairing": "paired as neighbours, where",
        "factor": "positions times 0.25, where",
    }[change] in cause.text


def test_what_is_not_known_is_not_said(net: Net, tmp_path: Path) -> None:
    """Other weights are no gate, no mask and no table."""
    kinds = []
    for number, layer in enumerate(("attention.v_proj", "attention.o_proj", "mlp.up_proj", "head")):
        candidate = copy.deepcopy(net)
        weight = candidate.get_submodule(layer).weight
        weight.normal_(0, 0.2, generator=torch.Generator().manual_seed(number))  # type: ignore[operator]
        other = record(candidate, tmp_path / layer)
        first = tap.compare(record(net, tmp_path / f"{layer}-a"), other).first_divergence
        kinds.append(first.causes[0].kind)  # type: ignore[union-attr]
    assert kinds == ["noise"] * 4


def record(model: nn.Module, path: Path) -> Path:
    with torch.no_grad(), tap.record(model, path, layers="all", inputs=True):
        model(**make_inputs())
    return path
