"""One run with the reference's outputs at every layer: what each piece of code makes of them.

Whatever is wrong in such a run was made where it shows: in a layer, or in the code of a module
between the layers that it calls, since nothing wrong comes from further up. So code that is not a
layer can be named, also the model's own, and so can layers that take no tensors or run twice.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import torch
from torch import nn

from ...recording.reader import Record
from ...taps.patching import absent_arguments, leaves_of, leaves_of_call, match_leaves
from ..causes.arguments import hides_nothing
from ..judge import AGAINST_ESTIMATE
from ..maker import Maker, contains
from ..precision import estimated_floor, offset_of
from .explaining import Wrong
from .stage import Put, Stage, measured

__all__ = ["Forced", "Site", "bad_sites"]

_OPERATIONS = 8  # of the code between two layers, at most about so many
_AGAINST_PEERS = 3.0
_PEERS = 2
_FINE = 1e-5  # a precision in which whole numbers are not decided by rounding


# An error, what rounding explains of it, and what is wrong where it is more.
_Worst = tuple[float, float, Wrong | None, int]


@dataclass(frozen=True)
class Site:
    """A place in the forward of a layer, and how far it is off with all that went before right.

    `made_in` says which module's code, after and before which layers; `floor` what rounding
    explains of `error`. `wrong` is what is there, with what should be. `calls` are those of a
    pass in which it is off.
    """

    made_in: Maker
    error: float
    floor: float
    wrong: Wrong | None = field(default=None, repr=False, compare=False)
    calls: tuple[int, ...] = ()
    count: int = 0  # of the values that the error is a mean of

    @property
    def layer(self) -> str:
        return self.made_in.layer

    @property
    def reshaped(self) -> bool:
        """Whether what is there has another shape, so that nothing can be put in its place."""
        return self.wrong is not None and self.wrong.reshaped

    @property
    def lost(self) -> bool:
        """Whether nothing is there, or other whole numbers: of these no error is a measure."""
        tensor = None if self.wrong is None else self.wrong.tensor
        return math.isinf(self.error) and (
            tensor is None or not (tensor.is_floating_point() or tensor.is_complex())
        )

    def puts(self, stage: Stage) -> list[Put]:
        """Where the reference's tensors make it right.

        Of a layer that feeds itself at the calls that are off, so that the others stay as they are.
        """
        before = self.made_in.before
        if before is None:
            return [Put(self.layer, "output")]
        if not stage.feeds_itself(before):
            return [Put(before, "input")]
        return [Put(before, "input", call) for call in self.calls]

    @property
    def place(self) -> str:
        """What places of this kind have in common, in blocks of any number."""
        made = self.made_in
        return re.sub(r"\d+", "#", "|".join((made.layer, made.after or "", made.before or "")))


@dataclass
class _Call:
    """A call that has not returned: what it was given, and the last layer that it called."""

    layer: str
    given: bool | None  # whether its inputs are the reference's; None where that is unknown
    after: str | None = None
    line: tuple[str, int] | None = None


class Forced:
    """Watches all layers in one run, with the reference's outputs put at them."""

    def __init__(
        self,
        precisions: tuple[str | None, ...],
        unit: float,
        grids: Callable[[str], float] = lambda layer: 0.0,
        keep: Maker | None = None,
    ) -> None:
        self._grids = grids
        self.sites: list[Site] = []
        self.left = math.nan
        self._precisions, self._whole, self._keep = precisions, unit <= _FINE, keep
        self._open: list[_Call] = []

    def run(self, stage: Stage, layers: Sequence[str]) -> None:
        """Make the run; `left` is what the model's own code still makes of the final error."""
        final = stage.final.layer
        puts = [Put(name, "output") for name in layers if not contains(name, final)]
        self.left = stage.run(puts, dict.fromkeys(layers, self))

    def enter(
        self, stage: Stage, layer: str, call: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        module = stage.modules[layer]
        own = leaves_of_call(module, args, kwargs)
        names = match_leaves(module, own, stage.known.at(layer, "input", stage.batch, call))
        wanted = stage.replacements(
            module, Put(layer, "input"), call, {leaf: own[leaf] for leaf in names}
        )
        unknown = [t for leaf, t in own.items() if t.is_floating_point() and leaf not in wanted]
        outer = self._open[-1] if self._open else None
        line = None if outer is None else _line(stage.modules[outer.layer])
        given: bool | None = not unknown or None
        regrouped = bool(unknown) or self._decided_otherwise(wanted, own)
        records = stage.known.at(layer, "input", stage.batch, call)
        of = {leaf: records[theirs] for leaf, theirs in names.items()}
        at = (layer, stage.batch, call)
        worst = None if regrouped else self._worst(at, of, wanted, own)
        if regrouped:  # other tokens, or other experts for them: what comes of it is not judged
            given = None
            if outer is not None:
                outer.given = None
        if worst is None or not worst[0] > worst[1]:
            worst = self._lost(stage, at, module, args, kwargs, records) or worst
        if worst is not None and outer is not None:
            if worst[0] > worst[1]:
                given = False
            if outer.given:
                source = _source(outer.line, line)
                self._add(Maker(outer.layer, outer.after, layer, source), worst, stage.nth)
        self._open.append(_Call(layer, given, None, _first_line(module)))
        if outer is not None:
            outer.line = line or outer.line

    def leave(self, stage: Stage, layer: str, call: int, output: Any) -> None:
        done = self._open.pop()
        if self._open:
            self._open[-1].after = layer
        own = leaves_of(output)
        wanted = stage.replacements(stage.modules[layer], Put(layer, "output"), call, own)
        if self._decided_otherwise(wanted, own):
            return
        records = stage.known.at(layer, "output", stage.batch, call)
        worst = self._worst((layer, stage.batch, call), records, wanted, own)
        reshaped = self._reshaped((layer, stage.batch, call), stage.modules[layer], records, own)
        if reshaped is not None:
            if self._open:  # what it hands on is not the reference's
                self._open[-1].given = None
            if worst is None or not worst[0] > worst[1]:
                worst = reshaped
        if worst is not None and done.given:
            worst = (worst[0], max(worst[1], _AGAINST_PEERS * self._grids(layer)), *worst[2:])
            source = _source(done.line, None) if done.after is not None else ""
            self._add(Maker(layer, done.after, None, source), worst, stage.nth)

    def _add(self, made_in: Maker, worst: _Worst, call: int) -> None:
        error, floor, wrong, count = worst
        if not error > floor and (self._keep is None or _place(self._keep) != _place(made_in)):
            wrong = None
        calls = {call} if error > floor else set()
        for at, site in enumerate(self.sites):
            if _place(site.made_in) == _place(made_in):
                both = tuple(sorted({*site.calls, *calls}))
                self.sites[at] = replace(site, calls=both)
                if error > site.error:
                    self.sites[at] = Site(made_in, error, floor, wrong, both, count)
                return
        self.sites.append(Site(made_in, error, floor, wrong, tuple(calls), count))

    def _decided_otherwise(
        self, wanted: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]
    ) -> bool:
        """Whether whole numbers differ that rounding may have decided, as in a router."""
        return not self._whole and any(
            not (t.is_floating_point() or t.is_complex()) and not torch.equal(t, own[leaf])
            for leaf, t in wanted.items()
        )

    def _worst(
        self,
        at: tuple[str, int, int],
        records: Mapping[str, Record],
        wanted: Mapping[str, torch.Tensor],
        own: Mapping[str, torch.Tensor],
    ) -> _Worst | None:
        """The leaf that is furthest above rounding: its error, its floor, and what is wrong."""
        found: list[_Worst] = []
        for leaf, reference in wanted.items():
            tensor = own[leaf]
            if not (tensor.is_floating_point() or tensor.is_complex()):
                if self._whole and not torch.equal(reference, tensor):
                    other = Wrong(*at, records[leaf], tensor.detach().to("cpu", copy=True))
                    found.append((math.inf, 0.0, other, 0))
                continue
            difference = measured(reference.to("cpu"), tensor)
            error = math.inf if difference.disagreeing else difference.error
            if math.isnan(error):
                error = math.inf if difference.max_abs > 0 else 0.0
            floor = AGAINST_ESTIMATE * estimated_floor(
                difference.dtypes, self._precisions, _OPERATIONS, offset_of(difference)
            )
            wrong: Wrong | None = None
            if error > floor or self._keep is not None:
                wrong = Wrong(*at, records[leaf], tensor.detach().to("cpu", copy=True))
            found.append((error, floor, wrong, difference.finite))
        return max(found, key=lambda item: (item[0] > item[1], item[0]), default=None)

    def _lost(
        self,
        stage: Stage,
        at: tuple[str, int, int],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        records: Mapping[str, Record],
    ) -> _Worst | None:
        """An argument that the reference's layer was given, and this one was not."""
        layer, _, call = at
        missing = absent_arguments(module, args, kwargs, records)
        for name in stage.absent(module, Put(layer, "input"), call, args, kwargs):
            record = records[next(iter(missing[name].values()))]
            if not hides_nothing(record.tensor(), record.leaf):
                return math.inf, 0.0, Wrong(*at, record, None, name), 0
        return None

    def _reshaped(
        self,
        at: tuple[str, int, int],
        module: nn.Module,
        records: Mapping[str, Record],
        own: Mapping[str, torch.Tensor],
    ) -> _Worst | None:
        """An output of another shape, of a layer that was given what the reference's was.

        One with weights of another width is no bug, but another model.
        """
        widths = {p.shape[0] for p in module.parameters(recurse=False) if p.dim()}
        for leaf, tensor in own.items():
            record = records.get(leaf)
            floats = tensor.is_floating_point() or tensor.is_complex()
            if record is None or not floats or record.shape == tuple(tensor.shape):
                continue
            changed = set(tensor.shape) - set(record.shape)
            if not changed & widths:
                copied = tensor.detach().to("cpu", copy=True)
                return math.inf, 0.0, Wrong(*at, record, copied), 0
        return None


