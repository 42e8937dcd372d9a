"""Pairs of tensors as one stream: checked, handed to a backend, read as often as it needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from tensortap.errors import OptionError
from tensortap.numerics.difference_row import State, tolerances

if TYPE_CHECKING:
    import torch

    from tensortap.numerics.backend import Backend
    from tensortap.numerics.histogram import Histogram

    Pair = tuple[torch.Tensor, torch.Tensor]
    Measured = tuple[State, Sequence[float] | None, Histogram | None]

__all__ = ["Pairs", "check_pair", "unravel"]


class _Unsuited(Exception):
    """A later pair of a stream is not for the backend that the first one chose."""


class Pairs:
    """A stream that may be read several times, and what was seen of it."""

    def __init__(self, pairs: Sequence[Pair] | Callable[[], Iterable[Pair]]) -> None:
        if isinstance(pairs, Iterator):
            raise OptionError(
                f"The pairs of a difference are read several times, but a {type(pairs).__name__} "
                "can be read but once. Pass a list, or a function that returns them anew."
            )
        self._pairs = pairs
        self._shapes: list[tuple[tuple[int, ...], int]] = []
        self.dtypes: list[tuple[torch.dtype, torch.dtype]] = []

    def measure(self, *, percentiles: bool, rtol: float | None, atol: float | None) -> Measured:
        """The raw row, and for percentiles the order statistics and the histogram of |d|."""
        from tensortap.numerics.backend import REFERENCE, pick_pair

        first = next(self._read(), None)
        backend = REFERENCE if first is None else pick_pair(*first)
        try:
            return self._measured_by(backend, percentiles, rtol, atol)
        except _Unsuited:
            return self._measured_by(REFERENCE, percentiles, rtol, atol)

    def _measured_by(
        self, backend: Backend, percentiles: bool, rtol: float | None, atol: float | None
    ) -> Measured:
        from tensortap.numerics.backend import REFERENCE, pick_pair

        def stream() -> Iterator[Pair]:
            shapes, dtypes = [], []
            for reference, candidate in self._read():
                if backend is not REFERENCE and pick_pair(reference, candidate) is not backend:
                    raise _Unsuited
                parts = 2 if reference.is_complex() or candidate.is_complex() else 1
                shapes.append((tuple(reference.shape), parts))
                dtypes.append((reference.dtype, candidate.dtype))
                yield reference, candidate
            self._shapes, self.dtypes = shapes, dtypes

        row, ordered, histogram = backend.difference_row(
            stream, percentiles=percentiles, rtol=rtol, atol=atol
        )
        return State(*row), ordered, histogram

    @property
    def parts(self) -> int:
        """How many numbers an element of the first pair is."""
        return self._shapes[0][1] if self._shapes else 1

    def _read(self) -> Iterator[Pair]:
        for pair in self._pairs() if callable(self._pairs) else self._pairs:
            check_pair(*pair)
            yield pair

    def tolerances(self) -> tuple[float, float]:
        """The loosest default rtol and atol of all pairs."""
        usual = [tolerances(*pair) for pair in self.dtypes] or [(0.0, 0.0)]
        return max(rtol for rtol, _ in usual), max(atol for _, atol in usual)

    def place(self, at: int) -> tuple[int, tuple[int, ...]] | None:
        """A flat place in the stream as the number of the pair and the index in it."""
        for number, (shape, parts) in enumerate(self._shapes if at >= 0 else ()):
            size = math.prod(shape) * parts
            if at < size:
                return number, unravel(at // parts, shape)
            at -= size
        return None


def check_pair(reference: torch.Tensor, candidate: torch.Tensor) -> None:
    """Refuse, in words, what cannot be subtracted element by element."""
    import torch

    from tensortap.numerics.layout import check_summarizable

    for side, tensor in (("reference", reference), ("candidate", candidate)):
        if not isinstance(tensor, torch.Tensor):
            raise OptionError(
                f"A difference is between two tensors, but the {side} is a "
                f"{type(tensor).__name__}. Turn it into one: torch.as_tensor(...)."
            )
        check_summarizable(tensor)
    if reference.shape != candidate.shape:
        raise OptionError(
            f"The reference has shape {tuple(reference.shape)}, but the candidate "
            f"{tuple(candidate.shape)}. A difference needs equal shapes: permute, slice or reshape "
            "one of them first."
        )


def unravel(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The index of a flat place."""
    index = []
    for extent in reversed(shape):
        flat, rest = divmod(flat, extent)
        index.append(rest)
    return tuple(reversed(index))
