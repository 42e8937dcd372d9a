"""From the sums of a stream to a comparison, with everything that `compare` would say of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ...recording.reader import Recording
from ...recording.schema import Port
from ...taps.judging import Divergence
from ...taps.sink import Slot
from ...targets.floor_run import FloorRun
from ..absent import Absences
from ..align import LayerPair
from ..checks import check_compared, notes_of, third_warnings, warnings_of
from ..compare import Work, floor_words, inputs_of
from ..environment import environment_differences, same_input
from ..floor import Floor
from ..floor_runs import floor_notes, given_floor
from ..moments import by_moment, in_words
from ..parts import layer_row, missing_part, missing_row, unpaired_part
from ..results import Comparison, LayerComparison, Part
from ..rules import Rule
from ..sites import SitePair
from .live import live_layer, unstored
from .merging import RowSum

__all__ = ["Terms", "concluded"]


_OTHER_BATCHES = (
    "The two runs divide their samples into other batches: they were compared sample by sample."
)


@dataclass(frozen=True)
class Terms:
    """What a run is judged by."""

    reference: Recording
    floor_run: FloorRun | None
    floor: Floor | None
    work: Work
    rules: tuple[Rule, ...]
    preset: str | None


def concluded(
    terms: Terms,
    candidate: Recording,
    sums: Mapping[str, RowSum],
    heard: Sequence[Slot],
    partners: Mapping[str, str],
    unasked: Collection[str],
    stopped: Divergence | None,
    few_of: int | None,
    other_batches: bool,
) -> Comparison:
    """The comparison of the layers that were heard, in order, with the reference.

    Layers that the model has and nobody listened to are not missing, and no rows. `few_of` is how
    many layers could have a partner, where few of them have one.
    """
    reference = terms.reference
    absences = Absences(reference, candidate, [(ours, name) for name, ours in partners.items()])
    rows = list(_rows(terms, sums, heard, partners, stopped, absences))
    listed = [row for row in rows if row.candidate_layer is not None or row.layer not in unasked]
    left_out, rows = len(rows) - len(listed), listed
    check_compared(reference, candidate, rows)
    same, about_inputs = inputs_of(same_input(reference, candidate), rows)
    if stopped is not None and same is False:
        same = None  # the batches that were not run are no other inputs
    differing, in_common = environment_differences(reference, candidate)
    if stopped is not None:
        differing = tuple(item for item in differing if item.name != "inputs")
    conditions = [
        *(["Rules"] if terms.rules else []),
        *([f"The preset {terms.preset}"] if terms.preset is not None else []),
    ]
    return Comparison(
        reference=reference.path,
        candidate=candidate.path,
        layers=tuple(rows),
        environment=differing,
        in_common=in_common,
        same_input=same,
        floor=floor_words(terms.floor, terms.work, rows),
        preset=terms.preset,
        warnings=(
            *warnings_of(reference, candidate, same, [], []),
            *([] if few_of is None else [_few(len(partners), few_of)]),
            *third_warnings(reference, given_floor(terms.floor_run), "floor"),
        ),
        notes=(
            *about_inputs,
            *floor_notes(terms.floor_run),
            *([_OTHER_BATCHES] if other_batches else _other_steps(reference, sums, stopped)),
            *([f"{left_out} layers of the reference were not listened to."] if left_out else []),
            *notes_of(reference, candidate, terms.floor, conditions, rows),
        ),
    )


def _few(paired: int, total: int) -> str:
    return (
        f"Only {paired} of {total} layers pair with one of the reference by name or place: what "
        "is called the first divergence may lie behind a layer that has no partner. Pair layers by "
        "hand with --map 'regex=>template', or find where to look with --coarse, which also pairs "
        "by values."
    )


def _rows(
    terms: Terms,
    sums: Mapping[str, RowSum],
    heard: Sequence[Slot],
    partners: Mapping[str, str],
    stopped: Divergence | None,
    absences: Absences,
) -> Iterator[LayerComparison]:
    """The reference's layers in order; a layer of the candidate alone behind the one it follows."""
    followers: dict[str | None, list[LayerComparison]] = {}
    last: str | None = None
    known = {slot.name: slot.provenance for slot in heard}
    for slot in heard:
        if partners.get(slot.name) in sums:
            last = partners[slot.name]
        else:
            alone = missing_row(LayerPair(None, live_layer(slot.name, slot.type), ""), absences)
            alone = replace(alone, candidate_provenance=slot.provenance)
            followers.setdefault(last, []).append(alone)
    yield from followers.get(None, ())
    listened = set(partners.values())
    for name in terms.reference.layers:
        total = sums.get(name)
        if total is None:
            row = missing_row(LayerPair(terms.reference[name], None, ""), absences)
            if stopped is not None and name in listened:
                row = replace(row, note=f"{row.note}; the model was stopped at '{stopped.layer}'")
            yield row
            continue
        parts = (*total.parts(), *_gaps(terms.reference, name, total))
        left = terms.reference[name]
        row = layer_row(left, live_layer(total.candidate, total.kind), total.matched_by, parts)
        yield replace(row, candidate_provenance=known.get(total.candidate, "hook"))
        yield from followers.get(name, ())


