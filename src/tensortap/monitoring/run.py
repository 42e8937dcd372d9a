"""The monitor's run as a tensortap recording, beside its files."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ..numerics.summary import Summary
from ..recording.dtypes import dtype_name
from ..recording.schema import Site
from ..recording.writer import Writer
from ..taps.describe import rank
from ..taps.input_log import InputLog
from .choice import Chosen, described
from .earlier import Claim, make_room
from .manifest import manifest_of
from .outputs import Form, tensors_of

__all__ = ["Keep", "Run"]

Keep = Literal["tensors", "summary"]


class Run:
    """Every output that the monitor keeps, under its epoch, batch and call."""

    def __init__(
        self,
        model: nn.Module,
        folder: Path,
        chosen: Sequence[Chosen],
        *,
        keep: Keep,
        memory: int,
        overwrite: bool,
        mode: str | None,
        about: dict[str, Any],
    ) -> None:
        self.rank = _rank()
        self.earlier: str | None = None
        self._keep = keep
        self._claim: Claim | None = None
        self._order = itertools.count()
        self._sites: dict[Any, int] = {}
        self._skipped: Counter[tuple[str, str, str]] = Counter()
        self._inputs = InputLog()
        layers = {one.layer: described(one) for one in chosen}
        manifest = manifest_of(
            model,
            layers=[one.layer for one in chosen],
            ports=["output"],
            keep=keep,
            mode=mode,
            about={"monitor": {"layers": layers, **about}},
        )
        try:
            if self.rank == 0:
                self._claim = Claim(folder)
                self.earlier = make_room(folder, overwrite=overwrite)
            self._writer = Writer(
                str(folder),
                manifest,
                budget=max(16 << 20, min(256 << 20, memory // 2)),
                overwrite=True,  # an earlier run is out of the way
                rank=self.rank,
            )
        except BaseException:
            self._release()
            raise

    @property
    def failure(self) -> str | None:
        return self._writer.failure

    def see_inputs(self, moment: tuple[int, int], args: Any, kwargs: Mapping[str, Any]) -> None:
        self._inputs.see(moment, args, kwargs)

    def add(
        self,
        one: Chosen,
        form: Form,
        tensors: Sequence[torch.Tensor],
        summaries: Sequence[Summary],
        devices: Sequence[str],
        moment: tuple[int, int, int],
    ) -> None:
        """Record one call of a layer; what was copied already is copied again, into the arena."""
        for number, leaf in tensors_of(form):
            tensor = tensors[number]
            site = self._site(one, leaf, tensor, devices[number])
            when = (next(self._order), *moment)
            if self._keep == "summary":
                row: Any = summaries[number].to_row()
                self._writer.summary_line(site, when, row)
            else:
                self._writer.line(site, when, self._writer.take(tensor))
        for leaf in _absent(form, ""):
            self.skip(one, leaf, "None stands where a tensor could")

    def skip(self, one: Chosen, leaf: str, reason: str) -> None:
        self._skipped[(one.layer, leaf, reason)] += 1

    def close(self, failure: str | None, notes: Sequence[str], files: Sequence[str]) -> None:
        if self.rank != 0:
            self._writer.close()
            return
        manifest = self._writer.manifest
        self._writer.close(
            status="failed" if failure else "complete",
            failure=failure,
            inputs={**manifest.inputs, **self._inputs.to_dict()},
            skipped=[
                {"layer": layer, "port": "output", "leaf": leaf, "reason": why, "count": count}
                for (layer, leaf, why), count in sorted(self._skipped.items())
            ],
            selection={**manifest.selection, "files": sorted(files)},
            notes=[*manifest.notes, *notes],
        )
        self._release()

    def _release(self) -> None:
        if self._claim is not None:
            self._claim.release()
            self._claim = None

    def _site(self, one: Chosen, leaf: str, tensor: torch.Tensor, device: str) -> int:
        key = (one.layer, leaf, tensor.shape, tensor.dtype, device)
        site = self._sites.get(key)
        if site is None:
            site = self._sites[key] = self._writer.site(
                Site(
                    one.layer,
                    "output",
                    leaf,
                    one.alias,
                    one.type,
                    tuple(tensor.shape),
                    dtype_name(tensor.dtype),
                    device,
                )
            )
        return site


def _rank() -> int:
    """The rank of this process; of one that has not joined its group yet, from its launcher."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return rank()
    said, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    many = world.isdecimal() and int(world) > 1  # a job array has a rank, and no world
    return int(said) if many and said.isdecimal() else 0


def _absent(form: Form, leaf: str) -> list[str]:
    if form[0] == "none":
        return [leaf]
    if form[0] in ("tuple", "list", "dict"):
        return [found for name, _, item in form[1] for found in _absent(item, leaf + name)]
    return []
