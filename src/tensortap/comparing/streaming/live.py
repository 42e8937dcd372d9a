"""What a tap has just heard, in the shape of a record, so that the one judge can look at it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...numerics import summarize
from ...numerics.summary import Summary
from ...recording.dtypes import dtype_name
from ...recording.reader import Layer, Record
from ...recording.schema import Port, Provenance
from ...taps.sink import Call, Held

__all__ = ["LiveRecord", "live_layer", "live_record", "unstored"]

_NOWHERE: Any = None  # a live record stands in no file


@dataclass(frozen=True)
class LiveRecord(Record):
    """A record whose tensor is still in memory, and only until its call was judged."""

    content: str | None = None  # of the values, where there are any
    known: Summary | None = field(default=None, repr=False, compare=False)
    values: list[torch.Tensor] = field(default_factory=list, repr=False, compare=False)

    @property
    def stored(self) -> bool:
        return self.content is not None

    @property
    def fleeting(self) -> bool:
        return True

    @property
    def tensor_id(self) -> str | None:
        return self.content

    @property
    def summary(self) -> Summary:
        assert self.known is not None
        return self.known

    def tensor(self) -> torch.Tensor:
        return self.values[0]

    def release(self) -> None:
        """Let the tensor go; what was measured of it stays."""
        self.values.clear()


def live_record(call: Call, item: Held, rank: int) -> LiveRecord:
    """A tensor that was taken in a call, as a record."""
    held = None if item.values is None else item.values.tensor
    if item.row is not None:
        known = Summary.from_row(item.row.tolist(), item.histogram)
    else:  # it was held in case it should be asked for
        assert held is not None
        known = summarize(held)
    return LiveRecord(
        **_place(call.slot.name, call.slot.type, item.port, item.leaf, rank, call.slot.provenance),
        epoch=call.epoch,
        batch=call.batch,
        call=call.call,
        shape=tuple(item.shape),
        dtype=dtype_name(item.dtype),
        device=str(item.device),
        content=None if item.values is None else item.values.digest.hex(),
        known=known,
        values=[] if held is None else [held],
    )


def unstored(layer: str, port: Port, leaf: str, moment: tuple[int, int, int, int]) -> LiveRecord:
    """A record of which nothing is known but where and when it was."""
    rank, epoch, batch, call = moment
    return LiveRecord(
        **_place(layer, "", port, leaf, rank),
        epoch=epoch,
        batch=batch,
        call=call,
        shape=(),
        dtype="",
        device="",
    )


def live_layer(name: str, kind: str, records: Sequence[Record] = ()) -> Layer:
    """A layer of the model that is running."""
    return Layer(name, None, kind, 0, tuple(records))


def _place(
    layer: str, kind: str, port: Port, leaf: str, rank: int, provenance: Provenance = "hook"
) -> dict[str, Any]:
    return {
        "layer": layer,
        "alias": None,
        "port": port,
        "leaf": leaf,
        "order": 0,
        "type": kind,
        "rank": rank,
        "provenance": provenance,
        "_recording": _NOWHERE,
        "_segment": _NOWHERE,
        "_number": -1,
        "_summary_row": -1,
    }
