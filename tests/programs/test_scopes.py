"""Which values leave and enter a module's call: on small graphs, and on real exported ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tensortap.taps.programs.base import Options
from tensortap.taps.programs.exported.kind import ExportProgram, open_exported
from tensortap.taps.programs.scopes import Step, adopted, entering, leaving

A, B, OUTER = ("a", 0), ("b", 0), ("outer", 0)


def test_a_value_that_is_read_outside_has_left() -> None:
    steps = [
        Step("x", ()),
        Step("inner", ("x",), (A,)),
        Step("made", ("inner",), (A,)),
        Step("end", ("made",)),
    ]
    assert leaving(steps, ["end"]) == {A: ("made",)}


def test_a_result_of_the_graph_has_left_though_nobody_reads_it() -> None:
    steps = [Step("x", ()), Step("made", ("x",), (OUTER, A))]
    assert leaving(steps, ["made"]) == {OUTER: ("made",), A: ("made",)}


def test_the_value_made_last_comes_first() -> None:
    steps = [
        Step("x", ()),
        Step("cos", ("x",), (A,)),
        Step("sin", ("x",), (A,)),
        Step("end", ("cos", "sin")),
    ]
    assert leaving(steps, ["end"])[A] == ("sin", "cos")


def test_a_cast_of_the_input_to_what_it_is_has_not_left() -> None:
    """LlamaRMSNorm: `x.to(float32)`, and the residual reads that cast as if it were x."""
    steps = [
        Step("x", ()),
        Step("cast", ("x",), (A,), passes_on=True),
        Step("normed", ("cast",), (A,)),
        Step("sum", ("cast", "normed")),
    ]
    assert leaving(steps, ["sum"])[A] == ("normed",)


def test_a_cast_behind_a_cast_of_the_input_has_not_left_either() -> None:
    steps = [
        Step("x", ()),
        Step("one", ("x",), (A,), passes_on=True),
        Step("two", ("one",), (A,), passes_on=True),
        Step("normed", ("two",), (A,)),
        Step("sum", ("two", "normed")),
    ]
    assert leaving(steps, ["sum"])[A] == ("normed",)


def test_a_cast_of_what_the_call_made_has_left() -> None:
    steps = [
        Step("x", ()),
        Step("made", ("x",), (A,)),
        Step("cast", ("made",), (A,), passes_on=True),
        Step("end", ("cast",)),
    ]
    assert leaving(steps, ["end"])[A] == ("cast",)


def test_a_layer_that_only_passes_on_has_its_input_as_output() -> None:
    """Dropout in eval mode."""
    steps = [Step("x", ()), Step("drop", ("x",), (A,), passes_on=True), Step("end", ("drop",))]
    assert leaving(steps, ["end"])[A] == ("drop",)


def test_shapes_do_not_leave() -> None:
    steps = [
        Step("x", ()),
        Step("size", ("x",), (A,), data=False),
        Step("made", ("x",), (A,)),
        Step("end", ("made", "size")),
    ]
    assert leaving(steps, ["end"])[A] == ("made",)


def test_what_nobody_reads_has_not_left() -> None:
    steps = [Step("x", ()), Step("lost", ("x",), (A,)), Step("end", ("x",))]
    assert leaving(steps, ["end"])[A] == ()


def test_a_container_passes_its_childs_output_on() -> None:
    steps = [Step("x", ()), Step("made", ("x",), (OUTER, A)), Step("end", ("made",))]
    assert leaving(steps, ["end"]) == {OUTER: ("made",), A: ("made",)}


def test_between_two_children_a_value_leaves_the_first_and_not_the_container() -> None:
    steps = [
        Step("x", ()),
        Step("one", ("x",), (OUTER, A)),
        Step("two", ("one",), (OUTER, B)),
        Step("end", ("two",)),
    ]
    assert leaving(steps, ["end"]) == {OUTER: ("two",), A: ("one",), B: ("two",)}


def test_two_calls_of_one_module_are_two() -> None:
    again = ("a", 1)
    steps = [
        Step("x", ()),
        Step("one", ("x",), (A,)),
        Step("two", ("one",), (again,)),
        Step("end", ("two",)),
    ]
    assert leaving(steps, ["end"]) == {A: ("one",), again: ("two",)}
    assert entering(steps) == {A: ("x",), again: ("one",)}


def test_what_enters_is_what_was_not_made_inside() -> None:
    steps = [
        Step("x", ()),
        Step("mask", ()),
        Step("size", ("x",), data=False),
        Step("one", ("x", "size"), (OUTER, A)),
        Step("two", ("one", "mask"), (OUTER,)),
    ]
    assert entering(steps) == {OUTER: ("x", "mask"), A: ("x",)}


def test_a_quantised_value_in_the_middle_of_a_block_stays_in_it() -> None:
    steps = [
        Step("x", ()),
        Step("relu", ("x",), (OUTER, A)),
        Step("q", ("relu",)),
        Step("dq", ("q",)),
        Step("down", ("dq",), (OUTER, B)),
        Step("q2", ("down",)),
        Step("dq2", ("q2",)),
        Step("head", ("dq2",), (("head", 0),)),
    ]
    assert leaving(steps, ["head"])[OUTER] == ("down", "relu")  # without it: relu seems to leave
    mended = adopted(steps, ["q", "dq", "q2", "dq2"])
    assert leaving(mended, ["head"])[OUTER] == ("down",)
    assert leaving(mended, ["head"])[A] == ("relu",)
    assert [step.calls for step in mended if step.name == "dq2"] == [()]
    assert entering(mended)[B] == ("dq",)


def test_a_quantised_value_with_readers_in_and_out_has_left() -> None:
    steps = [
        Step("x", ()),
        Step("made", ("x",), (OUTER, A)),
        Step("q", ("made",)),
        Step("in", ("q",), (OUTER, B)),
        Step("out", ("q", "in")),
    ]
    mended = adopted(steps, ["q"])
    assert leaving(mended, ["out"])[OUTER] == ("in", "made")


def test_what_is_quantised_for_the_caller_of_the_model_is_outside() -> None:
    steps = [
        Step("x", ()),
        Step("made", ("x",), (A,)),
        Step("q", ("made",)),
        Step("dq", ("q",)),
    ]
    assert leaving(adopted(steps, ["q", "dq"], ["dq"]), ["dq"])[A] == ("made",)
    steps.append(Step("inside", ("dq",), (A,)))
    mended = adopted(steps, ["q", "dq"], ["dq"])
    assert leaving(mended, ["dq", "inside"])[A] == ("inside", "made")


# Real graphs.


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.to(torch.float32)
        return self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()
        self.linear = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.linear(self.norm(x)))


class Passing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.child(x)


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = self.linear(x)
        scores, chosen = logits.softmax(-1).topk(2)
        return logits, scores, chosen


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, scores, chosen = self.router(x)
        return scores * chosen


class Viewing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Flatten(0)
        self.again = nn.Flatten()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(x) + self.flat(x).sum()


class Constants(nn.Module):
    """A module that makes a value out of nothing but constants."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.rand(8, 4))

        def forward(self) -> torch.Tensor:
            return self.table[:3] * 2

    def __init__(self) -> None:
        super().__init__()
        self.positions = self.Positions()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.positions()


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Residual()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.block(x))


