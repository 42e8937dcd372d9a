"""Which tensors of two paired layers are compared: ports, leaves, moments and layouts.

Where shapes differ, every layout and arrangement of samples that fits is a guess; a sample of the
values decides. A guess that was confirmed at one layer is believed at a later one whose values
alone would not confirm it: there the values have diverged, which is what the user wants to see.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..recording.reader import Layer, Record, Recording
from .absent import runtime_of, skipped_of
from .align import LayerPair
from .loose import DROPPED, PASSED_ON, LooseLeaves, is_loose, plain_leaf
from .moments import Arrangement, MomentPair, by_moment, by_samples, in_words
from .sketch import EXACT, NONE, Agreement, compare_values, sample
from .sources import Sources
from .transforms import Transform, layouts, reorderings

__all__ = ["MomentPair", "SitePair", "SitePairer"]

_PROBES = 4
_PADDING = 0.2  # of the spread of the values: what is filled up with a constant has less
_VALUES = 1024
_SAME = Transform("")
_Leaves = dict[str, list[Record]]


@dataclass(frozen=True)
class SitePair:
    """One port and leaf of a paired layer over all its moments.

    `transform` is None when the layouts agree. `problem` says why the tensors cannot be compared,
    `missing` names the side that lacks the leaf, and `reason` why, where that is known. `unpaired`
    are the moments that one side alone has. `hint` says under which order of its axes the
    candidate would agree, `cut` what was left out. `grouped` says that tokens which chose other
    experts decide which rows there are.
    """

    port: str
    leaf: str
    candidate_leaf: str
    moments: tuple[MomentPair, ...]
    transform: Transform | None = None
    problem: str = ""
    missing: str = ""
    unpaired: tuple[str, ...] = ()
    hint: str = ""
    cut: str = ""
    reason: str = ""
    grouped: bool = False


@dataclass(frozen=True)
class _Guess:
    arrangement: Arrangement
    transform: Transform
    agreement: Agreement

    @property
    def kind(self) -> tuple[str, str]:
        return self.arrangement.kind, self.transform.name

    def site(self, known_from: str = "") -> tuple[Arrangement, Transform | None]:
        names = [name for name in (self.arrangement.name, self.transform.name) if name]
        if not names:
            return self.arrangement, None
        name = ", ".join(names) + (f", as in '{known_from}'" if known_from else "")
        return self.arrangement, self.transform.named(name)


class SitePairer:
    """Pairs the tensors of one layer after the other, and learns from what it saw."""

    def __init__(
        self, reference: Recording, candidate: Recording, pairs: Sequence[LayerPair] = ()
    ) -> None:
        self.reference = reference
        self.candidate = candidate
        self._ahead = list(pairs)  # layers whose shapes may show a layout that others hide
        self._confirmed: dict[tuple[str, str], str] = {}
        self._leaves: dict[tuple[str, str], str] = {}
        self._loose = LooseLeaves()
        self._sources = (Sources(reference), Sources(candidate))
        self._runtimes = (runtime_of(reference), runtime_of(candidate))

    def pair(self, pair: LayerPair) -> list[SitePair]:
        """Every port and leaf of two paired layers; nothing for a layer that stands alone."""
        if pair.reference is None or pair.candidate is None:
            return []
        ours, theirs = _sites(pair.reference), _sites(pair.candidate)
        result = []
        for port in dict.fromkeys([*ours, *theirs]):
            left, right = ours.get(port, {}), theirs.get(port, {})
            sides = self._loose_sides(pair, left, right)
            if left and right and any(sides):
                result += self._pair_loose(pair, port, left, right, sides)
                continue
            if sides[0] or sides[1]:  # a whole port is missing, whatever its values are called
                left, right = _first(left), _first(right)
            partners = self._pair_leaves(port, left, right)
            for leaf, records in left.items():
                other = partners.get(leaf)
                if other is None:
                    result.append(self._missing(pair, port, leaf, "candidate"))
                else:
                    site = self._site(pair.reference.name, records, right[other])
                    result.append(replace(site, port=port, leaf=leaf, candidate_leaf=other))
            used = set(partners.values())
            result += [
                self._missing(pair, port, leaf, "reference") for leaf in right if leaf not in used
            ]
        return result

    def _missing(
        self, pair: LayerPair, port: str, leaf: str, side: str, reason: str = ""
    ) -> SitePair:
        """A leaf that one side lacks; what that side's recording says of it counts first."""
        ours = side == "reference"
        run, layer = (self.reference, pair.reference) if ours else (self.candidate, pair.candidate)
        assert layer is not None
        skipped = skipped_of(run.manifest)
        told = skipped.get((layer.name, port, leaf))
        if told is None and not any(record.port == port for record in layer.records):
            told = skipped.get((layer.name, port, ""))
        return SitePair(port, leaf, leaf, (), missing=side, reason=told or reason)

    def _loose_sides(self, pair: LayerPair, left: _Leaves, right: _Leaves) -> tuple[bool, bool]:
        """Whether the leaves of either side say nothing of where they stand.

        A program's own outputs do, but every runtime has names of its own for them.
        """
        assert pair.reference is not None and pair.candidate is not None
        ours, theirs = (any(is_loose(found) for found in side.values()) for side in (left, right))
        other = self._runtimes[0] != self._runtimes[1]
        if other and "" in (pair.reference.name, pair.candidate.name):
            compiled = [runtime != "eager" for runtime in self._runtimes]
            return ours or (compiled[0] and not compiled[1]), theirs or compiled[1]
        if ours and theirs and not other and left.keys() == right.keys():
            return False, False  # the same kind of program gives its values the same names
        return ours, theirs

    def _pair_loose(
        self,
        pair: LayerPair,
        port: str,
        left: _Leaves,
        right: _Leaves,
        sides: tuple[bool, bool],
    ) -> list[SitePair]:
        """Leaves of which one side at least does not know the place."""
        assert pair.reference is not None and pair.candidate is not None
        name, flipped = pair.reference.name, sides == (True, False)
        known, loose = (right, left) if flipped else (left, right)
        knowing = pair.candidate if flipped else pair.reference
        sources = self._sources[::-1] if flipped else self._sources

        def site(ours: Sequence[Record], theirs: Sequence[Record]) -> SitePair:
            both = (theirs, ours) if flipped else (ours, theirs)
            return self._site(name, *both)

        named = _same_names(known, loose)
        choice = self._loose.choose(
            pair.reference.type or pair.candidate.type,
            port,
            {leaf: records for leaf, records in known.items() if leaf not in named},
            {leaf: records for leaf, records in loose.items() if leaf not in named.values()},
            lambda ours, theirs: not site(ours, theirs).problem,
            lambda ours, theirs: sources[0].same(ours, sources[1], theirs),
        )
        for leaf, other in named.items():
            choice.add(leaf, other, loose[other])
        result = []
        for leaf, records in known.items():
            if leaf in choice.partners:
                made = site(records, choice.partners[leaf])
                names = (leaf, choice.names[leaf])
                ours, theirs = reversed(names) if flipped else names
                result.append(replace(made, port=port, leaf=ours, candidate_leaf=theirs))
                continue
            side = "reference" if flipped else "candidate"
            reason = choice.reasons[leaf]
            if reason == DROPPED and _was_given(knowing, records):
                reason = PASSED_ON
            result.append(self._missing(pair, port, leaf, side, reason))
        if all(sides) and choice.partners:
            return [site for site in result if not site.missing]  # of both, some left by the way
        return result

    def _pair_leaves(
        self, port: str, ours: dict[str, list[Record]], theirs: dict[str, list[Record]]
    ) -> dict[str, str]:
        """Equal leaves; those that hold the same values, here or earlier; the last of each side."""
        found = {leaf: leaf for leaf in ours if leaf in theirs}
        left = [leaf for leaf in ours if leaf not in found]
        right = [leaf for leaf in theirs if leaf not in found]

        def take(leaf: str, other: str) -> None:
            found[leaf] = other
            left.remove(leaf)
            right.remove(other)

        if left and right and len(left) + len(right) > 2:
            for leaf in list(left):
                other = next((o for o in right if _alike(ours[leaf], theirs[o])), None)
                if other is not None:
                    self._leaves[port, leaf] = other
                    take(leaf, other)
            for leaf in list(left):
                known = self._leaves.get((port, leaf))
                if known in right:
                    take(leaf, known)
            # What a layer returns first is what it is for; the rest is caches and weights.
            first, other = next(iter(ours)), next(iter(theirs))
            alike = ours[first][0].shape == theirs[other][0].shape
            if alike and first in left and other in right:
                take(first, other)
        if len(left) == len(right) == 1:
            take(left[0], right[0])
        return found

    def _site(self, layer: str, ours: Sequence[Record], theirs: Sequence[Record]) -> SitePair:
        plain = by_moment(ours, theirs)
        stored = all(record.stored for record in (*ours, *theirs))
        even = all(pair.shapes[0] == pair.shapes[1] for pair in plain.pairs)
        if not stored:
            return _summaries(plain)
        if plain.pairs and even:
            transform, hint = self._reordering(plain)
            return replace(_made(plain, transform), hint=hint)
        guess, tried = self._guess(layer, ours, theirs, plain)
        if guess is None and not plain.pairs:
            return _made(plain, None)
        if guess is None:
            return replace(_made(plain, None), problem=_misfit(plain, ours, theirs, tried))
        arrangement, transform = guess
        fitting = _fitting(arrangement, transform or _SAME)
        for pair in arrangement.pairs:
            if pair.shapes not in fitting:
                problem = (
                    f"The shapes do not fit everywhere: {_lists(pair.shapes)} at {_when(pair)}, "
                    f"where '{(transform or _SAME).name}' does not lead to equal shapes."
                )
                return replace(_made(arrangement, transform), problem=problem)
        return _made(arrangement, transform)

    def _reordering(self, plain: Arrangement) -> tuple[Transform | None, str]:
        """A permutation of equal extents, which the shapes do not show.

        It is a layout only where a layer whose shapes show it has it too; else it is a mistake of
        the candidate, and a hint.
        """
        shapes = {pair.shapes for pair in plain.pairs}
        options = [
            option
            for option in reorderings(plain.pairs[0].shapes[0])
            if all(option.fits(*both) for both in shapes)
        ]
        same = _agreement(plain, _SAME) if options else NONE
        if not options or same.clear or not same.telling:
            return None, ""
        guesses = [_Guess(plain, option, _agreement(plain, option)) for option in options]
        if any(guess.agreement.error < 0.5 * same.error for guess in guesses):
            self._look_ahead()
        for guess in guesses:
            if guess.kind in self._confirmed and guess.agreement.error < 0.5 * same.error:
                return guess.site(self._confirmed[guess.kind])[1], ""
        best = min(guesses, key=lambda guess: guess.agreement.error)
        if best.agreement.exact and best.agreement.telling:
            return None, f"the values agree under '{best.transform.name}' of the candidate"
        return None, ""

    def _look_ahead(self) -> None:
        """Learn the layouts that the shapes of any layer show, before they are needed."""
        pairs, self._ahead = self._ahead, []
        for pair in pairs:
            if pair.reference is None or pair.candidate is None:
                continue
            ours, theirs = (
                next(iter(_sites(layer).get("output", {}).values()), [])
                for layer in (pair.reference, pair.candidate)
            )
            stored = ours and theirs and all(record.stored for record in (*ours, *theirs))
            if stored and ours[0].shape != theirs[0].shape:
                self._guess(pair.reference.name, ours, theirs, by_moment(ours, theirs))

    def _guess(
        self, layer: str, ours: Sequence[Record], theirs: Sequence[Record], plain: Arrangement
    ) -> tuple[tuple[Arrangement, Transform | None] | None, int]:
        options = list(_options(ours, theirs, plain))
        guesses = [
            _Guess(arrangement, transform, _agreement(arrangement, transform))
            for arrangement, transform in options
            if _cuts_padding(arrangement, transform)
        ]
        best = _clearest(guesses)
        if best is not None and best.transform.crop:
            # Samples that were divided otherwise at an earlier layer are no padding at this one.
            for guess in guesses:
                divided = guess.arrangement.pairs != plain.pairs and not guess.transform.crop
                if divided and guess.kind in self._confirmed:
                    return guess.site(self._confirmed[guess.kind]), len(options)
        if best is not None:
            if best.agreement.telling:
                self._confirmed.setdefault(best.kind, layer)
                return best.site(), len(options)
            guesses = [g for g in guesses if g.agreement.exact]
        for guess in guesses:
            if guess.kind in self._confirmed:
                return guess.site(self._confirmed[guess.kind]), len(options)
        if best is not None and best.transform.crop:
            best = None  # constants agree however they are cut: they tell nothing
        if best is None:
            # Axes of extent 1 hold nothing that could be in another order.
            best = next((guess for guess in guesses if guess.transform.only_squeezes), None)
        return (None if best is None else best.site()), len(options)


