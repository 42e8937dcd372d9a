"""A run in higher precision says which of two sides is nearer to it: it may be the candidate."""

from __future__ import annotations

from collections.abc import Sequence

from ..numerics.difference import difference_of
from ..recording.reader import Record, Recording
from .align import align
from .sites import SitePair, SitePairer

__all__ = ["Truth"]


class Truth:
    """A recording that both sides are measured against."""

    def __init__(
        self, reference: Recording, truth: Recording, names: Sequence[str] | None = None
    ) -> None:
        self.path = truth.path
        pairer = SitePairer(reference, truth)
        self._records: dict[tuple[str, str, str, int, int, int], Record] = {}
        for pair in align(reference, truth, names=names):
            if pair.reference is None:
                continue
            for site in pairer.pair(pair):
                if site.problem or site.missing or site.transform is not None:
                    continue
                for m in site.moments:
                    place = (pair.reference.name, site.port, site.leaf, m.epoch, m.batch, m.call)
                    self._records[place] = m.candidate

    @property
    def notes(self) -> list[str]:
        """That the truth says nothing, if it does not."""
        if any(record.stored for record in self._records.values()):
            return []
        return [
            f"The truth {self.path} has no tensor in common with the reference: it says nothing."
        ]

    def nearer(self, layer: str, site: SitePair) -> str | None:
        """`reference` or `candidate`; None where neither is, or the truth lacks the site."""
        if site.transform is not None:
            return None
        ours, theirs = [], []
        for m in site.moments:
            true = self._records.get((layer, site.port, site.leaf, m.epoch, m.batch, m.call))
            stored = m.reference.stored and m.candidate.stored
            if true is None or not true.stored or not stored or true.shape != m.reference.shape:
                continue
            left, right = m.tensors()
            ours.append((true.tensor(), left))
            theirs.append((true.tensor(), right))
        if not ours:
            return None
        left_error = difference_of(ours, percentiles=False).rmse
        right_error = difference_of(theirs, percentiles=False).rmse
        if left_error < right_error:
            return "reference"
        return "candidate" if right_error < left_error else None
