"""Other people's compilers talk while they work; what matters of it comes as an exception."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

__all__ = ["quietly"]


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without warnings, of Python and of any logger."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
