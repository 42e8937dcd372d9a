"""Errors by token and by channel for pairs on a device, by torch, without waiting in between."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from tensortap.numerics.layout import paired_pieces, plain

__all__ = ["profile_on"]

CHUNK = 1 << 23  # elements in float64 at once

Table = NDArray[np.float64]


def profile_on(reference: torch.Tensor, candidate: torch.Tensor) -> tuple[Table, Table]:
    """Tokens and channels (`profile.COLUMNS`) of two real tensors that have axes and elements."""
    width = reference.shape[-1]
    rows = reference.numel() // width
    limit = max(1, CHUNK // width) * width  # whole tokens
    with torch.no_grad():
        tokens = torch.empty((rows, 4), dtype=torch.float64, device=reference.device)
        channels = torch.zeros((width, 4), dtype=torch.float64, device=reference.device)
        start = 0
        for one, two in paired_pieces(reference.detach(), candidate.detach(), limit):
            columns = _columns(plain(one).view(-1, width), plain(two).view(-1, width))
            here = columns[0].shape[0]
            tokens[start : start + here] = _reduced(columns, 1)
            part = _reduced(columns, 0)
            channels[:, 2] = torch.maximum(channels[:, 2], part[:, 2])
            part[:, 2] = 0.0
            channels += part
            start += here
        both = torch.cat((tokens, channels)).cpu().numpy()
    return both[:rows], both[rows:]


def _columns(reference: torch.Tensor, candidate: torch.Tensor) -> list[torch.Tensor]:
    """By place: d², reference², |d| and whether it disagrees."""
    r, c = reference.to(torch.float64), candidate.to(torch.float64)
    finite = torch.isfinite(r) & torch.isfinite(c)
    agreeing = (r == c) | (r.isnan() & c.isnan())
    d = torch.where(finite, c - r, 0.0)
    r = torch.where(finite, r, 0.0)
    return [d.square(), r.square(), d.abs(), (~finite & ~agreeing).to(torch.float64)]


def _reduced(columns: list[torch.Tensor], axis: int) -> torch.Tensor:
    found = [c.amax(dim=axis) if k == 2 else c.sum(dim=axis) for k, c in enumerate(columns)]
    return torch.stack(found, dim=-1)
