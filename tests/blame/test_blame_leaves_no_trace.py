"""Blame leaves the model as it was: no hook, no changed weight, mode, attribute or random state."""

from __future__ import annotations

import copy
import random
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blame_models import Chain, Step, batch, gain, make, recorded
from torch import Tensor, nn

import tensortap as tap


class Moody(Chain):
    """Everything that a forward pass can change: buffers, attributes, lists, random numbers."""

    def __init__(self, blocks: int = 3, width: int = 16) -> None:
        super().__init__(blocks, width)
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("passes", torch.zeros(()))
        self.last: Tensor | None = None
        self.log: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = self.dropout(block(x))
        self.passes += 1
        self.last = x
        self.log.append(len(self.log))
        random.random()
        np.random.rand()
        return self.head(x)


def _state(model: nn.Module) -> dict[str, Any]:
    hooks = (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_pre_hooks_with_kwargs",
        "_backward_hooks",
    )
    return {
        "weights": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "ids": {name: id(tensor) for name, tensor in model.named_parameters()},
        "modes": [module.training for module in model.modules()],
        "hooks": [[list(getattr(module, name)) for name in hooks] for module in model.modules()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "grads": [tensor.grad for tensor in model.parameters()],
        "requires": [tensor.requires_grad for tensor in model.parameters()],
        "random": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": str(np.random.get_state()),
        "grad mode": torch.is_grad_enabled(),
    }


def _same(before: dict[str, Any], after: dict[str, Any]) -> None:
    for name, tensor in before.pop("weights").items():
        assert torch.equal(tensor, after["weights"][name]), name
    assert torch.equal(before.pop("random"), after["random"])
    for key, value in before.items():
        assert after[key] == value, key


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("bisect", [False, True])
def test_nothing_is_changed(training: bool, bisect: bool, tmp_path: Path) -> None:
    model = make(Moody)
    path = recorded(tmp_path / "ref", copy.deepcopy(model), batch())
    candidate = gain(model, "blocks.1.up")
    candidate.train(training)
    heard: list[int] = []
    candidate.blocks[1].register_forward_hook(lambda *_: heard.append(1))
    before = _state(candidate)
    result = tap.blame(path, candidate, batch(), bisect=bisect)
    _same(before, _state(candidate))
    assert heard, "the user's own hook is called"
    assert candidate.last is None
    assert candidate.log == []
    if not training:
        assert result.culprit == "blocks.1.up"


def test_nothing_is_changed_when_a_run_fails(tmp_path: Path) -> None:
    model = make(Moody)
    path = recorded(tmp_path / "ref", copy.deepcopy(model), batch())
    calls: list[int] = []

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(1)
            if len(calls) == 3:
                raise ValueError("no more")
            return x * 1.1

    candidate = copy.deepcopy(model)
    candidate.head = nn.Sequential(candidate.head, Fails())
    before = _state(candidate)
    with pytest.raises(
        tap.TapError,
        match=r"The model failed in batch 0 with the reference's .*: ValueError: no more",
    ):
        tap.blame(path, candidate, batch())
    _same(before, _state(candidate))


def test_the_inputs_are_not_changed(tmp_path: Path) -> None:
    class Writes(Chain):
        def forward(self, x: Tensor) -> Tensor:
            x += 1
            return super().forward(x)

    model = make(Writes)
    path = recorded(tmp_path / "ref", model, batch())
    given = batch()
    result = tap.blame(path, gain(model, "blocks.1.up"), given)
    assert result.culprit == "blocks.1.up"
    assert torch.equal(given, batch())


def test_the_recording_is_not_changed(tmp_path: Path) -> None:
    """In-place operations of the model must not reach the reference's memory map."""

    class Writes(Chain):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = block(x)
                x += 1
            return self.head(x)

    model = make(Writes)
    path = recorded(tmp_path / "ref", model, batch())
    files = {file: file.read_bytes() for file in Path(path).iterdir()}
    opened = tap.open(path)
    kept = {name: opened[name].output.clone() for name in opened.layers}
    assert tap.blame(opened, gain(model, "blocks.1.up"), batch()).culprit == "blocks.1.up"
    assert {file: file.read_bytes() for file in Path(path).iterdir()} == files
    for name, tensor in kept.items():
        assert torch.equal(opened[name].output, tensor)


TICKS: list[int] = []


class Ticking(Chain):
    """Counts outside of all modules, where nobody can put it back."""

    def forward(self, x: Tensor) -> Tensor:
        TICKS.clear()
        return super().forward(x)


class TickingStep(Step):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        TICKS.append(1)
        return super().forward(x) * (1 + 0.1 * len(TICKS))


def test_state_outside_of_modules_is_found_out(tmp_path: Path) -> None:
    """A block alone that does something else on its second run is not trusted."""
    model = make(Ticking)
    model.blocks = nn.ModuleList(TickingStep(16) for _ in range(3))
    path = recorded(tmp_path / "ref", model, batch())
    result = tap.blame(path, gain(model, "blocks.0.down"), batch())
    assert result.culprit == "blocks.0.down"
    assert any("it keeps state" in note for note in result.notes)


class Notes:
    """A plain object that a module keeps."""

    def __init__(self) -> None:
        self.count = 0
        self.values = {"last": [torch.zeros(2)]}


class Keeper(Chain):
    """State in every kind of attribute but a buffer."""

    def __init__(self, blocks: int = 3, width: int = 16) -> None:
        super().__init__(blocks, width)
        self.plain = torch.zeros(6, width)
        self.table = {"k": torch.zeros(width), "deep": {"list": [1, [2]]}}
        self.queue = deque([1], maxlen=3)
        self.array = np.zeros(3)
        self.notes = Notes()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        self.plain += x.mean(0)
        self.table["k"].add_(1)
        self.table["deep"]["list"][1].append(3)
        self.queue.append(len(self.queue))
        self.array += 1
        self.notes.count += 1
        self.notes.values["last"][0].add_(1)
        for block in self.blocks:
            x = block(x + self.plain)
        return self.head(x)


def test_state_in_plain_attributes_is_put_back(tmp_path: Path) -> None:
    model = make(Keeper)
    path = recorded(tmp_path / "ref", copy.deepcopy(model), batch())
    candidate = gain(model, "blocks.1.up")
    result = tap.blame(path, candidate, batch())
    assert result.culprit == "blocks.1.up"
    assert result.share == pytest.approx(1.0, abs=1e-6)
    assert not candidate.plain.any()
    assert not candidate.table["k"].any()
    assert candidate.table["deep"] == {"list": [1, [2]]}
    assert candidate.queue == deque([1], maxlen=3)
    assert not candidate.array.any()
    assert candidate.notes.count == 0
    assert not candidate.notes.values["last"][0].any()


def test_buffers_of_other_kinds_do_not_stop_it(tmp_path: Path) -> None:
    model = make(Chain)
    model.register_buffer("shape", torch.empty(3, device="meta"))
    model.register_buffer("thin", torch.eye(3).to_sparse())
    path = recorded(tmp_path / "ref", model, batch())
    candidate = gain(model, "blocks.1.up")
    assert tap.blame(path, candidate, batch()).culprit == "blocks.1.up"
