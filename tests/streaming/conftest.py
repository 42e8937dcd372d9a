"""Models to stream: those of tests/comparing, and one with everything that is awkward."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tap

sys.path.insert(0, str(Path(__file__).parents[1] / "comparing"))

Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Record a model on some batches; the recorder, closed."""
    count = 0

    def record(model: nn.Module, *batches: Any, **options: Any) -> tap.Recorder:
        nonlocal count
        count += 1
        with torch.no_grad(), tap.record(model, tmp_path / str(count), **options) as rec:
            for batch in batches:
                model(batch)
                rec.step()
        assert rec.failure is None
        return rec

    return record
