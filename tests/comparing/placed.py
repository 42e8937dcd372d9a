"""Recordings with all that a comparison may meet, and what two answers must share."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tensortap as tap

__all__ = ["DTYPES", "check_same", "make_runs"]

DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?")


class Emit(nn.Module):
    """A layer that returns what it is told to."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value.clone()


def make_runs(folder: Path, batches: int = 3) -> dict[str, Path]:
    """A reference, a candidate, a floor and a truth, of a layer a dtype and some odd ones."""
    return {
        name: _record(folder / name, batches, noise, odd=name == "candidate")
        for name, noise in (
            ("reference", 1e-5),
            ("candidate", 1e-2),
            ("floor", 1e-3),
            ("truth", 0.0),
        )
    }


def _record(path: Path, batches: int, noise: float, *, odd: bool) -> Path:
    names = [f"in_{str(dtype).removeprefix('torch.')}" for dtype in DTYPES]
    names += ["holes", "equal", "empty", "scalar", "turned", *([] if odd else ["reference_only"])]
    model = nn.ModuleDict({name: Emit() for name in names})
    with tap.record(model, path, layers="leaves") as rec:
        for batch in range(batches):
            seed = torch.Generator().manual_seed(batch)
            for name, dtype in zip(names, DTYPES, strict=False):
                model[name](_values(dtype, seed, noise))
            holes = torch.randn(64, 96, generator=seed)
            holes[3, 5], holes[7] = math.nan, math.inf
            if odd:
                holes[9, 9] = math.nan
            model["holes"](holes)
            model["equal"](torch.randn(33, generator=seed))
            model["empty"](torch.empty(0, 5))
            model["scalar"](torch.tensor(2.0 + noise))
            turned = torch.randn(2, 40, 24, generator=seed)
            model["turned"](turned.transpose(1, 2).contiguous() if odd else turned)
            if not odd:
                model["reference_only"](torch.ones(3))
            rec.step()
    return path


def _values(dtype: torch.dtype, seed: torch.Generator, noise: float) -> torch.Tensor:
    values = 4 * torch.randn(4, 40, 96, generator=seed, dtype=torch.float64)
    values += noise * torch.randn(4, 40, 96, generator=seed, dtype=torch.float64)
    if dtype.is_complex:
        return torch.complex(values, values.flip(0)).to(dtype)
    if dtype == torch.bool:
        return values > 0
    if not dtype.is_floating_point:
        return (10 * values).abs().clamp(max=100).to(dtype)
    return values.to(dtype)


def check_same(ours: Any, theirs: Any, where: str = "") -> None:
    """Equal words, verdicts and counts; numbers within the bound between two devices."""
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs), where
        for key in theirs:
            check_same(ours[key], theirs[key], f"{where}.{key}")
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), where
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            check_same(one, other, f"{where}[{number}]")
    elif isinstance(theirs, float):
        assert isinstance(ours, float), where
        assert math.isclose(ours, theirs, rel_tol=1e-6, abs_tol=1e-7), (where, ours, theirs)
    elif isinstance(theirs, str):
        assert _NUMBER.sub("#", ours) == _NUMBER.sub("#", theirs), where
    else:
        assert ours == theirs, where
