"""Judges a run while it runs, call by call, against the recording of another.

Each call becomes a pair of layers that have this one moment, and `Work.row` compares them: the
arithmetic, the floor and the rules are those of `tap.compare`. The rows of all calls are summed up.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any

import torch

from ...errors import OptionError
from ...recording.reader import Layer, Record, Recording
from ...taps.judging import Divergence
from ...taps.sink import Call, Held, Slot
from ...targets.floor_run import FloorRun
from ..align import LayerPair
from ..causes.layer import explained
from ..checks import Run, check_third, opened
from ..compare import Work
from ..floor import Floor, FloorHere
from ..floor_runs import floor_beside, given_floor, is_made
from ..measure import SiteMeasurement
from ..results import BAD, Comparison, LayerComparison
from ..rules import parse_rules, preset_of
from ..sites import SitePairer
from .answer import Terms, concluded
from .batches import Batches
from .live import live_layer, live_record
from .merging import RowSum
from .pairing import pair_names
from .places import check_place

__all__ = ["Stream"]

_FORWARD = frozenset(("input", "output"))
_FEW = 0.5  # of the layers: where fewer pair, the first divergence may be in another
_MEASURED = 256
_JUDGED = 1 << 16

_Moment = tuple[int, int, int, int]


class Stream:
    """The judge of one recording; `taps.judging.Judge` is its shape."""

    def __init__(
        self,
        against: Run,
        path: str | os.PathLike[str],
        *,
        floor: Run | None = None,
        rules: str | Sequence[str] = (),
        map: str | Sequence[str] = (),
        preset: str | None = None,
        full: bool = False,
    ) -> None:
        self._full = full
        self._reference = opened(against, False)
        self._makes_floor = is_made(floor)
        self._floor: FloorRun | None = None
        if floor is not None and not self._makes_floor:
            self._floor = FloorRun(opened(floor, False))
        beside = given_floor(self._floor)
        check_place(path, reference=self._reference, floor=beside)
        self.reference = self._reference.path
        self.divergence: Divergence | None = None
        self.sure = True
        self._total = 0
        self._rules = [rules] if isinstance(rules, str) else list(rules)
        self._maps = [map] if isinstance(map, str) else list(map)
        self._preset, self._preset_rule = preset, preset_of(preset)
        self._partners: dict[str, tuple[str, str]] = {}
        self._slots: dict[str, Slot] = {}
        self._rows: dict[str, RowSum] = {}
        self._order: dict[str, None] = {}  # the candidate's layers as they are first heard
        self._moments: dict[str, dict[_Moment, list[Record]]] = {}
        self._rank = 0
        self._batches = Batches(self._reference)
        self._unasked: frozenset[str] = frozenset()
        self._work: Work | None = None
        self._terms: Terms | None = None

    # What a recorder asks of a judge.

    def begin(
        self, candidate: Recording, slots: Sequence[Slot], layers: Collection[str], rank: int
    ) -> None:
        self._partners = pair_names(self._reference, candidate.path, slots, self._maps)
        self._slots = {slot.name: slot for slot in slots}
        self._rank = rank
        paired = {ours for ours, _ in self._partners.values()}
        self._unasked = frozenset(layers) - self._slots.keys() - paired
        asked = [name for name in self._reference.layers if name not in self._unasked]
        self._total = min(len(slots), len(asked))
        self.sure = len(paired) >= _FEW * self._total
        names = [ours for ours, _ in self._partners.values()]
        rules = parse_rules(self._rules, names)
        if self._makes_floor:  # now that it is known how coarse the candidate is
            self._floor = floor_beside("auto", self._reference, candidate)
        check_third(self._reference, candidate, given_floor(self._floor), "floor")
        floor = None if self._floor is None else _Floor(self._reference, self._floor)
        preset = None if self._preset_rule is None else self._preset_rule.rule()
        pairer = SitePairer(self._reference, candidate)
        self._work = Work(self._reference, candidate, pairer, rules, preset, floor, None, ())
        self._work.measured = _Recent(_MEASURED)
        self._work.judged = _Recent(_JUDGED)
        self._terms = Terms(self._reference, self._floor, floor, self._work, rules, self._preset)

    def keep(self, call: Call, heard: Sequence[Held]) -> frozenset[str]:
        found = self._judged(call, heard)
        return found | {item.port for item in heard if item.asked} if self._full else found

    def _judged(self, call: Call, heard: Sequence[Held]) -> frozenset[str]:
        name = call.slot.name
        asked = [item for item in heard if item.asked]
        partner = self._partners.get(name)
        if not asked:
            return frozenset()
        self._order.setdefault(name)
        if partner is None:
            return frozenset()
        ours, how = partner
        if ours not in self._rows:
            self._rows[ours] = RowSum(name, self._slots[name].type, how)
        total = self._rows[ours]
        moment = (self._rank, call.epoch, call.batch, call.call)
        row = self._row(ours, how, call, asked)
        total.add(moment, {item.port for item in asked}, () if row is None else row.parts)
        if row is None:
            return frozenset()
        bad = frozenset(part.port for part in row.parts if part.verdict in BAD)
        if row.verdict != "diverged" or self.divergence is not None:
            return bad
        self.divergence = Divergence(name, call.epoch, call.batch, call.call)
        unasked = [item for item in heard if not item.asked]
        given = self._row(ours, how, call, unasked) if unasked else None
        if given is not None:  # held for this: they tell whether it was made here
            total.add(moment, {"input"}, given.parts)
        return bad | _FORWARD | {item.port for item in heard}

    def conclude(self, candidate: Recording, stopped: bool) -> Comparison:
        if self._terms is None:
            raise OptionError("Nothing has run yet, so there is nothing to compare.")
        found = concluded(
            self._terms,
            candidate,
            self._rows,
            [self._slots[name] for name in self._order],
            {name: ours for name, (ours, _) in self._partners.items()},
            self._unasked,
            self.divergence if stopped else None,
            None if self.sure else self._total,
            self._batches.differ,
        )
        return self._with_causes(found, candidate)

    # Inside.

    def _row(
        self, ours: str, how: str, call: Call, heard: Sequence[Held]
    ) -> LayerComparison | None:
        """One call beside the same call of the reference; None where that has none."""
        assert self._work is not None
        ports = {item.port for item in heard}
        moment = (self._rank, call.epoch, call.batch, call.call)
        records = [r for r in self._at(ours, moment) if r.port in ports]
        if not records and not self._batches.differ:
            return None
        whole = self._reference[ours]
        live = [live_record(call, item, self._rank) for item in heard]
        try:
            with torch.no_grad():
                cut = None
                if not self._work.mixtures.divides(ours, (moment[0], moment[1], moment[2])):
                    cut = self._batches.cut(ours, moment, records, live)
                if cut is not None:
                    self._rows[ours].cover(cut.covered, cut.alone)
                    records, live = cut.ours, [*live, *cut.theirs]
                if not records:
                    return None
                left = Layer(ours, whole.alias, whole.type, whole.order, tuple(records))
                shown = live if cut is None else cut.theirs
                right = live_layer(call.slot.name, call.slot.type, shown)
                return self._work.row(LayerPair(left, right, how))
        finally:
            self._work.sites.clear()
            for record in live:
                record.release()

    def _with_causes(self, found: Comparison, candidate: Recording) -> Comparison:
        """The first divergence is stored in full, so its causes can be looked for afterwards."""
        first = found.first_divergence
        if first is None or first.candidate_layer not in candidate.layers:
            return found
        pair = LayerPair(
            self._reference[first.layer], candidate[first.candidate_layer], first.matched_by
        )
        sites = SitePairer(self._reference, candidate).pair(pair)
        return explained(found, {first.layer: sites})

    def _at(self, layer: str, moment: _Moment) -> list[Record]:
        """The reference's records of a layer at a moment."""
        index = self._moments.get(layer)
        if index is None:
            index = self._moments[layer] = {}
            for record in self._reference[layer].records:
                key = (record.rank, record.epoch, record.batch, record.call)
                index.setdefault(key, []).append(record)
        return index.get(moment, [])


class _Recent(OrderedDict[Any, Any]):
    """What was found of pairs of tensors lately.

    A measurement under a transform would need its tensors again, which are gone: it is left out.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(value, SiteMeasurement) and value.site.transform is not None:
            return
        super().__setitem__(key, value)
        if len(self) > self._most:
            self.popitem(last=False)


class _Floor(Floor):
    """A floor that is asked for the same site call after call."""

    def __init__(self, reference: Recording, run: FloorRun) -> None:
        super().__init__(reference, run)
        self._measured: dict[tuple[str, str, str], FloorHere | None] = {}

    def here(self, layer: str, port: str, leaf: str) -> FloorHere | None:
        key = (layer, port, leaf)
        if key not in self._measured:
            self._measured[key] = super().here(layer, port, leaf)
        return self._measured[key]
