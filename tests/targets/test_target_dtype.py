"""`--dtype` for functions that take none: the model and its inputs, cast once built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tensortap as tap
from tensortap.errors import OptionError, TargetError
from tensortap.targets import Target, load_target
from tensortap.targets.casting import cast_target

SOURCE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)
        self.head.weight = nn.Parameter(self.first.weight[:3].detach().clone())
        self.register_buffer("order", torch.arange(8))
        self.register_buffer("turn", torch.full((8,), 1 + 0j))

    def forward(self, x, ids, scales):
        y = self.first(x * scales[0])[:, self.order] * self.turn.real
        return self.head(self.norm(y)) + ids[:, None]

def build(bug=False):
    model = Net()
    if bug:
        model.norm.weight.data.mul_(1.01)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    return model, {"x": x, "ids": torch.arange(4), "scales": [torch.full((4, 1), 0.5)]}

def tied():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    return model, torch.ones(1, 4)

def taking(dtype=torch.float32, device=torch.device("cpu")):
    return nn.Linear(4, 4).to(device, dtype), torch.ones(1, 4, dtype=dtype, device=device)

def ignoring(**options):
    return build()

def heeding(**options):
    return nn.Linear(4, 4).to(getattr(torch, options["dtype"])), torch.ones(1, 4).double()

class Table(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table, self.tables = table, {"more": [table], "few": (table, 1)}
        self.ids = torch.arange(4)

    def forward(self, x):
        return x @ self.table[self.ids] + self.tables["few"][0]

def tables():
    table = torch.eye(4)
    return nn.Sequential(nn.Linear(4, 4), Table(table), Table(table)), torch.ones(4, 4)
"""


@pytest.fixture
def spec(tmp_path: Path) -> str:
    path = tmp_path / "own.py"
    path.write_text(SOURCE)
    return f"{path}:build"


def run(target: Target, path: Path) -> tap.Recording:
    with tap.record(target.model, path, layers="leaves", inputs=True) as rec:
        for batch in target.batches:
            target(batch)
            rec.step()
    assert rec.failure is None
    return tap.open(path)


def test_what_is_floating_point_is_cast_and_nothing_else(spec: str) -> None:
    target = load_target(spec, {"dtype": "float64"})
    assert {p.dtype for p in target.model.parameters()} == {torch.float64}
    assert target.model.order.dtype == torch.int64
    assert target.model.turn.dtype == torch.complex128
    given = target.batches[0].kwargs
    assert given["x"].dtype == given["scales"][0].dtype == torch.float64
    assert given["ids"].dtype == torch.int64
    assert "takes no dtype" in target.notes[0]
    assert "cast to float64 behind it" in target.notes[0]
    assert target(target.batches[0]).dtype == torch.float64
    plain = load_target(spec).model.state_dict()
    for name, value in target.model.state_dict().items():
        assert torch.equal(value, plain[name].to(value.dtype))


def test_a_function_that_takes_a_dtype_gets_it(spec: str) -> None:
    target = load_target(spec.replace("build", "taking"), {"dtype": torch.float64})
    assert target.model.weight.dtype == torch.float64
    assert not target.notes


def test_a_default_is_as_good_as_an_annotation(spec: str) -> None:
    options = {"dtype": "float64", "device": "cpu"}
    target = load_target(spec.replace("build", "taking"), options)
    assert target.model.weight.dtype == torch.float64
    with pytest.raises(OptionError, match="no dtype that is known"):
        load_target(spec.replace("build", "taking"), {"dtype": "wide"})


def test_a_dtype_that_goes_into_options_is_not_lost(spec: str) -> None:
    target = load_target(spec.replace("build", "ignoring"), {"dtype": "float64"})
    assert {p.dtype for p in target.model.parameters()} == {torch.float64}
    assert "leaves the dtype aside" in target.notes[0]
    assert not load_target(spec.replace("build", "heeding"), {"dtype": "float64"}).notes
    assert not load_target(spec.replace("build", "ignoring"), {"dtype": "a word of its own"}).notes


def test_tables_that_are_no_buffers_are_cast(spec: str) -> None:
    target = load_target(spec.replace("build", "tables"), {"dtype": "float64"})
    assert target(target.batches[0]).dtype == torch.float64
    first, second = target.model[1], target.model[2]
    assert first.table is second.table and first.ids.dtype == torch.int64


def test_tied_weights_stay_tied(spec: str) -> None:
    model = load_target(spec.replace("build", "tied"), {"dtype": "bf16"}).model
    assert model[0].weight is model[1].weight
    assert model[0].weight.dtype == torch.bfloat16


def test_rubbish_is_told(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="no dtype that is known"):
        load_target(spec, {"dtype": "int3"})
    with pytest.raises(OptionError, match="does not take 'heads'"):
        load_target(spec, {"dtype": "fp64"}, ["heads=2"])

    def refuse(self: Any, dtype: Any = None, *rest: Any, **named: Any) -> Any:
        raise NotImplementedError("no such cast")

    target = load_target(spec)
    monkeypatch.setattr(torch.Tensor, "to", refuse)
    with pytest.raises(TargetError, match=r"cannot be cast to float64: no such cast\."):
        cast_target(target, torch.float64, spec)


def test_a_truth_of_any_target_finds_a_worse_reference(spec: str, tmp_path: Path) -> None:
    truth = run(load_target(spec, {"dtype": "float64"}), tmp_path / "fp64")
    wrong = run(load_target(spec, {}, ["bug=true"]), tmp_path / "wrong")
    clean = run(load_target(spec), tmp_path / "clean")
    result = tap.compare(wrong, clean, truth=truth)
    assert not result.warnings
    assert "the reference may be the worse side (first at norm" in result.sentence
    assert result["norm"].candidate_error < 1e-6 < result["norm"].reference_error


def test_a_truth_of_a_checkpoint(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=32,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    (tmp_path / "ids.txt").write_text("1 2 3 4 5 6 7")
    runs = {}
    for dtype in ("bf16", "fp32", "fp64"):
        target = load_target(
            f"hf:{tmp_path / 'model'}", {"dtype": dtype}, input_ids=tmp_path / "ids.txt"
        )
        runs[dtype] = run(target, tmp_path / dtype)
    result = tap.compare(runs["bf16"], runs["fp32"], truth=runs["fp64"])
    assert not result.warnings
    assert "the candidate is nearer at" in result.sentence
    assert "the reference may be the worse side" in result.sentence
    row = result["lm_head"]
    assert row.nearer == "candidate"
    assert row.candidate_error < 1e-5 < row.reference_error


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_mask_of_the_lowest_number_stays_finite(dtype: torch.dtype) -> None:
    """The lowest float32 would be an infinity in a narrower dtype, and NaN behind a softmax."""
    lowest = torch.finfo(torch.float32).min
    mask = torch.tensor([[0.0, lowest, -lowest, float("-inf"), 1e30]])
    model = torch.nn.Linear(5, 5)
    model.register_buffer("mask", mask.clone())
    made = cast_target(Target(model, {"input": mask.clone()}), dtype, "spec")
    limit = torch.finfo(dtype).max
    large = float(torch.tensor(1e30).to(dtype))  # an infinity in float16, as `.to` has it
    expected = [0.0, -limit, limit, float("-inf"), large]
    assert made.model.mask.tolist() == [expected]
    assert made.batches[0].kwargs["input"].tolist() == [expected]
    assert made.model.mask.dtype == dtype
