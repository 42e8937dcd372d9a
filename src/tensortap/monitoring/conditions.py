"""The text of a rule: `[LAYERS:] [PORT:] CONDITION [-> ACTION]`.

    nan                                     NaN or Inf, anywhere
    grad_norm > 100 -> raise
    blocks\\..*: dead > 0.9 and absmax < 1   at the outputs of these layers
    blocks\\..*: grad_output: underflow > 0.5

As in the rules of comparisons, LAYERS is a regular expression for the whole name, a condition is
joined by `and` and `or` (`and` binds closer), and an undefined metric fulfils none.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..errors import OptionError
from ..recording.schema import PORTS, Port
from .metrics import COUNTS, METRICS, NORMS, SHARES, Level, level_of

if TYPE_CHECKING:
    from .alarms import Alarm

__all__ = ["ACTIONS", "Action", "Rule", "Term", "Way", "check_action"]

Action: TypeAlias = "Literal['raise', 'warn', 'snapshot'] | Callable[[Alarm], object]"
ACTIONS = ("raise", "warn", "snapshot")
_EXAMPLE = "'blocks\\..*: output: absmax > 1e4 and std > 100'"
_OPERATORS: dict[str, np.ufunc] = {
    "<=": np.less_equal,
    ">=": np.greater_equal,
    "==": np.equal,
    "!=": np.not_equal,
    "<": np.less,
    ">": np.greater,
}
_TERM = re.compile(r"([A-Za-z_][\w./-]*)\s*(<=|>=|==|!=|<|>)\s*(\S+)")


@dataclass(frozen=True)
class Term:
    """One condition on one metric. A bare word (`nan`) is one without a sign."""

    metric: str
    sign: str
    limit: float
    scalar: bool = False  # a number that is logged under this name
    bare: bool = False

    @property
    def level(self) -> Level:
        return "scalar" if self.scalar else level_of(self.metric)

    def hold(self, values: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Where it holds; an undefined value (NaN) fulfils no term."""
        held: NDArray[np.bool_] = _OPERATORS[self.sign](values, self.limit)
        return held & ~np.isnan(values) if self.sign == "!=" else held

    def __str__(self) -> str:
        return self.metric if self.bare else f"{self.metric} {self.sign} {self.limit:g}"


@dataclass(frozen=True)
class Way:
    """Terms that must hold together."""

    terms: tuple[Term, ...]
    port: Port | None  # of its place terms; None for every port

    @cached_property
    def first(self) -> Term | None:
        """The bare word, when it is one: only the first bad place in order of execution is said."""
        return self.terms[0] if len(self.terms) == 1 and self.terms[0].bare else None

    @cached_property
    def placed(self) -> bool:
        """Whether it is judged place by place, and not once a step."""
        return any(term.level in ("place", "parameter") for term in self.terms)

    @cached_property
    def needs(self) -> frozenset[Port]:
        """The ports that it cannot do without."""
        found: set[Port] = {NORMS[term.metric] for term in self.terms if term.level == "step"}
        if any(term.level == "parameter" for term in self.terms):
            found |= {"update", "param"}
        if self.placed and self.port is not None:
            found.add(self.port)
        return frozenset(found - {"scalar"})


@dataclass(frozen=True)
class Rule:
    """When to raise an alarm, and what is done then."""

    text: str
    action: Action
    layers: re.Pattern[str] | None
    port: Port | None
    ways: tuple[Way, ...]

    @classmethod
    def parse(cls, text: str, action: Action | None = None) -> Rule:
        """Read a rule. The action is "warn" unless it is given, here or in the text (`-> raise`).

        >>> Rule.parse("grad_norm > 100 -> raise").action
        'raise'
        """
        if not isinstance(text, str):
            raise OptionError(f"A rule is a text, as {_EXAMPLE}; got {text!r}.")
        body, arrow, said = (part.strip() for part in text.rpartition("->"))
        if arrow:
            if action is not None and action != said:
                raise OptionError(
                    f"The rule {text!r} names its action, and {_called(action)} was given beside "
                    "it. Give one of them."
                )
            action = check_action(said, text)
        else:
            body = said
            action = check_action("warn" if action is None else action, text)
        head, _, condition = (part.strip() for part in body.rpartition(":"))
        if not condition or (":" in body and not head):
            raise OptionError(
                f"The rule {text!r} cannot be read: expected 'nan', or METRIC > NUMBER with a "
                f"pattern for layers or a port before it, as {_EXAMPLE}."
            )
        layers, port = _scope(head, text)
        ways = tuple(
            _way([part.strip() for part in re.split(r"\s+and\s+", way)], layers, port, text)
            for way in re.split(r"\s+or\s+", condition)
        )
        return cls(body, action, layers, port, ways)

    @property
    def scalars(self) -> frozenset[str]:
        """The logged numbers that it reads."""
        return frozenset(t.metric for way in self.ways for t in way.terms if t.level == "scalar")

    def __str__(self) -> str:
        return f"{self.text} -> {_called(self.action)}"