def _options(
    ours: Sequence[Record], theirs: Sequence[Record], plain: Arrangement
) -> Iterator[tuple[Arrangement, Transform]]:
    """Everything that may bring the two sides together, the likeliest first."""
    plainly = list(_laid_out(plain, same=False))
    yield from (option for option in plainly if not option[1].crop)
    for arrangement in by_samples(ours, theirs):
        if arrangement.pairs != plain.pairs:
            yield from _laid_out(arrangement, same=True)
    yield from (option for option in plainly if option[1].crop)


def _laid_out(arrangement: Arrangement, same: bool) -> Iterator[tuple[Arrangement, Transform]]:
    uneven = [pair for pair in arrangement.pairs if pair.shapes[0] != pair.shapes[1]]
    if uneven:
        for transform in layouts(*uneven[0].shapes):
            yield arrangement, transform
    elif same and arrangement.pairs:
        yield arrangement, _SAME


def _fitting(
    arrangement: Arrangement, transform: Transform
) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The shapes of an arrangement that a transform makes equal; moments share few shapes."""
    shapes = {pair.shapes for pair in arrangement.pairs}
    return {both for both in shapes if transform.fits(*both)}


def _agreement(arrangement: Arrangement, transform: Transform) -> Agreement:
    """How well the values agree over a few moments, spread over all of them."""
    fitting = _fitting(arrangement, transform)
    pairs = [pair for pair in arrangement.pairs if pair.shapes in fitting]
    if not pairs:
        return NONE
    chosen = {round(i * (len(pairs) - 1) / (_PROBES - 1)) for i in range(_PROBES)}
    left, right = [], []
    for index in sorted(chosen):
        reference, candidate = pairs[index].tensors(transform)
        left.append(sample(reference, _VALUES))
        right.append(sample(candidate, _VALUES))
    return compare_values(np.concatenate(left), np.concatenate(right))


def _cuts_padding(arrangement: Arrangement, transform: Transform) -> bool:
    """Whether what would be cut off the channels (the last axis) is padding: about one value.

    Positions that stand for nothing hold anything behind a few layers; channels are filled up with
    a constant, and where they are not, values would be lost.
    """
    if not transform.crop:
        return True
    ours, theirs = transform._laid_out(*arrangement.pairs[0].tensors(None))
    for axis, part in transform.crop:
        longer = max(ours, theirs, key=lambda tensor: tensor.shape[axis])
        low = min(ours.shape[axis], theirs.shape[axis])
        rest = longer.shape[axis] - low
        if axis == longer.dim() - 1 and rest:
            start = (low, 0) if part == "first" else (0, rest)
            cut = sample(longer.narrow(axis, start[0], rest), _VALUES)
            kept = sample(longer.narrow(axis, start[1], low), _VALUES)
            if np.isfinite(cut).all() and cut.std() > _PADDING * kept.std():
                return False
    return True


def _clearest(guesses: Sequence[_Guess]) -> _Guess | None:
    """The guess that the values confirm; of several that they confirm, the one that covers most.

    Where the values agree but roughly, another layout of the same moments must be clearly worse.
    """
    clear = [guess for guess in guesses if guess.agreement.clear]
    clear = [guess for guess in clear if guess.agreement.telling] or clear
    if not clear:
        return None
    least = min(guess.agreement.error for guess in clear)
    good = [guess for guess in clear if guess.agreement.error <= 2 * least + EXACT]
    best = max(good, key=lambda guess: guess.arrangement.elements)
    rivals = [
        guess.agreement.error
        for guess in guesses
        if guess.arrangement is best.arrangement and guess is not best
    ]
    rough = best.agreement.error > 0.1
    return None if rough and any(0.7 * e < best.agreement.error for e in rivals) else best


def _made(arrangement: Arrangement, transform: Transform | None) -> SitePair:
    problem = "" if arrangement.pairs else "The two sides have no moment in common."
    site = SitePair("", "", "", arrangement.pairs, transform, problem, "", arrangement.unpaired)
    if transform is None or not transform.crop:
        return site
    return replace(site, cut="what is taken for padding was not compared")


def _summaries(plain: Arrangement) -> SitePair:
    """Summaries tell nothing of layout: equal shapes, or equal counts and a word about it."""
    uneven = [pair for pair in plain.pairs if pair.shapes[0] != pair.shapes[1]]
    if not uneven:
        return _made(plain, None)
    shapes = _lists(uneven[0].shapes)
    if all(np.prod(pair.shapes[0]) == np.prod(pair.shapes[1]) for pair in uneven):
        name = f"summaries alone: {shapes}, as many elements"
        return _made(plain, Transform(name, uneven[0].shapes))
    problem = (
        f"The shapes differ: {shapes}. With summaries alone no layout can be tried. Record both "
        "sides with keep='tensors'."
    )
    return replace(_made(plain, None), problem=problem)


def _misfit(
    plain: Arrangement, ours: Sequence[Record], theirs: Sequence[Record], tried: int
) -> str:
    shapes = (ours[0].shape, theirs[0].shape)
    for pair in plain.pairs:
        if pair.shapes[0] != pair.shapes[1]:
            shapes = pair.shapes
            break
    if not tried:
        return (
            f"The shapes do not fit: {_lists(shapes)}. No permutation of axes, squeezing, "
            "flattening, padding or other batch size leads from one to the other."
        )
    ways = "1 way was" if tried == 1 else f"{tried} ways were"
    return (
        f"The shapes do not fit: {_lists(shapes)}. {ways} tried (axes permuted, squeezed or "
        "flattened, padding, other batches): under none of them do the values agree."
    )


def _lists(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> str:
    return f"{list(shapes[0])} in the reference, {list(shapes[1])} in the candidate"


def _when(pair: MomentPair) -> str:
    return in_words(pair.epoch, pair.batch, pair.call)


def _was_given(layer: Layer, records: Sequence[Record]) -> bool:
    """Whether a leaf of what a layer returns is what it was given, as far as that was recorded."""
    given = {(r.epoch, r.batch, r.call, r.tensor_id) for r in layer.port("input") if r.stored}
    return bool(given) and all((r.epoch, r.batch, r.call, r.tensor_id) in given for r in records)


def _first(leaves: _Leaves) -> _Leaves:
    return dict(list(leaves.items())[:1])


def _same_names(known: _Leaves, loose: _Leaves) -> dict[str, str]:
    """Leaves with names, of a program's own outputs, that are equal but for their spelling."""
    named = {plain_leaf(leaf): leaf for leaf in loose if leaf and not leaf.startswith("?")}
    found = {leaf: named[plain_leaf(leaf)] for leaf in known if plain_leaf(leaf) in named}
    return {
        leaf: other
        for leaf, other in found.items()
        if known[leaf][0].shape == loose[other][0].shape
    }


def _sites(layer: Layer) -> dict[str, dict[str, list[Record]]]:
    found: dict[str, dict[str, list[Record]]] = {}
    for record in layer.records:
        found.setdefault(record.port, {}).setdefault(record.leaf, []).append(record)
    return found


def _alike(ours: Sequence[Record], theirs: Sequence[Record]) -> bool:
    """Whether two leaves hold the same values, in whatever layout or batches, but whole."""
    plain = by_moment(ours, theirs)
    even = bool(plain.pairs) and plain.pairs[0].shapes[0] == plain.pairs[0].shapes[1]
    if not all(record.stored for record in (*ours, *theirs)):
        return even
    options = [(plain, _SAME)] if even else list(_options(ours, theirs, plain))
    found = [_agreement(way, transform) for way, transform in options if not transform.crop]
    return any(agreement.clear and agreement.telling for agreement in found)
