"""One layer on its recorded inputs: does it still return what was recorded?"""

from .engine import replay
from .results import Replay

__all__ = ["Replay", "replay"]