def _program(model: nn.Module) -> ExportProgram:
    exported = torch.export.export(model.eval(), (torch.rand(3, 4),), strict=False)
    return open_exported(exported, Options())


def _operators(program: ExportProgram, layer: str) -> list[list[str]]:
    """What made the values that leave each call of a layer."""
    left = leaving(program.reading.steps, program.reading.results)
    return [
        [program.reading.nodes[name].name.rstrip("_0123456789") for name in names]
        for call, names in left.items()
        if call[0] == layer
    ]


@pytest.mark.parametrize(
    ("make", "layer", "expected"),
    [
        (Residual, "norm", [["mul"]]),
        (Residual, "linear", [["linear"]]),
        (Residual, "drop", [["dropout"]]),
        (Passing, "child", [["linear"]]),
        (Routed, "router", [["getitem", "getitem"]]),
        (Routed, "router.linear", [["linear"]]),
        (Viewing, "flat", [["flatten"]]),
        (Viewing, "again", [["flatten"]]),
        (Constants, "positions", [["mul"]]),
        (Twice, "block", [["add"], ["add"]]),
        (Twice, "block.norm", [["mul"], ["mul"]]),
    ],
)
def test_real_graphs(make: Callable[[], nn.Module], layer: str, expected: list[list[str]]) -> None:
    assert _operators(_program(make()), layer) == expected
