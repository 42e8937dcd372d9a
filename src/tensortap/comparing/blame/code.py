"""The code between layers as a culprit: what no layer makes was made in the forward around them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...errors import TapError
from ..causes import Cause
from ..maker import Maker, contains
from .explaining import explained
from .forced import Forced, Site, bad_sites
from .levels import ancestors
from .results import BlamedLayer
from .stage import Put, Stage
from .trace import Trace
from .usual import OwnGrids
from .verdict import LEAST, MOST

__all__ = ["CodeFound", "Magnified", "look_between"]

_OTHERS = 2  # layers of a kind outside of a tower that show that it is the tower that is wrong
_CLEARLY = 4.0  # how much larger the error of one module must be than any other's


@dataclass(frozen=True)
class CodeFound:
    """A module that makes most of the error, and where in its forward; `made_in` None of a leaf."""

    row: BlamedLayer
    made_in: Maker | None
    causes: tuple[Cause, ...] = ()


@dataclass(frozen=True)
class Magnified:
    """A layer inside which all is right, given good tensors: it magnifies what its layers round."""

    layer: str


def look_between(
    stage: Stage,
    trace: Trace,
    types: Mapping[str, str],
    precisions: tuple[str | None, ...],
    unit: float,
    total: float,
    culprit: BlamedLayer | None,
    grids: OwnGrids,
) -> CodeFound | Magnified | None:
    """The module in whose own code the error is made; None where that is not clear.

    Of a culprit that holds others it may come out that nothing inside of it is wrong. Costs a run
    with the reference's outputs at all layers, and one that makes the place right.
    """
    forced = Forced(precisions, unit, grids)
    try:
        forced.run(stage, trace.order)
    except TapError:  # the model cannot run on other tensors than its own
        return None
    bad = bad_sites(forced.sites, unit)
    reshaped = _reshaped_before(culprit, bad, trace.order)
    if culprit is not None and reshaped and stage.misfed(culprit.layer):
        bad = reshaped  # it ran on tensors of another shape: who made these is to blame
    elif culprit is not None:
        if not any(contains(culprit.layer, n) for n in trace.order if n != culprit.layer):
            return None
        bad = [site for site in bad if contains(culprit.layer, site.layer)]
        own = [site for site in bad if site.layer == culprit.layer]
        if own:
            return _found(stage, culprit, own)
        if not bad and _all_judged(culprit.layer, forced.sites, trace.order):
            return Magnified(culprit.layer)
    above = [site for site in forced.sites if site.error > site.floor]
    sites = _clearest(bad, above)
    layer = sites[0].layer if sites else _tower(forced.sites, above, types, trace.order)
    if layer is None:
        return None
    if sites and culprit is not None and sites[0].reshaped:
        share = culprit.share  # nothing can be put in its place
    elif sites:
        share = _share(stage, sites, forced.left, total, alone=len(sites) == len(bad))
    else:
        share, sites = 1 - stage.run([Put(layer, "output")]) / total, above
    if not LEAST <= share <= MOST:
        return None
    first = sites[0]
    row = BlamedLayer(
        layer=layer,
        type=types[layer],
        made_here=first.error,
        accumulated=trace.outputs[layer].error,
        handed=trace.inputs[layer].error,
        share=share,
        floor=first.floor,
        how="patched",
    )
    return _found(stage, row, sites)


def _reshaped_before(
    culprit: BlamedLayer | None, bad: Sequence[Site], known: Sequence[str]
) -> list[Site]:
    """The places before a layer at which another shape is made."""
    if culprit is None or culprit.layer not in known:
        return []
    before = known[: known.index(culprit.layer)]
    return [site for site in bad if site.reshaped and site.layer in before]


def _all_judged(layer: str, sites: Sequence[Site], known: Sequence[str]) -> bool:
    """Whether every known layer inside one, and the one itself, was seen to make its output."""
    seen = {site.layer for site in sites if site.made_in.before is None}
    return all(name in seen for name in known if contains(layer, name))


def _found(stage: Stage, row: BlamedLayer, sites: Sequence[Site]) -> CodeFound:
    first = sites[0]
    causes = () if first.wrong is None else explained(stage.known, first.wrong, first.floor)
    here = first.made_in.beside_layers and first.layer == row.layer
    return CodeFound(row, first.made_in if here else None, causes)


def _clearest(bad: Sequence[Site], above: Sequence[Site]) -> list[Site]:
    """The places of the one module that is wrong, in order of time; nothing where several are.

    `above` are all places that make more than rounding: what many of them make is usual here.
    """
    if not bad:
        return []
    layer = max(bad, key=lambda site: site.error).layer
    sites = [site for site in bad if site.layer == layer]
    others = [site.error for site in above if site.layer != layer]
    clear = max(site.error for site in sites) > _CLEARLY * max(others, default=0.0)
    return sites if clear else []


def _tower(
    sites: Sequence[Site], above: Sequence[Site], types: Mapping[str, str], known: Sequence[str]
) -> str | None:
    """The module all of whose layers of a kind are wrong, where those outside of it are right.

    One of two towers, or an encoder beside a decoder. What all layers of a kind make everywhere, as
    in a quantised model, is not the fault of any of them.
    """
    wrong = {site.layer for site in above}
    around = ancestors(sorted(wrong), known) if wrong else []
    if not around:
        return None
    inside = around[0]
    kinds = {(types[name], _in_block(name)) for name in wrong}
    good = {
        site.layer
        for site in sites
        if not contains(inside, site.layer)
        and _in_block(site.layer)
        and (types[site.layer], _in_block(site.layer)) in kinds
        and site.layer not in wrong
    }
    return inside if len(good) >= _OTHERS else None


def _in_block(layer: str) -> str:
    """A layer's name from its block on, whichever that is; empty for one outside of the blocks."""
    parts = re.split(r"(?:^|\.)\d+(?=\.|$)", layer)
    return f"#{parts[-1]}" if len(parts) > 1 else ""


def _share(stage: Stage, sites: Sequence[Site], left: float, total: float, *, alone: bool) -> float:
    """The part of the error that goes when these places are made right."""
    puts = [put for site in sites for put in site.puts(stage)]
    if any(put.port == "output" and contains(put.layer, stage.final.layer) for put in puts):
        return 1.0 if alone else left / total  # the final output itself is made right
    if sites[0].reshaped:  # nothing can be put in its place
        return 1 - left / total if alone else math.nan
    try:
        return 1 - stage.run(puts) / total
    except TapError:
        return math.nan
