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
import operator
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from ..errors import OptionError, RecordingError, TapError, WatchAlarm
from ..recording.writer import Writer
from ..selection import Selection, select
from ..sizes import size_in_bytes
from ..taps import compiled
from ..taps.describe import rank
from ..taps.hearing import graphs_exist
from ..taps.replaced import replaced_note
from ..taps.session import TapWarning
from .board import Board
from .clock import Clock
from .journal import Journal
from .manifest import manifest_of
from .parameters import Parameters
from .places import Gate, Places
from .rules import Alarm, Rules
from .sinks import sinks_of
from .stepping import Stepping, Wanted
from .telling import failure_of, outside

if TYPE_CHECKING:
    from .config import Reread

__all__ = ["Watcher", "watch"]

Layers = str | Sequence[str]
Ids = set[int]
ClockKind = Literal["optimizer", "manual"]
_DEFAULT = "runs/train"
_SEAL_AFTER = 30.0
_LOG = logging.getLogger("tensortap.watch")
_ALARMS_KEPT = 1000


def watch(
    model: nn.Module,
    path: str | os.PathLike[str] | None = None,
    *,
    layers: Layers = "blocks",
    every: int = 10,
    outputs: bool = True,
    grads: bool = True,
    params: bool | Layers = True,
    updates: bool | Literal["exact", "sampled"] = False,
    rules: Any = ("nan",),
    sinks: Any = (),
    ring: int = 20,
    clock: ClockKind | torch.optim.Optimizer = "optimizer",
    config: str | os.PathLike[str] | None = None,
    within: Layers | None = None,
    training_only: bool = True,
    start: int = 0,
    budget: int | str = 1 << 30,
    overwrite: bool = False,
    mode: str | None = None,
) -> Watcher:
    """Watch a model while it trains. Listening begins at once and ends with `close()` or `with`.

    Args:
        model: any `torch.nn.Module`, compiled or not. Best watched before its first step.
        path: the folder that the recording of summaries is written to; runs/train by default.
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
        training_only: False listens to a model in eval mode too, whenever gradients are on.
        start: the number of the first step, for training that is resumed.
        budget: the most memory, in bytes or as "64MiB", for full tensors that a "snapshot" rule
            holds in a step.
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
        training_only=training_only,
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
        path: str | os.PathLike[str] | None,
        *,
        layers: Layers,
        every: int,
        outputs: bool,
        grads: bool,
        params: bool | Layers,
        updates: bool | Literal["exact", "sampled"],
        rules: Any,
        sinks: Any,
        ring: int,
        clock: ClockKind | torch.optim.Optimizer,
        config: str | os.PathLike[str] | None,
        within: Layers | None,
        training_only: bool,
        start: int,
        budget: int | str,
        overwrite: bool,
        mode: str | None,
    ) -> None:
        self._reread: Reread | None = None
        if config is not None:
            from .config import Reread, read_config

            self._reread = Reread(config)
            told = read_config(config).watch
            path = _told(told.path, path)
            layers, every = _told(told.layers, layers), _told(told.every, every)
            outputs, grads = _told(told.outputs, outputs), _told(told.grads, grads)
            params, updates = _told(told.params, params), _told(told.updates, updates)
            rules, ring = _told(told.rules, rules), _told(told.ring, ring)
        path = _DEFAULT if path is None else path
        _check(model, path, every, ring, start, updates, clock)
        budget = size_in_bytes("budget", budget)
        _check_layers("layers", layers)
        _check_layers("params", params, also_bool=True)
        if within is not None:
            _check_layers("within", within)
        wanted = Wanted(every, outputs, grads, params, updates)
        if not wanted.ports():
            raise OptionError("Nothing to watch: outputs, grads, params and updates are all off.")
        self.path = os.fspath(path)
        self.alarms: list[Alarm] = []
        self.notes: list[str] = []
        self.failure: str | None = None
        self._model = model
        self._manual = clock == "manual"
        self._closed = False
        self._said: set[str] = set()
        self._old_error = getattr(sys, "last_value", None)

        chosen = select(model, layers, default_fallback=layers == "blocks")
        self.notes += chosen.notes
        reach = chosen if within is None else select(model, within)
        devices = sorted({p.device for p in (*model.parameters(), *model.buffers())}, key=str)
        board, gate = Board(), Gate()
        self._stepping = stepping = Stepping(
            wanted,
            Rules(rules),
            board,
            gate,
            start=start,
            budget=budget,
            on_cpu=all(device.type == "cpu" for device in devices),
            by_hand=self._manual,
            act=self._act,
            land=self._land,
            say=self._say,
            next_step=self._follow,
        )
        self._traces_grads = bool(grads or config is not None or within is not None)
        self._places = stepping.places = Places(
            model,
            gate,
            stepping.take,
            self._fail,
            on_forward=self._on_forward,
            on_replaced=self._on_replaced,
            traces_grads=self._traces_grads,
            training_only=training_only,
        )
        stepping.parameters = Parameters(model, params or True, board.take_many)
        stepping.rules.check(list(dict.fromkeys([*chosen.names, *stepping.parameters.layers])))
        sending = sinks_of(sinks)
        self._writer = Writer(
            self.path,
            manifest_of(
                model,
                layers=layers,
                ports=wanted.ports(),
                keep="summary",
                notes=self.notes,
                mode=mode,
                about={"watch": {"every": every, "ring": ring}},
            ),
            overwrite=overwrite,
            seal_after=_SEAL_AFTER,
            rank=rank(),
        )
        self._journal = stepping.journal = Journal(
            self._writer,
            sending,
            ring=ring,
            judge=stepping.judge_later,
            on_failure=self._fail,
            on_problem=self._say,
            live=rank() == 0,
        )
        only = clock if isinstance(clock, torch.optim.Optimizer) else None
        self._clock = Clock(model, self._before_step, self._after_step, only=only)
        if graphs_exist():
            compiled.forget()
            if compiled.contains_compiled(model):
                self.notes.append(
                    "What was compiled in this process compiles anew, so that the taps are in it. "
                    "To save that, call tap.watch before anything runs compiled."
                )
        for device in devices:
            board.prepare(device)
        self._places.attach([*reach.layers, *chosen.layers])
        self._places.choose(chosen.layers)
        self._clock.attach()
        atexit.register(self._at_exit)
        stepping.begin()

    # Reading off.

    @property
    def layers(self) -> list[str]:
        """The layers whose outputs are watched now."""
        return self._places.names

    @property
    def batch(self) -> int:
        """The number of the step that runs, or that comes next."""
        return self._stepping.batch

    # While it runs.

    def step(self) -> None:
        """The step is over: for clock="manual"."""
        if not self._manual:
            self._say(
                "watch.step() was called, but steps are heard from the optimizer: the call counts "
                'for nothing. To say yourself when a step ends: tap.watch(…, clock="manual").'
            )
            return
        self._guarded(self._stepping.by_hand)

    def epoch(self, number: int) -> None:
        """Say which epoch the steps from now on belong to."""
        try:
            whole = -1 if isinstance(number, bool) else operator.index(number)
        except TypeError:
            whole = -1
        if whole < 0:
            raise OptionError(f"epoch must be a whole number from 0, got {number!r}.")
        self._guarded(self._stepping.forward)
        self._stepping.epoch = whole

    def log(self, values: Mapping[str, Any] | None = None, /, **more: Any) -> None:
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
        if self._stopped:
            return
        self._guarded(self._stepping.tell, numbers)

    def set(
        self,
        *,
        every: int | None = None,
        layers: Layers | None = None,
        outputs: bool | None = None,
        grads: bool | None = None,
        params: bool | Layers | None = None,
        updates: bool | Literal["exact", "sampled"] | None = None,
        rules: Any = None,
    ) -> None:
        """Change what is watched, from the next step on, without compiling anew."""
        self._guarded(self._stepping.forward)
        self._set(every, layers, outputs, grads, params, updates, rules)
        stepping = self._stepping
        if not len(stepping.board) and not self._places.forwards and not self._stopped:
            stepping.open_gate()  # the step that runs has not begun in earnest

    def _set(
        self,
        every: int | None,
        layers: Layers | None,
        outputs: bool | None,
        grads: bool | None,
        params: bool | Layers | None,
        updates: bool | Literal["exact", "sampled"] | None,
        rules: Any,
    ) -> None:
        stepping, wanted = self._stepping, self._stepping.wanted
        parameters = stepping.parameters
        if every is not None:
            _check_whole("every", every, 1)
        if updates is not None:
            _check_updates(updates)
        if grads and not self._traces_grads and compiled.contains_compiled(self._model):
            raise OptionError(
                "The gradients of outputs have no tap in the compiled graph. Begin the watch with "
                "grads=True, or with within=, to switch them on later."
            )
        chosen = None if layers is None else self._selected(layers)
        if params is not None and params != wanted.params:
            _check_layers("params", params, also_bool=True)
            parameters = Parameters(self._model, params or True, stepping.board.take_many)
        changed = None if rules is None else Rules(rules, after=stepping.rules)
        if changed is not None:
            names = self.layers if chosen is None else chosen.names
            changed.check(list(dict.fromkeys([*names, *parameters.layers])))
        # All is well: from here on things change.
        if chosen is not None:
            self._places.choose(chosen.layers)
        if changed is not None:
            stepping.use(changed)
        wanted.every = _told(every, wanted.every)
        wanted.outputs = _told(outputs, wanted.outputs)
        wanted.grads = _told(grads, wanted.grads)
        wanted.params = _told(params, wanted.params)
        stepping.parameters = parameters
        if updates is not None and updates != wanted.updates:
            wanted.updates = updates
            stepping.parameters.forget()

    def flush(self) -> None:
        """Return when every step that is over stands on disk, open to any reader."""
        if not self._closed and self._writer.is_ours:
            self._guarded(self._stepping.forward)
            self._land()
            if self._writer.failure is not None:
                self._fail(RecordingError(self._writer.failure))

    def _land(self) -> None:
        """Return when what was handed over is on disk."""
        self._journal.drain()
        self._writer.flush(sync=True)

    def close(self, failure: str | None = None) -> None:
        """Stop listening and write what is left. Closing twice is harmless."""
        if self._closed:
            return
        self._closed = True
        if not self._writer.is_ours:  # a forked child: the run is its parent's
            self._places.detach()
            self._clock.detach()
            return
        atexit.unregister(self._at_exit)
        self._places.detach()
        self._clock.detach()
        reason = self.failure or failure
        late = self._finish(reason is not None)
        if late is not None and reason is None:
            reason = failure_of(late)
        self._journal.close()
        self.notes += self._last_words()
        parameters = self._stepping.parameters
        self._writer.close(
            status="failed" if reason else "complete",
            failure=reason,
            notes=list(dict.fromkeys(self.notes)),
            skipped=[
                {"layer": layer, "port": "output", "leaf": leaf, "reason": why, "count": 1}
                for (layer, leaf), why in sorted(
                    {**self._places.unheard, **parameters.unheard}.items()
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
        if late is not None and failure is None:
            raise late

    def _finish(self, broken: bool) -> WatchAlarm | None:
        """Hand over the last step; a rule that raises does so when all is on disk."""
        try:
            self._stepping.finish(broken)
        except WatchAlarm as alarm:
            return alarm
        except Exception as error:  # training must not notice
            self._fail(error)
        return None

    def _at_exit(self) -> None:
        """The interpreter ends with the watch open; it may have died of an exception."""
        error = getattr(sys, "last_value", None)
        if error is self._old_error or hasattr(sys, "ps1"):  # an earlier one, of another cell
            error = None
        self.close(failure_of(error))

    def __enter__(self) -> Watcher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(failure_of(error))

    # Inside.

    @property
    def _stopped(self) -> bool:
        return self._closed or self.failure is not None or not self._writer.is_ours

    def _guarded(self, do: Callable[..., None], *args: Any) -> None:
        """Do something of ours inside the training loop: only an alarm may leave it."""
        if self._stopped:
            return
        try:
            do(*args)
        except WatchAlarm:
            raise
        except Exception as error:  # training must not notice
            self._fail(error)

    def _on_forward(self) -> None:
        self._guarded(self._stepping.forward)

    def _on_replaced(self, names: list[str]) -> None:
        """Layers were replaced: their parameters are others, too."""
        stepping = self._stepping
        params = stepping.wanted.params
        stepping.parameters = Parameters(self._model, params or True, stepping.board.take_many)
        stepping.parameters.begin()
        note = replaced_note(names)
        if note not in self.notes:
            self.notes.append(note)

    def _before_step(self, who: int, moved: Ids, inside: bool) -> None:
        self._guarded(self._stepping.before, who, moved, inside)

    def _after_step(self, who: int, moved: Ids) -> None:
        self._guarded(self._stepping.after, who, moved)
        if self._places.evaluations and not self._places.forwards:
            self._say(
                "The model trains in eval mode, which is taken for an evaluation: its outputs and "
                "their gradients are not watched. Call model.train(), or watch it all the same "
                "with training_only=False."
            )

    def _follow(self) -> None:
        """Take what the config file says now; what is wrong with it is said and changes nothing."""
        if self._reread is None:
            return
        try:
            told = self._reread.changed()
            if told is not None:
                self._set(
                    told.every,
                    told.layers,
                    told.outputs,
                    told.grads,
                    told.params,
                    told.updates,
                    told.rules,
                )
        except (TapError, TapWarning) as error:
            text = f"The new configuration was not taken: {error}"
            self.notes.append(text)
            self._warn(text)

    def _act(self, alarms: Sequence[Alarm]) -> Alarm | None:
        """Do what the rules say; the first alarm that is to be raised comes back."""
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
        return raising

    def _selected(self, layers: Layers) -> Selection:
        _check_layers("layers", layers)
        chosen = select(self._model, layers, default_fallback=layers == "blocks")
        if compiled.contains_compiled(self._model):
            beyond = self._places.beyond(chosen.layers)
            if beyond:
                raise OptionError(
                    f"{len(beyond)} of these layers have no tap in the compiled graph, "
                    f"'{beyond[0]}' first. Name all that may be switched on later when the watch "
                    "begins: tap.watch(…, within=…)."
                )
        return chosen

    # Trouble.

    def _last_words(self) -> list[str]:
        words = self._stepping.rules.notes() if self._stepping.steps else []
        if self._stepping.parameters.sharded:
            words.append(
                "Parameters are sharded: their summaries, and norms over them, are of this rank's "
                "part alone."
            )
        if self._stepping.board.captured:
            words.append(
                "Some layers ran inside a CUDA graph that was captured while they were watched; "
                "what such a graph replays cannot be heard."
            )
        if self._stepping.steps == 0:
            words.append(
                "No step was seen: no optimizer that holds a parameter of this model has stepped. "
                'With another kind of loop, use clock="manual" and call watch.step().'
            )
        if self._journal.passed_over:
            words.append(
                f"{self._journal.passed_over} steps did not go to the sinks, which were too slow "
                "or had ended; the recording has them."
            )
        return words

    def _fail(self, error: Exception) -> None:
        """Something of ours went wrong: watch no more, say it once, let training run on."""
        self._stepping.gate.open = False
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
            warnings.warn(text, TapWarning, stacklevel=outside())
        except TapWarning:  # warnings are errors here, but training must not die of this one
            _LOG.warning(text)


def _told(told: Any, otherwise: Any) -> Any:
    return otherwise if told is None else told


def _scalar(value: Any) -> float | torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex() or value.is_meta:
            return None
        with torch.no_grad():
            return float(value) if value.is_cpu else value.detach().reshape(()).clone()
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _check(
    model: object,
    path: object,
    every: object,
    ring: object,
    start: object,
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
    _check_updates(updates)
    if clock not in ("optimizer", "manual") and not isinstance(clock, torch.optim.Optimizer):
        raise OptionError(f"clock must be 'optimizer', 'manual' or an optimizer, got {clock!r}.")


def _check_layers(name: str, layers: object, *, also_bool: bool = False) -> None:
    if also_bool and isinstance(layers, bool):
        return
    if not isinstance(layers, str) and not (
        isinstance(layers, Sequence) and all(isinstance(item, str) for item in layers)
    ):
        raise OptionError(f"{name} must be a pattern or a list of patterns, got {layers!r}.")


def _check_whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise OptionError(f"{name} must be a whole number from {least}, got {value!r}.")


def _check_updates(updates: object) -> None:
    if not isinstance(updates, bool) and updates not in ("exact", "sampled"):
        raise OptionError(f"updates must be True, False or 'sampled', got {updates!r}.")
