"""Pools, means over an axis and resized images: the reference made one, the candidate another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .fits import Fit
from .near import Near
from .pairs import Pairs

__all__ = ["reduction"]

_MOST = 1 << 22  # elements of a tensor that is worth a try
_EXACT = 1e-5
_CLEAR = 1e-2
_POOLS = ((2, 2, 0), (3, 2, 1), (3, 1, 1), (3, 2, 0), (2, 1, 0), (4, 4, 0), (7, 7, 0), (8, 8, 0))


def reduction(pairs: Pairs, near: Sequence[Near]) -> Fit | None:
    """How the reference makes its values of a tensor of another size, and the candidate its own."""
    if pairs.whole is None or pairs.energy <= 0 or pairs.exponent or pairs.finite is not None:
        return None
    reference, candidate = (pairs.as_given(side) for side in pairs.whole[:2])
    if reference.numel() > _MOST:
        return None
    ours, theirs = (side.detach().cpu().double() for side in (reference, candidate))
    masks = [mask for one in near if (mask := one.padding()) is not None]
    for one in near:
        if not one.floats or one.later or one.record.nbytes > 8 * _MOST:
            continue
        given = one.tensor().detach().cpu().double()
        was = _named(given, ours, theirs, ours, masks, pairs.floor)
        if was is None:
            continue
        now = _named(given, ours, theirs, theirs, masks, pairs.floor)
        if now is not None and now != was:
            text = f"output = {now} of {one.name}, where the reference is {was}"
            details = {"reference": was, "candidate": now}
            return Fit("reduction", 0.0, 0.0, text, 0.9, 0.05, details=details)
    return _from_itself(ours, theirs, masks, pairs.floor)


def _from_itself(ours: Tensor, theirs: Tensor, masks: Sequence[Tensor], floor: float) -> Fit | None:
    """A picture that was made larger, where the small one was no layer's: told by equal blocks."""
    if ours.dim() != 4:
        return None
    for side in (ours, theirs):
        for step in (2, 4):
            small = side[:, :, ::step, ::step]
            if small.shape[2] < 2 or small.shape[2] * step != side.shape[2]:
                continue
            if not torch.equal(F.interpolate(small, side.shape[2:], mode="nearest"), side):
                continue
            was = _named(small, ours, theirs, ours, masks, floor)
            now = _named(small, ours, theirs, theirs, masks, floor)
            if was is not None and now is not None and was != now:
                text = f"output = {now}, where the reference is {was}"
                details = {"reference": was, "candidate": now}
                return Fit("reduction", 0.0, 0.0, text, 0.9, 0.05, details=details)
    return None


def _named(
    given: Tensor,
    reference: Tensor,
    candidate: Tensor,
    side: Tensor,
    masks: Sequence[Tensor],
    floor: float,
) -> str | None:
    """What makes this side of a tensor; None where nothing known does."""
    error = float((candidate - reference).square().sum())
    size = float(side.square().sum())
    for name, function in _functions(given, tuple(side.shape), masks):
        try:
            made = function()
        except (RuntimeError, ValueError):  # this pool does not go with this size
            continue
        if made.shape != side.shape:
            continue
        rest = float((made - side).square().sum())
        if rest <= (_EXACT + 2 * floor) ** 2 * size and rest <= _CLEAR * error:
            return name
    return None


_Option = tuple[str, Callable[[], Tensor]]


def _functions(x: Tensor, shape: tuple[int, ...], masks: Sequence[Tensor]) -> Iterator[_Option]:
    if x.dim() == len(shape) + 1:
        yield from _over_an_axis(x, shape, masks)
    elif x.dim() == len(shape) + 2 and tuple(x.shape[:2]) == shape:
        yield "the mean over places", lambda: x.mean((2, 3))
        yield "the maximum over places", lambda: x.amax((2, 3))
        yield "the sum over places", lambda: x.sum((2, 3))
    elif x.dim() == len(shape) == 4 and x.shape[:2] == shape[:2]:
        small = shape[2] <= x.shape[2] and shape[3] <= x.shape[3]
        yield from _pools(x, shape) if small else _resized(x, shape)
    elif x.shape == shape and x.dim() > 1:
        for axis in range(1, x.dim()):
            yield f"softmax over axis {axis}", lambda axis=axis: x.softmax(axis)  # type: ignore[misc]


