"""Comparing while the model runs, for runs that are too large to store.

`Stream` is the judge of a recording that is made against another: it hands each call, as it ends,
to the same work that compares two recordings (`comparing.compare.Work`), and sums up the rows.
`find_window` says from a few values of each tensor where such a recording is worth while.
"""

from .stream import Stream
from .window import Window, find_window

__all__ = ["Stream", "Window", "find_window"]
