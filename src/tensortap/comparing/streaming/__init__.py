"""Comparing while the model runs, for runs that are too large to store.

`Stream` is the judge of a recording that is made against another: it hands each call, as it ends,
to the same work that compares two recordings (`comparing.compare.Work`), and sums up the rows.
"""

from .stream import Stream

__all__ = ["Stream"]
