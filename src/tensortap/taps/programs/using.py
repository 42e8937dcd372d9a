"""Which options mean something to a model: one that does not is a mistake, and is refused."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from ...errors import OptionError
from .base import Options

__all__ = ["check_used", "given", "only_used"]

_FLAGS = {"weights": "--weights", "names_from": "--names-from", "custom_ops": "--custom-ops"}
_INSTEAD = {
    "weights": "",
    "names_from": "",
    "custom_ops": (
        " Operators of torch are loaded in the target's own function: torch.ops.load_library(…), "
        "in model.py:build."
    ),
}


def given(options: Options) -> list[str]:
    """The options that were given and that not every runtime has a use for."""
    return [name for name in _FLAGS if getattr(options, name)]


def check_used(options: Options, uses: Collection[str], what: str) -> None:
    """Refuse an option that was given and that this has no use for."""
    unused = [name for name in given(options) if name not in uses]
    if unused:
        raise OptionError(
            f"{_FLAGS[unused[0]]} means nothing to {what}.{_told(uses)} Leave it out."
            f"{_INSTEAD[unused[0]]}"
        )


def only_used(options: Options, uses: Collection[str]) -> Options:
    """The options without those that this has no use for, and others may have."""
    return replace(
        options,
        weights=options.weights if "weights" in uses else None,
        names_from=options.names_from if "names_from" in uses else None,
        custom_ops=options.custom_ops if "custom_ops" in uses else (),
    )


def _told(uses: Collection[str]) -> str:
    known: Sequence[str] = [flag for name, flag in _FLAGS.items() if name in uses]
    return f" It is told more by {' or '.join(known)}." if known else ""
