"""One warm interpreter for the commands of all recipes."""

from __future__ import annotations

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
    """A copy of recipes/minimax_m2, in which its tests compile the model once."""
    return MinimaxReader(tmp_path_factory.mktemp("minimax") / "minimax_m2", warm)
