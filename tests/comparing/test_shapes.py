"""An output of another shape is a divergence, made by the layer that was given the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import tensortap as tap

Recorded = Callable[..., tap.Recording]


class Convs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (
            nn.Conv2d(3, 8, 1),
            nn.Conv2d(8, 8, 3, 2, 1),
            nn.Conv2d(8, 8, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.c(self.b(self.a(x).relu()).relu())
        return result


def moved_stride() -> tuple[Convs, Convs, torch.Tensor]:
    torch.manual_seed(0)
    model = Convs().eval()
    bad = copy.deepcopy(model)
    bad.a.stride, bad.b.stride = (2, 2), (1, 1)
    return model, bad, torch.randn(2, 3, 16, 16)


@pytest.mark.parametrize("keep", ["tensors", "summary"])
def test_the_layer_that_changed_the_shape_is_the_first_divergence(
    recorded: Recorded, keep: str
) -> None:
    model, bad, x = moved_stride()
    options = {"inputs": True, "keep": keep}
    result = tap.compare(recorded(model, x, **options), recorded(bad, x, **options))
    first = result.first_divergence
    assert first is not None
    assert (first.layer, first.origin, first.input_verdict) == (
        "a",
        "made here",
        "identical" if keep == "tensors" else "within",
    )
    assert "[2, 8, 16, 16] in the reference, [2, 8, 8, 8] in the candidate" in first.why
    assert [cause.kind for cause in first.causes] == ["shape"]
    assert first.causes[0].details == {"reference": [2, 8, 16, 16], "candidate": [2, 8, 8, 8]}
    if keep == "tensors":
        words = "the candidate holds one of every 2 on axis 2 and one of every 2 on axis 3"
        assert words in first.causes[0].text
    assert "explains" not in str(first.causes[0])
    assert result["b"].origin == "inherited"  # what came in has another shape
    assert not result.same
    assert "First divergence at a (made here" in result.sentence


def test_without_inputs_the_first_layer_of_another_shape_is_it(recorded: Recorded) -> None:
    model, bad, x = moved_stride()
    options = {"layers": "leaves"}
    result = tap.compare(recorded(model, x, **options), recorded(bad, x, **options))
    first = result.first_divergence
    assert first is not None
    assert (first.layer, first.origin) == ("a", "unknown")


class Router(nn.Module):
    def __init__(self, experts: int, top: int) -> None:
        super().__init__()
        self.top, self.score = top, nn.Linear(16, experts)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores = self.score(x).softmax(-1)
        return scores, *scores.topk(self.top, -1)


class Mixture(nn.Module):
    """Experts that run over the tokens that chose them."""

    def __init__(self, top: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(16), Router(4, top)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        _, weights, chosen = self.router(x)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, place = (chosen == number).nonzero(as_tuple=True)
            result[token] += expert(x[token]) * weights[token, place, None]
        return result


def test_one_expert_fewer_is_the_routers_and_not_of_the_experts(recorded: Recorded) -> None:
    torch.manual_seed(0)
    model, bad = Mixture(2).eval(), Mixture(1).eval()
    bad.load_state_dict(model.state_dict())
    x = torch.randn(24, 16)
    result = tap.compare(recorded(model, x, inputs=True), recorded(bad, x, inputs=True))
    first = result.first_divergence
    assert first is not None
    assert (first.layer, first.origin) == ("router", "made here")
    assert [cause.kind for cause in first.causes] == ["shape"]
    assert "the candidate holds the first 1 of 2 on axis 1" in first.causes[0].text
    # An expert that is given other tokens is not at fault.
    for number in range(4):
        row = result[f"experts.{number}"]
        assert row.verdict != "diverged" or row.origin != "made here"


class Doubling(nn.Module):
    """A layer that is called twice and returns another shape at the second call."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.wrong, self.calls = wrong, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x[:, ::2] * 2 if self.wrong and self.calls == 2 else x * 2


class Twice(nn.Module):
    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.layer = Doubling(wrong)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        result: torch.Tensor = self.layer(x)
        return result


def test_the_call_that_changed_its_shape_is_named(recorded: Recorded) -> None:
    x = torch.randn(3, 8)
    left, right = (recorded(Twice(wrong), x, inputs=True) for wrong in (False, True))
    first = tap.compare(left, right).first_divergence
    assert first is not None
    assert (first.layer, first.first_moment) == ("layer", (0, 0, 1))
    assert "call 1" in first.why


