"""Which tensors of two paired layers are compared: ports, leaves, moments and layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..recording.reader import Layer, Record, Recording
from .align import LayerPair
from .transforms import Transform

__all__ = ["MomentPair", "SitePair", "SitePairer"]

_Key = tuple[int, int, int, int, int]  # rank, epoch, batch, call, and which of several


@dataclass(frozen=True)
class MomentPair:
    """The records of one moment on both sides; epoch, batch and call are the reference's.

    `*_samples` (start, stop) are the rows of the first axis that are meant, where the two runs
    divided their samples into other batches.
    """

    epoch: int
    batch: int
    call: int
    reference: Record
    candidate: Record
    reference_samples: tuple[int, int] | None = None
    candidate_samples: tuple[int, int] | None = None

    def tensors(self, transform: Transform | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The two tensors as views of equal shape."""
        reference = _rows(self.reference.tensor(), self.reference_samples)
        candidate = _rows(self.candidate.tensor(), self.candidate_samples)
        if transform is None:
            return reference, candidate
        return transform.reference(reference), transform.candidate(candidate)


@dataclass(frozen=True)
class SitePair:
    """One port and leaf of a paired layer over all its moments.

    `transform` is None when the layouts agree. `problem` says why the tensors cannot be compared,
    `missing` names the side that lacks the leaf, `unpaired` the moments that one side alone has.
    """

    port: str
    leaf: str
    candidate_leaf: str
    moments: tuple[MomentPair, ...]
    transform: Transform | None = None
    problem: str = ""
    missing: str = ""
    unpaired: tuple[str, ...] = ()


class SitePairer:
    """Pairs the tensors of one layer after the other, and learns from what it saw."""

    def __init__(self, reference: Recording, candidate: Recording) -> None:
        self._recordings = (reference, candidate)

    def pair(self, pair: LayerPair) -> list[SitePair]:
        """Every port and leaf of two paired layers; nothing for a layer that stands alone."""
        if pair.reference is None or pair.candidate is None:
            return []
        ours, theirs = _sites(pair.reference), _sites(pair.candidate)
        result = []
        for (port, leaf), records in ours.items():
            other = theirs.pop((port, leaf), None)
            if other is None:
                result.append(SitePair(port, leaf, leaf, (), missing="candidate"))
            else:
                result.append(_pair(port, leaf, leaf, records, other))
        result += [SitePair(p, leaf, leaf, (), missing="reference") for p, leaf in theirs]
        return result


def _sites(layer: Layer) -> dict[tuple[str, str], list[Record]]:
    found: dict[tuple[str, str], list[Record]] = {}
    for record in layer.records:
        found.setdefault((record.port, record.leaf), []).append(record)
    return found


def _pair(
    port: str, leaf: str, candidate_leaf: str, ours: Sequence[Record], theirs: Sequence[Record]
) -> SitePair:
    left, right = _moments(ours), _moments(theirs)
    pairs = tuple(
        MomentPair(record.epoch, record.batch, record.call, record, right[key])
        for key, record in left.items()
        if key in right
    )
    unpaired = [f"{_moment(key)} only in the reference" for key in left if key not in right]
    unpaired += [f"{_moment(key)} only in the candidate" for key in right if key not in left]
    problem = "" if pairs else "The two sides have no moment in common."
    for pair in pairs:
        if pair.reference.shape != pair.candidate.shape:
            problem = (
                f"The shapes differ: {list(pair.reference.shape)} in the reference, "
                f"{list(pair.candidate.shape)} in the candidate."
            )
            break
    return SitePair(port, leaf, candidate_leaf, pairs, problem=problem, unpaired=tuple(unpaired))


def _moments(records: Sequence[Record]) -> dict[_Key, Record]:
    found: dict[_Key, Record] = {}
    for record in records:
        key = (record.rank, record.epoch, record.batch, record.call, 0)
        while key in found:
            key = (*key[:4], key[4] + 1)
        found[key] = record
    return found


def _moment(key: _Key) -> str:
    rank, epoch, batch, call, _ = key
    where = f"epoch {epoch}, batch {batch}, call {call}"
    return f"rank {rank}, {where}" if rank else where


def _rows(tensor: torch.Tensor, samples: tuple[int, int] | None) -> torch.Tensor:
    return tensor if samples is None else tensor[samples[0] : samples[1]]
