"""Which layer of the reference a layer of the candidate is, and how their tensors lie.

Equal names need no look at values. Another implementation has other names, other arguments and
perhaps other layouts: the candidate runs once under a recorder, and the two recordings are paired
as `compare` pairs them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch

from ...errors import OptionError, TapError
from ...recording.reader import Record, Recording
from ...taps.isolation import unchanged
from ...targets import Target
from ...targets.running import Settings, record_target
from ..align import align
from ..names import normalised, parse_map
from ..sites import SitePair, SitePairer
from ..touched import Apart, Touched
from ..transforms import Transform

__all__ = ["LaidOut", "Pairing", "pair_names", "paired"]

_Site = tuple[str, str, str]  # the candidate's layer, the port, the reference's leaf


@dataclass(frozen=True)
class LaidOut(Record):
    """A record of the reference under the candidate's leaf, in the candidate's layout."""

    source: Record | None = field(default=None, compare=False)
    transform: Transform | None = field(default=None, compare=False)

    @property
    def tensor_id(self) -> str | None:
        known = super().tensor_id
        return known if self.transform is None else f"{known} as {self.transform.name}"

    def tensor(self) -> torch.Tensor:
        tensor = super().tensor() if self.source is None else self.source.tensor()
        if self.transform is None:
            return tensor
        count = torch.Size(self.shape).numel()
        places = torch.arange(count).reshape(self.shape)
        values, places = self.transform.views(tensor, places)
        made = torch.empty(count, dtype=tensor.dtype)
        made[places.flatten()] = values.flatten()
        return made.reshape(self.shape)


def apart_in(touched: Touched, record: Record) -> Apart | None:
    """The tokens of a record that follow another choice of expert, in the candidate's layout."""
    source = record.source if isinstance(record, LaidOut) else None
    return touched.apart(source or record, record.shape)


@dataclass(frozen=True)
class Pairing:
    """The candidate's layers, each with its name in the reference, and how tensors correspond."""

    names: Mapping[str, str]
    sites: Mapping[_Site, SitePair] = field(default_factory=dict)
    absent: Collection[_Site] = ()
    by_values: bool = False

    def laid_out(self, layer: str, record: Record) -> Record | None:
        """A record of the reference as the candidate's layer has it; None where it lacks it."""
        if (layer, record.port, record.leaf) in self.absent:
            return None
        site = self.sites.get((layer, record.port, record.leaf))
        if site is None or (site.transform is None and site.candidate_leaf == record.leaf):
            return record
        shape = record.shape if site.transform is None else site.moments[0].candidate.shape
        made = {item.name: getattr(record, item.name) for item in fields(Record)}
        made |= {"leaf": site.candidate_leaf, "shape": shape}
        return LaidOut(**made, source=record, transform=site.transform)


def paired(
    recording: Recording, target: Target, layers: Collection[str], maps: Sequence[str]
) -> Pairing:
    """The pairs by name where names are enough, else those that `compare` finds.

    The target runs once for that, on what it is given here: one batch is enough.
    """
    names = pair_names(recording, layers, maps)
    known = {ours for theirs, ours in names.items() if theirs}
    lone = [name for name in recording.layers if name and name not in known]
    if not lone or len([name for name in layers if name and name not in names]) == 0:
        return Pairing(names)
    with tempfile.TemporaryDirectory(prefix="tensortap-") as folder:
        try:
            with unchanged(target.model):
                settings = Settings(layers=("all",), inputs=True)
                made, _ = record_target(target, str(Path(folder) / "own"), settings, _silent)
        except TapError:
            return Pairing(names)  # the run that blame makes says what is wrong
        return _by_values(recording, made, names, layers, maps)


def _by_values(
    recording: Recording,
    made: Recording,
    names: Mapping[str, str],
    layers: Collection[str],
    maps: Sequence[str],
) -> Pairing:
    pairs = align(recording, made, maps=maps)
    both = [pair for pair in pairs if pair.reference is not None and pair.candidate is not None]
    pairer = SitePairer(recording, made, pairs)
    found: dict[str, str] = {}
    sites: dict[_Site, SitePair] = {}
    absent: set[_Site] = set()
    for pair in both:
        assert pair.reference is not None and pair.candidate is not None
        name = pair.candidate.name
        if name not in layers:
            continue
        found[name] = pair.reference.name
        for site in pairer.pair(pair):
            crops = site.transform is not None and site.transform.crop
            if site.missing == "candidate":
                absent.add((name, site.port, site.leaf))
            elif not site.missing and not site.problem and not crops and site.moments:
                sites[name, site.port, site.leaf] = site
    taken = set(found.values())
    found |= {name: ours for name, ours in names.items() if name not in found and ours not in taken}
    return Pairing(found, sites, absent, by_values=True)


def _silent(done: int, total: int | None) -> None:
    """Progress that nobody asked for."""


def pair_names(
    recording: Recording, layers: Iterable[str], maps: Iterable[str] = ()
) -> dict[str, str]:
    """The candidate's layers that the reference has, each with its name there."""
    mine = list(layers)
    found: dict[str, str] = {}
    for rule in [parse_map(text) for text in maps]:
        for ours in recording.layers:
            theirs = rule.target(ours)
            if theirs in mine and theirs not in found:
                found[theirs] = ours
        if not found:
            raise OptionError(
                f"The map '{rule.text}' leads to no layer of the candidate, which has "
                f"{', '.join(repr(name) for name in mine[1:4])}, …."
            )
    taken = set(found.values())
    found.update((n, n) for n in mine if n in recording.layers and n not in {*found, *taken})
    taken = set(found.values())
    plain = {normalised(name): name for name in recording.layers if name not in taken}
    for name in mine:
        ours = plain.get(normalised(name), "")
        if name and ours and name not in found and ours not in found.values():
            found[name] = ours
    return found
