"""What is left in a forked child: copies of our objects, without their threads.

A lock that another thread held while the process was forked is never released in the child. Things
that have locks are made known here, and get new ones there.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["Forkable", "make_known"]


class Forkable(Protocol):
    """Something that must be put in order in a forked child."""

    def in_child(self) -> None:
        """The process was forked, and this is the child's copy."""
        ...


_known: weakref.WeakSet[Forkable] = weakref.WeakSet()


def make_known(thing: Forkable) -> None:
    """Call its `in_child` in every child that is forked from now on."""
    _known.add(thing)


def _in_child() -> None:
    for thing in list(_known):
        thing.in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
