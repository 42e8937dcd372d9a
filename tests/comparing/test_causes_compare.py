"""A comparison says what kind of error its first divergence is: as data, in words, on the page."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator

import pytest
import torch
from planted import BUGS, Bug, make_inputs, make_model, plant

import tensortap as tap
from schemas import validate
from tensortap.comparing.compare import compare
from tensortap.reporting.layer_comparison import layer_screen

# What must be said of each bug: the kind of the first cause, and words of its text.
EXPECTED = {
    "wrong scale": ("scale", "the scores have the scale 0.01563 instead of 0.25"),
    "transposed weight": ("noise", "nothing simple fits"),
    "dropped bias": ("bias", "a constant for each channel"),
    "wrong eps": ("factors", "a factor for each token"),
    "wrong eps of an RMSNorm": ("factors", "a factor for each token"),
    "mean not subtracted": ("affine", "a factor and a constant for each token"),
    "head order": ("permutation", "heads in another order: 1, 0, 2, 3 (of width 16)"),
    "a head negated": ("sign", "channels 0 to 15 (of 64) with the sign turned"),
    "mask one ahead": ("mask", "the causal mask is off by 1: each token sees 1 ahead"),
    "mask one behind": ("tokens", "all tokens but the first (of 24)"),
    "positions off by one": ("offset", "what it adds off by 1 token"),
    "rotary positions off by one": ("noise", "nothing simple fits"),
    "wrong rotary base": ("tokens", "all tokens but the first (of 24)"),
    "wrong rotary pairing": ("tokens", "all tokens but the first (of 24)"),
    "saturated channel": ("saturation", "channel 5 of 64 alone: candidate clamped at ±0.2"),
    "one bad token": ("tokens", "token 9 of sample 0 alone: output = 1.3 x reference"),
    "two tokens swapped": ("permutation", "tokens 11 and 12 (of 24) swapped"),
    "NaN in one element": ("not finite", "NaN in the candidate, 1 value at token 4 of sample 1"),
    "infinity in one element": ("not finite", "Inf in the candidate, 1 value at token 23 of"),
    "2 % gain": ("factor", "output = 1.02 x reference"),
    "swapped q and k": ("noise", "nothing simple fits"),
    "missing residual": ("residual", "output = reference - the layer's input"),
    "wrong activation": (
        "function",
        "output = silu(the layer's input), where the",
    ),
    "approximate activation": ("function", "output = gelu_tanh(the layer's input), where the"),
    "stale cache": ("tokens", "the last token (of 24) alone"),
    "row never loaded": ("channels", "channel 7 of 256 alone"),
    "another block's weights": ("noise", "nothing simple fits"),
    "bf16 in one layer": ("rounding", "only values of bfloat16"),
    "fp16 in one layer": ("rounding", "only values of float16"),
}

Record = Callable[..., tap.Recording]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Record:
    folder = tmp_path_factory.mktemp("runs")

    @functools.cache
    def run(name: str = "", layers: str = "all", keep: str = "tensors") -> tap.Recording:
        model = make_model()
        if name:
            model = plant(model, next(bug for bug in BUGS if bug.name == name))
        path = folder / str(len(list(folder.iterdir())))
        with torch.no_grad(), tap.record(model, path, layers=layers, inputs=True, keep=keep):
            model(make_inputs())
        return tap.open(path)

    return run


def test_every_bug_has_an_answer() -> None:
    assert set(EXPECTED) == {bug.name for bug in BUGS}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_the_cause_is_said(bug: Bug, recorded: Record) -> None:
    result = compare(recorded(), recorded(bug.name))
    first = result.first_divergence
    assert first is not None
    kind, words = EXPECTED[bug.name]
    assert first.causes
    assert first.causes[0].kind == kind
    assert words in first.causes[0].text
    assert kind == "noise" or "noise" not in [cause.kind for cause in first.causes]
    assert not any(row.causes for row in result.layers if row is not first)


def test_it_is_in_the_json(recorded: Record) -> None:
    result = compare(recorded(), recorded("2 % gain"))
    data = json.loads(result.to_json())
    validate(data, "comparison")
    (cause,) = data["first_divergence"]["causes"]
    assert cause["kind"] == "factor"
    assert cause["details"]["factor"] == pytest.approx(1.02, abs=1e-6)
    rows = {row["layer"]: row["causes"] for row in data["layers"]}
    assert rows.pop(data["first_divergence"]["layer"]) == [cause]
    assert not any(rows.values())


@pytest.mark.parametrize(
    "name", ["dropped bias", "head order", "NaN in one element", "stale cache"]
)
def test_every_kind_of_detail_fits_the_schema(name: str, recorded: Record) -> None:
    validate(json.loads(compare(recorded(), recorded(name)).to_json()), "comparison")


def test_it_stands_under_the_answer(recorded: Record) -> None:
    result = compare(recorded(), recorded("2 % gain"))
    lines = str(result).splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith("First divergence at"))
    assert "  explains 100 % of the error: output = 1.02 x reference" in lines[at:]
    assert not any(line.startswith("  explains") for line in lines[:at])


def test_it_stands_on_the_layers_screen(recorded: Record) -> None:
    result = compare(recorded(), recorded("saturated channel"))
    first = result.first_divergence
    assert first is not None
    screen = str(layer_screen(result, first, width=70))
    assert "Causes:\n  explains 100 % of the error: channel 5 of 64 alone: candidate" in screen
    assert "Causes:" not in str(layer_screen(result, "blocks.3"))


def test_a_layer_that_is_asked_for_gets_its_own(recorded: Record) -> None:
    """`compare A B LAYER`: the layer is then the first divergence."""
    result = compare(recorded(), recorded("2 % gain"), layers="blocks.2")
    assert result["blocks.2"].causes


def test_it_stands_on_the_page(recorded: Record) -> None:
    result = compare(recorded(), recorded("2 % gain"))
    page = result.to_html()
    head = page[page.index("<header>") : page.index("<main>")]
    assert "<li>explains 100 % of the error: output = 1.02 x reference</li>" in head
    assert '"causes":["explains 100 % of the error: output = 1.02 x reference"]' in page
    assert "output = 1.02 x reference" in result._repr_html_()
    clean = compare(recorded(), recorded())
    assert 'class="causes"' not in clean.to_html()


def test_summaries_have_no_causes(recorded: Record) -> None:
    slim = recorded("2 % gain", keep="summary")
    first = compare(recorded(), slim).first_divergence
    assert first is not None
    assert first.causes == ()


class Mixer(torch.nn.Module):
    """Heads are mixed between two layers, in what is no layer itself."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.v, self.o = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.v(x).unflatten(-1, (4, 8))[..., self.order, :]
        result: torch.Tensor = self.o(heads.flatten(-2))
        return result


