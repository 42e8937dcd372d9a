"""Rules and presets: what they say, and what is said when they are wrong."""

from __future__ import annotations

import math

import pytest

from tensortap.comparing.rules import PRESETS, parse_rules, preset_of, rule_for
from tensortap.errors import OptionError

LAYERS = ["embedding", "blocks.0", "blocks.0.mlp", "blocks.1", "head"]


def test_a_rule_holds_for_whole_names_and_the_first_wins() -> None:
    rules = parse_rules(["blocks\\.0: max_abs < 1", ".*: max_abs < 2"], LAYERS)
    assert rule_for(rules, "blocks.0") is rules[0]
    assert rule_for(rules, "blocks.0.mlp") is rules[1]
    assert rule_for(rules[:1], "head") is None


def test_and_binds_tighter_than_or() -> None:
    (rule,) = parse_rules([".*: max_abs < 1e-2 and cosine > 0.99 or identical == 1"], LAYERS)
    assert rule.holds({"max_abs": 1e-3, "cosine": 0.999})
    assert not rule.holds({"max_abs": 1e-3, "cosine": 0.9})
    assert rule.holds({"max_abs": 9, "cosine": 0.0, "identical": 1})
    assert "cosine > 0.99 does not hold (got 0.9)" in rule.failing({"max_abs": 0, "cosine": 0.9})


def test_an_undefined_metric_fulfils_nothing() -> None:
    (rule,) = parse_rules([".*: correlation > 0.5"], LAYERS)
    (other,) = parse_rules([".*: correlation < 0.5"], LAYERS)
    assert not rule.holds({"correlation": math.nan})
    assert not other.holds({"correlation": math.nan})
    assert "undefined" in rule.failing({"correlation": math.nan})


def test_a_colon_in_the_pattern_is_part_of_it() -> None:
    (rule,) = parse_rules(["(?:blocks|head).*: mse <= 1e-4"], LAYERS)
    assert rule.matches("blocks.1")
    assert rule.matches("head")
    assert not rule.matches("embedding")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_abs < 1", "expected 'REGEX: condition'"),
        (": max_abs < 1", "expected 'REGEX: condition'"),
        (".*:", "expected 'REGEX: condition'"),
        ("(: max_abs < 1", "no regular expression"),
        (".*: max_abs", "cannot be read at 'max_abs'"),
        (".*: max_abs < 1 and", "cannot be read at ''"),
        (".*: max_abs < one", "which is no number"),
        (".*: max_abz < 1", "Did you mean max_abs?"),
        (".*: purple < 1", "The metrics are: "),
        ("nothing: max_abs < 1", "matches none of the 5 layers"),
    ],
)
def test_what_is_wrong_is_said(text: str, words: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_rules([text], LAYERS)
    assert words in str(caught.value)
    assert repr(text) in str(caught.value)


def test_presets_are_the_documents_limits() -> None:
    documents, device = PRESETS["documents"].rule(), PRESETS["device"].rule()
    assert documents.holds({"mse": 9e-3, "correlation": 0.991})
    assert not documents.holds({"mse": 1e-2, "correlation": 1.0})
    assert not documents.holds({"mse": 1e-5, "correlation": 0.98})
    assert device.holds({"max_abs": 0.009, "mae": 0.0009, "cosine": 0.991})
    for worse in ({"max_abs": 0.01}, {"mae": 0.001}, {"cosine": 0.99}):
        assert not device.holds({"max_abs": 0.009, "mae": 0.0009, "cosine": 0.991, **worse})
    with pytest.raises(OptionError, match="The presets are: documents, device"):
        preset_of("strict")
