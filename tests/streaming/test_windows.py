"""Where a run goes wrong, from a few values of each tensor; and the sketches that it needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import BUGS, Bug, make_inputs, make_model, plant, split
from torch import nn

import tensortap as tap
from tensortap.numerics.sampling import SKETCH, sample

Run = Callable[..., Any]
BATCHES = [make_inputs(0), make_inputs(1)]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The clean model, kept in every way."""
    folder, model = tmp_path_factory.mktemp("references"), make_model()
    ways: dict[str, dict[str, Any]] = {
        "tensors": {"layers": "all", "inputs": True},
        "sketch": {"layers": "all", "keep": "sketch"},
        "summary": {"layers": "all", "keep": "summary"},
        "blocks": {"layers": "blocks"},
    }
    for name, options in ways.items():
        with torch.no_grad(), tap.record(model, folder / name, **options) as rec:
            for batch in BATCHES:
                model(batch)
                rec.step()
    return {name: str(folder / name) for name in ways}


def named(bugs: list[Bug]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("bug", bugs, ids=lambda bug: bug.name.replace(" ", "-"))


@named(list(BUGS[::2]))
@pytest.mark.parametrize("kept", ["sketch", "summary", "blocks"])
def test_the_bug_is_in_the_window(bug: Bug, kept: str, references: dict[str, str]) -> None:
    model = plant(make_model(), bug)
    window = tap.find_window(model, BATCHES, against=references[kept])
    assert window
    assert bug.layer in window.layers
    assert window.layers[-1] == window.bad
    assert window.good not in window.layers
    most = {"sketch": 2, "summary": 20, "blocks": 20}[kept]
    assert len(window.layers) <= most
    assert set(window.lacking) == set(window.layers) - ({window.bad} if kept == "blocks" else set())
    assert window.command is not None and "--inputs" in window.command


@named([bug for bug in BUGS if bug.in_bf16 == "block"][::4])
def test_in_bf16(bug: Bug, references: dict[str, str]) -> None:
    model = plant(make_model().to(torch.bfloat16), bug)
    window = tap.find_window(model, BATCHES, against=references["sketch"])
    assert bug.layer in window.layers


@pytest.mark.parametrize("kept", ["tensors", "sketch", "summary", "blocks"])
def test_a_good_run_has_no_window(kept: str, references: dict[str, str]) -> None:
    models = [make_model(), split(make_model(), 3)]
    models += [make_model().to(dtype) for dtype in (torch.bfloat16, torch.float16)]
    for model in models:
        window = tap.find_window(model, BATCHES, against=references[kept])
        assert not window, window.sentence
        assert "Nothing is suspect" in window.sentence
        assert window.command is None


def test_the_model_is_left_as_it_was(references: dict[str, str]) -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5)).train()
    x = torch.randn(8, 4)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with pytest.raises(tap.TapError, match="nothing was compared"):
        tap.find_window(model, x, against=references["sketch"])
    assert torch.equal(torch.rand(2), expected)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(m._forward_hooks for m in model.modules())


def test_inputs_come_from_one_place(references: dict[str, str]) -> None:
    target = tap.Target(make_model(), BATCHES)
    assert not tap.find_window(target, against=references["sketch"])
    with pytest.raises(tap.TapError, match="one of the two"):
        tap.find_window(target, BATCHES, against=references["sketch"])
    with pytest.raises(tap.TapError, match="What should the model run on"):
        tap.find_window(make_model(), against=references["sketch"])


# Sketches.


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 70, 9),
        torch.randn(5),
        torch.randn(4, 600).to(torch.bfloat16).t(),
        torch.randn(2, 900, dtype=torch.float64) * 1e300,
        torch.arange(5000),
        torch.randn(30, 50, dtype=torch.complex64),
        torch.tensor(2.5),
        torch.empty(0, 3),
        torch.full((2000,), float("nan")),
    ],
    ids=["large", "small", "strided", "double", "integers", "complex", "scalar", "empty", "nan"],
)
def test_a_sketch_is_what_was_sampled(tensor: torch.Tensor, run: Run) -> None:
    recorder = run(nn.Identity(), tensor, layers="all", keep="sketch")
    (record,) = tap.open(recorder.path)[""].records
    expected = torch.from_numpy(sample(tensor, SKETCH))
    assert not record.stored
    found = torch.from_numpy(record.sketch.copy()) if len(expected) else expected
    assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7))
    assert record.summary.count == tap.summarize(tensor).count
    with pytest.raises(tap.TapError, match="keep='sketch'"):
        record.tensor()


def test_sketches_survive_the_joining_of_segments(tmp_path) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), [torch.randn(600, 4) for _ in range(3)]
    with torch.no_grad(), tap.record(model, tmp_path / "r", layers="all", keep="sketch") as rec:
        for batch in x:
            model(batch)
            rec.step()
            rec.flush()  # a segment of its own
    recording = tap.open(tmp_path / "r")
    assert len(list((tmp_path / "r").glob("*.safetensors"))) == 1
    with torch.no_grad():
        for record in recording["0"].records:
            expected = sample(model[0](x[record.batch]), SKETCH)
            assert (record.sketch == expected).all()
    assert recording["1"].records[0].sketch is not None


def test_other_recordings_have_no_sketches(run: Run) -> None:
    for keep in ("tensors", "summary"):
        recorder = run(nn.Linear(4, 4), torch.randn(2, 4), layers="all", keep=keep)
        assert tap.open(recorder.path)[""].records[0].sketch is None


def test_a_sketch_that_lies_is_refused(run: Run, tmp_path) -> None:
    recorder = run(nn.Identity(), torch.randn(8), layers="all", keep="sketch")
    (file,) = (tmp_path / "1").glob("*.safetensors")
    data = file.read_bytes()
    wrong = data.replace(b'\\"sketches\\":[[0,8]]', b'\\"sketches\\":[[0,9]]')
    assert wrong != data
    file.write_bytes(wrong)
    with pytest.raises(tap.TapError, match="its 'sketch_values' is"):
        tap.open(recorder.path)


class Decoding(nn.Module):
    """Runs its layers again and again on what came out, as generation does."""

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(16, 16) for _ in range(3))
        self.gain = gain

        def late(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            return output if len(args[0]) > 1 else output * self.gain

        self.second.register_forward_hook(late)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = self.third(self.second(self.first(x).tanh()).tanh())[-1:]
        return x


def test_a_layer_that_is_called_often_is_judged_call_by_call(tmp_path: Path) -> None:
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), tap.record(Decoding(), tmp_path / "a", layers="all") as rec:
        rec.run(x)
    window = tap.find_window(Decoding(1.5), x, against=tmp_path / "a")
    assert window.sure and window.layers == ("second",)
    assert (window.good, window.bad) == ("first", "second")


class Doubling(nn.Module):
    """Goes wrong in its own forward, behind all of its layers."""

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.extra = nn.Identity() if gain != 1 else None
        self.gain = gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x))
        return x if self.extra is None else self.extra(x) * self.gain


@pytest.mark.parametrize("keep", ["tensors", "sketch"])
def test_the_root_may_be_the_window(keep: Any, tmp_path: Path) -> None:
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
    options = {"layers": "all", "target": {"command": "tensortap record x.py:build"}}
    with torch.no_grad(), tap.record(Doubling(), tmp_path / "a", keep=keep, **options) as rec:
        rec.run(x)
    window = tap.find_window(Doubling(1.5), x, against=tmp_path / "a")
    assert window.layers == ("extra", "") and window.bad == ""
    assert "and '(root)', the first that is surely bad" in window.sentence
    assert window.command is not None and window.command.endswith(" --layers '' --inputs")