def test_what_came_in_is_explained_where_it_went_wrong_between_layers(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("between")
    x = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(1))
    for name, order in (("reference", [0, 1, 2, 3]), ("candidate", [0, 2, 1, 3])):
        model = Mixer(order)
        with torch.no_grad(), tap.record(model, folder / name, layers="leaves", inputs=True):
            model(x)
    result = compare(folder / "reference", folder / "candidate")
    first = result.first_divergence
    assert first is not None
    assert (first.layer, first.origin) == ("o", "inherited")
    (cause,) = first.causes
    assert cause.text == "of its input: heads in another order: 0, 2, 1, 3 (of width 8)"
    assert (cause.kind, cause.details["port"]) == ("permutation", "input")


def test_a_transform_between_the_runs_is_applied(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Sequence first on one side: causes are of the values, not of the layout."""
    folder = tmp_path_factory.mktemp("layouts")

    class Scale(torch.nn.Module):
        def __init__(self, gain: float) -> None:
            super().__init__()
            self.gain = gain

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.gain * x

    x = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(1))
    for name, gain, given in (("a", 1.0, x), ("b", 1.01, x.transpose(0, 1).contiguous())):
        model = torch.nn.Sequential(Scale(2.0), Scale(gain))
        with torch.no_grad(), tap.record(model, folder / name, layers="leaves", inputs=True):
            model(given)
    first = compare(folder / "a", folder / "b").first_divergence
    assert first is not None
    assert first.transform
    assert [cause.text for cause in first.causes] == ["output = 1.01 x reference"]
