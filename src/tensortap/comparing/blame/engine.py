"""`blame`: a reference recording and a live candidate in, who made the final error out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ...errors import OptionError
from ...recording.reader import Recording
from ...selection import select, structure
from ...selection.sites import is_called, sites, type_name
from ...sizes import size_in_bytes
from ...taps.describe import describe_module, device_of, matmul_precision
from ...taps.fingerprint import fingerprints
from ...taps.input_log import InputLog
from ...taps.training_mode import is_random
from ...targets import Target
from ..causes import Cause
from ..causes.cause import say_little
from ..checks import Run, opened
from ..depth import Depths
from ..floor_runs import floor_notes, floor_run
from ..judge import AGAINST_ESTIMATE, AGAINST_FLOOR
from ..maker import Maker
from ..precision import coarsest, estimated_floor, precision_of, unit_of
from ..weights.recorded import other_weights
from .beside_floor import AgainstFloor, BesideFloor, look_beside_floor
from .checks import (
    check_calls,
    check_inputs,
    check_kept,
    check_mode,
    check_options,
    target_of,
)
from .code import Magnified, look_between
from .descent import Descent
from .final import choose_final, norm_of, other_finals, relative
from .levels import ancestors, children_of, contains, first_level, operations
from .own_run import FinalVerdict, OwnRun
from .pairing import apart_in, paired
from .plan import Plan
from .reference import Known
from .results import Blame, BlamedLayer, BlameInterrupted
from .search import Bisection
from .shares import MOST_CALLS, Shares
from .stage import Put, WholeModel, copied
from .trace import Trace
from .usual import OwnGrids, UsualError
from .verdict import LEAST, MOST, against_peers, stands_out

__all__ = ["blame"]

_BUDGET = 1 << 30
_FOR_THE_CULPRIT = 2  # runs that are kept for its exact share


def blame(
    reference: Run,
    model: Any,
    inputs: Any = None,
    *,
    layers: str | Sequence[str] = "blocks",
    bisect: bool | None = None,
    final: str | None = None,
    floor: Run | None = None,
    map: str | Sequence[str] = (),
    budget: int | str = _BUDGET,
    progress: Callable[[int, int], None] | None = None,
    plan: Callable[[Plan], None] | None = None,
) -> Blame:
    """Say which layer of a live candidate makes the error at its output.

    The reference is a recording with the inputs and outputs of layers (`layers="all", inputs=True`
    lets blame descend to the leaf); `model` is the candidate with the same `inputs`, or a Target.
    For each layer the reference's input, and then its output, is put there in a run of the
    candidate, and what is left of the squared error at the output is measured.

    Args:
        reference: the recording to trust.
        model: the candidate, a `torch.nn.Module`, or a Target with its inputs.
        inputs: what the reference was recorded with: a tensor, a tuple of arguments, a dict of
            keyword arguments, or a list of those, one a batch. By default what was recorded.
        layers: what to look at first; by default the blocks, and what stands beside them.
        bisect: look at about log2 N of the blocks, where one of them makes half of the error. By
            default where to look at all of them would take longer than ten minutes.
        final: the layer whose output counts as the final one; by default the model's own.
        floor: a recording of the reference in the candidate's precision, or of a repeat run.
        map: `regex=>template` to pair layers of the reference with those of the candidate.
        budget: how much is kept of the candidate's own outputs, in bytes or as "64MiB".
        progress: told how often the model ran, and how often it may.
        plan: told what will be done, once the candidate has run for the first time.

    Ctrl-C raises `BlameInterrupted`, a `KeyboardInterrupt` that holds what was known by then.
    """
    check_options(layers)
    budget = size_in_bytes("budget", budget)
    recording = opened(reference, False)
    target = target_of(model, inputs, recording)
    work = _Work(recording, target, layers, bisect is True, final, floor, map, budget, progress)
    try:
        planned = work.plan(bisect)
        if plan is not None:
            plan(planned)
        return work.bisected() if planned.bisect else work.all_layers()
    except KeyboardInterrupt:
        raise BlameInterrupted(work.so_far()) from None


@dataclass(frozen=True)
class Edges:
    """The shares of what is before, behind and beside the chain of layers; NaN where unknown."""

    before: float = math.nan
    behind: float = math.nan
    beside: float = math.nan

    @property
    def most(self) -> float:
        known = [x for x in (self.before, self.behind, self.beside) if not math.isnan(x)]
        return max(known, default=0.0)


class _Work:
    """One blame from its first run to its answer."""

    def __init__(
        self,
        recording: Recording,
        target: Target,
        layers: str | Sequence[str],
        bisect: bool,
        final: str | None,
        floor: Run | None,
        maps: str | Sequence[str],
        budget: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.recording, self.target = recording, target
        self.warnings: list[str] = []
        self.notes: list[str] = []
        self._progress = progress
        places = [site for site in sites(target.model) if is_called(site.module)]
        modules = {site.name: site.module for site in places}
        self.types = {site.name: type_name(site.module) for site in places}
        rules = [maps] if isinstance(maps, str) else list(maps)
        once = replace(target, inputs=[copied(target.batches[0])])
        pairing = paired(recording, once, modules, rules)
        names = pairing.names
        if pairing.by_values:
            self.notes.append(
                f"The names of the two sides differ: {len(names)} layers were paired as compare "
                "pairs them, by a run of the candidate that was recorded for it."
            )
        self.known = Known(recording, pairing)
        self.random = {name for name, module in modules.items() if is_random(module)}
        self.kept = [
            name for name in names if self.known.has(name, "output") and name not in self.random
        ]
        check_kept(recording, modules, self.kept)
        self.structure = structure(target.model)
        self.chain, beside = self._first(layers)
        self.rows_wanted = self._ordered([*self.chain, *beside])
        self.final = choose_final(self.known, recording, self.kept, final)
        self.size = norm_of(self.known, self.final)
        self.stage = WholeModel(
            self.known, modules, self.final, scale=self.size or 1.0, target=target
        )
        self.operations = operations(target.model)
        self.precisions = (precision_of(recording), _precision(target.model))
        self.unit = max((unit_of(name) for name in self.precisions if name), default=0.0)
        self.trace = Trace(self.rows_wanted, budget)
        self.limit = _bisect_limit(len(self.chain)) if bisect else 2 * len(self.chain) + 3
        own = OwnRun(recording, target, names)
        self._own_run(own)
        if not self.total and final is None:
            self._another_final()
        self.final_error = relative(self.total, self.size)
        made = floor_run(floor, recording, self.precisions[1], target.mode)
        self._floor_made = made
        self._floor_run = None if made is None else made.recording
        self.notes += floor_notes(made)
        own.compare(made, rules)
        self._leave_touched(own)
        self.bits, self.on_the_way = own.bits(), own.on_the_way(self.final)
        self.judged = own.final(self.known, self.final) or self._estimated(own.problem)
        self._check_floor()
        self.shares = self._shares()
        self.grids = OwnGrids(target.model, self.known)
        self.usual = UsualError(self.trace, modules, self.operations, self.precisions, self.grids)
        self._rows: dict[str, BlamedLayer] = {}  # what is known so far
        self._search: Bisection | None = None

    # Setting up.

    def _first(self, layers: str | Sequence[str]) -> tuple[list[str], list[str]]:
        wanted = [layers] if isinstance(layers, str) else list(layers)
        if wanted == ["blocks"] or not wanted:
            blocks, beside = first_level(self.structure, self.kept)
            if blocks:
                return blocks, beside
            if self.structure.blocks:
                self.notes.append(
                    "The reference has no outputs of the blocks: the layers that it has are "
                    "looked at."
                )
            else:
                self.notes.append(
                    "The model has no repeated blocks; its outermost layers are looked at."
                )
            return children_of("", self.kept) or [""], []
        chosen = [site.name for site in select(self.target.model, wanted).layers]
        there = [name for name in chosen if name in self.kept and name]
        if not there:
            words = ", ".join(repr(word) for word in wanted)
            raise OptionError(
                f"None of the {len(chosen)} layers that {words} selects is in "
                f"{self.recording.path}. Record the reference with the same --layers and "
                "--inputs."
            )
        if len(there) < len(chosen):
            self.notes.append(
                f"{len(chosen) - len(there)} of {len(chosen)} selected layers are not in the "
                "reference and are not looked at."
            )
        return there, []

    def _ordered(self, names: Sequence[str]) -> list[str]:
        order = {ours: number for number, ours in enumerate(self.recording.layers)}
        return sorted(names, key=lambda name: order[self.known.names[name]])

    def _own_run(self, own: OwnRun) -> None:
        batches = len(self.target.batches)
        if batches != self.known.batches:
            self.warnings.append(
                f"The reference has {self.known.batches} batches and the candidate {batches}: the "
                f"first {min(batches, self.known.batches)} are looked at."
            )
        log = InputLog()

        def listen(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            log.see((0, self.stage.batch), args, kwargs)

        handle = self.target.model.register_forward_pre_hook(listen, with_kwargs=True)
        try:
            watch = dict.fromkeys(self.kept, self.trace)
            self.stage.beginning = own.begin
            with own.heard():
                self.total = self.stage.run((), watch)
        finally:
            self.stage.beginning = None
            handle.remove()
        self.trace.finish()
        self.stage.feeding = self.trace.feeding
        self._told()
        self.warnings += check_inputs(self.recording, self.trace, log)
        self.warnings += check_mode(self.random)
        self.warnings += check_calls(self.stage, self.trace, self.kept)
        heard = self.trace.order
        until = heard[: heard.index(self.final.layer) + 1] if self.final.layer in heard else heard
        around = [n for n in self.chain if n != self.final.layer and contains(n, self.final.layer)]
        inside = [name for name in until if any(contains(block, name) for block in around)]
        inside = [n for n in inside if n == self.final.layer or not contains(n, self.final.layer)]
        wanted = {*self.chain, *children_of("", inside)}
        self.chain = [name for name in until if name in wanted]
        self.rows_wanted = [name for name in until if name in {*self.rows_wanted, *self.chain}]

    def _leave_touched(self, own: OwnRun) -> None:
        """Leave tokens that follow another choice of expert out of the final error."""
        if not own.chose_otherwise or not self.total:
            return
        self.stage.routers = own.routers
        said = "Tokens chose other experts: in the runs they choose those of the reference."
        record = self.known.at(self.final.layer, "output", 0, 0).get(self.final.leaf)
        if own.hidden and own.touched is not None and record is not None:
            apart = apart_in(own.touched, record)
            if apart is not None and apart.axes and len(apart.clean):
                self.stage.touched = own.touched
                said = (
                    f"{apart.count} of {apart.total} tokens chose other experts, or follow such a "
                    "choice, which rounding explains: they are left out of the final error."
                )
        self.total = self.stage.run(())
        self.limit += 1
        self.final_error = relative(self.total, self.size)
        self.notes.append(said)

    def _another_final(self) -> None:
        """Where the first output is the reference's, another one of the model's may not be."""
        for other in other_finals(self.known, self.final):
            size = norm_of(self.known, other)
            self.stage.final, self.stage.scale = other, size or 1.0
            total = self.stage.run(())
            if total:
                self.final, self.size, self.total = other, size, total
                leaf = other.leaf.removeprefix(".")
                self.notes.append(f"The first output is the reference's: {leaf} is looked at.")
                return
        self.stage.final, self.stage.scale = self.final, self.size or 1.0

    def _shares(self) -> Shares:
        shares = Shares(
            self.stage,
            self.trace,
            self.total,
            precisions=self.precisions,
            told=self._told,
        )
        shares.first = self.rows_wanted[0] if self.rows_wanted else None
        shares.expect(self.rows_wanted)
        return shares

    def _told(self) -> None:
        if self._progress is not None:
            self._progress(self.stage.runs, max(self.limit, self.stage.runs))

    def _check_floor(self) -> None:
        """Say where a floor run was given and does not measure the final output."""
        floor = self._floor_run
        if floor is None or self.judged.measured or not self.final_error:
            return
        name = self.known.names[self.final.layer]
        if name in floor and any(record.stored for record in floor[name].port("output")):
            self.notes.append(
                f"The floor {floor.path} is the reference to the last bit: what rounding explains "
                "is estimated."
            )
        else:
            self.warnings.append(
                f"The floor {floor.path} has no tensor of the final output: what rounding explains "
                "is estimated."
            )

    def _estimated(self, problem: str) -> FinalVerdict:
        """What the final output is where compare cannot say it: by precision and depth alone."""
        if problem:
            self.warnings.append(
                f"compare could not judge the final output ({problem.rstrip('.')}): what rounding "
                "explains of it is estimated from the precision and the depth alone."
            )
        record = self.known.at(self.final.layer, "output", 0, 0)[self.final.leaf]
        dtypes = self.trace.outputs[self.final.layer].dtypes
        depth = Depths(self.recording).of(record)
        floor = estimated_floor(dtypes, self.precisions, depth) if dtypes else 0.0
        good = self.final_error <= AGAINST_ESTIMATE * floor
        why = f"error {self.final_error:.3g}, where rounding lets expect {floor:.3g}"
        allowed = AGAINST_ESTIMATE * floor
        return FinalVerdict("within" if good else "diverged", why, floor, allowed, False)

    # Looking.

    def row(self, layer: str) -> BlamedLayer:
        return self.shares.row(layer, *self._about(layer))

    def plan(self, bisect: bool | None) -> Plan:
        """What to do: bisect where that is asked for, or all would take too long."""
        again = any(name in self.trace.repeated for name in self.chain)
        can = bool(self.chain) and not again and self.total > 0
        made = Plan(
            layers=len(self.chain),
            runs=self.shares.planned(self.chain) + _FOR_THE_CULPRIT,
            bisected=_bisect_limit(len(self.chain)),
            seconds=self.stage.seconds,
            bisect=bool(bisect) and can,
            asked=bisect is not None,
        )
        if not made.worth_saying:
            return made
        self.stage.run()  # without watching and recording, as all others will be
        self.limit += 1
        made = replace(made, seconds=self.stage.seconds)
        if bisect is not None or not can or not made.long:
            return made
        made = replace(made, bisect=True)
        self.notes.append(str(made))
        return made

    def so_far(self) -> Blame:
        """What is known where the user does not wait for the end."""
        rows = [self._rows.get(name) or self._unasked(name) for name in self.rows_wanted]
        suspect = self._suspect()
        if suspect is not None:
            self.notes.append(
                f"Alone on the reference's inputs, {suspect} makes the largest error beyond what "
                f"rounding explains, {self.trace.made_alone(suspect):.2g}: look there first."
            )
        halved = None if self._search is None else self._search.between
        bisect = self._search is not None
        return self._answer(rows, bisect=bisect, interrupted=True, halved=halved)

    def _suspect(self) -> str | None:
        """The leaf that is furthest above rounding when it is alone on the reference's inputs."""
        found = {}
        for name in self.trace.order:
            made = self.trace.made_alone(name)
            floor = AGAINST_ESTIMATE * estimated_floor(
                self.trace.outputs[name].dtypes, self.precisions, 1, self.trace.inputs[name].offset
            )
            if made > floor > 0:
                found[name] = made / floor
        return max(found, key=lambda name: found[name], default=None)

    def all_layers(self) -> Blame:
        if not self.total:
            return self._answer([replace(self._unasked(n), share=0.0) for n in self.rows_wanted])
        rows = self._rows
        for layer in self._keeping_the_worst(self.chain):
            rows[layer] = self.row(layer)
        if not any(row.share >= LEAST for row in rows.values()):
            rows.update(self._by_call())
        edges = self._edges()
        room = self.limit - _FOR_THE_CULPRIT
        sought = set(self._sought(rows.values(), edges))
        for layer in self.rows_wanted:
            if layer not in rows:
                fits = self.stage.runs + self.shares.cost(layer) <= room
                asked = fits or layer in sought or not self.shares.cost(layer)
                rows[layer] = self.row(layer) if asked else self._unasked(layer)
        return self._conclude([rows[name] for name in self.rows_wanted], edges)

    def _keeping_the_worst(self, layers: Sequence[str]) -> Iterator[str]:
        """Layers one by one; of those behind us only the worst keeps what a descent needs."""
        worst: str | None = None
        for layer in layers:
            yield layer
            better = worst is None or self.shares.share(layer) > self.shares.share(worst)
            if better and worst is not None:
                self.shares.drop(worst)
            elif not better:
                self.shares.drop(layer)
            worst = layer if better else worst

    def _by_call(self) -> dict[str, BlamedLayer]:
        """Layers that come round again, by way of others: what each of their calls adds.

        With the reference's inputs at all calls, what a layer hands to itself would stay hidden.
        """
        calls = [self.trace.repeated.get(name, 1) for name in self.chain]
        again = [n for n in self.chain if n in self.trace.repeated]
        if not again or max(calls) > MOST_CALLS:
            return {}
        self.shares.by_call = True
        self.limit += 2 * sum(calls) + 2 * (max(calls) - 1)
        self.notes.append(
            f"'{again[0]}' runs several times in a pass: what each of its calls adds was looked at."
        )
        return {name: self.row(name) for name in again}

    def _sought(self, rows: Iterable[BlamedLayer], edges: Edges) -> list[str]:
        """The layers outside the chain that must be looked at: the error comes from there."""
        if any(row.share >= LEAST for row in rows) or not self.chain:
            return [] if self.chain else self.rows_wanted
        order = {name: number for number, name in enumerate(self.trace.order)}
        first, last = order[self.chain[0]], order[self.chain[-1]]
        return [
            name
            for name in self.rows_wanted
            if name not in self.chain
            and (
                (edges.before >= LEAST and order[name] < first)
                or (edges.behind >= LEAST and order[name] > last)
                or edges.beside >= LEAST
            )
        ]

    def bisected(self) -> Blame:
        chain = self.chain
        again = [name for name in chain if name in self.trace.repeated]
        if not chain or again:
            if again and self.total:
                self.notes.append(
                    f"'{again[0]}' runs several times in a pass, so there is nothing to bisect: "
                    "all layers were looked at."
                )
            self.limit = 2 * len(chain) + 3
            return self.all_layers()
        self.limit = _bisect_limit(len(chain)) + max(0, self.stage.runs - 1)
        if not self.total:
            return self._answer([self._unasked(name) for name in chain], bisect=True)
        found = self._search = Bisection(self.shares, chain)
        found.run()
        edges = Edges(found.before, found.behind, found.beside)
        rows = {name: self._unasked(name) for name in chain}
        rows[found.layer] = self.shares.row(
            found.layer, *self._about(found.layer), share=found.share
        )
        self._rows[found.layer] = rows[found.layer]
        for name in self._sought(rows.values(), edges):
            if self.stage.runs + self.shares.cost(name) <= self.limit:
                rows[name] = self.row(name)
        shown = [rows[name] for name in self.rows_wanted if name in rows]
        return self._conclude(shown, edges, bisect=True)

    def _about(self, layer: str) -> tuple[str, int]:
        return self.types[layer], self.operations[layer]

    def _unasked(self, layer: str) -> BlamedLayer:
        """A layer as far as the runs tell that were made for others."""
        return BlamedLayer(
            layer=layer,
            type=self.types[layer],
            made_here=self.shares.made_here(layer),
            accumulated=self.trace.outputs[layer].error,
            handed=self.trace.inputs[layer].error,
        )

    def _edges(self) -> Edges:
        """The shares of what runs before, behind and beside the chain of layers."""
        chain = self.chain
        if not chain or any(name in self.trace.repeated for name in chain):
            return Edges()
        left = self.shares.left
        ins = [left(Put(n, "input")) if self.known.has(n, "input") else self.total for n in chain]
        outs = [left(Put(n, "output")) for n in chain]
        beside = sum(out - into for out, into in zip(outs[:-1], ins[1:], strict=True))
        return Edges(1 - ins[0] / self.total, outs[-1] / self.total, beside / self.total)

    def _conclude(self, rows: list[BlamedLayer], edges: Edges, bisect: bool = False) -> Blame:
        estimates = {row.layer: row.floor for row in rows}
        rows = against_peers(rows, self.unit, self.usual)
        known = [row for row in rows if not math.isnan(row.share)]
        top = max(known, key=lambda row: row.share, default=None)
        culprit: BlamedLayer | None = None
        causes: tuple[Cause, ...] = ()
        usual = top is not None and top.floor > estimates[top.layer] and not top.clear
        if top is not None and not usual and stands_out(top, known) and self._above_floor(top):
            descent = Descent(
                self.shares,
                self.stage,
                self.types,
                self.operations,
                self.precisions,
                lambda rows: against_peers(rows, self.unit, self.usual),
                lambda runs: self.stage.runs + runs <= self.limit,
            )
            found = descent.into(top, self.trace.order)
            rows = _nested(rows, found.rows)
            culprit, causes = found.culprit, found.causes
            self.notes += found.notes
        elif edges.most >= LEAST and (not bisect or self.stage.runs < self.limit):
            culprit, more = self._around(known)
            rows = [*rows, *more]
        made_in: Maker | None = None
        if self._between_layers(culprit):
            code = look_between(
                self.stage,
                self.trace,
                self.types,
                self.precisions,
                self.unit,
                self.total,
                culprit,
                self.grids,
            )
            self._told()
            if isinstance(code, Magnified):
                if not self.judged.measured:
                    self.notes.append(
                        f"{code.layer} magnifies what its layers round: given the reference's "
                        "tensors, each of them and the code between them are right."
                    )
                    culprit, causes = None, ()
            elif code is not None:
                if not any(row.layer == code.row.layer for row in rows):
                    rows.append(code.row)
                if code.causes and (culprit is None or say_little(causes)):
                    causes = code.causes
                culprit, made_in = code.row, code.made_in
        beside: BesideFloor | None = None
        if culprit is None and self._floor_made is not None and self.judged.measured:
            beside = look_beside_floor(
                self.stage,
                self.trace,
                self.types,
                self.precisions,
                self.unit,
                self.total,
                self.target,
                self._floor_made,
            )
            self._told()
            self.notes += beside.notes
            if beside.row is not None:
                culprit, made_in, causes = beside.row, beside.made_in, beside.causes
                rows = [*(row for row in rows if row.layer != culprit.layer), culprit]
        return self._answer(
            rows,
            culprit=culprit,
            causes=causes,
            made_in=made_in,
            edges=edges,
            bisect=bisect,
            against=None if beside is None else beside.against,
        )

    def _between_layers(self, culprit: BlamedLayer | None) -> bool:
        """Whether the code between layers may be what makes the error."""
        if culprit is None:
            return self.judged.verdict == "diverged"
        if self.stage.misfed(culprit.layer):
            return True
        return any(contains(culprit.layer, n) for n in self.kept if n != culprit.layer)

    def _above_floor(self, row: BlamedLayer) -> bool:
        """Whether what a layer adds to the final error is more than a floor run has."""
        if not self.judged.measured:
            return True
        made = math.sqrt(max(0.0, row.share)) * self.final_error
        return made * AGAINST_FLOOR > self.judged.allowed

    def _around(self, known: Sequence[BlamedLayer]) -> tuple[BlamedLayer | None, list[BlamedLayer]]:
        """The innermost layer around the chain that makes the error in its own code."""
        looked = []
        for name in ancestors(self.chain, self.kept):
            (row,) = against_peers([self.row(name)], self.unit, self.usual)
            looked.append(row)
            inner = sum(other.share for other in known if contains(name, other.layer))
            if LEAST <= row.share <= MOST and row.share - inner >= LEAST and row.clear:
                return row, looked
        return None, looked

    def _answer(
        self,
        rows: Sequence[BlamedLayer],
        *,
        culprit: BlamedLayer | None = None,
        causes: tuple[Cause, ...] = (),
        made_in: Maker | None = None,
        edges: Edges | None = None,
        bisect: bool = False,
        interrupted: bool = False,
        halved: tuple[str, str] | None = None,
        against: AgainstFloor | None = None,
    ) -> Blame:
        edges = edges or Edges()
        if self.trace.too_large:
            self.notes.append(
                "The candidate's own outputs are larger than the budget: amplification is unknown "
                "for some layers."
            )
        if self.known.lent:
            self.notes.append(
                f"The reference has no inputs of {len(self.known.lent)} layers; they were taken "
                "from the outputs that they are. Record it with --inputs to be sure."
            )
        shares = [row.share for row in rows if not math.isnan(row.share)]
        return Blame(
            reference=self.recording.path,
            candidate=self._name(),
            layers=tuple(rows),
            culprit=None if culprit is None else culprit.layer,
            share=culprit.share if culprit is not None else max(shares, default=math.nan),
            final=self.final.layer,
            final_leaf=self.final.leaf,
            final_error=self.final_error,
            final_floor=self.judged.allowed,
            final_verdict=self.judged.verdict,
            final_why=self.judged.why,
            first_bit_difference=self.bits,
            first_divergence=self.on_the_way,
            before=edges.before,
            behind=edges.behind,
            beside=edges.beside,
            causes=causes,
            made_in=made_in,
            against_floor=against,
            bisect=bisect,
            interrupted=interrupted,
            halved=halved,
            forwards=self.stage.runs,
            limit=max(self.limit, self.stage.runs),
            ends=(self.chain[0], self.chain[-1]) if self.chain else None,
            batches=min(len(self.target.batches), self.known.batches),
            weights=self._other_weights(),
            warnings=tuple(self.warnings),
            notes=tuple(self.notes),
        )

    def _other_weights(self) -> tuple[str, ...]:
        """The layers whose weights are not the reference's, as far as its recording tells."""
        model = self.target.model
        mine = {"dtypes": describe_module(model)["dtypes"], "fingerprints": fingerprints(model)}
        return other_weights(self.recording.manifest.target, mine)

    def _name(self) -> str:
        name = self.target.name or type(self.target.model).__name__
        return f"{name} ({self.target.mode})" if self.target.mode else name


def _precision(model: nn.Module) -> str | None:
    """The coarsest precision that a live model computes in."""
    fast = matmul_precision() in ("high", "medium", "tf32")
    gpu = not device_of(model).startswith("cpu")
    return coarsest(describe_module(model)["dtypes"], tf32=gpu and fast)


def _bisect_limit(blocks: int) -> int:
    return math.ceil(math.log2(max(2, blocks))) + 4


def _nested(rows: Sequence[BlamedLayer], inner: Sequence[BlamedLayer]) -> list[BlamedLayer]:
    """Children behind the layer that they are inside of; a row that was measured again once."""
    again = {row.layer: row for row in inner}
    placed: list[BlamedLayer] = []

    def place(row: BlamedLayer) -> None:
        placed.append(row)
        for child in inner:
            if child.parent == row.layer:
                place(child)

    for row in rows:
        if row.parent is None and row.layer in again and again[row.layer].parent is None:
            row = again[row.layer]
        place(row)
    return placed
