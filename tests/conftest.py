"""Fixtures for all tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tap
from forked_commands import Commands
from support import Net

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports our kernels


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.arange(12).view(2, 6)


@pytest.fixture(scope="session")
def forked() -> Iterator[Commands]:
    """Our commands, each in a process of its own that is quick to start."""
    commands = Commands()
    yield commands
    commands.close()


@pytest.fixture
def recorded(tmp_path: Path) -> Callable[..., tap.Recording]:
    """Record a call of a model and open the result."""
    count = 0

    def run(model: nn.Module, *args: Any, call: Callable[[], Any] | None = None, **options: Any):
        nonlocal count
        count += 1
        path = tmp_path / f"run{count}"
        with tap.record(model, path, **{"layers": "all", **options}) as rec:
            if call is not None:
                call()
            else:
                model(*args)
        assert rec.failure is None
        return tap.open(path)

    return run
