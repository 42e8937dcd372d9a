"""Rows of single calls, summed up into the row of a layer, in little memory.

A layer's row over all its moments says what `parts.compared_part` says of them together: the first
moment that diverged speaks for all; if none did, the worst.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...numerics.difference import Difference
from ...numerics.histogram import Histogram
from ...numerics.summary import Summary
from ...recording.rows import Sparse, sparse
from ..epochs import EpochPart, joined
from ..flips import Flips
from ..moments import in_words
from ..results import Part, Verdict, severity, worst

__all__ = ["RowSum"]


@dataclass
class _PartSum:
    """One port and leaf over the moments that were heard so far."""

    speaker: Part  # whose words and shapes count
    worst: Part
    moments: int
    verdict: Verdict
    difference: Difference | None
    histogram: Sparse | None  # whole ones of thousands of tensors would be a burden
    reference: Summary | None
    candidate: Summary | None
    diverged_at: list[tuple[int, int, int]]
    bits_differ_at: tuple[int, int, int] | None
    max_abs_moment: tuple[int, int, int] | None
    epochs: tuple[EpochPart, ...] = ()
    flips: Flips | None = None
    apart: int = 0

    @classmethod
    def of(cls, part: Part) -> _PartSum:
        kept = None if part.difference is None else part.difference.histogram
        return cls(
            speaker=_slim(part),
            worst=_slim(part),
            moments=part.moments,
            verdict=part.verdict,
            difference=_without(part.difference),
            histogram=sparse(kept),
            reference=part.reference_summary,
            candidate=part.candidate_summary,
            diverged_at=list(part.diverged_at),
            bits_differ_at=part.bits_differ_at,
            max_abs_moment=part.max_abs_moment,
            epochs=part.epochs,
            flips=part.flips,
            apart=part.apart,
        )

    def add(self, part: Part) -> None:
        """One more call."""
        self._speak(part)
        self._measure(part.difference, part.max_abs_moment)
        self.reference = _merged(self.reference, part.reference_summary)
        self.candidate = _merged(self.candidate, part.candidate_summary)
        self.moments += part.moments
        self.diverged_at += part.diverged_at
        known = [at for at in (self.bits_differ_at, part.bits_differ_at) if at is not None]
        self.bits_differ_at = min(known, default=None)
        self.epochs = joined(self.epochs, part.epochs)
        self.apart = max(self.apart, part.apart)
        if part.flips is not None:
            self.flips = part.flips if self.flips is None else self.flips.merge(part.flips)
        self.verdict = worst((self.verdict, part.verdict)) or part.verdict

    def _speak(self, part: Part) -> None:
        if _badness(part) > _badness(self.worst):
            self.worst = _slim(part)
        if self.speaker.verdict != "diverged":
            self.speaker = _slim(part) if part.verdict == "diverged" else self.worst

    def _measure(self, found: Difference | None, moment: tuple[int, int, int] | None) -> None:
        if found is None or self.difference is None:
            self.difference = self.histogram = None
            return
        ours = self.difference
        if self.histogram is not None:
            ours = replace(ours, histogram=Histogram.from_sparse(*self.histogram))
        if found.finite and (not ours.finite or found.max_abs > ours.max_abs):
            self.max_abs_moment = moment
        whole = ours.merge(found)
        self.difference, self.histogram = _without(whole), sparse(whole.histogram)

    def part(self) -> Part:
        """All moments in one."""
        said, found = self.speaker, self.difference
        if self.moments <= 1:
            return replace(
                said,
                difference=found,
                reference_summary=self.reference,
                candidate_summary=self.candidate,
            )
        why = said.why
        if said.verdict == "diverged" and said.diverged_at and said.moments == 1:
            why = f"at {in_words(*said.diverged_at[0])} {why}"
        return replace(
            said,
            verdict=self.verdict,
            why=why,
            difference=found,
            reference_summary=self.reference,
            candidate_summary=self.candidate,
            error=math.nan if found is None else found.error,
            floor=self.worst.floor,
            floor_ratio=self.worst.floor_ratio,
            floor_measured=self.worst.floor_measured,
            moments=self.moments,
            worst_moment=self.worst.worst_moment,
            diverged_at=tuple(self.diverged_at),
            bits_differ_at=self.bits_differ_at,
            max_abs_moment=self.max_abs_moment,
            epochs=self.epochs,
            flips=self.flips,
            apart=self.apart,
        )


@dataclass
class RowSum:
    """A layer over the calls that were heard so far."""

    candidate: str
    kind: str
    matched_by: str
    heard: dict[str, set[tuple[int, int, int, int]]] = field(default_factory=dict)
    covered: dict[tuple[str, str, tuple[int, int, int, int]], int] = field(default_factory=dict)
    whole: dict[tuple[str, str], set[tuple[int, int, int, int]]] = field(default_factory=dict)
    alone: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    _sums: dict[tuple[str, str], _PartSum] = field(default_factory=dict)
    _missing: dict[tuple[str, str], Part] = field(default_factory=dict)

    def add(
        self, moment: tuple[int, int, int, int], ports: Iterable[str], parts: Sequence[Part]
    ) -> None:
        """One more call: what was heard of it, and what was found."""
        for port in ports:
            self.heard.setdefault(port, set()).add(moment)
        for part in parts:
            key = (part.port, part.leaf)
            if part.verdict == "missing":
                self._missing.setdefault(key, part)
            elif key in self._sums:
                self._sums[key].add(part)
            else:
                self._sums[key] = _PartSum.of(part)

    def cover(
        self,
        covered: Mapping[tuple[str, str, tuple[int, int, int, int]], int],
        alone: Mapping[tuple[str, str], str],
    ) -> None:
        """Samples of the reference's batches that were compared, and those that only we have."""
        for port, leaf, _ in covered:  # until now, moments were paired as they are
            if (port, leaf) not in self.whole:
                self.whole[port, leaf] = set(self.heard.get(port, ()))
        for key, samples in covered.items():
            self.covered[key] = self.covered.get(key, 0) + samples
        for place, words in alone.items():
            self.alone.setdefault(place, []).append(words)

    def parts(self) -> Iterator[Part]:
        """Every port and leaf, inputs first; then what one side lacks."""
        for key in sorted(self._sums, key=lambda key: key[0] != "input"):
            yield self._sums[key].part()
        yield from self._missing.values()


def _slim(part: Part) -> Part:
    """A part's words without what is summed up elsewhere."""
    return replace(part, difference=None, reference_summary=None, candidate_summary=None)


def _without(found: Difference | None) -> Difference | None:
    return None if found is None else replace(found, histogram=None)


def _merged(ours: Summary | None, theirs: Summary | None) -> Summary | None:
    return None if ours is None or theirs is None else ours.merge(theirs)


def _badness(part: Part) -> tuple[int, float]:
    return severity(part.verdict), part.floor_ratio or 0.0
