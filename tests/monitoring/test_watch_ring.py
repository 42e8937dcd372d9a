"""The ring: the last steps, bounded, in order."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from tensortap.errors import OptionError
from tensortap.monitoring.ring import Ring
from tensortap.monitoring.step import Step
from tensortap.numerics.summary import WIDTH


def step(batch: int) -> Step:
    return Step(0, batch, (), (), np.zeros((0, WIDTH)))


@pytest.mark.parametrize(
    ("size", "pushed", "kept"),
    [(3, 2, [0, 1]), (3, 3, [0, 1, 2]), (3, 7, [4, 5, 6]), (1, 2, [1]), (0, 4, [])],
)
def test_it_keeps_the_last_in_order_and_is_empty_once_taken(
    size: int, pushed: int, kept: list[int]
) -> None:
    ring = Ring(size)
    for batch in range(pushed):
        ring.push(step(batch))
    assert len(ring) == len(kept)
    assert [found.batch for found in ring.take()] == kept
    assert ring.take() == [] and len(ring) == 0
    ring.push(step(9))
    assert [found.batch for found in ring.take()] == ([9] if size else [])


def test_what_falls_out_is_let_go() -> None:
    ring = Ring(2)
    steps = [step(batch) for batch in range(4)]
    alive = [weakref.ref(found) for found in steps]
    for found in steps:
        ring.push(found)
    del steps, found
    gc.collect()
    assert [ref() is not None for ref in alive] == [False, False, True, True]


@pytest.mark.parametrize("size", [-1, 1.5, True, "3", None])
def test_a_size_that_is_none(size: object) -> None:
    with pytest.raises(OptionError, match="ring must be a number of steps"):
        Ring(size)  # type: ignore[arg-type]
