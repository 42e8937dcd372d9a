"""The floor run: a third recording whose distance from the reference is the noise to expect."""

from __future__ import annotations

from collections.abc import Sequence

from ..recording.reader import Recording
from ..targets.floor_run import FloorRun
from .align import align
from .measure import MomentMeasurement, SiteMeasurement, measure
from .place import HERE, Place
from .results import Moment, Part
from .sites import SitePair, SitePairer

__all__ = ["Floor", "FloorHere"]


class FloorHere:
    """The floor at one site, moment by moment."""

    def __init__(self, measured: SiteMeasurement) -> None:
        self._moments: dict[Moment, MomentMeasurement] = {}
        for moment in measured.moments:  # several, where samples were batched otherwise
            known = self._moments.get(moment.moment)
            if known is None or moment.rmse > known.rmse:
                self._moments[moment.moment] = moment

    def at(self, moment: Moment) -> MomentMeasurement | None:
        """The floor at a moment; at one that the floor run lacks, the largest of the others."""
        found = self._moments.get(moment)
        if found is not None:
            return found
        return max(self._moments.values(), key=lambda m: m.rmse, default=None)


class Floor:
    """Measures reference against floor run where somebody asks, and not before."""

    def __init__(
        self,
        reference: Recording,
        run: FloorRun,
        names: Sequence[str] | None = None,
        place: Place = HERE,
    ) -> None:
        self.name = run.name
        self._place = place
        pairer = SitePairer(reference, run.recording)
        self._sites: dict[tuple[str, str, str], SitePair] = {}
        for pair in align(reference, run.recording, names=names):
            if pair.reference is None or pair.candidate is None:
                continue
            for site in pairer.pair(pair):
                if not site.problem and not site.missing and site.moments:
                    self._sites[pair.reference.name, site.port, site.leaf] = site

    def __contains__(self, place: tuple[str, Part]) -> bool:
        """Whether the floor run has the tensors of this part of a layer."""
        layer, part = place
        site = self._sites.get((layer, part.port, part.leaf))
        return site is not None and all(
            pair.reference.stored and pair.candidate.stored for pair in site.moments
        )

    def here(self, layer: str, port: str, leaf: str) -> FloorHere | None:
        """The floor at one site; None where the floor run does not have it."""
        site = self._sites.get((layer, port, leaf))
        if site is None:
            return None
        return FloorHere(measure(site, percentiles=False, place=self._place))