def check_action(action: object, text: str) -> Action:
    """An action that is known, or a sentence."""
    if callable(action):
        return action
    if action == "raise" or action == "warn" or action == "snapshot":
        return action
    near = difflib.get_close_matches(str(action), ACTIONS, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise OptionError(
        f"The rule {text!r} has the action {action!r}, which does not exist.{hint} Actions are "
        f"{', '.join(ACTIONS)}, or in Python a function that takes the alarm."
    )


def _called(action: Action) -> str:
    return action if isinstance(action, str) else getattr(action, "__name__", repr(action))


def _scope(head: str, text: str) -> tuple[re.Pattern[str] | None, Port | None]:
    """Layers and port of `LAYERS: PORT`, either of which may be left out."""
    if not head:
        return None, None
    before, _, last = (part.strip() for part in head.rpartition(":"))
    port = next((port for port in PORTS if port == last), None)
    name = before if port else head
    if not port:
        first = name.partition(":")[0].strip()
        if first in PORTS:
            raise OptionError(
                f"The rule {text!r} names the port before the layers. The layers come first: "
                f"'LAYERS: {first}: condition'."
            )
        near = difflib.get_close_matches(name, PORTS, n=1, cutoff=0.85)
        if near and name.isidentifier():
            raise OptionError(
                f"The rule {text!r} can be read in two ways. For the port, write '{near[0]}: …'; "
                f"for a layer that is called so, '({name}): …'."
            )
    if not name:
        return None, port
    try:
        return re.compile(name), port
    except re.error as error:
        raise OptionError(
            f"The rule {text!r} has a pattern for layers, {name!r}, that is no regular expression "
            f"({error}). Ports are {', '.join(PORTS)}."
        ) from None


def _way(parts: list[str], layers: re.Pattern[str] | None, port: Port | None, text: str) -> Way:
    terms = tuple(_term(part, layers, port, text) for part in parts)
    levels = {term.level for term in terms}
    norms = [term.metric for term in terms if term.level in ("step", "parameter")]
    if norms and port is not None:
        raise OptionError(
            f"The rule {text!r} names the port {port}, but {norms[0]} has its own. Leave the port "
            "out."
        )
    if levels == {"scalar"} and port not in (None, "scalar"):
        raise OptionError(_unknown(terms[0].metric, text))
    if port == "scalar" and len(terms) > 1 and any(term.bare for term in terms):
        raise OptionError(
            f"The rule {text!r} joins a word for all logged numbers with a condition on one of "
            "them. Make two rules of it."
        )
    if port is None and "parameter" in levels:
        port = "update"
    elif port is None and any(t.level == "place" and t.metric not in COUNTS for t in terms):
        port = "output"
    return Way(terms, port)


def _term(part: str, layers: re.Pattern[str] | None, port: Port | None, text: str) -> Term:
    if part in COUNTS:
        return Term("inf" if part == "inf" else "bad", ">", 0.0, bare=True)
    match = _TERM.fullmatch(part)
    if match is None:
        raise OptionError(
            f"The rule {text!r} cannot be read at {part!r}: expected METRIC > NUMBER (or <, >=, "
            f"<=, ==, !=), joined by 'and' or 'or', or one of {', '.join(COUNTS)} alone, as "
            f"{_EXAMPLE}.{_near_word(part)}"
        )
    metric, sign, limit = match.groups()
    scalar = port == "scalar" or metric not in METRICS
    near = difflib.get_close_matches(metric, METRICS, n=1, cutoff=0.75)
    if scalar and port != "scalar" and (layers is not None or near):
        raise OptionError(_unknown(metric, text))
    try:
        value = float(limit)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise OptionError(
            f"The rule {text!r} compares {metric} with {limit!r}, which is no number."
        )
    if not scalar and metric in SHARES and not 0 <= value <= 1:
        raise OptionError(
            f"The rule {text!r} compares {metric} with {limit}, but it is a share, from 0 to 1."
        )
    return Term(metric, sign, value, scalar)


def _near_word(part: str) -> str:
    near = difflib.get_close_matches(part.lower(), COUNTS, n=1) if part.isalpha() else []
    return f" Did you mean {near[0]!r}?" if near else ""


def _unknown(metric: str, text: str) -> str:
    near = difflib.get_close_matches(metric, METRICS, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return (
        f"The rule {text!r} names the metric {metric!r}, which does not exist.{hint} The metrics "
        f"are: {', '.join(METRICS)}. A number that you log under this name gets a rule of its own: "
        f"'scalar: {metric} > 1'."
    )
