"""What kind of error a tensor of the candidate has, with what the reference had around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ...recording.reader import Record
from ..causes import Cause, explain
from ..causes.arguments import argument_cause, missing_cause
from ..causes.axes import KindAt, layout_at
from ..causes.near import near_of
from ..causes.shapes import shape_cause
from .reference import Known

__all__ = ["Wrong", "explained"]


@dataclass(frozen=True, eq=False)
class Wrong:
    """A tensor of one call of a layer that is not the reference's, with the reference's record.

    `tensor` is None where the candidate hands over nothing at all. `name` is the parameter's, where
    it is known.
    """

    layer: str
    batch: int
    call: int
    record: Record = field(repr=False)
    tensor: torch.Tensor | None = field(repr=False)
    name: str = ""

    @property
    def reshaped(self) -> bool:
        """Whether it has another shape than the reference's."""
        return self.tensor is not None and tuple(self.tensor.shape) != self.record.shape


def explained(known: Known, wrong: Wrong, floor: float) -> tuple[Cause, ...]:
    """The causes of what is wrong with a tensor.

    They are sought with the layer's input, the tensors that were made just before, and the axes as
    the layer's kind has them.
    """
    reference, tensor, leaf = wrong.record.tensor(), wrong.tensor, wrong.name or wrong.record.leaf
    if tensor is None:
        return (missing_cause(reference, leaf),)
    if wrong.reshaped:
        return (shape_cause(wrong.record.shape, tuple(tensor.shape), (reference, tensor)),)
    given = wrong.record.port == "input"
    other = argument_cause(reference, tensor, leaf) if given else None
    if other is not None or not (tensor.is_floating_point() or tensor.is_complex()):
        return () if other is None else (other,)
    return explain(
        reference,
        tensor,
        floor=floor,
        input=None if given else _given(known, wrong),
        axes=_axes(known, wrong.layer, reference.shape),
        near=near_of(wrong.record),
    )


def _axes(known: Known, layer: str, shape: Sequence[int]) -> tuple[str, ...]:
    """What the axes of a layer's tensors hold."""
    found = [known.recording[name] for name in known.recording.layers]
    kinds = [KindAt(one.type, tuple(record.shape for record in one.records)) for one in found]
    names = [one.name for one in found]
    return layout_at(kinds, names.index(known.names[layer]), shape)


def _given(known: Known, wrong: Wrong) -> torch.Tensor | None:
    """What the reference's layer was given, where that has the shape of what it made."""
    for record in known.at(wrong.layer, "input", wrong.batch, wrong.call).values():
        same = wrong.tensor is not None and record.shape == tuple(wrong.tensor.shape)
        if same and record.dtype.startswith(("float", "bfloat")):
            return record.tensor()
    return None
