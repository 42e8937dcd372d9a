"""Rules that are judged at every step of training, and their alarms.

A rule gives an alarm when it becomes true at a place after not being so: an episode, not a step.
Of what is not finite only the first place in order of execution is said, for NaN spreads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import OptionError, WatchAlarm
from ..recording.schema import PORTS, Port
from .alarms import Alarm, bad_alarm, logged_alarm, place_alarm, step_alarm
from .conditions import Action, Rule, Term, Way
from .metrics import NORMS, Layout, Rows, Values
from .step import Key, Step

__all__ = ["Action", "Alarm", "Rule", "Rules", "WatchAlarm"]

_LAYOUTS = 4  # steps come in a few kinds: with parameters, without them


@dataclass(eq=False)
class _Episodes:
    """Where a rule is true now, in one of the three ways in which it can be asked."""

    active: set[Key] = field(default_factory=set)
    born: set[Key] = field(default_factory=set)  # not finite since they were first seen: masks
    judged: bool = False  # whether there ever was something to judge

    def update(self, held: Iterable[Key], seen: Iterable[Key]) -> list[Key]:
        """Take in a step: what held of what was seen. Returns where it became true."""
        held = dict.fromkeys(held)
        new = [key for key in held if key not in self.active]
        self.active.difference_update(key for key in seen if key not in held)
        self.active.update(held)
        return new


@dataclass(eq=False)
class _Judge:
    """One rule with its episodes."""

    rule: Rule
    first: _Episodes = field(default_factory=_Episodes)
    placed: _Episodes = field(default_factory=_Episodes)
    whole: _Episodes = field(default_factory=_Episodes)

    def __post_init__(self) -> None:
        ways = self.rule.ways
        self.first_ways = [way for way in ways if way.first]
        self.placed_ways = [way for way in ways if way.placed and not way.first]
        self.whole_ways = [way for way in ways if not way.placed]

    def judge(self, values: Values, fresh: set[Key]) -> list[Alarm]:
        alarms: list[Alarm] = []
        if self.first_ways:
            alarms += self._first(values, fresh)
        if self.placed_ways:
            alarms += self._placed(values)
        for way in self.whole_ways:
            alarms += self._whole(way, values)
        return alarms

    # What is not finite.

    def _first(self, values: Values, fresh: set[Key]) -> list[Alarm]:
        rule, step, layout, state = self.rule, values.step, values.layout, self.first
        state.judged = state.judged or bool(len(step) or step.scalars)
        infinite = all(way.terms[0].metric == "inf" for way in self.first_ways)
        hits = step.column("posinf") + step.column("neginf")
        if not infinite:
            hits = hits + step.column("nan")
        names = self._logged(step, infinite)
        if not state.active and not names and not hits.any():
            return []
        places = layout.places(rule.layers, rule.port)
        rows: Rows = np.flatnonzero((hits > 0) & np.isin(layout.group, places))
        held = dict.fromkeys(layout.row_keys[row] for row in rows.tolist())
        logged: dict[Key, str] = {(name, "scalar", ""): name for name in names}
        seen: list[Key] = [layout.keys[place] for place in places.tolist()]
        seen += [(name, "scalar", "") for name in step.scalars]
        spreading = any(key in held and key not in state.born for key in state.active)
        state.born.update(key for key in held if key in fresh)
        new = set(state.update({**held, **logged}, seen))
        if spreading or not new:
            return []  # more of the same
        row = next((row for row in rows.tolist() if layout.row_keys[row] in new), None)
        if row is not None:
            return [bad_alarm(rule, step, layout, row, rows)]
        name = next(logged[key] for key in logged if key in new)
        return [logged_alarm(rule, step, name, fine=not len(rows))]

    def _logged(self, step: Step, infinite: bool) -> list[str]:
        """The logged numbers that are not finite; a rule for some layers does not ask for them."""
        if self.rule.layers is not None or self.rule.port not in (None, "scalar"):
            return []
        bad = math.isinf if infinite else _not_finite
        return [name for name, value in step.scalars.items() if bad(value)]

    # Place by place.

    def _placed(self, values: Values) -> list[Alarm]:
        state, layout = self.placed, values.layout
        held: dict[Key, tuple[Term, float]] = {}
        seen: list[Key] = []
        for way in self.placed_ways:
            found = self._look(way, values)
            if found is None:
                continue
            state.judged = True
            places, holds, term, column = found
            if state.active:
                seen += [layout.keys[place] for place in places.tolist()]
            for index in np.flatnonzero(holds).tolist():
                held.setdefault(layout.keys[places[index]], (term, float(column[index])))
        if not held and not state.active:
            return []
        order = sorted(held, key=layout.numbers.__getitem__)
        new = state.update(order, seen)
        if not new:
            return []
        term, value = held[new[0]]
        return [place_alarm(self.rule, values.step, term, new[0], value, new)]

    def _look(
        self, way: Way, values: Values
    ) -> tuple[Rows, NDArray[np.bool_], Term, NDArray[np.float64]] | None:
        """The places of a way, where it holds, and the metric that is said; None: not to judge."""
        layers, layout = self.rule.layers, values.layout
        owners = None
        if any(term.level == "parameter" for term in way.terms):
            places, owners = layout.updates(layers)
        else:
            places = layout.places(layers, way.port)
        if not len(places):
            return None
        holds: NDArray[np.bool_] | None = None
        said: tuple[Term, NDArray[np.float64]] | None = None
        for term in way.terms:
            if term.level in ("step", "scalar"):
                value = self._value(term, values)
                if value is None:
                    return None
                column = np.full(len(places), value)
            else:
                if owners is not None and term.level == "parameter":
                    column = values.ratio(places, owners)
                else:
                    column = values.place(term.metric)[places]
                said = said or (term, column)
            held = term.hold(column)
            holds = held if holds is None else holds & held
        assert holds is not None and said is not None  # a placed way has a placed term
        return places, holds, *said

    # Once a step.

    def _whole(self, way: Way, values: Values) -> list[Alarm]:
        step, state = values.step, self.whole
        found = [self._value(term, values) for term in way.terms]
        numbers = [value for value in found if value is not None]
        if len(numbers) < len(found):
            return []
        state.judged = True
        term, value = way.terms[0], numbers[0]
        holds = all(
            bool(term.hold(np.array(value))) for term, value in zip(way.terms, numbers, strict=True)
        )
        key: Key = (str(way.terms), "scalar", "")
        if not state.update([key] if holds else [], [key]):
            return []
        if term.level == "scalar":
            return [logged_alarm(self.rule, step, term.metric)]
        rows = values.layout.places(self.rule.layers, NORMS[term.metric])
        return [step_alarm(self.rule, term, value, values, rows)]

    def _value(self, term: Term, values: Values) -> float | None:
        """A number that the step has once; None where it has none."""
        if term.level == "scalar":
            logged = values.step.scalars.get(term.metric)
            return None if logged is None else float(logged)
        rows = values.layout.places(self.rule.layers, NORMS[term.metric])
        return values.norm(rows) if len(rows) else None

    @property
    def judged(self) -> bool:
        return self.first.judged or self.placed.judged or self.whole.judged


class Rules:
    """The rules of a watch. `judge` takes its steps in order and keeps what is true.

        Rules(["nan", "grad_norm > 100 -> raise"])
        Rules({"nan": "snapshot", "loss > 10": print})

    `after` hands over the episodes of rules that were there before, when rules are changed while a
    model trains: what was said already is not said again.
    """

    def __init__(
        self,
        rules: str | Rule | Iterable[str | Rule] | Mapping[str, Action] | Rules = ("nan",),
        *,
        after: Rules | None = None,
    ) -> None:
        found = _read(rules)
        self.rules: tuple[Rule, ...] = tuple(
            rule for index, rule in enumerate(found) if rule not in found[:index]
        )
        old = {judge.rule.text: judge for judge in after._judges} if after else {}
        self._judges: list[_Judge] = [
            _Judge(rule, *_taken_over(old.get(rule.text))) for rule in self.rules
        ]
        self._layouts: list[Layout] = []
        self._known: set[Key] = set(after._known) if after else set()

    def __len__(self) -> int:
        return len(self.rules)

    @property
    def needs(self) -> frozenset[Port]:
        """The ports that some rule cannot do without. Rules that name none read what is there."""
        return frozenset().union(*(way.needs for rule in self.rules for way in rule.ways))

    @property
    def looks_everywhere(self) -> bool:
        """Whether a rule asks for what is not finite, at any port: then gradients are read too."""
        return any(way.first and rule.port is None for rule in self.rules for way in rule.ways)

    @property
    def needs_now(self) -> bool:
        """Whether an alarm must be acted on at its step, not merely told."""
        return any(rule.action != "warn" for rule in self.rules)

    @property
    def needs_tensors(self) -> bool:
        """Whether a rule may ask for the full tensors of a step."""
        return any(rule.action == "snapshot" for rule in self.rules)

    def judge(self, step: Step) -> list[Alarm]:
        """The alarms of a step: in order of the rules, one a rule unless `or` gives it several."""
        if not self._judges:
            return []
        layout, fresh = self._layout(step)
        values = Values(step, layout)
        with np.errstate(all="ignore"):
            return [alarm for judge in self._judges for alarm in judge.judge(values, fresh)]

    def check(self, layers: Sequence[str]) -> None:
        """Refuse a pattern that matches none of the layers that are watched."""
        for rule in self.rules:
            if rule.layers is not None and not any(map(rule.layers.fullmatch, layers)):
                shown = ", ".join(repr(name) for name in layers[:3])
                raise OptionError(
                    f"The rule {rule.text!r} matches none of the {len(layers)} watched layers. Its "
                    "pattern is for the whole name, so write '.*name.*' to find a part of it. "
                    f"Layers are: {shown}{', …' if len(layers) > 3 else ''}. "
                    f"Ports are: {', '.join(PORTS)}."
                )
            if rule.layers is None and rule.port in layers:
                raise OptionError(
                    f"The rule {rule.text!r} can be read in two ways, for there is a layer called "
                    f"'{rule.port}'. Write '.*: {rule.port}: …' for the port of every layer, "
                    f"'({rule.port}): …' for that layer."
                )

    def notes(self) -> list[str]:
        """Rules that never had anything to judge, in words: a mistyped name would be silent."""
        found = []
        for judge in self._judges:
            if judge.judged:
                continue
            rule = judge.rule
            needs = sorted({f"'{name}' was logged" for name in rule.scalars})
            ports = frozenset[Port]().union(*(way.needs for way in rule.ways))
            needs += [f"{port} was watched" for port in sorted(ports)]
            why = f": no {' and no '.join(needs)}" if needs else ""
            found.append(f"The rule {rule.text!r} was never judged{why}.")
        return found

    def _layout(self, step: Step) -> tuple[Layout, set[Key]]:
        """Where the rows of a step stand, and which places are new."""
        for index, layout in enumerate(self._layouts):
            if layout.fits(step):
                if index:
                    self._layouts.insert(0, self._layouts.pop(index))
                return layout, set()
        layout = Layout(step)
        self._layouts = [layout, *self._layouts[: _LAYOUTS - 1]]
        fresh = {key for key in layout.keys if key not in self._known}
        self._known |= fresh
        return layout, fresh


def _read(rules: Any) -> list[Rule]:
    if isinstance(rules, Rules):
        return list(rules.rules)
    if isinstance(rules, str | Rule):
        rules = [rules]
    if isinstance(rules, Mapping):
        return [Rule.parse(text, action) for text, action in rules.items()]
    if not isinstance(rules, Iterable):
        raise OptionError(
            f"rules must be a list of rules, or a mapping of rules to actions, got {rules!r}."
        )
    return [rule if isinstance(rule, Rule) else Rule.parse(rule) for rule in rules]


def _taken_over(judge: _Judge | None) -> list[_Episodes]:
    if judge is None:
        return []
    return [
        _Episodes(set(had.active), set(had.born), had.judged)
        for had in (judge.first, judge.placed, judge.whole)
    ]


def _not_finite(value: float) -> bool:
    return not math.isfinite(value)
