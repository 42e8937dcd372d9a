"""The candidate's own run, seen from the outside.

One run tells how far each layer's inputs and outputs are from the reference's, which tensors would
change at all if the reference's were put there, and which layer's output is which other's input: so
that most of the runs that blame asks for need not be made.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ...numerics.difference import Difference
from ...recording.reader import Record
from ...taps.patching import call_with, leaves_of, leaves_of_call, match_leaves, why_not_put
from ..precision import offset_of
from .alone import run_alone, runs_alone
from .levels import contains
from .stage import Put, Stage, measured

__all__ = ["Errors", "Trace"]

_weak: Any = StorageWeakRef


class Errors:
    """Relative errors of the leaves of one port, merged over batches and calls."""

    def __init__(self) -> None:
        self._leaves: dict[str, Difference] = {}

    def add(self, leaf: str, found: Difference) -> None:
        known = self._leaves.get(leaf)
        self._leaves[leaf] = found if known is None else known.merge(found)

    @property
    def error(self) -> float:
        """The largest of the leaves; infinite where only one side is a number, NaN of nothing."""
        if any(found.disagreeing for found in self._leaves.values()):
            return math.inf
        known = [f.error for f in self._leaves.values() if not math.isnan(f.error)]
        zeros = [f for f in self._leaves.values() if f.finite and math.isnan(f.error)]
        if any(f.max_abs > 0 for f in zeros):
            return math.inf  # something where the reference is zero
        return max(known, default=0.0 if zeros else math.nan)

    @property
    def offset(self) -> float:
        """How large the reference's values are beside their spread."""
        return max((offset_of(found) for found in self._leaves.values()), default=1.0)

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(name for found in self._leaves.values() for name in found.dtypes)


@dataclass(frozen=True)
class _Produced:
    """A tensor that a layer returned, known by its memory and not kept alive."""

    layer: str
    leaf: str
    record: Record | None
    storage: Any  # StorageWeakRef, which is untyped
    key: tuple[Any, ...]


@dataclass
class _Link:
    """One layer's input is another's output, and nobody else's."""

    source: str
    sole: bool = True
    same: bool = True  # the reference has the same tensor in both places


