"""`tap.watch`: summaries of every layer while a model trains, nearly for free.

    with tap.watch(model, "runs/train", layers="blocks", every=10) as watch:
        ...  # any training loop

Outputs and their gradients are reduced where they are, as they come (`places`, `board`);
parameters are looked at when the optimizer steps (`clock`, `parameters`); a thread writes
(`journal`). A step that is not due is computed all the same while a rule stands, because the step
in which something breaks is never one of the cadence; it lives in the ring until then.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from ..errors import OptionError, TapError, WatchAlarm
from ..recording.schema import Site
from ..recording.writer import Writer
from ..selection import select
from ..taps import compiled
from ..taps.session import TapWarning
from .board import Board, Gathered
from .clock import Clock
from .hearing import graphs_exist
from .journal import Entry, Held, Journal
from .manifest import manifest_of, rank
from .parameters import Parameters, Updates
from .places import Gate, Places
from .rules import Alarm, Rules
from .sinks import sinks_of
from .step import Step

if TYPE_CHECKING:
    from .config import Reread

__all__ = ["Watcher", "watch"]

Layers = str | Sequence[str]
ClockKind = Literal["optimizer", "manual"]
_SEAL_AFTER = 30.0
_LOG = logging.getLogger("tensortap.watch")
_ALARMS_KEPT = 1000


def watch(
    model: nn.Module,
    path: str | os.PathLike[str] = "runs/train",
    *,
    layers: Layers = "blocks",
    every: int = 10,
    outputs: bool = True,
    grads: bool = True,
    params: bool | Layers = True,
    updates: bool | Literal["sampled"] = False,
    rules: Any = ("nan",),
    sinks: Any = (),
    ring: int = 20,
    clock: ClockKind | torch.optim.Optimizer = "optimizer",
    config: str | os.PathLike[str] | None = None,
    within: Layers | None = None,
    start: int = 0,
    budget: int = 1 << 30,
    overwrite: bool = False,
    mode: str | None = None,
) -> Watcher:
    """Watch a model while it trains. Listening begins at once and ends with `close()` or `with`.

    Args:
        model: any `torch.nn.Module`, compiled or not. Best watched before its first step.
        path: the folder that the recording of summaries is written to.
        layers: whose outputs to watch (docs/selection.md); by default the repeated blocks.
        every: write every so many steps. Steps count from 0.
        outputs, grads: the outputs of layers; their gradients, and those of parameters.
        params: the parameters themselves, at the steps that are written: all of the model, or
            those under the layers named here, which then holds for their gradients and updates.
        updates: what each written step did to the parameters, from a copy of them ("sampled": from
            16384 elements of each, where there is no room for a copy).
        rules: what to look out for in every step (docs/rules.md): texts, or a mapping from text to
            "warn", "raise", "snapshot" or a function. Without rules only written steps cost.
        sinks: where else the numbers go: "tensorboard:DIR", "wandb", "stdout", a function.
        ring: how many steps before an alarm are written with it.
        clock: "optimizer" hears steps from the optimizer that holds the model's parameters; one
            optimizer of several; or "manual": call `step()` at the end of each.
        config: a JSON or TOML file (docs/rules.md) whose watch_* keys go before the arguments here,
            read again while training when it changes.
        within: the layers that can be switched on later in a compiled model without a new compile.
        start: the number of the first step, for training that is resumed.
        budget: the most memory in bytes for full tensors that a "snapshot" rule holds in a step.
        overwrite: replace a recording that is there.
        mode: the name of the run, kept in the manifest.
    """
    return Watcher(
        model,
        path,
        layers=layers,
        every=every,
        outputs=outputs,
        grads=grads,
        params=params,
        updates=updates,
        rules=rules,
        sinks=sinks,
        ring=ring,
        clock=clock,
        config=config,
        within=within,
        start=start,
        budget=budget,
        overwrite=overwrite,
        mode=mode,
    )


class Watcher:
    """A watch that runs. `alarms` are the rules that became true so far."""

    def __init__(
        self,
        model: nn.Module,
        path: str | os.PathLike[str],
        *,
        layers: Layers,
        every: int,
        outputs: bool,
        grads: bool,
        params: bool | Layers,
        updates: bool | Literal["sampled"],
        rules: Any,
        sinks: Any,
        ring: int,
        clock: ClockKind | torch.optim.Optimizer,
        config: str | os.PathLike[str] | None,
        within: Layers | None,
        start: int,
        budget: int,
        overwrite: bool,
        mode: str | None,
    ) -> None:
        self._reread: Reread | None = None
        if config is not None:
            from .config import Reread, read_config

            self._reread = Reread(config)
            told = read_config(config).watch
            layers = told.layers if told.layers is not None else layers
            every = told.every if told.every is not None else every
            outputs = told.outputs if told.outputs is not None else outputs
            grads = told.grads if told.grads is not None else grads
            params = told.params if told.params is not None else params
            updates = told.updates if told.updates is not None else updates
            rules = told.rules if told.rules is not None else rules
            ring = told.ring if told.ring is not None else ring
        _check(model, path, every, ring, start, budget, updates, clock)
        if not (outputs or grads or params or updates):
            raise OptionError("Nothing to watch: outputs, grads, params and updates are all off.")
        self.path = os.fspath(path)
        self.batch = start
        self.alarms: list[Alarm] = []
        self.notes: list[str] = []
        self.failure: str | None = None
        self._model = model
        self._every = every
        self._outputs, self._grads = outputs, grads
        self._params, self._updates = params, updates
        self._manual = clock == "manual"
        self._budget = budget
        self._epoch = 0
        self._scalars: dict[str, float | torch.Tensor] = {}
        self._pending: Entry | None = None  # the step that ended last, open for late numbers
        self._held: Held = {}
        self._held_bytes = 0
        self._early: list[Alarm] = []
        self._steps = 0
        self._closed = False
        self._said: set[str] = set()
        self._use(Rules(rules))

        chosen = select(model, layers, default_fallback=layers == "blocks")
        self.notes += chosen.notes
        reach = chosen if within is None else select(model, within)
        devices = sorted({p.device for p in (*model.parameters(), *model.buffers())}, key=str)
        self._gate = Gate()
        self._board = Board()
        changeable = config is not None or within is not None
        self._places = Places(
            model, self._gate, self._take, self._fail, traces_grads=grads or changeable
        )
        self._parameters = Parameters(model, params or True, self._board.take_many)
        self._on_cpu = all(device.type == "cpu" for device in devices)
        self._rules.check(self._all_layers(chosen.names))
        sending = sinks_of(sinks)
        self._writer = Writer(
            self.path,
            manifest_of(
                model,
                layers=layers,
                ports=self._port_names(),
                keep="summary",
                notes=self.notes,
                mode=mode,
                structure=None,
                about={"watch": {"every": every, "ring": ring}},
            ),
            overwrite=overwrite,
            seal_after=_SEAL_AFTER,
            rank=rank(),
        )
        self._journal = Journal(
            self._writer,
            sending,
            ring=ring,
            judge=self._judge_later,
            on_failure=self._fail,
            on_problem=self._say,
            live=rank() == 0,
        )
        self._clock = Clock(
            model,
            self._before_step,
            self._after_step,
            forwards=lambda: self._places.forwards,
            only=clock if isinstance(clock, torch.optim.Optimizer) else None,
        )
        if graphs_exist():
            compiled.forget()
            if compiled.contains_compiled(model):
                self.notes.append(
                    "The model was compiled before: it compiles anew, with the taps inside. To "
                    "save that, call tap.watch before the first step."
                )
        for device in devices:
            self._board.prepare(device)
        self._places.attach([*reach.layers, *chosen.layers])
        self._places.choose(chosen.layers)
        self._clock.attach()
        atexit.register(self._at_exit)
        self._begin_step()

    # Reading off.

    @property
    def layers(self) -> list[str]:
        """The layers whose outputs are watched now."""
        return self._places.names

    # While it runs.

    def step(self) -> None:
        """The step is over: for clock="manual"."""
        if not self._manual:
            self._say(
                "watch.step() was called, but steps are heard from the optimizer: the call counts "
                'for nothing. To say yourself when a step ends: tap.watch(…, clock="manual").'
            )
            return
        self._after_step()

    def epoch(self, number: int) -> None:
        """Say which epoch the steps from now on belong to."""
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise OptionError(f"epoch must be a whole number from 0, got {number!r}.")
        self._epoch = number

    def log(self, values: Mapping[str, Any] | None = None, **more: Any) -> None:
        """Keep numbers of your own with this step: `watch.log(loss=loss)`.

        Behind the optimizer's step, and before the next forward, it is still the step that ended.
        """
        numbers: dict[str, float | torch.Tensor] = {}
        for name, value in {**(values or {}), **more}.items():
            number = _scalar(value)
            if number is None:
                self._say(
                    f"watch.log: '{name}' is {type(value).__name__} and no single number; it is "
                    "left out."
                )
            else:
                numbers[str(name)] = number
        if self._steps and not self._places.forwards and not len(self._board):
            self._log_late(numbers)
        else:
            self._scalars.update(numbers)

    def _log_late(self, numbers: dict[str, float | torch.Tensor]) -> None:
        if self._closed or self.failure is not None:
            return
        if self._pending is None:
            empty = Board().gather(self._epoch, self.batch - 1, {})
            self._pending = Entry(empty, False, self._every, [])
        entry = self._pending
        entry.gathered.tell(numbers)
        if entry.alarms is None:
            return  # judged later, with these numbers in it
        alone = Board().gather(self._epoch, entry.gathered.batch, numbers).step()
        found = self._rules.judge(alone) if self._rules else []
        entry.alarms += found
        if found:
            self._settle()
        self._act(found)

    def set(
        self,
        *,
        every: int | None = None,
        layers: Layers | None = None,
        outputs: bool | None = None,
        grads: bool | None = None,
        params: bool | Layers | None = None,
        updates: bool | Literal["sampled"] | None = None,
        rules: Any = None,
    ) -> None:
        """Change what is watched, from the next step on, without compiling anew."""
        if every is not None:
            _check_whole("every", every, 1)
            self._every = every
        if layers is not None:
            self._choose(layers)
        self._outputs = self._outputs if outputs is None else outputs
        self._grads = self._grads if grads is None else grads
        if params is not None and params != self._params:
            self._params = params
            self._parameters = Parameters(self._model, params or True, self._board.take_many)
        if updates is not None and updates != self._updates:
            _check_updates(updates)
            self._updates = updates
            self._parameters.forget()
        if rules is not None:
            changed = Rules(rules, after=self._rules)
            changed.check(self._all_layers())
            self._use(changed)
        if not len(self._board) and not self._places.forwards:
            self._open_gate()  # the step that runs has not begun in earnest

    def flush(self) -> None:
        """Return when every step that is over stands on disk, open to any reader."""
        if not self._closed:
            self._settle()
            self._journal.drain()
            self._writer.flush(sync=True)

    def close(self, failure: str | None = None) -> None:
        """Stop listening and write what is left. Closing twice is harmless."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        self._places.detach()
        self._clock.detach()
        reason = self.failure or failure
        self._settle()
        unfinished = self._board.gather(self._epoch, self.batch, self._scalars)
        if unfinished.sites or self._scalars or reason:
            entry = Entry(unfinished, True, self._every, list(self._early), self._held)
            entry.broken = reason is not None
            self._journal.put(entry)
        self._journal.close()
        self._parameters.forget()
        self._held = {}
        self.notes += self._last_words()
        self._writer.close(
            status="failed" if reason else "complete",
            failure=reason,
            notes=list(dict.fromkeys(self.notes)),
            skipped=[
                {"layer": layer, "port": "output", "leaf": leaf, "reason": why, "count": 1}
                for (layer, leaf), why in sorted(
                    {**self._places.unheard, **self._parameters.unheard}.items()
                )
            ],
            selection={
                **self._writer.manifest.selection,
                "alarms": [alarm.to_dict() for alarm in self.alarms[:_ALARMS_KEPT]],
            },
        )
        if self._writer.failure and self.failure is None:
            self.failure = self._writer.failure
            self._warn(f"tensortap stopped writing to {self.path}: {self.failure}.")

    def _at_exit(self) -> None:
        """The interpreter ends with the watch open; it may have died of an exception."""
        error = getattr(sys, "last_value", None)
        self.close(None if error is None else f"training raised {type(error).__name__}: {error}")

    def __enter__(self) -> Watcher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        text = f": {error}" if error is not None and str(error) else ""
        self.close(None if kind is None else f"training raised {kind.__name__}{text}")

    # A step, from its beginning to its end.

    @property
    def _due(self) -> bool:
        return self.batch % self._every == 0

    def _how(self) -> Updates:
        return "sampled" if self._updates == "sampled" else "exact"

    def _wants(self, port: str) -> bool:
        """Whether parameters are looked at in this step: it is written, or a rule asks."""
        return self._due or port in self._rules.needs

    def _begin_step(self) -> None:
        self._places.begin()
        self._scalars = {}
        self._held, self._held_bytes, self._early = {}, 0, []
        self._open_gate()
        if self._manual and self._updates and self._wants("update"):
            self._parameters.remember(self._how())

    def _open_gate(self) -> None:
        self._gate.outputs, self._gate.grads = self._outputs, self._grads
        wanted = self._due or bool(self._rules)
        self._gate.open = wanted and not self._closed and self.failure is None

    def _before_step(self) -> None:
        """An optimizer is about to step: gradients are as it will see them."""
        if self._closed or self.failure is not None:
            return
        try:
            if self._grads and self._wants("grad_param"):
                self._parameters.take_grads()
            if self._updates and not self._manual and self._wants("update"):
                self._parameters.remember(self._how())
            if self._rules.needs_now:
                self._judge_early()
        except WatchAlarm:
            raise
        except Exception as error:  # training must not notice
            self._fail(error)

    def _after_step(self) -> None:
        if self._closed or self.failure is not None:
            return
        try:
            if self._params and self._wants("param"):
                self._parameters.take_values()
            if self._updates and self._wants("update"):
                moved = None if self._manual else self._clock.moved
                self._parameters.take_updates(self._how(), moved)
            self._end_step()
        except WatchAlarm:
            raise
        except Exception as error:  # training must not notice
            self._fail(error)

    def _end_step(self) -> None:
        if not (self._due or len(self._board) or self._rules or self._scalars):
            self._settle()  # nothing was asked of this step
            self._next()
            return
        gathered = self._board.gather(self._epoch, self.batch, self._scalars)
        alarms: list[Alarm] | None = None
        if self._on_cpu or self._rules.needs_now:
            new = self._rules.judge(gathered.step()) if self._rules else []
            alarms = self._early + new
        else:
            new = []
        self._hand_over(gathered, alarms)
        self._next()
        self._act(new)

    def _hand_over(self, gathered: Gathered, alarms: list[Alarm] | None) -> None:
        wanted = alarms is not None and any(alarm.action == "snapshot" for alarm in alarms)
        held = self._held if wanted else {}
        self._settle()
        self._pending = Entry(gathered, self._due, self._every, alarms, held)
        if alarms:
            self._settle()

    def _settle(self) -> None:
        """The step that ended last is complete: write it down."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._journal.put(pending)

    def _next(self) -> None:
        self.batch += 1
        self._steps += 1
        if self._reread is not None:
            self._follow(self._reread)
        self._begin_step()

    def _follow(self, reread: Reread) -> None:
        """Take what the config file says now; what is wrong with it is said and changes nothing."""
        try:
            told = reread.changed()
            if told is not None:
                self.set(
                    every=told.every,
                    layers=told.layers,
                    outputs=told.outputs,
                    grads=told.grads,
                    params=told.params,
                    updates=told.updates,
                    rules=told.rules,
                )
        except (TapError, TapWarning) as error:
            self._say(f"The new configuration was not taken: {error}")

    # Rules.

    def _use(self, rules: Rules) -> None:
        self._rules = rules
        self._snapshots = rules.needs_tensors

    def _all_layers(self, watched: Sequence[str] | None = None) -> list[str]:
        """The names that a rule may speak of: watched layers and owners of parameters."""
        names = self.layers if watched is None else list(watched)
        return list(dict.fromkeys([*names, *self._parameters.layers]))

    def _judge_early(self) -> None:
        """Before the weights are touched, for rules whose user wants to act on it."""
        gathered = self._board.gather(self._epoch, self.batch, self._scalars, clear=False)
        found = self._rules.judge(gathered.step())
        self._early += found
        if any(alarm.action == "snapshot" for alarm in found):
            for site, tensor in self._parameters.grads():
                self._hold(site, 0, tensor)
        if any(alarm.action == "raise" for alarm in found):
            whole = self._board.gather(self._epoch, self.batch, self._scalars)
            self._hand_over(whole, self._early)
            self._next()
        self._act(found)

    def _judge_later(self, step: Step) -> list[Alarm]:
        """In the journal's thread, where nobody waits for the answer."""
        found = self._rules.judge(step) if self._rules else []
        self._act(found)
        return found

    def _act(self, alarms: Sequence[Alarm]) -> None:
        raising: Alarm | None = None
        for alarm in alarms:
            self.alarms.append(alarm)
            if alarm.action == "raise":
                raising = raising or alarm
            elif callable(alarm.action):
                try:
                    alarm.action(alarm)
                except Exception as error:  # the user's function, but training must not die of it
                    self._say(
                        f"The function for the rule '{alarm.rule}' raised "
                        f"{type(error).__name__}: {error}. Training runs on."
                    )
            else:
                self._warn(alarm.text)
        if raising is not None:
            self.flush()
            raise WatchAlarm(raising.text, raising)

    # Taking and keeping.

    def _take(self, site: Site, call: int, tensor: torch.Tensor) -> None:
        taken = self._board.take(site, call, tensor)
        if not taken:
            self._say(
                f"Step {self.batch} has {len(self._board)} records and does not end: no optimizer "
                "that holds a parameter of this model has stepped. The rest of the step is left "
                'out. With another kind of loop, use clock="manual" and call watch.step().'
            )
        if taken and self._snapshots and site.port in ("output", "grad_output"):
            self._hold(site, call, tensor)

    def _hold(self, site: Site, call: int, tensor: torch.Tensor) -> None:
        """Copy a tensor, in case a rule wants a snapshot of this step."""
        nbytes = tensor.numel() * tensor.element_size()
        if self._held_bytes + nbytes > self._budget:
            self._say(
                f"A snapshot of step {self.batch} needs more than the budget of {self._budget} "
                "bytes: some tensors are known by their summaries alone. Raise budget=."
            )
            return
        self._held_bytes += nbytes
        with torch.no_grad():
            self._held[(site, call)] = tensor.detach().clone()

    def _choose(self, layers: Layers) -> None:
        chosen = select(self._model, layers, default_fallback=layers == "blocks")
        if compiled.contains_compiled(self._model):
            beyond = self._places.beyond(chosen.layers)
            if beyond:
                raise OptionError(
                    f"{len(beyond)} of these layers have no tap in the compiled graph, "
                    f"'{beyond[0]}' first. Name all that may be switched on later when the watch "
                    "begins: tap.watch(…, within=…)."
                )
        self._places.choose(chosen.layers)

    def _port_names(self) -> list[str]:
        ports = {
            "output": self._outputs,
            "grad_output": self._grads,
            "grad_param": self._grads,
            "param": self._params,
            "update": self._updates,
        }
        return [name for name, on in ports.items() if on]

    # Trouble.

    def _last_words(self) -> list[str]:
        words = self._rules.notes() if self._steps else []
        if self._board.captured:
            words.append(
                "Some layers ran inside a CUDA graph that was captured while they were watched; "
                "what such a graph replays cannot be heard."
            )
        if self._steps == 0:
            words.append(
                "No step was seen: no optimizer that holds a parameter of this model has stepped. "
                'With another kind of loop, use clock="manual" and call watch.step().'
            )
        if self._journal.passed_over:
            words.append(
                f"{self._journal.passed_over} steps did not go to the sinks, which were too slow; "
                "the recording has them."
            )
        return words

    def _fail(self, error: Exception) -> None:
        """Something of ours went wrong: watch no more, say it once, let training run on."""
        self._gate.open = False
        if self.failure is None:
            self.failure = f"{type(error).__name__}: {error}"
            self._warn(
                f"tensortap stopped watching (to {self.path}): {self.failure}. Training runs on."
            )

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.notes.append(text)
            self._warn(text)

    def _warn(self, text: str) -> None:
        try:
            warnings.warn(text, TapWarning, stacklevel=4)
        except TapWarning:  # warnings are errors here, but training must not die of this one
            _LOG.warning(text)


