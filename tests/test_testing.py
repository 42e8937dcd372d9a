"""`tap.testing.assert_matches`: what it lets pass, and what it says when it does not."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensortap as tap
from support import Net
from tensortap.errors import OptionError
from tensortap.testing import assert_matches

Record = Callable[..., tap.Recording]


def message(*args: Any, **options: Any) -> str:
    with pytest.raises(AssertionError) as caught:
        tap.testing.assert_matches(*args, **options)
    return str(caught.value)


# Tensors.


def test_sentences_are_those_of_torch() -> None:
    expected = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    got = expected + torch.tensor([[0.0, 0.01, 0.02], [0.03, 0.04, 0.1]])
    with pytest.raises(AssertionError) as caught:
        torch.testing.assert_close(got, expected)
    ours, torchs = message(expected, got), str(caught.value)
    assert "Mismatched elements: 5 / 6 (83.3%)" in torchs
    number = r"(\d+(?:\.\d+)?(?:e-?\d+)?)"
    for pattern in (
        r"Mismatched elements: \d+ / \d+ \(\d+\.\d%\)",
        rf"Greatest absolute difference: {number} at index \(1, 2\) \(up to 1e-05 allowed\)",
        rf"Greatest relative difference: {number}.*\(up to 1\.3e-06 allowed\)",
    ):
        left, right = re.search(pattern, torchs), re.search(pattern, ours)
        assert left is not None and right is not None, pattern
        for a, b in zip(left.groups(), right.groups(), strict=True):
            assert float(b) == pytest.approx(float(a), rel=1e-4)


def test_tolerances_are_of_the_looser_dtype_and_can_be_given() -> None:
    x = torch.linspace(1, 2, 50)
    assert_matches(x, x.bfloat16())
    assert_matches(x, x * (1 + 5e-7))
    assert "(up to 1.3e-06 allowed)" in message(x, x * 1.001)
    assert_matches(x, x * 1.001, rtol=2e-3, atol=0.0)
    assert "(up to 0.0005 allowed)" in message(x, x * 1.001, rtol=5e-4, atol=0.0)
    assert_matches(x, x + 0.5, rtol=0.0, atol=0.6)


def test_integers_are_equal_or_not() -> None:
    x = torch.arange(6)
    assert_matches(x, x.clone())
    said = message(x, x + torch.tensor([0, 0, 0, 1, 0, 0]))
    assert "Mismatched elements: 1 / 6 (16.7%)" in said
    assert "Greatest absolute difference: 1 at index (3,)\n" in said


def test_not_a_number() -> None:
    x = torch.ones(4)
    y = x.clone()
    y[2] = math.nan
    assert "1 pairs disagree about NaN or Inf" in message(x, y)
    assert_matches(y, y.clone())


@pytest.mark.parametrize(
    ("reference", "candidate", "words"),
    [
        ({"a": [torch.ones(2)]}, {"a": [torch.zeros(2)]}, "item ['a'][0]"),
        ({"a": torch.ones(2), "b": torch.ones(2)}, {"a": torch.ones(2)}, "only in the reference"),
        ([torch.ones(2)], [torch.ones(2), torch.ones(3)], "only in the candidate"),
        (torch.ones(2, 3), torch.ones(3, 2), "'shape' do not match: [2, 3] != [3, 2]"),
        (np.ones(3), torch.zeros(3), "Mismatched elements: 3 / 3 (100.0%)"),
        ([torch.ones(2)] * 3, [torch.zeros(2)] * 3, "2 other items do not match either: [1], [2]"),
    ],
)
def test_structures(reference: Any, candidate: Any, words: str) -> None:
    assert_matches(reference, reference)
    assert words in message(reference, candidate)


def test_tensors_against_a_floor_and_rules() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100, generator=generator)
    noise = torch.randn(100, generator=generator) * 0.01
    other = torch.randn(100, generator=generator) * 0.01
    assert_matches(x, x + other, floor=x + noise)
    said = message(x, x + 5 * other, floor=x + noise)
    assert "times the floor's 0.0" in said
    assert_matches({"y": x}, {"y": x + other}, rules=r"\['y'\]: max_abs < 0.1")
    said = message({"y": x}, {"y": x + other}, rules=r"\['y'\]: max_abs < 0.01")
    assert "max_abs < 0.01 does not hold (got" in said
    assert_matches({"y": x}, {"y": x + other}, floor={"y": x + noise}, rules=".*: floor_ratio < 3")
    assert_matches({"y": x}, {"y": x + other}, rules=".*: error < 0.1 and mismatched > 0")
    assert_matches(x, x + other, preset="documents")
    assert "across devices" in message(x, x + 0.5, preset="device")


@pytest.mark.parametrize(
    ("args", "options", "words"),
    [
        ((torch.ones(1), "runs/fp32"), {}, "two recordings"),
        (({}, {}), {}, "neither side holds a tensor"),
        ((torch.ones(1), torch.ones(1)), {"layers": "all"}, "layers: no such option for tensors"),
        ((torch.ones(1), torch.zeros(1)), {"floor": torch.ones(2)}, "floor has the shape"),
        (("runs/a", "runs/b"), {"rtol": 1e-3}, "rtol and atol are for tensors"),
        ((torch.ones(1), torch.ones(1)), {"rules": "x: speed < 1"}, "speed"),
    ],
)
def test_mistakes_are_told(args: tuple[Any, Any], options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=re.escape(words)):
        assert_matches(*args, **options)


def test_parts_of_a_recording_are_refused(net: Net, ids: torch.Tensor, recorded: Record) -> None:
    layer = recorded(net, ids)["blocks.0"]
    for part in (layer, layer.records[0]):
        with pytest.raises(OptionError, match="part of a recording"):
            assert_matches(part, part)
    assert_matches(layer.output, layer.records[0].tensor())


# Recordings.


def spoiled(net: Net) -> Net:
    with torch.no_grad():
        net.blocks[1].down.weight.mul_(1.05)
    return net


def test_runs_that_match(net: Net, ids: torch.Tensor, recorded: Record) -> None:
    first, again = recorded(net, ids), recorded(net, ids)
    assert_matches(first, again)
    assert_matches(first.path, again)
    assert_matches(first, again.path, layers="blocks", complete=True)


def test_runs_that_do_not(net: Net, ids: torch.Tensor, recorded: Record) -> None:
    reference = recorded(net, ids, inputs=True)
    candidate = recorded(spoiled(net), ids, inputs=True)
    said = message(reference, candidate)
    assert said.startswith(f"{candidate.path} does not match {reference.path}. First divergence")
    assert "Layer blocks.1.down, output, epoch 0, batch 0, call 0: diverged" in said
    assert re.search(r"Mismatched elements: \d+ / 96 \(\d+\.\d%\)", said)
    assert re.search(r"Greatest absolute difference: \S+ at index \(\d, \d, \d\) \(up to", said)
    assert "Greatest relative difference: " in said
    assert re.search(r"\d+ other layers are diverged: blocks\.1, ", said)
    assert_matches(reference, candidate, layers="blocks.0")
    assert_matches(reference, candidate, rules=".*: cosine > 0.9")
    assert_matches(reference, candidate, floor=recorded(net, ids, inputs=True))


def test_the_moment_and_the_leaf_are_named(recorded: Record) -> None:
    class Pair(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bad = False

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"same": x, "other": x * 2 + (1.0 if self.bad and x.mean() > 0.5 else 0.0)}

    model = Pair()

    def call() -> None:
        model(torch.zeros(4))
        model(torch.ones(4))

    reference = recorded(model, call=call)
    model.bad = True
    said = message(reference, recorded(model, call=call))
    assert "Layer (root), output ['other'], epoch 0, batch 0, call 1: diverged" in said


def test_missing_layers_fail_when_asked(net: Net, ids: torch.Tensor, recorded: Record) -> None:
    everything, some = recorded(net, ids), recorded(net, ids, layers="blocks")
    assert_matches(everything, some)
    said = message(everything, some, complete=True)
    assert "Layer embedding: missing, missing in the candidate." in said
    assert "other layers are missing: " in said


def test_warnings_are_in_the_message(net: Net, ids: torch.Tensor, recorded: Record) -> None:
    said = message(recorded(net, ids), recorded(net, (ids + 1) % 16))
    assert "Warning: The two runs were given different inputs" in said


def test_the_page_runs(tmp_path, monkeypatch) -> None:
    page = Path(__file__).parent.parent / "docs" / "testing.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(code, {})


def test_small_numbers_are_held_to_their_own_size() -> None:
    values = 1e-6 * torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    assert_matches(values, values * (1 + 1e-7))
    with pytest.raises(AssertionError, match="Mismatched elements"):
        assert_matches(values, values.flip(-1))
    assert_matches(values, values.flip(-1), rtol=0.0, atol=1e-5)  # as the user says
