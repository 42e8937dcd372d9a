"""What the scripts of this folder share; importing it finds tensortap in a bare clone."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
_SOURCES = HERE.parent.parent / "src"

if importlib.util.find_spec("tensortap") is None and (_SOURCES / "tensortap").is_dir():
    sys.path.insert(0, str(_SOURCES))
