"""The package `quamba` of recipes/quamba, for tests: import this before it."""

from __future__ import annotations

import sys
from pathlib import Path

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "quamba"

if str(RECIPE) not in sys.path:
    sys.path.append(str(RECIPE))