def _over_an_axis(x: Tensor, shape: tuple[int, ...], masks: Sequence[Tensor]) -> Iterator[_Option]:
    for axis in range(x.dim()):
        if (*x.shape[:axis], *x.shape[axis + 1 :]) != shape:
            continue
        words = "tokens" if x.dim() == 3 and axis == 1 else f"axis {axis}"
        one = words.removesuffix("s") if words == "tokens" else f"place of {words}"
        yield f"the first {one}", lambda axis=axis: x.select(axis, 0)  # type: ignore[misc]
        yield f"the last {one}", lambda axis=axis: x.select(axis, -1)  # type: ignore[misc]
        yield f"the mean over {words}", lambda axis=axis: x.mean(axis)  # type: ignore[misc]
        yield f"the maximum over {words}", lambda axis=axis: x.amax(axis)  # type: ignore[misc]
        yield f"the sum over {words}", lambda axis=axis: x.sum(axis)  # type: ignore[misc]
    for mask in masks:
        if x.dim() == 3 and tuple(mask.shape) == tuple(x.shape[:2]):
            yield from _over_real(x, mask.detach().cpu())


def _over_real(x: Tensor, mask: Tensor) -> Iterator[_Option]:
    real = mask.double()[..., None]
    count = real.sum(1).clamp_min(1)
    last = (mask.long() * torch.arange(mask.shape[1])).argmax(1)
    yield "the mean over the tokens that are not padding", lambda: (x * real).sum(1) / count
    yield "the last token that is not padding", lambda: x[torch.arange(len(x)), last]
    hidden = real == 0
    words = "the maximum over the tokens that are not padding"
    yield words, lambda: x.masked_fill(hidden, -torch.inf).amax(1)


def _pools(x: Tensor, shape: tuple[int, ...]) -> Iterator[_Option]:
    size = (shape[2], shape[3])
    yield "the mean of each window", lambda: F.adaptive_avg_pool2d(x, size)
    yield "the maximum of each window", lambda: F.adaptive_max_pool2d(x, size)
    for width, step, padding in _POOLS:
        if padding * 2 > width or (x.shape[2] + 2 * padding - width) // step + 1 not in (
            shape[2],
            shape[2] - 1,
        ):
            continue
        words = f"{width} x {width}, stride {step}, padding {padding}"
        for ceil in (False, True):
            about = f"{words}{', rounded up' if ceil else ''}"
            yield (
                f"the maximum pool ({about})",
                lambda w=width, s=step, p=padding, c=ceil: F.max_pool2d(x, w, s, p, ceil_mode=c),  # type: ignore[misc]
            )
            for count in (True, False):
                with_it = "" if count or not padding else ", padding not counted"
                yield (
                    f"the mean pool ({about}{with_it})",
                    lambda w=width, s=step, p=padding, c=ceil, n=count: F.avg_pool2d(  # type: ignore[misc]
                        x, w, s, p, ceil_mode=c, count_include_pad=n
                    ),
                )


def _resized(x: Tensor, shape: tuple[int, ...]) -> Iterator[_Option]:
    size = (shape[2], shape[3])
    for mode in ("nearest", "nearest-exact"):
        yield f"{mode} resizing", lambda m=mode: F.interpolate(x, size, mode=m)  # type: ignore[misc]
    for mode in ("bilinear", "bicubic"):
        for aligned in (False, True):
            yield (
                f"{mode} resizing with align_corners={aligned}",
                lambda m=mode, a=aligned: F.interpolate(x, size, mode=m, align_corners=a),  # type: ignore[misc]
            )
