"""The tool's own self-test: a bug that was planted is found, in the layer where it was planted."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from planted import BUGS, HERE, Bug, Planted, make_inputs, make_model, massive, plant

import tensortap as tap
from tensortap.comparing.compare import compare

Record = Callable[..., tap.Recording]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Small models run faster on one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Record a model once under each name; the clean ones serve every bug."""
    folder = tmp_path_factory.mktemp("runs")

    @functools.cache
    def run(
        bug: Bug | None, dtype: torch.dtype, layers: str, inputs: bool = True, kind: str = ""
    ) -> tap.Recording:
        model: Planted = make_model()
        if kind:
            model = massive(model, kind)
        model = model.to(dtype)
        if bug is not None:
            model = plant(model, bug)
        path: Path = folder / str(len(list(folder.iterdir())))
        with torch.no_grad(), tap.record(model, path, layers=layers, inputs=inputs):
            model(make_inputs())
        return tap.open(path)

    return run


def named(bugs: list[Bug]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("bug", bugs, ids=lambda bug: bug.name.replace(" ", "-"))


def test_there_are_many_kinds() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 14


@named(list(BUGS))
def test_the_layer_is_found(bug: Bug, recorded: Record) -> None:
    reference, candidate = (recorded(b, torch.float32, "all") for b in (None, bug))
    result = compare(reference, candidate)
    first = result.first_divergence
    assert first is not None
    assert first.layer == bug.layer
    assert first.origin == "made here"
    assert not result
    before = result.layers[: result.layers.index(first)]
    assert {row.verdict for row in before} == {"identical"}


@named(list(BUGS))
def test_the_block_is_found(bug: Bug, recorded: Record) -> None:
    reference, candidate = (recorded(b, torch.float32, "blocks") for b in (None, bug))
    first = compare(reference, candidate).first_divergence
    assert first is not None
    assert first.layer == bug.block
    assert first.origin == ("made here" if bug.block == HERE else "inherited")


@named([bug for bug in BUGS if bug.in_bf16])
def test_the_layer_is_found_in_bf16(bug: Bug, recorded: Record) -> None:
    reference = recorded(None, torch.float32, "all")
    floor, candidate = (recorded(b, torch.bfloat16, "all") for b in (None, bug))
    first = compare(reference, candidate, floor=floor).first_divergence
    assert first is not None
    assert first.layer == bug.layer
    assert first.origin == "made here"


@named([bug for bug in BUGS if bug.in_bf16 == "block"])
def test_the_block_is_found_in_bf16(bug: Bug, recorded: Record) -> None:
    reference = recorded(None, torch.float32, "blocks")
    floor, candidate = (recorded(b, torch.bfloat16, "blocks") for b in (None, bug))
    first = compare(reference, candidate, floor=floor).first_divergence
    assert first is not None
    assert first.layer == bug.block


# What the rounding of the massive values themselves is larger than.
DROWNED = {("token", "stale cache"), ("channel", "stale cache"), ("channel", "one bad token")}


@pytest.mark.parametrize("kind", ["token", "channel"])
@named([bug for bug in BUGS if bug.in_bf16 == "block"])
def test_massive_activations_do_not_hide_a_bug(bug: Bug, kind: str, recorded: Record) -> None:
    if (kind, bug.name) in DROWNED:
        pytest.skip("smaller than the rounding of the massive values")
    reference = recorded(None, torch.float32, "blocks", kind=kind)
    floor, candidate = (recorded(b, torch.bfloat16, "blocks", kind=kind) for b in (None, bug))
    first = compare(reference, candidate, floor=floor).first_divergence
    assert first is not None
    assert first.layer == bug.block


@named([bug for bug in BUGS if bug.name in ("2 % gain", "one bad token", "NaN in one element")])
def test_without_inputs_the_origin_is_unknown(bug: Bug, recorded: Record) -> None:
    runs = (recorded(b, torch.float32, "all", False) for b in (None, bug))
    first = compare(*runs).first_divergence
    assert first is not None
    assert (first.layer, first.origin) == (bug.layer, "unknown")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("one bad token", "token 9 of sample 0"),
        ("saturated channel", "channel 5"),
        ("NaN in one element", "token 4 of sample 1, channel 3"),
    ],
)
def test_the_bad_place_is_named(name: str, words: str, recorded: Record) -> None:
    bug = next(bug for bug in BUGS if bug.name == name)
    reference, candidate = (recorded(b, torch.float32, "all") for b in (None, bug))
    first = compare(reference, candidate).first_divergence
    assert first is not None
    assert any(words in hint for hint in first.hints), first.hints
