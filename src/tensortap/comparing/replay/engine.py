"""`replay`: a recording, a layer and a live model in, a verdict on that layer out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial as bind
from typing import Any, Literal

import torch
from torch import nn

from ...errors import OptionError, TapError, TargetError
from ...recording.dtypes import dtype_name
from ...selection.recorded import find_layer
from ...selection.sites import Site
from ...taps.training_mode import is_random
from ...targets import Target
from ..causes import Cause, explain
from ..checks import Run, opened
from ..parts import overall
from ..results import LayerComparison, Part
from .live import judged_parts
from .recorded import RecordedCall, live_layer, recorded_calls
from .results import Replay
from .running import (
    CannotRunAlone,
    Played,
    Precisions,
    precisions_of,
    run_alone,
    run_inside,
)
from .script import Story, write_script

__all__ = ["replay"]

_How = Literal["alone", "inside"]


def replay(
    run: Run,
    layer: str,
    model: nn.Module | Target,
    inputs: Any = None,
    *,
    epoch: int | None = None,
    batch: int | None = None,
    call: int | None = None,
    partial: bool = False,
) -> Replay:
    """Run one layer of a live model on its recorded inputs, and compare what it returns.

        result = tap.replay("runs/fp32", "blocks.4", model)
        if not result:
            print(result)
            result.to_script("bug.py")

    `model` is a module, or a Target, which brings the inputs of the whole model along. They (or
    `inputs`, in the forms that a Target takes) are needed where the layer cannot be called on its
    recorded tensors alone: then the model is run once a batch and the recorded tensors are put at
    the layer in that run. All recorded calls are run again, or those of `epoch`, `batch`, `call`.
    The model is left as it was.
    """
    if not isinstance(layer, str):
        raise OptionError(f"layer must be the name of one layer, got {layer!r}.")
    recording = opened(run, partial)
    recorded = find_layer(recording, layer)
    target = _target(model, inputs)
    net = model.model if isinstance(model, Target) else model
    if not isinstance(net, nn.Module) or isinstance(net, torch.jit.ScriptModule):
        raise OptionError(
            f"A replay calls single layers, which a {type(net).__name__} does not let us do: it "
            "needs the eager torch.nn.Module."
        )
    site = live_layer(net, recorded.name)
    calls, left = recorded_calls(recording, recorded, epoch=epoch, batch=batch, call=call)
    precisions = precisions_of(recording, site.module)
    stage = _Stage(net, target, site, calls, Precisions.of(recording, net, site.module), precisions)
    how, played, parts, notes = stage.play()
    row = LayerComparison(
        layer=recorded.name,
        candidate_layer=site.name,
        matched_by="name",
        verdict=overall(parts) or "incomparable",
        parts=parts,
        order=recorded.order,
        type=recorded.type,
        candidate_type=site.type,
        input_verdict="within" if _casts(played) else "identical",
        note="; ".join(part.why for part in parts if part.verdict == "missing"),
    )
    name = target.name if target is not None and target.name else type(net).__name__
    shown = _telling(row, played)
    row = replace(row, causes=_causes(row, shown))
    story = Story(recording.path, name, row, shown, net, site.module)
    return Replay(
        run=recording.path,
        target=name,
        layer=recorded.name,
        row=row,
        how=how,
        notes=(*notes, *_left_out(left), *_said(site, played)),
        _to_script=bind(write_script, story),
    )


def _target(model: Any, inputs: Any) -> Target | None:
    if isinstance(model, Target):
        if inputs is not None:
            raise OptionError("A Target brings its own inputs. Give a module to name others.")
        return model
    return None if inputs is None else Target(model, inputs)


class _Stage:
    """Everything that running the layer again needs, whichever way."""

    def __init__(
        self,
        model: nn.Module,
        target: Target | None,
        site: Site,
        calls: Sequence[RecordedCall],
        kinds: Precisions,
        precisions: tuple[str | None, str | None],
    ) -> None:
        self.model, self.target, self.site, self.calls = model, target, site, calls
        self.kinds, self.precisions = kinds, precisions

    def play(self) -> tuple[_How, list[Played], tuple[Part, ...], list[str]]:
        """Alone where that is enough; what differs then is asked again inside the model."""
        name = self.site.name or "(root)"
        try:
            played = run_alone(self.model, self.site.module, self.calls, self.kinds)
        except CannotRunAlone as reason:
            return self._only_inside(name, str(reason))
        parts = self._parts(played)
        missing = list(dict.fromkeys(name for one in played for name in one.unrecorded))
        good = overall(parts) in ("identical", "within")
        if good or (not missing and _stateless(self.site.module)):
            return "alone", played, parts, []
        left = f"'{name}' was called on its recorded tensors alone"
        if missing:
            told = ", ".join(missing[:6]) + (", …" if len(missing) > 6 else "")
            left += f", with defaults for what is no tensor and was not recorded ({told})"
        if self.target is None:
            note = f"{left}: give the model's inputs to see whether it does the same inside."
            return "alone", played, parts, [note]
        try:
            again = run_inside(self.target, self.site.module, name, self.calls)
        except TapError as error:
            return "alone", played, parts, [f"{left}: inside the model it could not run. {error}"]
        if _same_outputs(played, again):
            return "alone", played, parts, []
        note = (
            f"{left}, it returns something else than inside the model: it keeps a state, or needs "
            "what was not recorded. So the model was run on its own inputs, with the recorded "
            "tensors put at the layer."
        )
        return "inside", again, self._parts(again), [note]

    def _only_inside(
        self, name: str, reason: str
    ) -> tuple[_How, list[Played], tuple[Part, ...], list[str]]:
        if self.target is None:
            raise TargetError(
                f"Layer '{name}' cannot be called on its recorded tensors alone ({reason}). Give "
                "the model's inputs (inputs=…, or a Target), so that it can run inside the model."
            )
        played = run_inside(self.target, self.site.module, name, self.calls)
        note = (
            f"'{name}' cannot be called on its recorded tensors alone ({reason}). The model was "
            "run on its own inputs, with the recorded tensors put at the layer."
        )
        return "inside", played, self._parts(played), [note]

    def _parts(self, played: Sequence[Played]) -> tuple[Part, ...]:
        return judged_parts(self.site.module, played, self.precisions)


def _stateless(module: nn.Module) -> bool:
    """Whether a layer is all torch's own, which compute from their arguments alone."""
    return all(type(part).__module__.startswith("torch.nn.") for part in module.modules())


