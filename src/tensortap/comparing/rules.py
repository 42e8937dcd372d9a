"""Rules that a user writes for some layers: `REGEX: max_abs < 1e-2 and cosine > 0.99`."""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import OptionError
from .metrics import metric_names

__all__ = ["PRESETS", "Preset", "Rule", "parse_rules", "preset_of", "rule_for"]

_EXAMPLE = "'blocks\\..*: max_abs < 1e-2 and cosine > 0.99'"

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
_TERM = re.compile(r"\s*([A-Za-z_]\w*)\s*(<=|>=|==|!=|<|>)\s*(\S+)\s*")


@dataclass(frozen=True)
class Term:
    """One condition on one metric; an undefined metric fulfils none."""

    metric: str
    sign: str
    limit: float

    def holds(self, values: Mapping[str, float]) -> bool:
        value = values.get(self.metric, math.nan)
        return not math.isnan(value) and _OPERATORS[self.sign](value, self.limit)

    def __str__(self) -> str:
        return f"{self.metric} {self.sign} {self.limit:g}"


@dataclass(frozen=True)
class Rule:
    """A condition for the layers whose whole name matches: a disjunction of conjunctions."""

    text: str
    pattern: re.Pattern[str]
    ways: tuple[tuple[Term, ...], ...]

    @property
    def metrics(self) -> frozenset[str]:
        """The metrics that it names."""
        return frozenset(term.metric for way in self.ways for term in way)

    def matches(self, layer: str) -> bool:
        return self.pattern.fullmatch(layer) is not None

    def holds(self, values: Mapping[str, float]) -> bool:
        return any(all(term.holds(values) for term in way) for way in self.ways)

    def failing(self, values: Mapping[str, float]) -> str:
        """The terms that do not hold, with what was got."""
        terms = dict.fromkeys(term for way in self.ways for term in way if not term.holds(values))
        return ", ".join(
            f"{term} does not hold ({_shown(values.get(term.metric, math.nan))})" for term in terms
        )


def parse_rules(texts: Iterable[str], layers: Sequence[str]) -> tuple[Rule, ...]:
    """Read the rules; one that matches none of these layers is an error."""
    rules = tuple(_parse(text) for text in texts)
    for rule in rules:
        if not any(rule.matches(layer) for layer in layers):
            near = difflib.get_close_matches(rule.pattern.pattern, layers, n=3, cutoff=0.3)
            there = ", ".join(repr(name) for name in near or layers[:3])
            raise OptionError(
                f"The rule {rule.text!r} matches none of the {len(layers)} layers. The pattern is "
                f"for the whole name, so write '.*name.*' to find a part of it. Layers are: {there}"
                f"{', …' if len(layers) > 3 else ''}."
            )
    return rules


def rule_for(rules: Iterable[Rule], layer: str) -> Rule | None:
    """The first rule that matches."""
    return next((rule for rule in rules if rule.matches(layer)), None)


def _parse(text: str) -> Rule:
    name, colon, condition = text.rpartition(":")
    if not colon or not name.strip() or not condition.strip():
        raise OptionError(
            f"The rule {text!r} cannot be read: expected 'REGEX: condition', as {_EXAMPLE}."
        )
    try:
        pattern = re.compile(name.strip())
    except re.error as error:
        raise OptionError(
            f"The rule {text!r} has a pattern that is no regular expression ({error})."
        ) from None
    ways = tuple(
        tuple(_term(part, text) for part in re.split(r"\band\b", way))
        for way in re.split(r"\bor\b", condition)
    )
    return Rule(text, pattern, ways)


def _term(part: str, text: str) -> Term:
    match = _TERM.fullmatch(part)
    if match is None:
        raise OptionError(
            f"The rule {text!r} cannot be read at {part.strip()!r}: expected METRIC < NUMBER, "
            f"joined by 'and' or 'or', as {_EXAMPLE}."
        )
    metric, sign, limit = match.groups()
    known = metric_names()
    if metric not in known:
        near = difflib.get_close_matches(metric, known, n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise OptionError(
            f"The rule {text!r} names the metric {metric!r}, which does not exist. {hint}"
            f"The metrics are: {', '.join(known)}."
        )
    try:
        value = float(limit)
    except ValueError:
        raise OptionError(
            f"The rule {text!r} compares {metric} with {limit!r}, which is no number."
        ) from None
    return Term(metric, sign, value)


def _shown(value: float) -> str:
    return "undefined" if math.isnan(value) else f"got {value:.4g}"


@dataclass(frozen=True)
class Preset:
    """Limits from one of the documents, for every layer."""

    name: str
    says: str
    ways: tuple[tuple[Term, ...], ...]

    def rule(self) -> Rule:
        return Rule(self.says, re.compile(".*", re.DOTALL), self.ways)


PRESETS: dict[str, Preset] = {
    "documents": Preset(
        "documents",
        "the documents' grades: MSE < 1e-2 and correlation > 0.99",
        ((Term("mse", "<", 1e-2), Term("correlation", ">", 0.99)),),
    ),
    "device": Preset(
        "device",
        "the documents' limits across devices: max abs < 0.01, mean abs < 0.001, cosine > 0.99",
        ((Term("max_abs", "<", 0.01), Term("mae", "<", 0.001), Term("cosine", ">", 0.99)),),
    ),
}


def preset_of(name: str | None) -> Preset | None:
    """A preset by its name, or a sentence that lists them."""
    if name is None:
        return None
    if name not in PRESETS:
        raise OptionError(f"There is no preset {name!r}. The presets are: {', '.join(PRESETS)}.")
    return PRESETS[name]
