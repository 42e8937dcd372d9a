"""Bugs in real architectures are found, blamed on the layer in which they sit, and explained.

Each kind of the first four models runs once, in turns through the models and the depths, and of
each other model one bug, but of those that are spare; `TENSORTAP_TURN=3` takes others of these.
benchmarks/diagnosis.py runs all of them everywhere. What is known to be missed (known.py) is not
asked here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from bugs import BUGS, DEPTHS, Bug, Case, cases
from clean import CLEAN, OTHERWISE, Pair, pairs
from diagnosing import Outcome, Workshop, workshop
from known import KNOWN
from watching import called, first_wrong, leaves
from zoo import ARCHITECTURES, has_transformers, make

TURN = int(os.environ.get("TENSORTAP_TURN", "0"))


def _in_turns() -> list[Case]:
    """Every kind of the first models once."""
    chosen = []
    kinds = [bug for bug in BUGS if bug.shows != "?" and ARCHITECTURES[bug.models[0]].core]
    for index, bug in enumerate(kinds):
        name = bug.models[index % len(bug.models)]
        depth = bug.depths[(index // len(bug.models)) % len(bug.depths)]
        chosen.append(Case(ARCHITECTURES[name], bug, depth))
    return chosen


def _families() -> list[Case]:
    """One bug of each other model."""
    chosen = []
    for index, (name, model) in enumerate(ARCHITECTURES.items()):
        if not model.core and not model.spare:
            its = [case for case in cases() if case.architecture.name == name]
            its = [case for case in its if str(case) not in KNOWN]
            chosen.append(its[(7 * index + TURN) % len(its)])
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
    assert {item.architecture.name for item in every} == set(ARCHITECTURES)
    for name, model in ARCHITECTURES.items():
        kinds = {item.bug.kind for item in every if item.architecture.name == name}
        assert len(kinds) >= (3 if model.spare else 12)
    assert {item.depth for item in every} == {"before", *DEPTHS, "behind"}
    names = tuple(str(item) for item in (*every, *pairs()))
    assert all(missed.startswith(names) for missed in KNOWN)
    chosen = [*_in_turns(), *_families()]
    tested = {name for name, model in ARCHITECTURES.items() if not model.spare}
    assert {item.architecture.name for item in chosen} == tested
    assert {item.kind for item in pairs()} == {*CLEAN, *OTHERWISE}


@pytest.mark.parametrize("case", [*_in_turns(), *_families()], ids=_id)
def test_a_bug_changes_its_own_layer_alone(case: Case) -> None:
    """Names and types stay; of the weights, at most the layer's own are others."""
    _needs(case.architecture.name)
    before, model = make(case.architecture.name), case.model()
    assert [(n, type(m).__name__) for n, m in model.named_modules()] == [
        (n, type(m).__name__) for n, m in before.named_modules()
    ]
    own = dict(model.named_parameters())
    for name, weight in before.named_parameters():
        if case.layer and not name.startswith(f"{case.layer}."):
            assert torch.equal(own[name], weight)
    inputs = case.architecture.inputs()
    with torch.no_grad():
        first, second = [list(leaves(found(**inputs))) for found in (before, model)]
    assert any(not torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("case", _in_turns(), ids=_id)
def test_hooks_hear_a_bug_where_it_was_said_to_show(case: Case) -> None:
    """What the other models rely on agrees with what is written down for the first four."""
    _needs(case.architecture.name)
    right = make(case.architecture.name)
    inputs = case.architecture.inputs()
    names = called(right, inputs)
    assert first_wrong(right, case.model(), inputs, names) == case.first(names)


@pytest.mark.parametrize("case", [*_in_turns(), *_families()], ids=_id)
def test_a_bug_is_found_blamed_and_explained(case: Case, shop: Workshop) -> None:
    _needs(case.architecture.name)
    outcome = shop.diagnose(case)
    assert outcome.first == outcome.expected_first
    assert outcome.culprit == outcome.expected_culprit, outcome.sentence
    assert outcome.bisect_right is not False, outcome.bisected
    assert outcome.hint_right is not False, (outcome.hint, outcome.explains)
    assert outcome.first_hint_right is not False, outcome.first_hint


def _pairs() -> list[Pair]:
    """One of each kind of the first models, and of each other model."""
    every = [pair for pair in pairs(range(1)) if str(pair) not in KNOWN]
    chosen = [pair for pair in every if pair.architecture.core]
    for index, (name, model) in enumerate(ARCHITECTURES.items()):
        its = [pair for pair in every if pair.architecture.name == name]
        if not model.core and not model.spare and its:
            chosen.append(its[(3 * index + TURN) % len(its)])
    return chosen


@pytest.mark.parametrize("pair", _pairs(), ids=_id)
def test_nobody_is_blamed_for_rounding(pair: Pair, shop: Workshop) -> None:
    _needs(pair.architecture.name)
    outcome: Outcome = shop.diagnose(pair)
    assert outcome.first_right, outcome.first
    assert outcome.culprit is None, outcome.sentence
    assert outcome.bisected is None


def test_a_bug_is_a_kind_once() -> None:
    kinds: list[Bug] = list(BUGS)
    assert len({bug.kind for bug in kinds}) == len(kinds)
