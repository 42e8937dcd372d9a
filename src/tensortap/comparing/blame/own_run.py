"""The candidate's own run as a recording, so that `compare` itself judges what comes out of it.

Blame and compare must not disagree about one pair of runs. So the run that blame watches is
recorded as the reference was, and the final output, and where the bits part, are what a comparison
of the two recordings says.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import nn

from ...errors import TapError
from ...recording.reader import Recording
from ...recording.reader import open as open_recording
from ...selection.sites import unwrap
from ...taps.session import Recorder, TapWarning, record
from ...targets import Target
from ...targets.floor_run import FloorRun
from ..compare import verdicts
from ..judge import AGAINST_ESTIMATE, AGAINST_FLOOR, scatter
from ..maker import Maker
from ..results import BitDifference, Comparison, LayerComparison, Part, Verdict
from ..touched import Touched
from .pairing import LaidOut
from .reference import Known
from .stage import Final

__all__ = ["FinalVerdict", "OwnRun"]

_JUDGED = ("identical", "within", "diverged")


@dataclass(frozen=True)
class FinalVerdict:
    """What compare says of the final output.

    `floor` is the error to be expected there, `allowed` the largest that is within, both relative;
    `measured` says whether a floor run has it.
    """

    verdict: Verdict
    why: str
    floor: float
    allowed: float
    measured: bool


class OwnRun:
    """One run of the candidate, recorded while it is watched, and compared with the reference."""

    def __init__(self, recording: Recording, target: Target, names: Mapping[str, str]) -> None:
        self._recording, self._target, self._names = recording, target, names
        self._folder = tempfile.TemporaryDirectory(prefix="tensortap-own-")
        self._recorder: Recorder | None = None
        self.problem = ""  # why there is no comparison
        self.comparison: Comparison | None = None
        self.touched: Touched | None = None  # the tokens that follow another choice of expert
        self._routers: frozenset[str] = frozenset()

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Record what runs while this is open: the layers and ports that the reference has."""
        model = self._target.model
        assert isinstance(model, nn.Module)
        ours = [name for name in self._names.values() if name in self._recording]
        inputs = any(r.port == "input" for name in ours for r in self._recording[name].records)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TapWarning)  # what fails is said once, by us
            recorder = record(
                unwrap(model),
                f"{self._folder.name}/run",
                layers=[name for name, ours in self._names.items() if ours in self._recording],
                inputs=inputs,
                mode=self._target.mode,
            )
            self._recorder = recorder
            with recorder:
                yield
        if recorder.failure is not None:
            self.problem = f"its own run could not be recorded: {recorder.failure}"

    def begin(self, number: int) -> None:
        """A batch begins: it has the moment that it has in the reference."""
        if self._recorder is not None and self._recorder.failure is None:
            epoch, batch = self._recording.steps[number]
            self._recorder.moment(epoch=epoch, batch=batch)

    def compare(self, floor: FloorRun | None, maps: Sequence[str]) -> None:
        """Compare the two runs; the recording of this one is not kept."""
        try:
            if not self.problem:
                own = open_recording(f"{self._folder.name}/run", partial=True)
                found, mixtures = verdicts(self._recording, own, floor=floor, maps=maps)
                self.touched = mixtures.touched if mixtures.touched else None
                self._routers = frozenset(mixtures.routers)
                self.comparison = replace(found, candidate=self._target.name or "the candidate")
        except TapError as error:
            self.problem = str(error)
        finally:
            self._folder.cleanup()

    @property
    def routers(self) -> frozenset[str]:
        """The layers that return a choice of experts and do so as the reference, by its own names.

        One that was given other values chooses others for a part of the tokens.
        """
        rows = () if self.comparison is None else self.comparison.layers
        return frozenset(
            row.candidate_layer
            for row in rows
            if row.layer in self._routers
            and row.candidate_layer is not None
            and (row.verdict != "diverged" or _given_others(row))
        )

    @property
    def chose_otherwise(self) -> bool:
        """Whether any tokens chose other experts."""
        rows = () if self.comparison is None else self.comparison.layers
        return any(row.flips is not None and row.flips.changed for row in rows)

    @property
    def hidden(self) -> bool:
        """Whether tokens chose other experts where no layer returns the choice."""
        rows = () if self.comparison is None else self.comparison.layers
        found = [row for row in rows if row.flips is not None and row.flips.changed]
        return any(row.layer not in self._routers for row in found)

    def final(self, known: Known, final: Final) -> FinalVerdict | None:
        """The verdict on the final output; None where it could not be compared."""
        if self.comparison is None:
            return None
        rows = self.comparison.layers
        row = next((r for r in rows if r.candidate_layer == final.layer), None)
        if row is None or row.verdict not in _JUDGED:
            return None
        record = known.at(final.layer, "output", known.batches - 1, 0).get(final.leaf)
        record = record or known.at(final.layer, "output", 0, 0)[final.leaf]
        source = record.source if isinstance(record, LaidOut) else None
        leaf = (source or record).leaf
        part = next((p for p in row.parts if p.port == "output" and p.leaf == leaf), row.main)
        if part is None or part.verdict not in _JUDGED:
            return None
        why = part.why if part.verdict == row.verdict else f"{_named(row.main)}{row.why}"
        floor = part.floor or 0.0
        limit = AGAINST_FLOOR if part.floor_measured else AGAINST_ESTIMATE
        allowed = floor * limit * scatter(part.difference.finite if part.difference else 1)
        return FinalVerdict(row.verdict, why, floor, allowed, part.floor_measured)

    def bits(self) -> BitDifference | None:
        """Where the bits of the two runs part, in the candidate's names."""
        found = None if self.comparison is None else self.comparison.first_bit_difference
        if found is None or self.comparison is None:
            return None
        theirs = {row.layer: row.candidate_layer or row.layer for row in self.comparison.layers}
        maker = found.maker
        if maker is not None:
            maker = Maker(
                theirs.get(maker.layer, maker.layer),
                None if maker.after is None else theirs.get(maker.after, maker.after),
                None if maker.before is None else theirs.get(maker.before, maker.before),
                maker.source,
            )
        return BitDifference(replace(found.row, layer=theirs[found.row.layer]), maker)

    def on_the_way(self, final: Final) -> str | None:
        """The first layer that diverged before the final output, in the candidate's name."""
        first = None if self.comparison is None else self.comparison.first_divergence
        if first is None or first.candidate_layer in (None, final.layer):
            return None
        return first.candidate_layer


def _given_others(row: LayerComparison) -> bool:
    """Whether a router chose others since it was given other values, as far as one can tell."""
    flips = row.flips
    return row.origin == "inherited" and flips is not None and 2 * flips.changed < flips.tokens


def _named(part: Part | None) -> str:
    return f"{part.leaf}: " if part is not None and part.leaf else ""
