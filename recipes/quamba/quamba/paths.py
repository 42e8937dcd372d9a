"""What the fused path of the scan and the one in plain PyTorch differ by, on the same operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .scan import OPERANDS, FusedScan, PlainScan

__all__ = ["PathDifference", "path_difference", "path_text"]


@dataclass(frozen=True)
class PathDifference:
    """One layer's scan, fused minus plain.

    `relative` is the largest difference as a share of the largest output; `codes` of `values` is
    how many int8 codes of out_proj's input come out otherwise. Where that is 0, the layer's output
    is the same to the bit, whichever path ran.
    """

    layer: int
    max_abs: float
    mean_abs: float
    relative: float
    codes: int
    values: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def path_difference(model: nn.Module, input_ids: Tensor) -> tuple[PathDifference, ...]:
    """Run a model whose scans are fused (modes 0, 2-0, 2-3), and each scan in plain PyTorch too.

    Both paths of a layer get the operands of the fused run, so nothing adds up over layers.
    """
    blocks: Any = model.get_submodule("backbone.layers")
    found: list[PathDifference] = []
    handles = []
    for index, block in enumerate(blocks):
        scan = block.mixer.scan
        if not isinstance(scan, FusedScan):
            raise ValueError(f"The scan of layer {index} is {type(scan).__name__}, not fused.")
        handles.append(
            scan.register_forward_hook(_compare(index, block.mixer, found), with_kwargs=True)
        )
    try:
        with torch.no_grad():
            model.get_submodule("backbone")(input_ids=input_ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return tuple(found)


def plain_of(scan: FusedScan) -> PlainScan:
    """The same scan, with the same scales, in plain PyTorch."""
    scales = {name: scan.get_buffer(f"{name}_scale") for name in OPERANDS}
    return PlainScan(scan.segment, {**scales, "state": scan.state.scale})


def _compare(index: int, mixer: Any, found: list[PathDifference]) -> Callable[..., None]:
    def hook(scan: FusedScan, _: Any, operands: dict[str, Tensor], fused: Tensor) -> None:
        plain = plain_of(scan)(**operands)
        difference = (fused.double() - plain.double()).abs()
        largest = plain.abs().max().item()
        codes = mixer.out_proj.codes(fused) != mixer.out_proj.codes(plain)
        found.append(
            PathDifference(
                layer=index,
                max_abs=difference.max().item(),
                mean_abs=difference.mean().item(),
                relative=difference.max().item() / largest if largest else 0.0,
                codes=int(codes.sum()),
                values=codes.numel(),
            )
        )

    return hook


def path_text(rows: Sequence[PathDifference]) -> str:
    """A line for the screen: the largest difference, and whether it reaches a layer's output."""
    worst = max(rows, key=lambda row: row.relative)
    codes, values = sum(row.codes for row in rows), sum(row.values for row in rows)
    return (
        f"Fused path minus plain PyTorch, on the same operands: at most {worst.max_abs:.3e} "
        f"({worst.relative:.1e} of the largest value) in layer {worst.layer} of {len(rows)}; "
        f"{codes} of {values} int8 codes behind it differ."
    )
