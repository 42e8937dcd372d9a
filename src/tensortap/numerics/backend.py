"""Who computes: the registry of numerics backends, and the choice among them.

The compiled core reads CPU memory, Triton's kernels CUDA tensors of the common dtypes; the torch
reference does the rest, on any device. `TENSORTAP_BACKEND=native|triton|reference` allows but one
beside the reference, for tests and for ruling out the others when something looks wrong; it is read
once.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tensortap.errors import OptionError
from tensortap.numerics import native
from tensortap.numerics.giving_up import warn_of
from tensortap.numerics.native_difference import NativeDifference, suits_pair
from tensortap.numerics.reference import ReferenceBackend
from tensortap.numerics.reference_difference import ReferenceDifference

if TYPE_CHECKING:
    from tensortap.numerics.histogram import Histogram

__all__ = ["BACKENDS", "REFERENCE", "Backend", "describe", "pick", "pick_pair"]

Pair = tuple[torch.Tensor, torch.Tensor]
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
        stream: Callable[[], Iterator[Pair]],
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


class _Triton:
    """Everything by Triton's kernels, which are imported on first use: that takes half a second."""

    name = "triton"

    def summarize_row(
        self, tensor: torch.Tensor, histogram: bool
    ) -> tuple[Sequence[float], Histogram | None]:
        from tensortap.numerics.device import empty_rows, fill_on

        if histogram:  # which the kernels have not
            return REFERENCE.summarize_row(tensor, histogram)
        row = empty_rows(1, tensor.device)[0]
        fill_on(tensor, row)
        return row.tolist(), None

    def difference_row(
        self,
        stream: Callable[[], Iterator[Pair]],
        *,
        percentiles: bool,
        rtol: float | None,
        atol: float | None,
    ) -> tuple[Sequence[float], Sequence[float] | None, Histogram | None]:
        from tensortap.numerics.triton_difference import TritonDifference

        pairs, by = _Pairs(stream), TritonDifference()
        try:
            return by.difference_row(pairs, percentiles=percentiles, rtol=rtol, atol=atol)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if error is pairs.error:
                raise
            _give_up(error)
        return REFERENCE.difference_row(stream, percentiles=percentiles, rtol=rtol, atol=atol)

    def profile_rows(self, reference: torch.Tensor, candidate: torch.Tensor) -> tuple[Table, Table]:
        from tensortap.numerics.triton_difference import TritonDifference

        try:
            return TritonDifference().profile_rows(reference, candidate)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            _give_up(error)
        return REFERENCE.profile_rows(reference, candidate)


class _Pairs:
    """A stream of pairs that remembers its own error, which is no kernel's."""

    def __init__(self, stream: Callable[[], Iterator[Pair]]) -> None:
        self._stream = stream
        self.error: Exception | None = None

    def __call__(self) -> Iterator[Pair]:
        try:
            yield from self._stream()
        except Exception as error:
            self.error = error
            raise


_FAILED: list[Exception] = []  # what kernels for pairs have failed with


def _give_up(error: Exception) -> None:
    """Torch compares pairs from now on; that is said once."""
    _FAILED.append(error)
    if len(_FAILED) == 1:
        warn_of("compute a difference", error, stacklevel=3)


REFERENCE: Backend = _Reference()
_NATIVE: Backend = _Native()
_TRITON: Backend = _Triton()

BACKENDS: dict[str, Backend] = {"reference": REFERENCE}
if native.core is not None:
    BACKENDS["native"] = _NATIVE
if importlib.util.find_spec("triton") is not None:
    BACKENDS["triton"] = _TRITON

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
    if name == "triton" and name not in BACKENDS:
        raise OptionError(
            f"{_VARIABLE} asks for the triton backend, but Triton is not installed. "
            "It comes with CUDA builds of torch: install one, or unset the variable."
        )
    if name not in BACKENDS:
        raise OptionError(
            f"{_VARIABLE} is {name!r}, but the backends are: {', '.join(sorted(BACKENDS))}."
        )
    return name


@cache
def _kernels() -> ModuleType | None:
    """The kernels for pairs, where Triton can be imported."""
    try:
        from tensortap.numerics import triton_difference
    except ImportError:
        return None
    return triton_difference


def pick(tensor: torch.Tensor) -> Backend:
    """The backend for this tensor: the quickest that can read it where it lies."""
    forced = _forced()
    if forced == "reference":
        return REFERENCE
    if tensor.is_cuda:
        kernels = _kernels() if forced != "native" else None
        suits = kernels is not None and kernels.readable(tensor)
        return _TRITON if suits else REFERENCE
    return _NATIVE if forced != "triton" and native.suits(tensor) else REFERENCE


def pick_pair(reference: torch.Tensor, candidate: torch.Tensor) -> Backend:
    """The backend for two tensors: the quickest that can read both where they lie."""
    forced = _forced()
    if forced == "reference":
        return REFERENCE
    if reference.is_cuda:
        kernels = _kernels() if forced != "native" and not _FAILED else None
        suits = kernels is not None and kernels.suits_pair(reference, candidate)
        return _TRITON if suits else REFERENCE
    return _NATIVE if forced != "triton" and suits_pair(reference, candidate) else REFERENCE


def describe() -> dict[str, Any]:
    """Which backend tensors get on a CPU and on CUDA, and why, for `tensortap doctor`."""
    forced = _forced()
    if native.core is None:
        backend, why = "reference", native.missing
    elif forced is not None:
        backend, why = "native" if forced == "native" else "reference", f"{_VARIABLE} is set"
    else:
        backend, why = "native", "the compiled core is installed"
    core = native.core if backend == "native" else None
    return {
        "backend": backend,
        "why": why,
        "isa": core.isa() if core is not None else None,
        "openmp": core.openmp() if core is not None else None,
        "threads": torch.get_num_threads(),
        "cuda": _describe_cuda(forced),
    }


def _describe_cuda(forced: str | None) -> dict[str, str] | None:
    """The same for CUDA; None where there is none."""
    if not torch.cuda.is_available():
        return None
    if forced in ("native", "reference"):
        return {"backend": "reference", "why": f"{_VARIABLE} is set"}
    if _kernels() is None:
        return {"backend": "reference", "why": "Triton cannot be imported"}
    return {"backend": "triton", "why": "Triton is installed"}
