"""Running a target, as the verbs of the command line know it; it is done in targets/running."""

from __future__ import annotations

from ..targets.running import Outcome, Settings, record_target, run_target

__all__ = ["Outcome", "Settings", "record_target", "run_target"]