def test_a_run_that_is_compared_live_says_the_same(recorded: Recorded, tmp_path: Path) -> None:
    model, bad, x = moved_stride()
    left = recorded(model, x, inputs=True)
    with tap.record(bad, tmp_path / "live", inputs=True, against=left) as live:
        bad(x)
    result = live.comparison
    assert result is not None
    assert result.first_divergence is not None
    assert result.first_divergence.layer == "a"
    assert [cause.kind for cause in result.first_divergence.causes] == ["shape"]


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool, self.last = nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(self.last(self.pool(self.conv(x).relu())).mean((2, 3)))
        return made


def test_a_pool_that_another_layer_stands_for(recorded: Recorded) -> None:
    torch.manual_seed(0)
    model = Pooled().eval()
    bad = copy.deepcopy(model)
    bad.pool = nn.Identity()  # type: ignore[assignment]
    x = torch.randn(2, 3, 18, 18)
    first = tap.compare(
        recorded(model, x, inputs=True), recorded(bad, x, inputs=True)
    ).first_divergence
    assert first is not None
    assert (first.layer, first.origin) == ("pool", "made here")
    assert [cause.kind for cause in first.causes] == ["shape"]
    assert "[2, 8, 8, 8] in the reference, [2, 8, 16, 16] in the candidate" in first.why


class Mixing(nn.Module):
    """A layer in which every token sees all, and which may drop a token at either end of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(16), nn.Linear(16, 16)
        self.drop = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, :-1] if self.drop == "before" else x[:, 1:] if self.drop == "first" else x
        made = self.norm(x)
        x = x + self.up(made @ made.transpose(1, 2) / 4 @ made).tanh()
        return x[:, :-1] if self.drop == "after" else x


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixing() for _ in range(3))
        self.head = nn.Linear(16, 5)
        self.drop = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x[:, :-1] if self.drop and number == 1 else x)
        result: torch.Tensor = self.head(x)
        return result


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize(
    ("drop", "layer", "after", "before"),
    [
        ("before", "layers.1", None, "layers.1.norm"),
        ("first", "layers.1", None, "layers.1.norm"),
        ("after", "layers.1", "layers.1.up", None),
        ("root", "", "layers.0", "layers.1"),
    ],
)
def test_a_token_that_was_dropped_is_no_padding(
    recorded: Recorded, local: bool, drop: str, layer: str, after: str | None, before: str | None
) -> None:
    torch.manual_seed(0)
    model, x = Dropping().eval(), torch.randn(2, 9, 16)
    if local:  # then all other tokens are right to the last bit
        for block in model.layers:
            torch.nn.init.zeros_(block.up.weight)
    bad = copy.deepcopy(model)
    if drop == "root":
        bad.drop = True
    else:
        bad.layers[1].drop = drop
    result = tap.compare(recorded(model, x, inputs=True), recorded(bad, x, inputs=True))
    assert not result.same
    assert result[""].verdict == "diverged"
    assert result.first_divergence is not None
    assert result.maker is not None
    assert (result.maker.layer, result.maker.after, result.maker.before) == (layer, after, before)
    bits = result.first_bit_difference
    assert bits is None or bits.row is not result.first_divergence or bits.maker == result.maker
    assert [cause.kind for cause in result.first_divergence.causes] == ["shape"]
    shapes = result.first_divergence.causes[0].details
    assert (shapes["reference"][1], shapes["candidate"][1]) == (9, 8)


class Padding(nn.Module):
    """A head whose rows are filled up, and what else is no dropped token."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.up = kind, nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.up(x)
        if self.kind == "channels":
            return nn.functional.pad(made, (0, 2))
        if self.kind == "tokens":
            return nn.functional.pad(made, (0, 0, 0, 2))
        return made


@pytest.mark.parametrize("kinds", [("channels", ""), ("", "channels"), ("", "tokens")])
def test_channels_and_tokens_that_were_added_are_still_padding(
    recorded: Recorded, kinds: tuple[str, str]
) -> None:
    x, runs = torch.randn(2, 9, 16), []
    for kind in kinds:
        torch.manual_seed(0)
        runs.append(recorded(Padding(kind).eval(), x, inputs=True))
    result = tap.compare(*runs)
    assert result.first_divergence is None
    assert result[""].verdict == "within"


def test_a_dropped_token_is_said_live_too(recorded: Recorded, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Dropping().eval(), torch.randn(2, 9, 16)
    bad = copy.deepcopy(model)
    bad.layers[1].drop = "before"
    left = recorded(model, x, inputs=True)
    with tap.record(bad, tmp_path / "live", layers="all", inputs=True, against=left) as live:
        bad(x)
    assert live.comparison is not None
    assert live.comparison.maker == tap.compare(left, recorded(bad, x, inputs=True)).maker
