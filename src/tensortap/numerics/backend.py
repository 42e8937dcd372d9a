"""Who computes: the registry of numerics backends, and the choice among them.

`TENSORTAP_BACKEND=native|reference` forces one, for tests and for ruling the core out when
something looks wrong; it is read once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tensortap.errors import OptionError
from tensortap.numerics import native
from tensortap.numerics.native_difference import NativeDifference, suits_pair
from tensortap.numerics.reference import ReferenceBackend
from tensortap.numerics.reference_difference import ReferenceDifference

if TYPE_CHECKING:
    from tensortap.numerics.histogram import Histogram

__all__ = ["BACKENDS", "REFERENCE", "Backend", "describe", "pick", "pick_pair"]

Table = NDArray[np.float64]


class Backend(Protocol):
    """What turns a tensor into a raw summary row, and two tensors into that of a difference."""

    @property
    def name(self) -> str: ...

    def summarize_row(
        self, tensor: torch.Tensor, histogram: bool
    ) -> tuple[Sequence[float], Histogram | None]:
        """The row (`summary.COLUMNS`, then the first values) and, when asked, the histogram."""
        ...

    def difference_row(
        self,
        stream: Callable[[], Iterator[tuple[torch.Tensor, torch.Tensor]]],
        *,
        percentiles: bool,
        rtol: float | None,
        atol: float | None,
    ) -> tuple[Sequence[float], Sequence[float] | None, Histogram | None]:
        """All pairs as one: the row (`difference_row.STATE`); and when percentiles are asked for,
        the values of |d| at `percentiles.ranks(finite)` and its histogram, which may be that of a
        sample. The stream is called once a pass; its pairs have equal shapes. Without rtol or atol,
        `difference_row.tolerances` of each pair decide.
        """
        ...

    def profile_rows(self, reference: torch.Tensor, candidate: torch.Tensor) -> tuple[Table, Table]:
        """Tokens and channels (`profile.COLUMNS`) of two tensors that have axes and elements."""
        ...


class _Reference(ReferenceBackend, ReferenceDifference):
    """Everything by torch."""


class _Native(native.NativeBackend, NativeDifference):
    """Everything by the compiled core."""


REFERENCE: Backend = _Reference()
_NATIVE: Backend = _Native()

BACKENDS: dict[str, Backend] = {"reference": REFERENCE}
if native.core is not None:
    BACKENDS["native"] = _NATIVE

_VARIABLE = "TENSORTAP_BACKEND"


@cache  # since looking up the environment takes as long as summarising a small tensor
def _forced() -> str | None:
    name = os.environ.get(_VARIABLE)
    if not name:
        return None
    if name == "native" and native.core is None:
        raise OptionError(
            f"{_VARIABLE} asks for the native backend, but {native.missing}. "
            "Install a C++ compiler and reinstall tensortap, or unset the variable."
        )
    if name not in BACKENDS:
        raise OptionError(
            f"{_VARIABLE} is {name!r}, but the backends are: {', '.join(sorted(BACKENDS))}."
        )
    return name


def pick(tensor: torch.Tensor) -> Backend:
    """The backend for this tensor: the core where it can read the memory, else the reference."""
    forced = _forced()
    if forced is not None and forced != "native":
        return BACKENDS[forced]
    return _NATIVE if native.suits(tensor) else REFERENCE


def pick_pair(reference: torch.Tensor, candidate: torch.Tensor) -> Backend:
    """The backend for two tensors: the core where it can read both, else the reference."""
    forced = _forced()
    if forced is not None and forced != "native":
        return BACKENDS[forced]
    return _NATIVE if suits_pair(reference, candidate) else REFERENCE


def describe() -> dict[str, Any]:
    """Which backend CPU tensors get and why, for `tensortap doctor`."""
    forced = _forced()
    if native.core is None:
        backend, why = "reference", native.missing
    elif forced is not None:
        backend, why = forced, f"{_VARIABLE} is set"
    else:
        backend, why = "native", "the compiled core is installed"
    core = native.core if backend == "native" else None
    return {
        "backend": backend,
        "why": why,
        "isa": core.isa() if core is not None else None,
        "openmp": core.openmp() if core is not None else None,
        "threads": torch.get_num_threads(),
    }
