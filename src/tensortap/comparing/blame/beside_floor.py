"""Layers beside those of a floor run: what stands out where rounding hides it.

In a candidate that is coarser than the reference every layer errs, and a small bug errs no more.
But the same layer of a floor run, given the same, errs by rounding alone. So the places of the
candidate are set one by one against the same places of the floor run: that is run here on the
reference's tensors, where its target is at hand. Of a floor that was only recorded, the candidate's
layers are given what the floor's were given: what they make otherwise is theirs alone.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from torch import nn

from ...errors import OptionError, TapError
from ...recording.reader import Recording
from ...selection.sites import is_called, sites
from ...targets import Target
from ...targets.floor_run import FloorRun
from ...targets.floor_target import FloorTarget, load_floor_target, target_named
from ...targets.perturbing import perturbed
from ..causes import Cause
from ..maker import Maker, contains
from ..results import number
from ..sentences import name_of
from .explaining import explained
from .final import choose_final, norm_of
from .forced import Forced, Site
from .pairing import Pairing, pair_names
from .reference import Known
from .results import BlamedLayer
from .stage import Stage, WholeModel
from .trace import Trace

__all__ = [
    "AgainstFloor",
    "BesideFloor",
    "Exceeding",
    "departing",
    "exceeding",
    "floor_sites",
    "look_beside_floor",
    "told_by",
]

_TIMES = 1.25  # the floor's error: both are means over many roundings, which hardly vary
_SCATTER = 3.0  # of few values it does: by the inverse of the root of their number
_PEERS = 2
_ROUNDING = ("rounding", "noise")  # causes that the floor run rules out

_Key = tuple[str, str | None, str | None]


@dataclass(frozen=True)
class AgainstFloor:
    """What the culprit makes alone, and what the same layer of the floor run does.

    `by` says how that is known. The floor run's own layers ran `alone` on the reference's inputs:
    `made_here` and `floor` are the relative errors of both. Or the candidate's layers ran on the
    inputs of the floor's `recording`: `made_here` is how far they are from its outputs, and `floor`
    zero, since no other layer is.
    """

    made_here: float
    floor: float
    by: Literal["alone", "recording"]

    def to_dict(self) -> dict[str, Any]:
        return {"made_here": number(self.made_here), "floor": number(self.floor), "by": self.by}


@dataclass(frozen=True)
class Exceeding:
    """A place of the candidate that makes more than the same place of the floor run."""

    site: Site
    against: AgainstFloor

    @property
    def layer(self) -> str:
        return self.site.layer


@dataclass(frozen=True)
class BesideFloor:
    """The layer that makes more alone than the floor run's, if it is one; and what was used."""

    row: BlamedLayer | None = None
    made_in: Maker | None = None
    against: AgainstFloor | None = None
    causes: tuple[Cause, ...] = ()
    notes: tuple[str, ...] = ()


def look_beside_floor(
    stage: Stage,
    trace: Trace,
    types: Mapping[str, str],
    precisions: tuple[str | None, ...],
    unit: float,
    total: float,
    candidate: Target,
    floor: FloorRun,
) -> BesideFloor:
    """The one layer that makes more than the same layer of the floor run.

    Costs a run with the reference's outputs at all layers, one of the floor's target or another on
    the recorded floor's tensors, one that makes the place right, and one to see what is there.
    """
    notes: list[str] = []
    try:
        own = _run(stage, trace.order, precisions, unit)
        recording, sites = floor.recording, None
        # A target that only a manifest names is not loaded: its code would run.
        if floor.command or target_named(recording) == candidate.name != "":
            try:
                loaded = load_floor_target(recording)
                sites = floor_sites(loaded, stage.known.recording, precisions, unit)
            except TapError as error:
                notes.append(f"{error} Its recording is used instead.")
        if sites is not None:
            notes.append(
                "Each layer ran alone on the reference's inputs, and so did the same layer of the "
                f"floor run ({target_named(recording)}, loaded for this)."
            )
            found = exceeding(own, sites, stage.known.names)
        else:
            notes.append(
                f"Each layer ran alone on the inputs that are in the floor {recording.path}, and "
                "was set beside its outputs."
            )
            found = told_by(own, departing(candidate, recording, precisions, unit))
    except TapError as error:
        return BesideFloor(notes=(*notes, f"The floor run tells nothing of single layers: {error}"))
    layers = list(dict.fromkeys(item.layer for item in found))
    if len(layers) > 1:
        named = ", ".join(name_of(name) for name in layers[:4]) + (", …" if layers[4:] else "")
        notes.append(
            f"{len(layers)} layers make more alone than the floor run's ({named}): none of them "
            "is the one to blame."
        )
    if len(layers) != 1:
        return BesideFloor(notes=tuple(notes))
    first = found[0]
    row = BlamedLayer(
        layer=first.layer,
        type=types[first.layer],
        made_here=first.site.error,
        accumulated=trace.outputs[first.layer].error,
        handed=trace.inputs[first.layer].error,
        share=_share(stage, [item.site for item in found], total),
        floor=first.against.floor,
        how="patched",
    )
    here = first.site.made_in
    return BesideFloor(
        row,
        here if here.beside_layers else None,
        first.against,
        _causes(stage, trace, first, precisions, unit),
        tuple(notes),
    )


def _run(
    stage: Stage,
    layers: Sequence[str],
    precisions: tuple[str | None, ...],
    unit: float,
    keep: Maker | None = None,
) -> list[Site]:
    """One run with the recorded outputs at all layers; what is at the place to keep is kept."""
    forced = Forced(precisions, unit, keep=keep)
    forced.run(stage, layers)
    return forced.sites


