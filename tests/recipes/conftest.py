"""One warm interpreter for the commands of all recipes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from minimax_reader import Reader as MinimaxReader
from warm_python import WarmPython


@pytest.fixture(scope="session")
def warm() -> Iterator[WarmPython]:
    found = WarmPython()
    yield found
    found.close()


@pytest.fixture(scope="session")
def minimax(warm: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> MinimaxReader:
    """recipes/minimax_m2 behind document 000's commands, which run once for all workers."""
    own = tmp_path_factory.getbasetemp()
    shelf = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "minimax_document"
    folder = tmp_path_factory.mktemp("minimax") / "minimax_m2"
    return MinimaxReader.of_the_document(folder, warm, shelf)