def _same_outputs(ours: Sequence[Played], theirs: Sequence[Played]) -> bool:
    by_moment = {one.recorded.moment: one for one in theirs}
    for one in ours:
        other = by_moment[one.recorded.moment].outputs
        if one.outputs.keys() != other.keys():
            return False
        for leaf, tensor in one.outputs.items():
            if not torch.equal(tensor.nan_to_num(), other[leaf].nan_to_num()):
                return False
    return True


def _telling(row: LayerComparison, played: Sequence[Played]) -> Played:
    """The call that shows the verdict: the first that diverged, else the worst."""
    main = row.main
    moment = None
    if main is not None:
        moment = main.diverged_at[0] if main.diverged_at else main.worst_moment
    return next((one for one in played if one.recorded.moment == moment), played[0])


def _causes(row: LayerComparison, played: Played) -> tuple[Cause, ...]:
    main = row.main
    if row.verdict != "diverged" or main is None or main.leaf not in played.outputs:
        return ()
    floats = [t for t in played.inputs.values() if t.is_floating_point()]
    return explain(
        played.recorded.outputs[main.leaf].tensor(),
        played.outputs[main.leaf],
        floor=main.floor or 0.0,
        input=floats[0].to("cpu") if floats else None,
    )


def _casts(played: Sequence[Played]) -> list[tuple[str, str]]:
    """The dtypes that inputs had when they were recorded, and those that the layer was given."""
    found = {
        (record.dtype, dtype_name(one.inputs[leaf].dtype))
        for one in played
        for leaf, record in one.recorded.inputs.items()
        if leaf in one.inputs
    }
    return sorted((ours, theirs) for ours, theirs in found if ours != theirs)


def _left_out(calls: int) -> list[str]:
    some = "1 call is" if calls == 1 else f"{calls} calls are"
    return [f"{some} summaries alone in the recording: not run again."] if calls else []


def _said(site: Site, played: Sequence[Played]) -> list[str]:
    """What was done to the inputs, and what makes the output a matter of chance."""
    notes = [
        f"The recorded inputs were cast from {ours} to {theirs}." for ours, theirs in _casts(played)
    ]
    if any(is_random(module) for module in site.module.modules()):
        notes.append("The layer is in training mode: its dropout makes its output random.")
    return notes