class Trace:
    """Watches all layers that the reference knows in one run of the candidate."""

    def __init__(self, keep_outputs: Iterable[str], budget: int) -> None:
        self.outputs: dict[str, Errors] = defaultdict(Errors)
        self.inputs: dict[str, Errors] = defaultdict(Errors)
        self.changed: dict[Put, set[str]] = defaultdict(set)
        self.fitting: set[Put] = set()
        self.counts: dict[tuple[str, int, int], dict[str, int]] = {}
        self.own: dict[tuple[str, int, int], torch.Tensor] = {}
        self.order: list[str] = []
        self.too_large = False
        self.repeated: dict[str, int] = {}  # how often in a pass
        self.alone: dict[str, Errors] = defaultdict(Errors)
        self.inherited: dict[str, Errors] = defaultdict(Errors)
        self._inexact: set[str] = set()
        self._tried: set[str] = set()
        self._untried: set[str] = set()
        self._arguments: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
        self.feeding: set[str] = set()
        self._later: dict[Put, set[str]] = defaultdict(set)
        self._keep = set(keep_outputs)
        self._room = budget
        self._produced: list[_Produced] = []
        self._links: dict[str, dict[str, _Link]] = defaultdict(dict)
        self._pending: list[tuple[_Produced, str, str]] = []

    # What it saw.

    def no_op(self, where: Put) -> bool:
        """Whether the reference's tensors are what stands there anyway."""
        inner = any(contains(name, where.layer) for name in self.feeding)
        later = set() if inner else self._later[where]
        return where in self.fitting and not self.changed[where] and not later

    def twin(self, layer: str) -> Put | None:
        """The output that stands at this layer's input, where putting one is putting the other."""
        if layer in self.repeated:
            return None
        changed = self.changed[Put(layer, "input")]
        links = {leaf: self._links[layer].get(leaf) for leaf in changed}
        sources = {
            link.source if link and link.sole and link.same else None for link in links.values()
        }
        if len(sources) != 1 or None in sources:
            return None
        (source,) = sources
        assert source is not None
        if source in self.repeated:
            return None
        where = Put(source, "output")
        return where if len(self.changed[where]) == len(changed) else None

    def exact(self, layer: str) -> bool:
        """Whether a leaf makes of the reference's inputs just what the reference has."""
        return layer in self._tried and layer not in self._inexact | self._untried

    def made_alone(self, layer: str) -> float:
        """The error that a leaf makes of the reference's inputs; NaN where it was not tried."""
        known = layer in self._tried and layer not in self._untried
        return self.alone[layer].error if known else math.nan

    def follows(self, layer: str, source: str) -> bool:
        """Whether a layer is given another one's output."""
        return any(link.source == source for link in self._links[layer].values())

    # Watching.

    def enter(
        self, stage: Stage, layer: str, call: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._look_back(layer)
        if stage.nth:
            self.repeated[layer] = max(self.repeated.get(layer, 0), stage.nth + 1)
        if layer in self._keep:
            self.counts[layer, stage.batch, call] = dict(stage.calls)
        module = stage.modules[layer]
        own = leaves_of_call(module, args, kwargs)
        for leaf, tensor in own.items():
            self._link(stage, layer, call, leaf, tensor)
        records = stage.known.at(layer, "input", stage.batch, call)
        pairs = {
            leaf: (records[name], own[leaf])
            for leaf, name in match_leaves(module, own, records).items()
        }
        wanted = self._compare(stage, Put(layer, "input"), call, pairs, self.inputs[layer])
        more = stage.absent(module, Put(layer, "input"), call, args, kwargs)
        for name in more:
            self.fitting.add(Put(layer, "input"))
            self.changed[Put(layer, "input")].add(f"[{name!r}]")
        if runs_alone(module):
            self._arguments[layer].append((*call_with(module, args, kwargs, more), wanted))

    def leave(self, stage: Stage, layer: str, call: int, output: Any) -> None:
        if layer not in self.order:
            self.order.append(layer)
        own = leaves_of(output)
        records = stage.known.at(layer, "output", stage.batch, call)
        pairs = {leaf: (records[leaf], own[leaf]) for leaf in own if leaf in records}
        wanted = self._compare(stage, Put(layer, "output"), call, pairs, self.outputs[layer])
        if self._arguments[layer]:
            self._try(stage, layer, self._arguments[layer].pop(), records, wanted, own)
        for leaf, tensor in own.items():
            key = _key(tensor)
            if key is not None:
                storage = _weak(tensor.untyped_storage())
                self._produced.append(_Produced(layer, leaf, records.get(leaf), storage, key))
        if layer in self._keep:
            self._keep_output(layer, stage.batch, call, own)

    def finish(self) -> None:
        """The run is over: what is still alive was given away."""
        self._look_back(None)
        self._produced.clear()

    # Inside.

    def _compare(
        self,
        stage: Stage,
        where: Put,
        call: int,
        pairs: dict[str, tuple[Record, torch.Tensor]],
        errors: Errors,
    ) -> dict[str, torch.Tensor]:
        own = {leaf: tensor for leaf, (_, tensor) in pairs.items()}
        wanted = stage.replacements(stage.modules[where.layer], where, call, own)
        if wanted:
            self.fitting.add(where)
        later = where.port == "input" and stage.nth > 0
        for leaf, (record, tensor) in pairs.items():
            if leaf not in wanted:
                self.changed[where].discard(leaf)
                continue
            if not _same_bits(wanted[leaf], tensor):
                (self._later if later else self.changed)[where].add(leaf)
            if tensor.is_floating_point() or tensor.is_complex():
                errors.add(leaf, measured(record.tensor(), tensor))
        return wanted

    def _try(
        self,
        stage: Stage,
        layer: str,
        given: tuple[Any, ...],
        records: Mapping[str, Record],
        expected: dict[str, torch.Tensor],
        own: Mapping[str, torch.Tensor],
    ) -> None:
        """Run a leaf on the reference's inputs, and see what it makes of them."""
        args, kwargs, inputs = given
        made = run_alone(stage.modules[layer], args, kwargs, inputs) if inputs else None
        if made is None or not expected or set(expected) - set(made):
            self._untried.add(layer)
            return
        self._tried.add(layer)
        for leaf, tensor in made.items():
            if leaf not in expected or tensor.shape != expected[leaf].shape:
                continue
            if tensor.is_floating_point() or tensor.is_complex():
                self.alone[layer].add(leaf, measured(records[leaf].tensor(), tensor))
                if leaf in own and own[leaf].shape == tensor.shape:
                    inherited = measured(tensor.detach().to("cpu"), own[leaf])
                    self.inherited[layer].add(leaf, inherited)
            if not _same_bits(expected[leaf], tensor):
                self._inexact.add(layer)

    def _link(self, stage: Stage, layer: str, call: int, leaf: str, tensor: torch.Tensor) -> None:
        key = _key(tensor)
        found = None
        for item in reversed(self._produced if key is not None else []):
            if item.key == key and not item.storage.expired():
                found = item
                break
        known = self._links[layer].get(leaf)
        if found is None:
            if known is not None:
                known.sole = False
            return
        if stage.nth and (contains(layer, found.layer) or contains(found.layer, layer)):
            self.feeding.add(layer)
        self._pending.append((found, layer, leaf))
        records = stage.known.at(layer, "input", stage.batch, call)
        recorded = match_leaves(stage.modules[layer], {leaf: tensor}, records)
        if not recorded and found.record is not None:
            if not why_not_put(found.record.tensor(), tensor):
                stage.known.lend(layer, stage.batch, call, leaf, found.record)
            record: Record | None = found.record
        else:
            record = records[recorded[leaf]] if recorded else None
        same = record is not None and _same_record(record, found.record)
        if known is None:
            self._links[layer][leaf] = _Link(found.layer, same=same)
        else:
            known.sole &= known.source == found.layer
            known.same &= same

    def _look_back(self, entering: str | None) -> None:
        """Whoever still holds a tensor that a later layer has taken uses it elsewhere too.

        Asked when a layer is entered that is not inside the one that took it: by then whoever made
        the call has let go of it.
        """
        left = []
        for produced, taker, leaf in self._pending:
            if entering is not None and contains(taker, entering):
                left.append((produced, taker, leaf))
            elif not produced.storage.expired():
                link = self._links[taker].get(leaf)
                if link is not None:
                    link.sole = False
        self._pending = left
        self._produced = [item for item in self._produced if not item.storage.expired()]

    def _keep_output(self, layer: str, batch: int, call: int, own: dict[str, torch.Tensor]) -> None:
        """The first float of a layer's output, so that it can be told what the layer inherits."""
        tensor = first_float(own)
        if tensor is None:
            return
        self._room -= tensor.numel() * tensor.element_size()
        if self._room < 0:
            self.too_large = True
            return
        self.own[layer, batch, call] = tensor.detach().to("cpu", copy=True)


def first_float(leaves: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """The first tensor of real numbers, rather one that is no mere number."""
    floats = [t for t in leaves.values() if t.is_floating_point()]
    return next((t for t in floats if t.dim()), floats[0] if floats else None)


def _key(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """What two looks at one tensor have in common, and a look at a changed one has not."""
    try:
        storage = tensor.untyped_storage()
        version = None if tensor.is_inference() else tensor._version
        return (
            storage.data_ptr(),
            tensor.storage_offset(),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
            version,
        )
    except (RuntimeError, NotImplementedError):  # sparse and other tensors without a memory
        return None


def _same_bits(wanted: torch.Tensor, own: torch.Tensor) -> bool:
    if torch.equal(wanted, own):
        return True
    if not wanted.is_floating_point():
        return False
    left, right = (t if t.element_size() > 1 else t.float() for t in (wanted, own))
    both = left.isnan() & right.isnan()
    return bool(both.any()) and bool((both | (left == right)).all())


def _same_record(record: Record, other: Record | None) -> bool:
    if other is None or record.shape != other.shape or record.dtype != other.dtype:
        return False
    if record.tensor_id == other.tensor_id:
        return True
    return bool(torch.equal(record.tensor(), other.tensor()))
