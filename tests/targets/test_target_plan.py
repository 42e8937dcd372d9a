"""Shapes without running: right, complete, and the model as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tensortap.demo import build
from tensortap.selection import select, sites
from tensortap.targets import Batch, Plan, shapes_without_running


def recorded(model: nn.Module, batch: Batch, pattern: str) -> list[tuple[Any, ...]]:
    """What plain hooks see of single tensors when the model really runs."""
    seen: list[tuple[Any, ...]] = []
    handles = []
    for site in select(model, pattern).layers:

        def hook(_: Any, __: Any, output: Any, name: str = site.name) -> None:
            if isinstance(output, Tensor):
                seen.append((name, tuple(output.shape), str(output.dtype)[6:]))

        handles.append(site.module.register_forward_hook(hook))
    with torch.no_grad():
        model(*batch.args, **batch.kwargs)
    for handle in handles:
        handle.remove()
    return seen


def planned(plan: Plan) -> list[tuple[Any, ...]]:
    return [(row.layer, row.shape, row.dtype) for row in plan.rows]


def test_demo_as_it_really_runs() -> None:
    target = build(mode="bf16", seq_len=7)
    layers = select(target.model, "all").layers
    plan = shapes_without_running(target.model, target.batches[0], layers)
    assert planned(plan) == recorded(target.model, target.batches[0], "all")
    assert plan.notes == ()
    head = next(row for row in plan.rows if row.layer == "head")
    assert (head.shape, head.dtype, head.nbytes) == ((1, 7, 1000), "bfloat16", 14000)
    assert plan.nbytes == sum(row.nbytes or 0 for row in plan.rows)
    assert plan.to_dict()["rows"][0]["layer"] == "embedding"


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_transformers(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    special = {"bos_token_id": 0, "eos_token_id": 0, "vocab_size": 64}
    if family == "llama":
        config = transformers.LlamaConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, **special,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config).eval()
    else:
        config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, **special)
        model = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.randint(64, (2, 5))
    batch = Batch(kwargs={"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    plan = shapes_without_running(model, batch, select(model, "blocks, type:Linear").layers)
    assert planned(plan) == recorded(model, batch, "blocks, type:Linear")
    assert plan.notes == ()
    root = shapes_without_running(model, batch, select(model, "").layers)
    assert [r.shape for r in root.rows if r.leaf == ".logits"] == [(2, 5, 64)]


def test_ports_leaves_and_calls() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(3, 3)

        def forward(self, x: Tensor, scale: Tensor) -> dict[str, Tensor]:
            return {"a": self.part(self.part(x)), "b": x * scale}

    model = Twice()
    batch = Batch((torch.ones(2, 3),), {"scale": torch.ones(1)})
    plan = shapes_without_running(model, batch, sites(model), inputs=True, outputs=True)
    found = [(r.layer, r.port, r.leaf, r.shape, r.call) for r in plan.rows]
    assert found == [
        ("part", "input", "", (2, 3), 0),
        ("part", "output", "", (2, 3), 0),
        ("part", "input", "", (2, 3), 1),
        ("part", "output", "", (2, 3), 1),
        ("", "input", "[0]", (2, 3), 0),
        ("", "input", "['scale']", (1,), 0),
        ("", "output", "['a']", (2, 3), 0),
        ("", "output", "['b']", (2, 3), 0),
    ]


class Peeks(nn.Module):
    """Looks at a value between its two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x) if x.sum().item() > 0 else x


def test_data_dependent_model_is_listed_with_a_reason(capfd: pytest.CaptureFixture[str]) -> None:
    model = Peeks()
    plan = shapes_without_running(model, Batch((torch.ones(1, 2),)), select(model, "leaves").layers)
    assert [(r.layer, r.shape, r.nbytes) for r in plan.rows] == [
        ("first", (1, 2), 8),
        ("second", None, None),
    ]
    assert "looks at values" in plan.notes[0]
    assert "Traceback" not in capfd.readouterr().err


def test_a_layer_that_is_not_called_is_said() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].spare = nn.ReLU()
    plan = shapes_without_running(model, Batch((torch.ones(1, 2),)), select(model, "all").layers)
    assert [row.layer for row in plan.rows if row.shape is None] == ["0.spare"]
    assert "'0.spare'" in plan.notes[0]


def test_run_is_used() -> None:
    model = nn.Linear(2, 2)

    def run(model: nn.Module, batch: Batch) -> None:
        model(model(batch.args[0]))

    plan = shapes_without_running(model, Batch((torch.ones(1, 2),)), sites(model), run=run)
    assert [row.call for row in plan.rows] == [0, 1]


def test_compiled_model_is_not_compiled_for_it() -> None:
    model = torch.compile(nn.Sequential(nn.Linear(2, 3)))
    plan = shapes_without_running(model, Batch((torch.ones(1, 2),)), select(model, "all").layers)
    assert planned(plan) == [("0", (1, 3), "float32"), ("", (1, 3), "float32")]


class Messy(nn.Module):
    """Changes itself in every way that a forward can."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.drop = nn.Dropout(0.5)
        self.tied = nn.Linear(3, 3)
        self.again = nn.Linear(3, 3)
        self.again.weight = self.tied.weight
        self.register_buffer("seen", torch.zeros(3))
        self.history: list[Tensor] = []
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.again(self.tied(self.drop(self.norm(x))))
        self.history.append(x)
        self.last = x
        self.seen += x.sum(0)
        self.register_buffer("late", x * torch.rand(3))
        self.drop.eval()
        torch.manual_seed(self.calls)
        return x


@pytest.mark.parametrize("fail", [False, True])
def test_the_model_is_left_as_it_was(fail: bool) -> None:
    model = Messy().train()
    model.tied.register_forward_hook(lambda *_: None)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    tensors = {id(p): p._version for p in [*model.parameters(), *model.buffers()]}
    flags = [module.training for module in model.modules()]
    hooks = [len(module._forward_hooks) for module in model.modules()]
    attributes = [list(vars(module)) for module in model.modules()]
    random = torch.get_rng_state()
    x = torch.ones(4, 5 if fail else 3)
    plan = shapes_without_running(model, Batch((x,)), select(model, "all").layers, True, True)
    assert bool(plan.notes) is fail
    assert list(state) == list(model.state_dict())
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert {id(p): p._version for p in [*model.parameters(), *model.buffers()]} == tensors
    assert model.again.weight is model.tied.weight
    assert flags == [module.training for module in model.modules()]
    assert hooks == [len(module._forward_hooks) for module in model.modules()]
    assert attributes == [list(vars(module)) for module in model.modules()]
    assert (model.calls, model.history) == (0, [])
    assert torch.equal(random, torch.get_rng_state())
    assert type(model(torch.ones(4, 3))) is Tensor
