"""Rules on the steps of training: what they may say, when they give an alarm, and what it says."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensortap.errors import OptionError, TapError, WatchAlarm
from tensortap.monitoring.metrics import METRICS, Layout, Values
from tensortap.monitoring.rules import Alarm, Rule, Rules
from tensortap.monitoring.step import Step
from tensortap.numerics import summarize
from tensortap.numerics.summary import WIDTH
from tensortap.recording.schema import Port, Site

Heard = tuple[str, Port, str, torch.Tensor]


def step_of(heard: Sequence[Heard], batch: int = 0, epoch: int = 0, **scalars: float) -> Step:
    """A step in which these tensors were heard, in this order; calls are counted a place."""
    sites, calls, rows, seen = [], [], [], {}
    for layer, port, leaf, tensor in heard:
        call = seen[layer, port, leaf] = seen.get((layer, port, leaf), -1) + 1
        dtype = str(tensor.dtype).removeprefix("torch.")
        sites.append(Site(layer, port, leaf, shape=tuple(tensor.shape), dtype=dtype))
        calls.append(call)
        rows.append(summarize(tensor).to_row())
    table = np.array(rows, dtype=np.float64).reshape(len(rows), WIDTH)
    return Step(epoch, batch, tuple(sites), tuple(calls), table, scalars)


def outputs(*tensors: torch.Tensor) -> list[Heard]:
    return [(f"blocks.{index}", "output", "", tensor) for index, tensor in enumerate(tensors)]


def told(rules: object, *steps: Step) -> list[list[Alarm]]:
    judge = Rules(rules)  # type: ignore[arg-type]
    return [judge.judge(step) for step in steps]


FINE = torch.tensor([1.0, -2.0, 0.0, 3.0])
NAN = torch.tensor([1.0, math.nan, math.inf, -math.inf])


# What a rule may say.


@pytest.mark.parametrize(
    ("text", "layers", "port", "terms"),
    [
        ("nan", None, None, [["bad"]]),
        ("inf", None, None, [["inf"]]),
        ("bad", None, None, [["bad"]]),
        ("grad_norm > 100", None, None, [["grad_norm > 100"]]),
        ("grad_norm>1e2", None, None, [["grad_norm > 100"]]),
        ("loss > 10", None, None, [["loss > 10"]]),
        ("train/loss >= -1", None, None, [["train/loss >= -1"]]),
        ("output: absmax > 1e4", None, "output", [["absmax > 10000"]]),
        (r"blocks\..*: dead > 0.9", r"blocks\..*", None, [["dead > 0.9"]]),
        (r"(?:a|b): grad_output: mean != 0", "(?:a|b)", "grad_output", [["mean != 0"]]),
        ("(output): nan", "(output)", None, [["bad"]]),
        (
            "absmax > 3 and std < 1 or nan",
            None,
            None,
            [["absmax > 3", "std < 1"], ["bad"]],
        ),
        ("scalar: mean > 3", None, "scalar", [["mean > 3"]]),
    ],
)
def test_a_rule_is_read(
    text: str, layers: str | None, port: str | None, terms: list[list[str]]
) -> None:
    rule = Rule.parse(text)
    assert (rule.layers.pattern if rule.layers else None) == layers
    assert rule.port == port
    assert [[str(term) for term in way.terms] for way in rule.ways] == terms
    assert rule.action == "warn" and rule.text == text


def test_an_action_stands_in_the_text_beside_it_or_in_a_mapping() -> None:
    assert Rule.parse("nan -> raise").action == "raise"
    assert Rule.parse("nan->snapshot").text == "nan"
    assert Rule.parse("nan", "raise").action == "raise"
    assert Rule.parse("nan -> raise", "raise").action == "raise"
    with pytest.raises(OptionError, match="names its action, and warn was given beside"):
        Rule.parse("nan -> raise", "warn")
    assert [rule.action for rule in Rules({"nan": print, "loss > 1": "raise"}).rules] == [
        print,
        "raise",
    ]
    assert Rules("nan").rules == Rules(["nan", "nan"]).rules == Rules(Rule.parse("nan")).rules


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "cannot be read"),
        ("  ", "cannot be read"),
        ("blocks: ", "cannot be read"),
        (": nan", "cannot be read"),
        ("grad_nrom > 1", "Did you mean grad_norm?"),
        ("absmaxx > 1", "Did you mean absmax?"),
        ("blocks: spread > 1", "'spread', which does not exist"),
        ("output: spread > 1", "'spread', which does not exist"),
        ("nann", "Did you mean 'nan'?"),
        ("absmax", "expected METRIC > NUMBER"),
        ("absmax = 3", "expected METRIC > NUMBER"),
        ("3 < absmax", "expected METRIC > NUMBER"),
        ("0 < absmax < 3", "expected METRIC > NUMBER"),
        ("absmax > 3 and", "expected METRIC > NUMBER"),
        ("absmax > many", "'many', which is no number"),
        ("absmax > nan", "'nan', which is no number"),
        ("dead > 90", "it is a share, from 0 to 1"),
        ("output: grad_norm > 1", "grad_norm has its own"),
        ("param: update_ratio > 1", "update_ratio has its own"),
        ("outputs: nan", "two ways. For the port, write 'output: …'"),
        ("output: blocks.*: nan", "The layers come first: 'LAYERS: output: condition'"),
        ("blocks.(*: nan", "no regular expression"),
        ("nan -> rise", "Did you mean 'raise'?"),
        ("nan -> ", "action ''"),
        ("scalar: nan and loss > 1", "Make two rules"),
    ],
)
def test_what_cannot_be_read_is_said(text: str, said: str) -> None:
    with pytest.raises(OptionError) as error:
        Rule.parse(text)
    assert said in str(error.value) and repr(text) in str(error.value)


def test_rules_that_are_no_rules() -> None:
    with pytest.raises(OptionError, match="must be a list of rules"):
        Rules(3)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="A rule is a text"):
        Rules([3])  # type: ignore[list-item]


@given(
    st.text(max_size=40) | st.from_regex(r"[a-z_.*:]{0,9}:? ?(nan|absmax|loss) ?[<>=]{0,2} ?.{0,5}")
)
@settings(max_examples=300, deadline=None)
def test_any_text_is_a_rule_or_a_sentence(text: str) -> None:
    try:
        rule = Rule.parse(text)
    except TapError as error:
        assert str(error).endswith((".", "?")) and repr(text) in str(error)
    else:
        assert Rules(rule).judge(step_of(outputs(FINE), loss=0.5)) is not None


# What it reads.


def test_every_metric_is_the_number_that_the_summary_has() -> None:
    torch.manual_seed(0)
    tiny = torch.tensor([1e-40, 0.0, 3.4028234663852886e38, -1.0])
    step = step_of([*outputs(torch.randn(50), NAN, tiny), ("blocks.1", "output", "", FINE)])
    values = Values(step, Layout(step))
    for index, summary in enumerate(step.merged.values()):
        expected = {
            **{name: getattr(summary, name) for name in ("count", "nan", "zeros", "mean", "std")},
            **{name: getattr(summary, name) for name in ("min", "max", "absmax", "l2", "rms")},
            "norm": summary.l2,
            "inf": summary.posinf + summary.neginf,
            "bad": summary.count - summary.finite,
            "dead": summary.zeros / summary.count,
            "saturated": summary.saturated / summary.count,
            "underflow": summary.subnormal / summary.count,
        }
        assert set(expected) | {"update_ratio", "grad_norm", "param_norm", "update_norm"} == set(
            METRICS
        )
        for metric, value in expected.items():
            assert values.place(metric)[index] == pytest.approx(value, rel=1e-12), metric


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.lists(
                st.floats(width=32, allow_subnormal=False)
                | st.sampled_from([math.nan, math.inf, 0.0]),
                min_size=1,
                max_size=5,
            ),
        ),
        min_size=1,
        max_size=8,
    )
)
@settings(max_examples=100, deadline=None)
def test_calls_are_merged_as_summaries_are(heard: list[tuple[str, list[float]]]) -> None:
    step = step_of([(name, "output", "", torch.tensor(values)) for name, values in heard])
    with np.errstate(all="ignore"):
        values = Values(step, Layout(step))
        for name in ("count", "nan", "zeros", "mean", "std", "min", "max", "absmax", "rms"):
            expected = [getattr(summary, name) for summary in step.merged.values()]
            np.testing.assert_allclose(
                values.place(name), expected, rtol=1e-9, atol=1e-9 * _largest(step), err_msg=name
            )


def _largest(step: Step) -> float:
    sizes = step.column("absmax")
    return float(np.nanmax(sizes)) if np.isfinite(sizes).any() else 0.0


def parameters(grad: float = 1.0, update: float = 0.01, param: float = 1.0) -> list[Heard]:
    heard: list[Heard] = []
    for port, size in (("param", param), ("grad_param", grad), ("update", update)):
        for layer in ("a", "b"):
            heard.append((layer, port, ".weight", torch.full((4,), size)))  # type: ignore[arg-type]
    return heard


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("grad_norm > 100", math.sqrt(8 * 50**2)),
        ("a: grad_norm > 99", 100),
        ("param_norm > 1", math.sqrt(8)),
        ("update_norm > 1", math.sqrt(8 * 0.5**2)),
        ("loss > 2", 3),
        ("grad_norm > 1 and loss > 2", math.sqrt(8 * 50**2)),
    ],
)
def test_a_rule_on_the_whole_step(text: str, value: float) -> None:
    step = step_of(parameters(grad=50, update=0.5), loss=3.0)
    [[alarm]] = told([text], step)
    assert alarm.value == pytest.approx(value)
    assert alarm.layer == ("loss" if text.startswith("loss") else "")
    assert text in alarm.text
    assert told([text], step_of(parameters(grad=0, update=0, param=0), loss=0.1)) == [[]]


def test_a_norm_names_what_makes_it_large() -> None:
    heard = parameters(grad=1)
    heard[3] = ("b", "grad_param", ".weight", torch.full((4,), 60.0))
    [[alarm]] = told(["grad_norm > 100"], step_of(heard, batch=8, epoch=2))
    assert alarm.port == "grad_param"
    assert alarm.text == (
        "Step 8 of epoch 2: grad_norm is 120 over 2 tensors (rule: grad_norm > 100); the largest "
        "is the grad_param .weight of 'b' with 120."
    )


def test_a_norm_with_infinities_is_infinite_and_one_with_nan_is_undefined() -> None:
    heard = parameters()
    heard[3] = ("b", "grad_param", ".weight", torch.tensor([1.0, math.inf]))
    [[alarm]] = told(["grad_norm > 100"], step_of(heard))
    assert alarm.value == math.inf and "the first that is not finite is the grad_param" in str(
        alarm
    )
    heard[2] = ("a", "grad_param", ".weight", torch.tensor([1.0, math.nan]))
    assert told(["grad_norm > 100 or grad_norm < 100"], step_of(heard)) == [[]]


def test_the_ratio_of_an_update_to_its_parameter() -> None:
    heard = parameters(param=1, update=0.01)
    heard[1] = ("b", "param", ".weight", torch.full((4,), 0.1))
    [[alarm]] = told(["update_ratio > 0.05"], step_of(heard))
    assert (alarm.layer, alarm.port, alarm.leaf) == ("b", "update", ".weight")
    assert alarm.value == pytest.approx(0.1)
    heard[1] = ("b", "param", ".weight", torch.zeros(4))  # a bias before its first step
    assert told(["update_ratio > 0.05"], step_of(heard)) == [[]]
    assert told(["update_ratio > 0.05"], step_of(heard[4:])) == [[]]


def test_without_a_port_a_metric_is_that_of_outputs_and_counts_are_of_everything() -> None:
    big = torch.tensor([1e6, math.inf])
    step = step_of([("a", "grad_output", "", big), ("a", "output", "", FINE)])
    assert told(["absmax > 1e4"], step) == [[]]
    [[alarm]] = told(["grad_output: absmax > 1e4"], step)
    assert alarm.port == "grad_output"
    [[alarm]] = told(["inf > 0"], step)
    assert alarm.port == "grad_output"
    assert told(["output: nan"], step) == [[]]


def test_an_undefined_metric_fulfils_nothing() -> None:
    nothing = torch.tensor([math.nan, math.nan])
    for metric in ("mean", "std", "min", "max", "absmax", "l2", "norm", "rms"):
        for sign in ("<", ">", "<=", ">=", "==", "!="):
            assert told([f"{metric} {sign} 0"], step_of(outputs(nothing))) == [[]]
    [[alarm]] = told(["nan > 1"], step_of(outputs(nothing)))
    assert alarm.value == 2
    assert told(["loss > 1 or loss <= 1"], step_of(outputs(FINE), loss=math.nan)) == [[]]
    assert told(["dead < 1"], step_of(outputs(torch.zeros(0)))) == [[]]


def test_layers_are_matched_by_their_whole_name() -> None:
    step = step_of(
        [("blocks.1", "output", "", FINE), ("blocks.10", "output", "", FINE)],
    )
    [[alarm]] = told([r"blocks\.1: absmax > 0"], step)
    assert (alarm.layer, alarm.also) == ("blocks.1", ())
    [[alarm]] = told([r"blocks\.1.*: absmax > 0"], step)
    assert alarm.also == (("blocks.10", "output", ""),)


def test_what_rules_need() -> None:
    assert Rules(["nan", "bad > 3", "loss > 3"]).needs == frozenset()
    assert Rules(["grad_norm > 3"]).needs == {"grad_param"}
    assert Rules(["update_ratio > 3", "param_norm > 1"]).needs == {"update", "param"}
    assert Rules(["absmax > 3", "grad_output: nan"]).needs == {"output", "grad_output"}
    assert not Rules(["nan"]).needs_now and not Rules(["nan"]).needs_tensors
    assert Rules(["nan -> raise"]).needs_now and not Rules(["nan -> raise"]).needs_tensors
    assert Rules({"nan": "snapshot"}).needs_now and Rules({"nan": "snapshot"}).needs_tensors
    assert Rules({"nan": print}).needs_now
    assert Rules([]).judge(step_of(outputs(NAN))) == [] and not Rules([])


# When it gives an alarm.


def test_an_alarm_is_given_when_it_becomes_true() -> None:
    dead, alive = torch.zeros(4), FINE
    steps = [
        step_of(outputs(a, b), batch)
        for batch, (a, b) in enumerate(
            [
                (alive, alive),
                (dead, alive),
                (dead, alive),
                (dead, dead),
                (alive, dead),
                (dead, dead),
            ]
        )
    ]
    found = told(["dead > 0.9"], *steps)
    assert [[(a.layer, a.batch) for a in alarms] for alarms in found] == [
        [],
        [("blocks.0", 1)],
        [],
        [("blocks.1", 3)],
        [],
        [("blocks.0", 5)],
    ]


def test_places_that_a_step_did_not_see_stay_as_they_were() -> None:
    written, other = step_of([*outputs(FINE), *parameters(param=9)]), step_of(outputs(FINE))
    assert [len(found) for found in told(["param: absmax > 3"], written, other, written)] == [
        1,
        0,
        0,
    ]
    assert [len(f) for f in told(["param_norm > 3"], written, other, written)] == [1, 0, 0]
    logged, silent = step_of(outputs(FINE), loss=3.0), step_of(outputs(FINE))
    assert [len(f) for f in told(["loss > 1"], logged, silent, logged)] == [1, 0, 0]
    heard = [*outputs(FINE), ("a", "param", ".w", NAN)]
    assert [len(f) for f in told(["nan"], other, step_of(heard), other, step_of(heard))] == [
        0,
        1,
        0,
        0,
    ]


def test_ways_of_one_rule_make_one_episode() -> None:
    rule = ["absmax > 2 or dead > 0.5"]
    steps = [outputs(FINE), outputs(torch.zeros(4)), outputs(torch.ones(4)), outputs(FINE)]
    assert [len(found) for found in told(rule, *map(step_of, steps))] == [1, 0, 0, 1]


def test_new_rules_take_over_what_was_said() -> None:
    step = step_of(outputs(torch.zeros(4)))
    old = Rules(["dead > 0.9"])
    assert len(old.judge(step)) == 1
    new = Rules(["dead > 0.9", "zeros > 3"], after=old)
    assert [alarm.rule for alarm in new.judge(step)] == ["zeros > 3"]
    assert len(Rules(["dead > 0.9"]).judge(step)) == 1
    heard: list[Alarm] = []
    called = Rules({"dead > 0.9": heard.append}, after=old)
    assert called.judge(step) == []  # said before, with another action
    called.judge(step_of(outputs(FINE)))
    [alarm] = called.judge(step)
    assert alarm.action == heard.append
    assert old.judge(step) == []  # and the old ones are as they were


# NaN and Inf.


def test_the_first_bad_place_is_named_with_what_came_before_it() -> None:
    near = torch.tensor([60000.0, 1.0], dtype=torch.float16)
    half = NAN.to(torch.float16)
    step = step_of(outputs(FINE, near, half, half), batch=12)
    [[alarm]] = told(["nan"], step)
    assert alarm.text == (
        "Step 12: 1 NaN and 2 Inf of 4 values in the output of 'blocks.2', in the forward pass. It "
        "is the first of 2 bad places; everything before it is finite, the output of 'blocks.1' "
        "just before it at most 6e+04 (the largest float16 is 6.55e+04). It came about between "
        "'blocks.1' and 'blocks.2': in 'blocks.2', or in code before it that is in no watched "
        "layer."
    )
    assert (alarm.layer, alarm.port, alarm.call, alarm.value) == ("blocks.2", "output", 0, 3)
    assert alarm.also == (("blocks.3", "output", ""),)


def test_the_first_is_the_first_in_order_of_execution_whatever_its_port() -> None:
    heard: list[Heard] = [
        ("a", "output", "", FINE),
        ("b", "output", "[1]", FINE),
        ("b", "grad_output", "[1]", NAN),
        ("a", "grad_output", "", NAN),
        ("a", "grad_param", ".weight", NAN),
    ]
    [[alarm]] = told(["nan"], step_of(heard))
    assert (alarm.layer, alarm.port, alarm.leaf) == ("b", "grad_output", "[1]")
    assert "in the grad_output [1] of 'b', in the backward pass" in alarm.text
    assert "the first of 3 bad places; everything before it is finite" in alarm.text


def test_of_several_calls_the_first_bad_one_is_named() -> None:
    [[alarm]] = told(["nan"], step_of(outputs(FINE) * 2 + outputs(NAN) + outputs(FINE)))
    assert alarm.call == 2 and "call 2 of 4" in alarm.text
    assert "It is the only one" in alarm.text


def test_nan_that_spreads_is_one_alarm() -> None:
    steps = [
        step_of(outputs(FINE, FINE, FINE)),
        step_of(outputs(FINE, NAN, NAN)),
        step_of([*outputs(NAN, NAN, NAN), ("a", "param", ".w", NAN)], loss=math.nan),
        step_of(outputs(NAN, NAN, NAN), loss=math.nan),
        step_of(outputs(FINE, FINE, FINE)),
        step_of(outputs(NAN, FINE, FINE)),
    ]
    found = told(["nan"], *steps)
    assert [[alarm.layer for alarm in alarms] for alarms in found] == [
        [],
        ["blocks.1"],
        [],
        [],
        [],
        ["blocks.0"],
    ]


def test_a_mask_of_infinities_does_not_hide_what_comes_later() -> None:
    mask = torch.tensor([0.0, -math.inf])
    first, second, third = (
        step_of([("mask", "output", "", mask), *outputs(FINE, last)], batch)
        for batch, last in enumerate([FINE, FINE, NAN])
    )
    found = told(["nan"], first, second, third, third)
    assert [[alarm.layer for alarm in alarms] for alarms in found] == [
        ["mask"],
        [],
        ["blocks.1"],
        [],
    ]
    assert "before it the output of 'mask' was so already" in found[2][0].text
    assert told([r"(?!mask).*: nan"], first) == [[]]


def test_a_logged_number_that_is_not_finite() -> None:
    fine, lost = step_of(outputs(FINE), loss=0.5), step_of(outputs(FINE), loss=math.inf)
    found = told(["nan"], fine, lost, lost)
    assert [len(alarms) for alarms in found] == [0, 1, 0]
    assert (found[1][0].layer, found[1][0].port) == ("loss", "scalar")
    assert "the logged 'loss' is inf" in found[1][0].text
    assert "every watched tensor of the step is finite" in found[1][0].text
    assert [len(f) for f in told(["scalar: nan"], lost, step_of(outputs(NAN)))] == [1, 0]
    assert told(["output: nan"], lost) == [[]]
    [[alarm]] = told(["nan"], step_of(outputs(NAN), loss=math.nan))
    assert alarm.layer == "blocks.0"


def test_inf_asks_for_infinities_alone() -> None:
    only_nan, only_inf = torch.tensor([math.nan]), torch.tensor([math.inf])
    step = step_of(outputs(FINE, only_nan, only_inf), loss=math.nan)
    [[alarm]] = told(["inf"], step)
    assert alarm.layer == "blocks.2"
    [[alarm]] = told(["nan > 0"], step)
    assert (alarm.layer, alarm.also) == ("blocks.1", ())


# What goes with it.


def test_an_alarm_is_json_and_frozen() -> None:
    def stop(alarm: Alarm) -> None: ...

    [[alarm]] = told({"grad_norm > 1": stop}, step_of([("a", "grad_param", "", NAN[2:])]))
    data = json.loads(json.dumps(alarm.to_dict(), allow_nan=False))
    assert data["value"] is None and data["action"] == "stop" and data["rule"] == "grad_norm > 1"
    assert {field.name for field in dataclasses.fields(Alarm)} == set(data)
    with pytest.raises(dataclasses.FrozenInstanceError):
        alarm.text = ""  # type: ignore[misc]
    assert isinstance(WatchAlarm(alarm.text, alarm), TapError)
    assert str(WatchAlarm(alarm.text, alarm)) == alarm.text


def test_a_pattern_that_matches_no_layer_is_refused() -> None:
    rules = Rules([r"block\..*: nan"])
    with pytest.raises(OptionError, match=r"none of the 2 watched layers.*'blocks\.0'"):
        rules.check(["blocks.0", "blocks.1"])
    rules.check(["block.0"])
    with pytest.raises(OptionError, match="there is a layer called 'output'"):
        Rules(["output: nan"]).check(["blocks.0", "output"])
    Rules([".*: output: nan", "(output): nan"]).check(["blocks.0", "output"])


def test_a_rule_that_never_had_anything_to_judge_is_noted() -> None:
    rules = Rules(["nan", "los > 1", "grad_norm > 1", "loss > 1"])
    rules.judge(step_of(outputs(FINE), loss=0.3))
    assert rules.notes() == [
        "The rule 'los > 1' was never judged: no 'los' was logged.",
        "The rule 'grad_norm > 1' was never judged: no grad_param was watched.",
    ]


def test_shapes_may_change_from_step_to_step() -> None:
    rules = Rules(["nan", "absmax > 2.5"])
    found = [
        rules.judge(step_of(outputs(*(torch.ones(length) * size for _ in range(3))), length))
        for length, size in ((3, 1), (4, 1), (5, 3), (6, 3))
    ]
    assert [len(alarms) for alarms in found] == [0, 0, 1, 0]
    assert len(rules._layouts) == 1


def test_an_empty_step_is_no_trouble() -> None:
    every = ["nan", "absmax > 1", "grad_norm > 1", "loss > 1", "update_ratio > 1"]
    empty, logged = told(every, step_of([]), step_of([], loss=3.0))
    assert empty == [] and [alarm.rule for alarm in logged] == ["loss > 1"]


def _microseconds(judge: Callable[[Step], object], steps: Sequence[Step]) -> float:
    start = time.perf_counter()
    for step in steps:
        judge(step)
    return (time.perf_counter() - start) / len(steps) * 1e6


def test_judging_is_quick() -> None:
    """Twelve microseconds on an idle core; a loop over rows in Python would take thousands."""
    step = step_of([(f"blocks.{index}", "output", "", FINE) for index in range(300)])
    scalars: Mapping[str, float] = {"loss": 0.3}
    steps = [Step(0, i, step.sites, step.calls, step.table, scalars) for i in range(200)]
    rules = Rules()
    rules.judge(step)
    assert min(_microseconds(rules.judge, steps) for _ in range(5)) < 100
