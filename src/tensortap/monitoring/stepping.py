"""One step after the other: what is taken when, when it is judged, and when it is over.

A step is the forward and backward passes up to an optimizer's step. It is not over there: another
optimizer may follow, and so may the loss that the loop logs. It is over when the next forward pass
begins, or when somebody asks for what there is. Rules are judged as soon as there is something to
judge: ahead of the optimizer for those that want to act before the weights are touched, behind it
for the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..errors import WatchAlarm
from ..recording.schema import Site
from .board import Board
from .journal import Entry, Held, Journal
from .parameters import Parameters, Updates
from .places import Gate, Places
from .rules import Alarm, Rules
from .step import Step

__all__ = ["Stepping", "Wanted"]

_ALL = None  # parameters, whoever holds them
_REMEMBERED = 16  # steps, to see whether optimizers take turns


@dataclass(eq=False)
class Wanted:
    """What is watched; may change between steps."""

    every: int
    outputs: bool
    grads: bool
    params: Any  # bool or patterns
    updates: bool | Literal["exact", "sampled"]

    def ports(self) -> list[str]:
        on = {
            "output": self.outputs,
            "grad_output": self.grads,
            "grad_param": self.grads,
            "param": self.params,
            "update": self.updates,
        }
        return [name for name, wanted in on.items() if wanted]


class Stepping:
    """Takes a model's steps apart for the journal."""

    def __init__(
        self,
        wanted: Wanted,
        rules: Rules,
        board: Board,
        gate: Gate,
        *,
        start: int,
        budget: int,
        on_cpu: bool,
        by_hand: bool,
        act: Callable[[Sequence[Alarm]], Alarm | None],
        land: Callable[[], None],
        say: Callable[[str], None],
        next_step: Callable[[], None],
    ) -> None:
        self.wanted = wanted
        self.board = board
        self.gate = gate
        self.epoch = 0
        self.over = False  # an optimizer has stepped, or the user has said so
        self.steps = 0
        self.scalars: dict[str, float | torch.Tensor] = {}
        self._told = 0
        self.places: Places
        self.parameters: Parameters
        self.journal: Journal
        self._number = start
        self._budget = budget
        self._on_cpu = on_cpu
        self._by_hand = by_hand
        self._act = act
        self._land = land
        self._acting = False  # a rule's function runs: what it asks for waits for the step's end
        self._kinds: deque[frozenset[int]] = deque(maxlen=_REMEMBERED)
        self._cycle = 1
        self._expected = 1
        self._say = say
        self._next_step = next_step
        self._stepped: set[int] = set()
        self._found: list[Alarm] = []
        self._judged: tuple[int, int] | None = None
        self._held: Held = {}
        self._held_bytes = 0
        self._short = False
        self.use(rules)

    @property
    def batch(self) -> int:
        """The number of the step that runs, or that the next forward will begin."""
        return self._number + self.over

    def use(self, rules: Rules) -> None:
        self.rules = rules
        self._holds = rules.needs_tensors
        self._needs, self._everywhere = rules.needs, rules.looks_everywhere

    # Taking.

    def take(self, site: Site, call: int, tensor: torch.Tensor) -> None:
        if not self.board.take(site, call, tensor):
            self._say(
                f"Step {self._number} has {len(self.board)} records and does not end: no optimizer "
                "that holds a parameter of this model has stepped. The rest of the step is left "
                'out. With another kind of loop, use clock="manual" and call watch.step().'
            )
        elif self._holds:
            self._hold(site, call, tensor)

    def _hold(self, site: Site, call: int, tensor: torch.Tensor) -> None:
        """Copy a tensor, in case a rule wants a snapshot of this step."""
        nbytes = tensor.numel() * tensor.element_size()
        if self._held_bytes + nbytes > self._budget:
            self._short = True
            return
        self._held_bytes += nbytes
        with torch.no_grad():
            self._held[(site, call)] = tensor.detach().clone()

    def tell(self, numbers: Mapping[str, float | torch.Tensor]) -> None:
        """Numbers of the user's own, for the step that runs or has just ended."""
        self.scalars.update(numbers)
        self._told += 1
        if self.over and not self._acting and self._judges_here():
            self._judge()

    # From its beginning to its end.

    def begin(self) -> None:
        self.places.begin()
        self.scalars = {}
        self.over = self.gate.over = False
        self._stepped.clear()
        self._found, self._judged, self._told = [], None, 0
        self._held, self._held_bytes, self._short = {}, 0, False
        self.parameters.begin()
        self.open_gate()
        if self._by_hand and self._wants("update"):
            self.parameters.remember(self._how(), _ALL)

    def open_gate(self) -> None:
        self.gate.outputs, self.gate.grads = self.wanted.outputs, self.wanted.grads
        self.gate.open = self._due or bool(self.rules)

    def forward(self) -> None:
        """A forward pass begins behind an optimizer's step: the step is over."""
        if (self.over or self.gate.over) and not self._acting:
            self.end()

    def before(self, who: int, moved: set[int], inside: bool) -> None:
        """An optimizer is about to step: the gradients are as it will see them.

        `inside`: it runs the passes itself, and may run more of them before it is done.
        """
        if self.over and who in self._stepped:
            self.end()  # the same one again: another step, though no forward was heard
        if self._wants("grad_param"):
            self.parameters.take_grads(moved)
        if self._wants("update") and not self._by_hand:
            self.parameters.remember(self._how(), moved)
        if not inside and not self._by_hand:
            self.gate.over = True  # also when the optimizer raises, and training goes on
        if self.rules.needs_now:
            self._judge()

    def after(self, who: int, moved: set[int]) -> None:
        """An optimizer has stepped."""
        if self._wants("param"):
            self.parameters.take_values(moved)
        if self._wants("update") and not self._by_hand:
            self.parameters.take_updates(self._how(), moved)
        self._stepped.add(who)
        if not self._by_hand:
            self._close_step()

    def by_hand(self) -> None:
        """The user says that the step is over."""
        if self.over:
            self.end()
        if self._wants("grad_param") and not self._stepped:
            self.parameters.take_grads(_ALL)
        if self._wants("update"):
            self.parameters.take_updates(self._how(), _ALL)
        self._close_step()

    def _close_step(self) -> None:
        self.over = self.gate.over = True
        if self._judges_here() and len(self._stepped) >= self._expected:
            self._judge()
            if self._has("snapshot"):
                self._hold_parameters()

    def end(self) -> None:
        """The step is complete: hand it over, and begin the next."""
        if self._wants("param"):
            self.parameters.take_values(_ALL)  # what no optimizer holds
        if not (self._due or len(self.board) or self.rules or self.scalars):
            self._go_on()  # nothing was asked of this step
            return
        if self._judges_here():
            self._judge()
        self._hand_over()

    def finish(self, broken: bool) -> None:
        """No more steps: hand over what there is of the last one."""
        if self.over and not broken:
            self.end()
        if len(self.board) or self.scalars or broken:
            self._hand_over(broken=broken, last=True)
        self.parameters.forget()
        self._held = {}

    def _hand_over(self, *, broken: bool = False, last: bool = False) -> None:
        alarms: list[Alarm] | None = list(self._found) if self._judges_here() or last else None
        wanted = self._has("snapshot")
        if wanted and self._short:
            self._say(
                f"A snapshot needs more than the budget of {self._budget} bytes: some tensors are "
                "known by their summaries alone. Raise budget=."
            )
        gathered = self.board.gather(self.epoch, self._number, self.scalars)
        held = self._held if wanted else {}
        due = self._due or last
        self.journal.put(Entry(gathered, due, self.wanted.every, alarms, held, broken))
        if not last:
            self._go_on()

    def _go_on(self) -> None:
        self._kinds.append(frozenset(self._stepped))
        self._cycle = len(set(self._kinds))
        self._expected = max(1, len(self._stepped))
        self._number += 1
        self.steps += 1
        self.over = self.gate.over = False
        self._next_step()
        self.begin()

    @property
    def _due(self) -> bool:
        """Optimizers that take turns, as in a GAN, each have their turn at being written."""
        return self._number // self._cycle % self.wanted.every == 0

    def _how(self) -> Updates:
        return "sampled" if self.wanted.updates == "sampled" else "exact"

    def _wants(self, port: str) -> bool:
        """Whether parameters are looked at in this step: it is written, or a rule asks."""
        asked = {
            "param": self.wanted.params,
            "grad_param": self.wanted.grads,
            "update": self.wanted.updates,
        }
        if port == "grad_param" and self._everywhere:
            return bool(asked[port])
        return bool(asked[port]) and (self._due or port in self._needs)

    # Rules.

    def _judges_here(self) -> bool:
        """On a CPU the numbers are there; elsewhere waiting for them must be worth it."""
        return self._on_cpu or self.rules.needs_now

    def _judge(self) -> None:
        state = (len(self.board), self._told)
        if not self.rules or state == self._judged:
            return
        self._judged = state
        gathered = self.board.gather(self.epoch, self._number, self.scalars, clear=False)
        found = self.rules.judge(gathered.step())
        self._found += found
        if self._has("snapshot"):
            self._hold_parameters()
        self._acting = True
        try:
            raising = self._act(found)
        finally:
            self._acting = False
        if raising is not None:
            self._hand_over()
            self._land()
            raise WatchAlarm(raising.text, raising)

    def _has(self, action: str) -> bool:
        return any(alarm.action == action for alarm in self._found)

    def _hold_parameters(self) -> None:
        for site, tensor in self.parameters.at_hand():
            if (site, 0) not in self._held:
                self._hold(site, 0, tensor)

    def judge_later(self, step: Step) -> list[Alarm]:
        """In the journal's thread, where nobody waits for the answer."""
        found = self.rules.judge(step) if self.rules else []
        self._act(found)
        return found