def _causes(
    stage: Stage, trace: Trace, found: Exceeding, precisions: tuple[str | None, ...], unit: float
) -> tuple[Cause, ...]:
    """What kind of error it is: one run more, to have the tensors that are there."""
    made_in = found.site.made_in
    sites = _run(stage, trace.order, precisions, unit, made_in)
    wrong = next((site.wrong for site in sites if _key(site) == _key(found.site)), None)
    causes = () if wrong is None else explained(stage.known, wrong, found.against.floor)
    return tuple(cause for cause in causes if cause.kind not in _ROUNDING)


def floor_sites(
    floor: FloorTarget, recording: Recording, precisions: tuple[str | None, ...], unit: float
) -> list[Site]:
    """The same run of the floor's own target, in the reference's names."""
    context = perturbed(floor.target) if floor.perturb else contextlib.nullcontext(floor.target)
    with context as target:
        return _sites(target, recording, precisions, unit)


def departing(
    candidate: Target, floor: Recording, precisions: tuple[str | None, ...], unit: float
) -> list[Site]:
    """How far the candidate's layers are from a recorded floor's, given what those were given."""
    return _sites(candidate, floor, precisions, unit)


def _sites(
    target: Target, recording: Recording, precisions: tuple[str | None, ...], unit: float
) -> list[Site]:
    modules: dict[str, nn.Module] = {
        site.name: site.module for site in sites(target.model) if is_called(site.module)
    }
    known = Known(recording, Pairing(pair_names(recording, modules)))
    kept = [name for name in known.names if known.has(name, "output")]
    if not kept:
        raise OptionError(f"{recording.path} has no tensors of the layers of {target.name}.")
    final = choose_final(known, recording, kept, None)
    stage = WholeModel(known, modules, final, scale=norm_of(known, final) or 1.0, target=target)
    return _run(stage, kept, precisions, unit)


def exceeding(
    own: Sequence[Site], floors: Sequence[Site], names: Mapping[str, str]
) -> list[Exceeding]:
    """The places that make more than the floor run's do alone; `names` are the reference's.

    What places of a kind have in common in the candidate, as another kernel, is no one's fault.
    """
    known = {_key(site): site.error for site in floors}
    beside = {}
    for site in own:
        floor = known.get(_named(site, names))
        if floor is not None and math.isfinite(floor):
            beside[_key(site)] = floor
    found = []
    for site in own:
        floor = beside.get(_key(site))
        if floor is None:
            continue
        peers = [s for s in _peers(site, own) if _key(s) in beside]
        usual = _ratio([(s.error, beside[_key(s)]) for s in peers])
        limit = _TIMES * max(1.0, usual) * (1 + _SCATTER / math.sqrt(max(1, site.count)))
        most = limit * floor
        if not floor:  # exact in the floor run: it must be in the others here, too
            exact = len(peers) >= _PEERS and not any(s.error for s in peers)
            most = 0.0 if exact else math.inf
        if site.error > most:
            found.append(Exceeding(site, AgainstFloor(site.error, floor, "alone")))
    return _first_ones(found)


def told_by(own: Sequence[Site], apart: Sequence[Site]) -> list[Exceeding]:
    """The one place that departs from a recorded floor, where all others have the floor's bits.

    Rounding is the same on both sides there, so that the floor's own error is what is left of the
    candidate's once the departure is taken off.
    """
    errors = {_key(site): site for site in own}
    departed = _first_ones(
        [
            Exceeding(site, AgainstFloor(site.error, 0.0, "recording"))
            for site in apart
            if site.error > 0
        ]
    )
    if len({item.layer for item in departed}) != 1:
        return []
    found = []
    for item in departed:
        site, departure = errors.get(_key(item.site)), item.site.error
        if site is None or len(_peers(item.site, apart)) < _PEERS:
            continue
        floor = math.sqrt(max(0.0, site.error**2 - departure**2))
        limit = _TIMES * (1 + _SCATTER / math.sqrt(max(1, site.count)))
        if math.isinf(site.error) or site.error > limit * floor:
            found.append(Exceeding(site, item.against))
    return found


def _first_ones(found: Sequence[Exceeding]) -> list[Exceeding]:
    """Without the layers that were given what one of the others made."""
    given = [item.site.made_in.before for item in found]
    return [
        item
        for item in found
        if not any(before is not None and contains(before, item.layer) for before in given)
    ]


def _peers(site: Site, own: Sequence[Site]) -> list[Site]:
    """The same place in other blocks."""
    return [s for s in own if s.place == site.place and s.layer != site.layer]


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """How many times the floor's error is usual here; 1 where too few tell."""
    ratios = [own / floor for own, floor in pairs if floor > 0 and math.isfinite(own)]
    return median(ratios) if len(ratios) >= _PEERS else 1.0


def _key(site: Site) -> _Key:
    return site.made_in.layer, site.made_in.after, site.made_in.before


def _named(site: Site, names: Mapping[str, str]) -> _Key:
    """A place in the reference's names."""
    made = site.made_in
    after, before = (None if n is None else names.get(n, n) for n in (made.after, made.before))
    return names.get(made.layer, made.layer), after, before


def _share(stage: Stage, sites: Sequence[Site], total: float) -> float:
    """The part of the final error that goes when these places are made right; NaN if unknown."""
    puts = [put for site in sites for put in site.puts(stage)]
    if not total or any(p.port == "output" and contains(p.layer, stage.final.layer) for p in puts):
        return math.nan
    try:
        return 1 - stage.run(puts) / total
    except TapError:
        return math.nan
