"""Training mode: what depends on it is found, is in the manifest, and is the first warning."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import tensortap as tap
from tensortap.taps.training_mode import in_eval, training_effects


class Attention(nn.Module):
    """As transformers writes it: a share in an attribute, and a functional dropout."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.attention_dropout = dropout
        self.proj = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(self.proj(x), self.attention_dropout, self.training)


class Written(nn.Module):
    """A functional dropout whose rate is in the code."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x, 0.1, self.training)


class Configured(nn.Module):
    """A functional dropout whose rate is in a config."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_dropout=rate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x, p=self.config.hidden_dropout, training=self.training)


class Usual(nn.Module):
    """A functional dropout with the usual rate."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x, training=self.training)


class Owner(nn.Module):
    """Looks at its mode, and holds a dropout that does nothing under the function's name."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(x).clone() if self.training else x


class DropPath(nn.Module):
    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keep = 1 - self.drop_prob
        return x * torch.bernoulli(torch.full((len(x), 1), keep)) / keep if self.training else x


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5))


X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))

EFFECTS: dict[str, tuple[nn.Module, dict[str, list[str]]]] = {
    "norm_and_dropout": (small(), {"batch statistics": ["1"], "dropout": ["3"]}),
    "no_dropout": (nn.Sequential(nn.Dropout(0.0), Attention(0.0), nn.LSTM(2, 2)), {}),
    "no_running_statistics": (nn.BatchNorm1d(3, track_running_stats=False), {}),
    "instance_norm": (nn.InstanceNorm1d(3), {}),
    "instance_norm_running": (
        nn.InstanceNorm1d(3, track_running_stats=True),
        {"batch statistics": [""]},
    ),
    "functional": (nn.Sequential(Attention()), {"dropout": ["0"]}),
    "drop_path": (nn.Sequential(DropPath(0.2), DropPath(0.0)), {"dropout": ["0"]}),
    "attention": (nn.MultiheadAttention(4, 2, dropout=0.1), {"dropout": [""]}),
    "deep_lstm": (nn.LSTM(2, 2, num_layers=2, dropout=0.3), {"dropout": [""]}),
    "rrelu": (nn.RReLU(), {"noise": [""]}),
    "written": (nn.Sequential(Written(), Usual()), {"dropout": ["0", "1"]}),
    "configured": (nn.Sequential(Configured(0.0), Configured(0.2)), {"dropout": ["1"]}),
    "owner": (nn.Sequential(Owner()), {}),
    "scripted": (
        torch.jit.script(small()),
        {"batch statistics": ["1"], "dropout": ["3"]},
    ),
    "counts": (nn.Conv2d(1, 1, 1), {}),
}


@pytest.mark.parametrize("name", EFFECTS)
def test_what_depends_on_training_mode_is_found(name: str) -> None:
    model, expected = EFFECTS[name]
    assert training_effects(model.train()) == expected
    assert training_effects(model.eval()) == {}
    model.train()


@pytest.mark.parametrize(
    "name",
    [
        "norm_and_dropout",
        "functional",
        "drop_path",
        "rrelu",
        "written",
        "configured",
    ],
)
def test_what_is_found_changes_the_output(name: str) -> None:
    model, _ = EFFECTS[name]
    torch.manual_seed(0)
    assert not torch.equal(model.train()(X), model.eval()(X))
    model.train()


def test_transformers_attention_is_found() -> None:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, intermediate_size=8, vocab_size=9)
    quiet = transformers.LlamaForCausalLM(config).train()
    assert training_effects(quiet) == {}
    config.attention_dropout = 0.1
    found = training_effects(transformers.LlamaForCausalLM(config).train())
    assert found == {"dropout": ["model.layers.0.self_attn"]}


def test_in_eval_puts_every_module_back() -> None:
    model = small()
    model[1].eval()
    before = [module.training for module in model.modules()]
    with pytest.raises(ZeroDivisionError), in_eval(model):
        assert not any(module.training for module in model.modules())
        raise ZeroDivisionError
    assert [module.training for module in model.modules()] == before
    assert model.training and not model[1].training


