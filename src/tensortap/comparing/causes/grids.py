"""Values on a grid with a scale: int8, int4 or fp8, for the whole tensor, a channel or a token.

A scale is not known, but the largest value of a group is a whole number of steps: at most 255 of
them for integers, one of a few significands for fp8. Each is tried, and is believed when values
that would fall anywhere by chance all lie on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .fits import Fit, number_words
from .pairs import Pairs

__all__ = ["grid"]

_MOST_STEPS = 255
_GROUPS = 32  # that are looked at
_VALUES = 128  # of each
_FIRST = 12  # of these, to see whether it is worth looking at the others
_TOLERANCE = 0.01  # of a step
_BITS = 24.0  # evidence that is asked for, beyond the choice of a scale
_LEFT = 0.1
_UNSURE = 0.05
_TINY = 1e-3  # of the squared error that a grid's steps make
# The coarser first: its significands are some of the other's.
_FLOAT8 = {"float8_e5m2": (4, torch.float8_e5m2), "float8_e4m3fn": (8, torch.float8_e4m3fn)}


@dataclass(frozen=True)
class _Found:
    """A grid: what it is called, how many steps the largest value has, how to round to it."""

    name: str
    steps: float
    dtype: torch.dtype | None


def grid(pairs: Pairs) -> Fit | None:
    """The candidate on a grid that the reference is not on."""
    if pairs.energy <= 0 or pairs.count < 16 or pairs.candidate.dtype != torch.float64:
        return None
    unit = _unit(pairs.dtypes[1])
    for name, axis in (("the whole tensor", None), ("each channel", -1), ("each token", -2)):
        groups = _grouped(pairs.candidate, axis)
        if axis is not None and (groups.shape[0] < 2 or groups.shape[1] < 4):
            continue
        few = _few(groups)
        found = [one for one in (_integers(few, unit), _floats(few, unit)) if one is not None]
        if not found:
            continue
        if _on_same(_few(_grouped(pairs.reference, axis)), found[0], unit):
            return None
        # Few values can lie on both kinds by chance: the one that is meant rounds to them.
        return min((_fitted(pairs, one, name, axis) for one in found), key=lambda fit: fit.left)
    return None


def _unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2 if dtype.is_floating_point else 2.0**-24


def _grouped(tensor: Tensor, axis: int | None) -> Tensor:
    """A row for each group that shares a scale."""
    if axis is None:
        return tensor.reshape(1, -1)
    flat = tensor.reshape(-1, tensor.shape[-1])
    return flat.T if axis == -1 else flat


def _few(groups: Tensor) -> Tensor:
    """Some groups and some values of each; the largest of a group is always there."""
    if groups.shape[0] > _GROUPS:
        groups = groups[torch.linspace(0, groups.shape[0] - 1, _GROUPS).long()]
    if groups.shape[0] == 1:
        return _distinct(groups[0])
    if groups.shape[1] <= _VALUES:
        return groups
    peak = groups.gather(1, groups.abs().argmax(1, keepdim=True))
    chosen = groups[:, torch.linspace(0, groups.shape[1] - 1, _VALUES - 1).long()]
    return torch.cat((chosen, peak), 1)


def _distinct(values: Tensor) -> Tensor:
    peak = values[values.abs().argmax()][None]
    step = max(1, values.numel() // (1 << 14))
    found = torch.unique(values[::step])
    if len(found) > _VALUES:
        found = found[torch.linspace(0, len(found) - 1, _VALUES).long()]
    return torch.cat((found, peak))[None]


def _integers(groups: Tensor, unit: float) -> _Found | None:
    """The fewest steps under which every group lies on whole numbers."""
    groups, peak = _alive(groups)
    if not len(groups):
        return None
    shares = groups / peak
    if shares.shape[1] > 2 * _FIRST and (_steps(_spread(shares), unit) == 0).any():
        return None
    steps = _steps(shares, unit)
    if float((steps == 0).double().mean()) > 0.02:
        return None
    scaled = shares * steps.clamp_min(1)[:, None]
    evidence = _evidence(scaled, scaled.round(), unit)
    if evidence < _BITS + len(groups) * math.log2(_MOST_STEPS):
        return None
    most = int(steps.max())
    if most < 2:
        return None
    name = "int4" if most <= 15 else "int8" if most <= 128 else "uint8"
    return _Found(name, float(most), None)


def _spread(shares: Tensor) -> Tensor:
    """A few values of a few groups."""
    few = shares[torch.linspace(0, len(shares) - 1, min(8, len(shares))).long()]
    return few[:, torch.linspace(0, few.shape[1] - 1, _FIRST).long()]


def _steps(shares: Tensor, unit: float) -> Tensor:
    """For each group the fewest steps under which all values are whole; 0 where there are none."""
    counts = torch.arange(1, _MOST_STEPS + 1, dtype=torch.float64)
    steps = torch.zeros(len(shares), dtype=torch.float64)
    for start in range(0, _MOST_STEPS, 16):  # in parts, to stay small
        part = counts[start : start + 16]
        scaled = shares[:, None, :] * part[None, :, None]
        fits = _whole(scaled, unit).all(-1)
        first = torch.where(fits, part[None], math.inf).amin(1)
        steps = torch.where((steps == 0) & torch.isfinite(first), first, steps)
    return steps


def _floats(groups: Tensor, unit: float) -> _Found | None:
    """An fp8 format under whose significands every group lies."""
    groups, peak = _alive(groups)
    if not len(groups):
        return None
    for name, (parts, dtype) in _FLOAT8.items():
        fitting: Tensor | None = None
        for part in range(parts):
            significand = 1 + part / parts
            fraction = torch.frexp(groups / peak * significand)[0] * (2 * parts)
            fits = _whole(fraction, unit).all(-1) * significand
            fitting = fits if fitting is None else torch.maximum(fitting, fits)
        assert fitting is not None
        if float((fitting == 0).double().mean()) > 0.02:
            continue
        fraction, power = torch.frexp(groups / peak * fitting[:, None])
        fraction = fraction * (2 * parts)
        points = torch.ldexp(fraction.round(), power)
        if _evidence(fraction, points, unit) < _BITS + len(groups) * math.log2(parts):
            continue
        most = float(fitting.max())
        largest = torch.finfo(dtype).max
        top = 2.0 ** math.floor(math.log2(largest))
        return _Found(name, min(largest, most * top), dtype)
    return None


def _alive(groups: Tensor) -> tuple[Tensor, Tensor]:
    """The groups that are not all zero, and their largest absolute values."""
    peak = groups.abs().amax(1, keepdim=True)
    keep = peak[:, 0] > 0
    return groups[keep], peak[keep]


def _tolerance(scaled: Tensor, unit: float) -> Tensor:
    return _TOLERANCE + 2 * unit * scaled.abs()


def _whole(scaled: Tensor, unit: float) -> Tensor:
    return (scaled - scaled.round()).abs() <= _tolerance(scaled, unit)


def _evidence(scaled: Tensor, points: Tensor, unit: float) -> float:
    """How many bits of chance it took for all to be whole.

    Each point of a group's grid tells once: values that lie close together lie at one point of any
    grid. Zeros and the point of the largest value tell nothing.
    """
    points, order = points.sort(1)
    fresh = torch.ones_like(points, dtype=torch.bool)
    fresh[:, 1:] = points[:, 1:] != points[:, :-1]
    sizes = points.abs()
    telling = fresh & (sizes != 0) & (sizes < sizes.amax(1, keepdim=True))
    chance = (2 * _tolerance(scaled.gather(1, order), unit)).clamp(max=1.0)
    return float((-torch.log2(chance) * telling).sum())


def _on_same(groups: Tensor, found: _Found, unit: float) -> bool:
    """Whether the reference lies on such a grid too: then it explains nothing."""
    other = _integers(groups, unit) if found.dtype is None else _floats(groups, unit)
    return other is not None


def _fitted(pairs: Pairs, found: _Found, name: str, axis: int | None) -> Fit:
    flat = pairs.candidate.reshape(-1, pairs.shape[-1])
    peak = flat.abs().amax() if axis is None else flat.abs().amax(0 if axis == -1 else 1, True)
    scale = peak / found.steps
    safe = torch.where(scale > 0, scale, 1.0)
    reference = pairs.reference.reshape(flat.shape) / safe
    if found.dtype is None:
        rounded = reference.round().clamp(-found.steps, found.steps)
    else:
        most = torch.finfo(found.dtype).max
        rounded = reference.clamp(-most, most).to(found.dtype).to(torch.float64)
    left = pairs.left((rounded * safe).reshape(pairs.shape))
    shown = pairs.natural(float(scale)) if axis is None else None
    words = f"a scale for {name}" if shown is None else f"one scale ({number_words(shown)})"
    details = {"format": found.name, "per": name.split()[-1], "scale": shown, "steps": found.steps}
    cost = 1.4 if axis is None else 2.0
    if left <= _LEFT:
        text = f"output = reference on a grid of {found.name} with {words}"
        return Fit("grid", left, left, text, cost, _LEFT, details=details)
    # Computed before it was set on the grid: the size of a step is all that can be asked for.
    step = scale if found.dtype is None else 2.0**-3 * flat.abs()
    expected = float((step.square() / 12 * torch.ones_like(flat)).sum())
    rest = max(_UNSURE, 1 - min(1.0, 4 * expected / pairs.energy))
    if pairs.energy < _TINY * expected:
        rest = 1.0  # such steps would have made much more
    text = f"the candidate's values lie on a grid of {found.name} with {words}"
    return Fit("grid", rest, rest, text, cost + 0.5, 0.5, details=details)
