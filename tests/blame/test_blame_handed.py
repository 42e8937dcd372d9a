"""What a layer was handed, or was not: masks, ids, states, another shape, another output."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from blame_models import make
from torch import Tensor, nn

import tensortap as tap


class Layer(nn.Module):
    """Attention over tokens that are real."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.norm(x)
        scores = y @ y.transpose(1, 2)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        result: Tensor = x + self.out(scores.softmax(-1) @ y)
        return result


class Reader(nn.Module):
    """Ids, padding, a state that is carried, and two answers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.gru = nn.GRU(16, 16, batch_first=True)
        self.pool = nn.Conv1d(16, 16, 3, padding=1)
        self.head, self.box = nn.Linear(16, 5), nn.Linear(16, 4)
        self.rows, self.masked, self.carried, self.squashed = 40, True, True, True

    def forward(self, ids: Tensor, real: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids % self.rows)
        mask = real[:, None, :].bool() if self.masked else None
        for layer in self.layers:
            x = layer(x, mask=mask)
        first, state = self.gru(x[:, :6])
        second, _ = self.gru(x[:, 6:], state) if self.carried else self.gru(x[:, 6:])
        y = self.pool(torch.cat((first, second), 1).transpose(1, 2)).mean(2)
        box = self.box(y)
        return {"logits": self.head(y), "boxes": box.sigmoid() if self.squashed else box}


def _inputs() -> dict[str, Tensor]:
    ids = torch.arange(24).reshape(2, 12) * 7 % 40
    real = torch.ones(2, 12, dtype=torch.long)
    real[1, -3:] = 0
    return {"ids": ids, "real": real}


@pytest.mark.parametrize(
    ("name", "value", "place", "kind", "words"),
    [
        ("masked", False, ("embed", "layers.0"), "mask", "hides tokens 9 to 11 of sample 1"),
        ("rows", 20, (None, "embed"), "lookup", "looked up as id mod 20"),
        ("carried", False, ("gru", "gru"), "missing", "hx is not given (a state is not carried)"),
        ("squashed", False, ("head", None), "function", "where the reference is sigmoid('box')"),
    ],
)
def test_what_is_handed_on_is_named_with_its_cause(
    name: str,
    value: Any,
    place: tuple[str | None, str | None],
    kind: str,
    words: str,
    tmp_path: Path,
) -> None:
    model, wrong, inputs = make(Reader), make(Reader), _inputs()
    setattr(wrong, name, value)
    for path, one in (("right", model), ("wrong", wrong)):
        with tap.record(one, tmp_path / path, layers="all", inputs=True):
            one(**inputs)
    blamed = tap.blame(tmp_path / "right", wrong, inputs)
    assert blamed.culprit == ""
    assert blamed.made_in is not None
    assert (blamed.made_in.after, blamed.made_in.before) == place
    assert blamed.causes[0].kind == kind
    assert words in blamed.causes[0].text
    compared = tap.compare(tmp_path / "right", tmp_path / "wrong")
    assert compared.maker is not None and compared.first_divergence is not None
    assert (compared.maker.layer, compared.maker.before) == ("", place[1])
    assert compared.first_divergence.causes[0].kind == kind


def test_a_changed_shape_is_blamed_where_it_is_made(tmp_path: Path) -> None:
    model, inputs = make(Reader), _inputs()
    with tap.record(model, tmp_path / "right", layers="all", inputs=True):
        model(**inputs)
    wrong = copy.deepcopy(model)
    wrong.pool.stride = (2,)
    blamed = tap.blame(tmp_path / "right", wrong, inputs)
    assert (blamed.culprit, blamed.causes[0].kind) == ("pool", "shape")


def test_a_mask_that_hides_nothing_is_not_missed(tmp_path: Path) -> None:
    model, inputs = make(Reader), _inputs()
    inputs["real"] = torch.ones_like(inputs["real"])
    with tap.record(model, tmp_path / "right", layers="all", inputs=True):
        model(**inputs)
    model.masked = False
    with torch.no_grad():
        model.layers[1].out.bias += 0.5
    with tap.record(model, tmp_path / "wrong", layers="all", inputs=True):
        model(**inputs)
    blamed = tap.blame(tmp_path / "right", model, inputs)
    assert blamed.culprit == "layers.1.out"
    compared = tap.compare(tmp_path / "right", tmp_path / "wrong")
    assert compared.maker is not None and compared.maker.layer == "layers.1.out"


def test_keywords_of_fused_layers_are_recorded_and_blamed(tmp_path: Path) -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(8, 8)
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
            self.masked = True

        def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
            keywords = {"src_key_padding_mask": hidden} if self.masked else {}
            result: Tensor = self.layer(self.stem(x), **keywords)
            return result

    model, x = make(Fused), torch.randn(2, 6, 8)
    hidden = torch.zeros(2, 6, dtype=torch.bool)
    hidden[1, 4:] = True
    with torch.no_grad(), tap.record(model, tmp_path / "right", layers="all", inputs=True):
        model(x, hidden)
    leaves = [r.leaf for r in tap.open(tmp_path / "right")["layer"].port("input")]
    assert "['src_key_padding_mask']" in leaves
    model.masked = False
    blamed = tap.blame(tmp_path / "right", model, (x, hidden))
    assert (blamed.culprit, blamed.causes[0].kind) == ("", "mask")
    assert "tokens 4, 5 of sample 1 (padding)" in blamed.causes[0].text


class OfExperts(nn.Module):
    """Experts that are handed a choice, so that another number of them reaches another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 16, 16) / 4)

    def forward(self, x: Tensor, share: Tensor, chosen: Tensor) -> Tensor:
        made = torch.einsum("td,tkdo->tko", x, self.weight[chosen])
        return (made * share[..., None]).sum(1)


class OfChoice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.top = nn.Parameter(torch.randn(6, 16)), 2

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        share, chosen = nn.functional.linear(x, self.weight).softmax(-1).topk(self.top, -1)
        return share, chosen


class ChoosingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router, self.experts = nn.LayerNorm(16), OfChoice(), OfExperts()

    def forward(self, x: Tensor) -> Tensor:
        normal = self.norm(x)
        made: Tensor = x + self.experts(normal, *self.router(normal))
        return made


@pytest.mark.parametrize("at", [0, 2])
def test_the_router_that_chooses_fewer_is_blamed_and_not_its_experts(
    tmp_path: Path, at: int
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(ChoosingBlock() for _ in range(3))).eval()
    x = torch.randn(40, 16)
    with torch.no_grad(), tap.record(model, tmp_path / "run", layers="all", inputs=True):
        model(x)
    bad = copy.deepcopy(model)
    bad[at].router.top = 1  # type: ignore[union-attr]
    found = tap.blame(tmp_path / "run", bad, x)
    assert found.culprit == f"{at}.router"
    assert [cause.kind for cause in found.causes] == ["shape"]