def recorded(model: nn.Module, path: Path, **options: Any) -> tap.Recording:
    with tap.record(model, path, layers="all", **options):
        model(X)
    return tap.open(path)


def test_a_recording_says_what_ran_in_training_mode(tmp_path: Path) -> None:
    run = recorded(small(), tmp_path / "run")
    assert run.manifest.target["training_effects"] == {"batch statistics": ["1"], "dropout": ["3"]}
    (note,) = run.notes
    assert "training mode" in note and "'1'" in note and "'3'" in note and "--eval" in note


def test_the_model_itself_has_a_name(tmp_path: Path) -> None:
    (note,) = recorded(Attention(), tmp_path / "run").notes
    assert "1 layer drops values at random (the model itself)" in note


@pytest.mark.parametrize("model", [small().eval(), nn.Sequential(nn.Linear(4, 4))])
def test_where_nothing_depends_on_it_nothing_is_said(model: nn.Module, tmp_path: Path) -> None:
    run = recorded(model, tmp_path / "run")
    assert "training_effects" not in run.manifest.target and not run.notes


def test_the_mode_counts_in_which_the_model_is_called(tmp_path: Path) -> None:
    model = small()
    with tap.record(model, tmp_path / "eval", layers="all"):
        model.eval()
        model(X)
    assert "training_effects" not in tap.open(tmp_path / "eval").manifest.target
    with tap.record(model, tmp_path / "later", layers="all"):
        model(X)
        model.train()
        model(X)
        model.eval()
    assert "training_effects" in tap.open(tmp_path / "later").manifest.target


def test_a_compiled_model_has_its_own_names(tmp_path: Path) -> None:
    model = torch.compile(small(), backend="eager")
    run = recorded(model, tmp_path / "run")
    assert run.manifest.target["training_effects"] == {"batch statistics": ["1"], "dropout": ["3"]}


@pytest.mark.parametrize("side", ["reference", "candidate"])
def test_compare_says_first_that_one_side_was_in_training_mode(tmp_path: Path, side: str) -> None:
    training, evaluated = small(), small().eval()
    pair = (training, evaluated) if side == "reference" else (evaluated, training)
    runs = [tmp_path / "reference", tmp_path / "candidate"]
    recorded(pair[0], runs[0])
    with tap.record(pair[1], runs[1], layers="all"):
        pair[1](X + 1)  # other inputs too: the mode is said before
    result = tap.compare(*runs)
    assert result.warnings[0].startswith(f"The {side} was recorded in training mode")
    assert "'1'" in result.warnings[0] and "'3'" in result.warnings[0]
    assert len(result.warnings) == 2
    assert not any("training mode" in note for note in result.notes)
    assert all("training_effects" not in row.name for row in result.environment)
    assert result.to_dict()["warnings"][0] == result.warnings[0]


def test_a_comparison_while_the_model_runs_says_it_too(tmp_path: Path) -> None:
    recorded(small().eval(), tmp_path / "reference")
    with tap.record(
        model := small(), tmp_path / "candidate", layers="all", against=tmp_path / "reference"
    ) as rec:
        model(X)
        assert rec.comparison.warnings[0].startswith("The candidate was recorded in training mode")
    assert rec.comparison.warnings[0].startswith("The candidate was recorded in training mode")


def test_two_runs_that_draw_are_told_of_and_two_of_batch_statistics_are_not(tmp_path: Path) -> None:
    for name in ("a", "b"):
        recorded(small(), tmp_path / name)
        recorded(nn.Sequential(nn.BatchNorm1d(4)), tmp_path / f"{name}_norm")
    (warning,) = tap.compare(tmp_path / "a", tmp_path / "b").warnings
    assert warning.startswith("Both runs were recorded in training mode: 1 layer drops values")
    assert not tap.compare(tmp_path / "a_norm", tmp_path / "b_norm").warnings
