"""Layers in the branches of a torch.cond, known by their scopes or by their weights."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from programs.eager_calls import compare_calls, run_all, same
from tensortap.taps.programs.base import Options
from tensortap.taps.programs.exported.kind import open_exported


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.act = nn.SiLU()
        self.down = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.yes = Block()
        self.no = nn.LayerNorm(4)
        self.both = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)

        def true(t: torch.Tensor) -> torch.Tensor:
            return self.both(self.yes(t)) + 1

        def false(t: torch.Tensor) -> torch.Tensor:
            return self.no(self.both(t)).clone()

        return self.last(torch.cond(x.sum() > 0, true, false, (x,)))


def eager(model: Branching, x: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
    """The same by hand: torch.cond compiles what it is given, where hooks are not heard."""
    with torch.no_grad():
        heard: list[tuple[str, torch.Tensor]] = []

        def say(name: str, value: torch.Tensor) -> torch.Tensor:
            heard.append((name, value.clone()))
            return value

        x = say("first", model.first(x))
        if x.sum() > 0:
            up = say("yes.up", model.yes.up(x))
            act = say("yes.act", model.yes.act(up))
            down = say("yes.down", model.yes.down(act))
            say("yes", down)
            x = say("both", model.both(down)) + 1
        else:
            x = say("no", model.no(say("both", model.both(x))))
        output = say("last", model.last(x))
    return output, [(name, [("", value)]) for name, value in heard]


@pytest.fixture(scope="module")
def model() -> Branching:
    torch.manual_seed(0)
    return Branching().eval()


@pytest.fixture(scope="module", params=[False, True], ids=["by weight", "by scope"])
def saved(
    request: pytest.FixtureRequest, model: Branching, tmp_path_factory: pytest.TempPathFactory
) -> tuple[bool, Path]:
    strict = bool(request.param)
    path = tmp_path_factory.mktemp("cond") / "m.pt2"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(torch.export.export(model, (torch.randn(3, 4),), strict=strict), path)
    return strict, path


def inputs(model: Branching) -> list[torch.Tensor]:
    """One for each branch."""
    found: dict[bool, torch.Tensor] = {}
    while len(found) < 2:
        x = torch.randn(3, 4)
        found[bool(model.first(x).sum() > 0)] = x
    return [found[True], found[False]]


def test_the_branch_that_is_taken_is_heard(model: Branching, saved: tuple[bool, Path]) -> None:
    strict, path = saved
    program = open_exported(path, Options())
    known = {place.name: place for place in program.places}
    if strict:
        assert known["yes"].gone is None
        assert known["yes"].provenance == "scope"
    else:
        assert known["yes.up"].provenance == known["both"].provenance == "weight"
        assert known["yes.act"].gone is not None
        assert "torch.cond" in known["yes.act"].gone
    assert known["first"].provenance == "scope"
    assert known["no"].type == "LayerNorm"
    for x in inputs(model):
        output, expected = eager(model, x)
        run = run_all(program, (x,))
        assert same(run.output, output)
        assert same(program.plain((x,), {}), output)
        # Without scopes the containers are not known; what is left must all be there, in order.
        expected = [(n, v) for n, v in expected if n in known and known[n].gone is None]
        assert [call.layer for call in run.calls] == [name for name, _ in expected]
        assert compare_calls(program, run, expected)["wrong"] == []


def test_layers_outside_need_no_look_into_branches(
    model: Branching, saved: tuple[bool, Path]
) -> None:
    program = open_exported(saved[1], Options())
    x = inputs(model)[0]
    with torch.no_grad():
        run = program.tapped(["first", "last"], inputs=False, linears=[])((x,), {})
    output, expected = eager(model, x)
    assert same(run.output, output)
    assert [call.layer for call in run.calls] == ["first", "last"]
    assert same(run.calls[1].outputs[0][1], output)
    assert expected[0][0] == "first"