def _scalar(value: Any) -> float | torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            return None
        with torch.no_grad():
            return float(value) if value.is_cpu else value.detach().reshape(()).clone()
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _check(
    model: object,
    path: object,
    every: object,
    ring: object,
    start: object,
    budget: object,
    updates: object,
    clock: object,
) -> None:
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise OptionError(
            f"Cannot watch a {type(model).__module__}.{type(model).__qualname__}: expected a "
            "torch.nn.Module that trains."
        )
    if not isinstance(path, str | os.PathLike):
        raise OptionError(f"path must be a folder's path or URL, got {path!r}.")
    _check_whole("every", every, 1)
    _check_whole("ring", ring, 0)
    _check_whole("start", start, 0)
    _check_whole("budget", budget, 0)
    _check_updates(updates)
    if clock not in ("optimizer", "manual") and not isinstance(clock, torch.optim.Optimizer):
        raise OptionError(f"clock must be 'optimizer', 'manual' or an optimizer, got {clock!r}.")


def _check_whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise OptionError(f"{name} must be a whole number from {least}, got {value!r}.")


def _check_updates(updates: object) -> None:
    if not isinstance(updates, bool) and updates not in ("exact", "sampled"):
        raise OptionError(f"updates must be True, False or 'sampled', got {updates!r}.")
