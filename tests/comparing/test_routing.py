"""Mixtures of experts: choices that rounding explains, and what follows from them."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tensortap as tap
from tensortap.comparing.routing import Known, choice_of, judge_choice

Recorded = Callable[..., tap.Recording]

WIDTH, EXPERTS = 32, 6


class Router(nn.Module):
    """Chooses two experts for each token; `says` is what it returns beside them."""

    def __init__(self, says: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH) * WIDTH**-0.5)
        self.says = says

    def forward(self, x: Tensor) -> Any:
        logits = F.linear(x, self.weight)
        weights, chosen = logits.softmax(-1).topk(2, -1)
        return {
            "scores": (logits, weights, chosen),
            "values": (weights, chosen),
        }[self.says]


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.gelu(self.up(x)))
        return result


class Mixture(nn.Module):
    """A loop over experts; with the gate a linear layer, nobody records what was chosen."""

    def __init__(self, says: str) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False) if says == "groups" else Router(says)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        found = self.gate(flat)
        if isinstance(found, Tensor):
            weights, chosen = found.softmax(-1).topk(2, -1)
        else:
            *_, weights, chosen = found
        total = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            token, place = (chosen == index).nonzero(as_tuple=True)
            if len(token):
                total.index_add_(0, token, expert(flat[token]) * weights[token, place, None])
        return total.view_as(x)


class Looking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = 8**-0.5

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        result: Tensor = self.out(y.transpose(1, 2).flatten(-2))
        return result


class Block(nn.Module):
    def __init__(self, says: str) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mixture = Looking(), Mixture(says)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.mixture(self.norm2(x))
        return result


class Model(nn.Module):
    def __init__(self, says: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block(says) for _ in range(3))
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x)
        return result


STYLES = ("scores", "values", "groups")


def made(says: str, seed: int = 0) -> tuple[Model, Tensor]:
    torch.manual_seed(seed)
    model = Model(says).eval().requires_grad_(False)
    return model, torch.randint(0, 64, (3, 20))


def recording(recorded: Recorded, model: nn.Module, ids: Tensor) -> tap.Recording:
    return recorded(model, ids, inputs=True)


def changed(result: tap.Comparison) -> int:
    return sum(row.flips.changed for row in result.layers if row.flips is not None)


@pytest.mark.parametrize("says", STYLES)
def test_a_clean_mixture_in_half_precision_has_no_divergence(recorded: Recorded, says: str) -> None:
    flips = 0
    for seed in range(8):
        model, ids = made(says, seed)
        reference = recording(recorded, model, ids)
        half = copy.deepcopy(model).bfloat16()
        result = tap.compare(reference, recording(recorded, half, ids))
        assert result.same, result.sentence
        assert result.first_divergence is None
        flips += changed(result)
    assert flips >= 3  # or nothing was asked


class Batched(nn.Module):
    """A mixture that computes token by token, with one activation for all rows."""

    def __init__(self, sorts: bool) -> None:
        super().__init__()
        self.gate, self.sorts = Router("scores"), sorts
        self.up = nn.Parameter(torch.randn(EXPERTS, 24, WIDTH) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 24) * 24**-0.5)
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        _, weights, chosen = self.gate(flat)
        token = torch.arange(len(flat)).repeat_interleave(2)
        expert, weight = chosen.flatten(), weights.flatten()
        if self.sorts:
            order = torch.argsort(expert)
            token, expert, weight = token[order], expert[order], weight[order]
        inner = self.act(torch.einsum("rd,red->re", flat[token], self.up[expert]))
        rows = torch.einsum("re,rde->rd", inner, self.down[expert]) * weight[:, None]
        return torch.zeros_like(flat).index_add_(0, token, rows).view_as(x)


@pytest.mark.parametrize("sorts", [False, True])
def test_rows_of_all_experts_are_compared_by_token(recorded: Recorded, sorts: bool) -> None:
    """Two experts of a token may also change places, which moves its rows."""
    moved = 0
    for seed in range(8):
        model, ids = made("scores", seed)
        for block in model.blocks:
            block.mixture = Batched(sorts)
        reference = recording(recorded, model, ids)
        half = copy.deepcopy(model).bfloat16()
        result = tap.compare(reference, recording(recorded, half, ids))
        assert result.same, result.sentence
        for row in result.layers:
            moved += 0 if row.flips is None else row.flips.changed + row.flips.reordered
    assert moved >= 3


def flipped(recorded: Recorded, says: str) -> tuple[Model, Tensor, tap.Recording]:
    """The first seed at which a token chooses another expert in an early block."""
    for seed in range(40):
        model, ids = made(says, seed)
        reference = recording(recorded, model, ids)
        half = copy.deepcopy(model).bfloat16()
        result = tap.compare(reference, recording(recorded, half, ids))
        early = [row for row in result.layers if row.layer.startswith(("blocks.0", "blocks.1"))]
        if any(row.flips is not None and row.flips.changed for row in early):
            return model, ids, reference
    raise AssertionError("no seed has another choice of expert")


@pytest.mark.parametrize("says", STYLES)
@pytest.mark.parametrize("where", ["blocks.2.attention.out", "blocks.2.mixture.experts.1.down"])
def test_a_bug_elsewhere_is_found_beside_another_choice(
    recorded: Recorded, says: str, where: str
) -> None:
    model, ids, reference = flipped(recorded, says)
    bad = copy.deepcopy(model).bfloat16()
    bad.get_submodule(where).weight.mul_(1.3)
    result = tap.compare(reference, recording(recorded, bad, ids))
    first = result.first_divergence
    assert first is not None
    assert first.layer == where, result.sentence


@pytest.mark.parametrize("says", ["scores", "values"])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1)])
def test_other_batches_are_compared_by_token(
    recorded: Recorded, tmp_path: Path, says: str, sizes: tuple[int, ...]
) -> None:
    model, ids, _ = flipped(recorded, says)
    half = copy.deepcopy(model).bfloat16()

    def run(of: Model, parts: tuple[int, ...]) -> tap.Recording:
        path = tmp_path / f"{of.head.weight.dtype}-{len(parts)}"
        with tap.record(of, path, layers="all", inputs=True, overwrite=True) as rec:
            for part in ids.split(list(parts)):
                of(part)
                rec.step()
        return tap.open(path)

    for ours, theirs in (((3,), sizes), (sizes, (3,))):
        result = tap.compare(run(model, ours), run(half, theirs))
        assert result.same, result.sentence
        assert changed(result) > 0


def test_the_answer_counts_the_tokens_and_gives_the_margin(
    recorded: Recorded, tmp_path: Path
) -> None:
    model, ids, reference = flipped(recorded, "scores")
    half = copy.deepcopy(model).bfloat16()
    result = tap.compare(reference, recording(recorded, half, ids))
    row = next(row for row in result.layers if row.flips is not None and row.flips.changed)
    flips = row.flips
    assert flips is not None
    assert row.layer.endswith("mixture.gate")
    assert row.verdict == "within"
    assert flips.basis == "scores"
    assert 0 < flips.margin <= flips.room
    assert f"{flips.changed} of 60 tokens chose another expert" in " ".join(row.hints)
    assert "within a margin of" in result.sentence
    assert row.hints[0] in result.to_html()
    mixture = result[row.layer.rpartition(".")[0]]
    apart = [part.apart for part in mixture.parts if part.port == "output"]
    assert apart == [flips.changed]
    schema = json.loads((Path(__file__).parents[2] / "docs/comparison.schema.json").read_text())
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(json.loads(result.to_json()), schema)


@pytest.mark.parametrize("says", STYLES)
def test_a_router_that_chooses_wrong_experts_diverges(recorded: Recorded, says: str) -> None:
    model, ids, reference = flipped(recorded, says)
    bad = copy.deepcopy(model).bfloat16()
    gate = bad.get_submodule("blocks.1.mixture.gate")
    gate.weight.copy_(gate.weight.roll(1, 0))
    first = tap.compare(reference, recording(recorded, bad, ids)).first_divergence
    assert first is not None
    assert first.layer == "blocks.1.mixture.gate"


def test_a_choice_that_no_rounding_explains_diverges_in_one_precision(recorded: Recorded) -> None:
    model, ids = made("values")
    bad = copy.deepcopy(model)
    gate = bad.get_submodule("blocks.1.mixture.gate")

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = F.linear(x, gate.weight).softmax(-1).topk(2, -1)
        chosen[5] = (chosen[5] + 1) % EXPERTS
        return weights, chosen

    gate.forward = forward
    result = tap.compare(recording(recorded, model, ids), recording(recorded, bad, ids))
    first = result.first_divergence
    assert first is not None
    assert first.layer == "blocks.1.mixture.gate"
    assert "by more than rounding explains" in first.why


@pytest.mark.parametrize("says", ["scores", "values"])
def test_a_run_that_is_judged_while_it_runs_gets_the_same_answer(
    recorded: Recorded, tmp_path: Path, says: str
) -> None:
    model, ids, reference = flipped(recorded, says)
    half = copy.deepcopy(model).bfloat16()
    whole = tap.compare(reference, recording(recorded, half, ids))
    with tap.record(half, tmp_path / "live", layers="all", inputs=True, against=reference) as rec:
        half(ids)
    live = rec.comparison
    assert live is not None
    assert live.first_divergence is None, live.sentence
    assert live.same
    assert changed(live) == changed(whole) > 0


# The judgement itself.


def known(scores: Tensor, others: Tensor, expected: float) -> Known:
    return Known(expected, (scores.double().numpy(), others.double().numpy()))


def test_the_margin_of_the_reference_decides() -> None:
    scores = torch.tensor([[3.0, 2.0, 1.999, 0.0], [3.0, 2.0, 1.0, 0.0]])
    ours, theirs = torch.tensor([[0, 1], [0, 1]]), torch.tensor([[0, 2], [0, 1]])
    choice = choice_of(ours, theirs)
    assert choice is not None
    clean = np.zeros(2, dtype=bool)
    judged, explained = judge_choice(choice, known(scores, scores, 1e-3), clean, True)
    assert (judged.verdict, explained) == ("within", (0,))
    assert judged.flips is not None
    assert math.isclose(judged.flips.margin, 0.001, rel_tol=1e-3)
    judged, explained = judge_choice(choice, known(scores, scores, 1e-6), clean, True)
    assert (judged.verdict, explained) == ("diverged", ())
    # What came in touched follows from its own scores.
    moved = scores + torch.tensor([[0.0, -0.5, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0]])
    touched = np.array([True, False])
    judged, explained = judge_choice(choice, known(scores, moved, 1e-6), touched, True)
    assert (judged.verdict, explained) == ("within", (0,))


def test_the_same_experts_in_another_order_touch_nothing() -> None:
    scores = torch.tensor([[2.0, 1.999, 0.0, -1.0]])
    choice = choice_of(torch.tensor([[0, 1]]), torch.tensor([[1, 0]]))
    assert choice is not None
    judged, explained = judge_choice(
        choice, known(scores, scores, 1e-3), np.zeros(1, dtype=bool), True
    )
    assert (judged.verdict, explained) == ("within", ())
    assert "the same experts in another order" in judged.why


def test_without_scores_the_number_of_tokens_decides() -> None:
    torch.manual_seed(0)
    ours = torch.stack([torch.randperm(8)[:2] for _ in range(100)])
    few, many = ours.clone(), ours.clone()
    few[7] = (ours[7] + 1) % 8
    many[:] = (ours + 1) % 8
    clean = np.zeros(100, dtype=bool)
    for theirs, expected, verdict in (
        (few, 0.004, "within"),
        (few, 1e-7, "diverged"),
        (many, 0.004, "diverged"),
    ):
        choice = choice_of(ours, theirs)
        assert choice is not None
        assert judge_choice(choice, Known(expected), clean, True)[0].verdict == verdict


def test_what_is_no_choice_is_none() -> None:
    assert choice_of(torch.tensor([[1, 1]]), torch.tensor([[1, 2]])) is None
    assert choice_of(torch.tensor([[-1, 1]]), torch.tensor([[-1, 2]])) is None
    assert choice_of(torch.arange(4), torch.arange(4)) is None
    hot = choice_of(torch.eye(3, dtype=torch.int64), torch.eye(3, dtype=torch.int64))
    assert hot is not None
    assert hot.reference is not None
    assert hot.reference.tolist() == [[0], [1], [2]]


@pytest.mark.parametrize("says", STYLES)
def test_nobody_is_blamed_for_another_choice(recorded: Recorded, says: str) -> None:
    model, ids, reference = flipped(recorded, says)
    found = tap.blame(reference, copy.deepcopy(model).bfloat16(), ids)
    assert found.culprit is None, found.sentence
    assert "tokens chose other experts" in " ".join(found.notes).lower()


@pytest.mark.parametrize("says", STYLES)
def test_a_bug_is_blamed_beside_another_choice(recorded: Recorded, says: str) -> None:
    model, ids, reference = flipped(recorded, says)
    bad = copy.deepcopy(model).bfloat16()
    bad.get_submodule("blocks.2.attention.out").weight.mul_(1.5)
    found = tap.blame(reference, bad, ids)
    assert found.culprit == "blocks.2.attention.out", found.sentence
