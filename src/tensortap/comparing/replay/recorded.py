"""What a recording has of one layer, call by call, and the layer of a model that it is of."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from ...errors import OptionError, RecordingError, SelectionError
from ...recording.reader import Layer, Record, Recording
from ...selection.recorded import choose_records
from ...selection.sites import Site, sites
from ..names import normalised
from ..results import Moment

__all__ = ["RecordedCall", "live_layer", "recorded_calls"]


@dataclass(frozen=True)
class RecordedCall:
    """One call: what went in and what came out, by leaf; `step` counts batches from 0."""

    moment: Moment
    step: int
    inputs: dict[str, Record] = field(default_factory=dict)
    outputs: dict[str, Record] = field(default_factory=dict)


def recorded_calls(
    recording: Recording,
    layer: Layer,
    *,
    epoch: int | None = None,
    batch: int | None = None,
    call: int | None = None,
) -> tuple[list[RecordedCall], int]:
    """The calls of a layer that can be run again, in order, and how many are summaries alone.

    Where there are none, why not. A recording that was made against another holds tensors only of
    what differed.
    """
    _check_ports(recording, layer)
    records = choose_records(layer.records, epoch=epoch, batch=batch, call=call)
    _check_stored(recording, layer, records)
    steps = {step: number for number, step in enumerate(recording.steps)}
    found: dict[Moment, RecordedCall] = {}
    for record in records:
        if record.rank or record.port not in ("input", "output"):
            continue
        moment = record.epoch, record.batch, record.call
        step = steps[record.epoch, record.batch]
        here = found.setdefault(moment, RecordedCall(moment, step))
        (here.inputs if record.port == "input" else here.outputs)[record.leaf] = record
    whole = [one for one in found.values() if one.inputs and one.outputs]
    stored = [one for one in whole if _stored(one)]
    if not stored:
        raise OptionError(
            f"No call of layer '{layer.name or '(root)'}' in {recording.path} that was asked for "
            f"has both its inputs and its outputs as tensors. {_again(recording, layer)}"
        )
    return stored, len(whole) - len(stored)


def _stored(call: RecordedCall) -> bool:
    return all(record.stored for port in (call.inputs, call.outputs) for record in port.values())


def _check_ports(recording: Recording, layer: Layer) -> None:
    name = layer.name or "(root)"
    for port in ("input", "output"):
        there = [record for record in layer.records if record.port == port]
        if not there and port in (recording.manifest.selection.get("ports") or ()):
            raise RecordingError(
                f"Layer '{name}' of {recording.path} has no {port} that is a tensor, so there is "
                "nothing to run it on or to compare it with."
            )
        if not there:
            raise RecordingError(
                f"The recording {recording.path} has no {port}s of layer '{name}', which a replay "
                f"needs. {_again(recording, layer)}"
            )


def _check_stored(recording: Recording, layer: Layer, records: Sequence[Record]) -> None:
    """Refuse what no call has a tensor of, with the reason that the recording gives."""
    selection = recording.manifest.selection
    keep = selection.get("keep")
    why = f"--keep {keep}" if keep in ("summary", "sketch") else "nothing differed there"
    if selection.get("against") and keep not in ("summary", "sketch"):
        why = f"it was made against {selection['against']}, and keeps what differs"
    for port in ("input", "output"):
        there = [record for record in records if record.port == port]
        if there and not any(record.stored for record in there):
            raise RecordingError(
                f"The recording {recording.path} has the {port}s of layer "
                f"'{layer.name or '(root)'}' as summaries alone ({why}), which no layer can be run "
                f"on. {_again(recording, layer)}"
            )


def _again(recording: Recording, layer: Layer) -> str:
    spec = recording.manifest.target.get("spec") or "TARGET"
    return f"Record them: tensortap record {spec} -o DIR --inputs --layers '{layer.name or 'all'}'"


def live_layer(model: nn.Module, name: str) -> Site:
    """The module of a model that goes by a recorded name; wrappers around names do not count."""
    known = sites(model)
    for site in known:
        if name in site.names:
            return site
    plain = [site for site in known if normalised(site.name) == normalised(name)]
    if len(plain) == 1 and name:
        return plain[0]
    names = [site.name for site in known]
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(repr(one) for one in near)}?" if near else ""
    raise SelectionError(
        f"The model {type(model).__name__} has no layer '{name}', which the recording has.{hint} "
        f"It has {len(names)} modules, {', '.join(repr(one) for one in names[1:4])}, …"
    )