def _gaps(reference: Recording, layer: str, total: RowSum) -> Iterator[Part]:
    """The ports and moments that one side alone has."""
    leaves: dict[tuple[Port, str], list[tuple[int, int, int, int]]] = {}
    sizes: dict[tuple[str, str, tuple[int, int, int, int]], int] = {}
    for record in reference[layer].records:
        moment = (record.rank, record.epoch, record.batch, record.call)
        leaves.setdefault((record.port, record.leaf), []).append(moment)
        sizes[record.port, record.leaf, moment] = record.shape[0] if record.shape else 1
    cut = {(port, leaf) for port, leaf, _ in total.covered}
    for (port, leaf), moments in leaves.items():
        theirs = total.heard.get(port)
        if theirs is None:
            yield missing_part(SitePair(port, leaf, leaf, (), missing="candidate"))
            continue
        if (port, leaf) in cut:
            lost = [*_uncovered(port, leaf, moments, sizes, total)]
            lost += total.alone.get((port, leaf), [])
            if lost:
                yield unpaired_part(SitePair(port, leaf, leaf, (), unpaired=tuple(lost)))
            continue
        way = by_moment(
            [unstored(layer, port, leaf, moment) for moment in moments],
            [unstored(layer, port, leaf, moment) for moment in sorted(theirs)],
        )
        if way.unpaired:
            yield unpaired_part(SitePair(port, leaf, leaf, (), unpaired=way.unpaired))


def _uncovered(
    port: str,
    leaf: str,
    moments: Sequence[tuple[int, int, int, int]],
    sizes: Mapping[tuple[str, str, tuple[int, int, int, int]], int],
    total: RowSum,
) -> Iterator[str]:
    """The samples of the reference that no batch of the run held."""
    for moment in moments:
        seen, size = total.covered.get((port, leaf, moment), 0), sizes[port, leaf, moment]
        if seen < size and moment not in total.whole.get((port, leaf), ()):
            part = f"{size - seen} of {size} samples of " if seen else ""
            yield f"{part}{in_words(*moment[1:])} only in the reference"


def _other_steps(
    reference: Recording, sums: Mapping[str, RowSum], stopped: Divergence | None
) -> list[str]:
    """That the two runs have other batches: only those of both are compared."""
    ours = set(reference.steps)
    theirs = {
        (epoch, batch)
        for total in sums.values()
        for moments in total.heard.values()
        for _, epoch, batch, _ in moments
    }
    if stopped is not None or ours == theirs:
        return []
    return [
        f"The reference has {len(ours)} batches, this run {len(theirs)}; {len(ours & theirs)} of "
        "them are in both and were compared. Samples in other batches are compared by tensortap "
        "compare, from two recordings in full."
    ]
