"""Bugs in real architectures are found, blamed on the layer in which they sit, and explained.

Each kind of bug runs once, in turns through the models and the depths; benchmarks/diagnosis.py runs
all of them everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from bugs import BUGS, DEPTHS, Bug, Case, cases
from clean import CLEAN, Pair, pairs
from diagnosing import Outcome, Workshop, workshop
from zoo import ARCHITECTURES, has_transformers, make


def _in_turns() -> list[Case]:
    """Every kind once."""
    chosen = []
    for index, bug in enumerate(BUGS):
        name = bug.models[index % len(bug.models)]
        depth = bug.depths[(index // len(bug.models)) % len(bug.depths)]
        chosen.append(Case(ARCHITECTURES[name], bug, depth))
    return chosen


def _id(item: Case | Pair) -> str:
    return str(item).replace(", ", "-").replace(" ", "_")


@pytest.fixture(scope="module")
def shop() -> Iterator[Workshop]:
    with workshop() as made:
        yield made


def _needs(name: str) -> None:
    if name != "demo" and not has_transformers():
        pytest.skip("transformers is not installed, so there are no other models than our demo.")


def test_the_bench_covers_what_it_should() -> None:
    every = cases()
    assert {item.architecture.name for item in every} == {"demo", "llama", "bert", "mamba"}
    for name in ARCHITECTURES:
        kinds = {item.bug.kind for item in every if item.architecture.name == name}
        assert len(kinds) >= 12
    assert {item.depth for item in every} == {"before", *DEPTHS, "behind"}
    assert {item.architecture.name for item in _in_turns()} == set(ARCHITECTURES)
    assert {item.bug.kind for item in _in_turns()} == {bug.kind for bug in BUGS}
    assert {item.kind for item in pairs()} == set(CLEAN)


@pytest.mark.parametrize("case", _in_turns(), ids=_id)
def test_a_bug_changes_its_own_layer_alone(case: Case) -> None:
    """Names and types stay; of the weights, at most the layer's own are others."""
    _needs(case.architecture.name)
    before, model = make(case.architecture.name), case.model()
    assert [(n, type(m).__name__) for n, m in model.named_modules()] == [
        (n, type(m).__name__) for n, m in before.named_modules()
    ]
    own = dict(model.named_parameters())
    for name, weight in before.named_parameters():
        if not name.startswith(f"{case.layer}."):
            assert torch.equal(own[name], weight)
    inputs = case.architecture.inputs()
    with torch.no_grad():
        outputs = [_first(found(**inputs)) for found in (before, model)]
    assert not torch.equal(*outputs)


def _first(value: object) -> torch.Tensor:
    tensor = value if isinstance(value, torch.Tensor) else value.logits  # type: ignore[attr-defined]
    assert isinstance(tensor, torch.Tensor)
    return tensor


@pytest.mark.parametrize("case", _in_turns(), ids=_id)
def test_a_bug_is_found_blamed_and_explained(case: Case, shop: Workshop) -> None:
    _needs(case.architecture.name)
    outcome = shop.diagnose(case)
    assert outcome.first == outcome.expected_first
    assert outcome.culprit == outcome.expected_culprit, outcome.sentence
    assert outcome.bisect_right, outcome.bisected
    assert outcome.hint_right is not False, (outcome.hint, outcome.explains)
    assert outcome.first_hint_right is not False, outcome.first_hint


@pytest.mark.parametrize("pair", pairs(range(1)), ids=_id)
def test_nobody_is_blamed_for_rounding(pair: Pair, shop: Workshop) -> None:
    _needs(pair.architecture.name)
    outcome: Outcome = shop.diagnose(pair)
    assert outcome.first_right, outcome.first
    assert outcome.culprit is None, outcome.sentence
    assert outcome.bisected is None


def test_a_bug_is_a_kind_once() -> None:
    kinds: list[Bug] = list(BUGS)
    assert len({bug.kind for bug in kinds}) == len(kinds)