def _place(made_in: Maker) -> tuple[str, str | None, str | None]:
    return made_in.layer, made_in.after, made_in.before


def bad_sites(sites: Sequence[Site], unit: float) -> list[Site]:
    """The places that make more than rounding and places like them, with what was expected."""
    found = []
    for site in sites:
        peers = [s.error for s in sites if s.place == site.place and s.layer != site.layer]
        peers = [error for error in peers if math.isfinite(error)]
        floor = site.floor
        if len(peers) >= _PEERS:
            usual, most = median(peers), max(peers)
            if usual > floor:
                floor = _AGAINST_PEERS * usual
            elif most >= unit / 4:
                floor = min(floor, _AGAINST_PEERS * most)
        if site.error > floor:
            found.append(replace(site, floor=floor))
    lost = [site for site in found if site.lost]
    return [site for site in found if site not in lost] or lost


def _line(module: nn.Module) -> tuple[str, int] | None:
    """The line of a module's forward that is running, from inside a hook of a layer it calls."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        own = code.co_varnames[0] if code.co_argcount else ""
        in_torch = f"{os.sep}torch{os.sep}nn{os.sep}modules{os.sep}module.py" in code.co_filename
        if own and not in_torch and frame.f_locals.get(own) is module:
            return code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


def _first_line(module: nn.Module) -> tuple[str, int] | None:
    """The first line of a module's forward."""
    forward: Any = type(module).forward
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    code = getattr(forward, "__code__", None)
    return None if code is None else (code.co_filename, code.co_firstlineno)


def _source(start: tuple[str, int] | None, end: tuple[str, int] | None) -> str:
    """A file and the lines between two calls; empty where that is not known."""
    if start is None:
        return "" if end is None else f"{Path(end[0]).name}:{end[1]}"
    name = Path(start[0]).name
    if end is None or end[0] != start[0]:
        return f"{name}:{start[1]}"
    low, high = sorted((start[1], end[1]))
    return f"{name}:{low}" if low == high else f"{name}:{low}-{high}"
