"""What two runs wrote, side by side from shortly before their texts part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import text
from .console import table

if TYPE_CHECKING:
    from rich.table import Table

    from ..comparing.generation import GenerationComparison

__all__ = ["HEAD", "generation_rows", "generations_table"]

HEAD = ("prompt", "tokens", "first to differ", "reference", "candidate", "margin", "error", "why")
_BEFORE, _MOST = 40, 160  # letters that are shown before the texts part, and in all
_WHY = {
    "same": "-",
    "rounding": "rounding",
    "bug": "not rounding",
    "sampled": "drawn at random",
    "unknown": "unknown",
}


def generation_rows(found: Sequence[GenerationComparison]) -> list[tuple[str, ...]]:
    """A row for each text, its cells in the order of `HEAD`."""
    return [
        (
            _shortened(one.prompt) if one.prompt else f"batch {one.batch}",
            text.count(len(one.reference_tokens)),
            "-" if one.first is None else f"token {one.first + 1}",
            *_both(one),
            text.number(one.margin, 3),
            text.number(one.error, 3),
            _WHY[one.kind] if one.same_prompt else "another prompt",
        )
        for one in found
    ]


def generations_table(found: Sequence[GenerationComparison]) -> Table:
    """What was written, a row for each text."""
    folds = ("prompt", "reference", "candidate")
    made = table(*((name, "left") for name in HEAD), folds=folds)
    for row in generation_rows(found):
        made.add_row(*row)
    return made


def _both(one: GenerationComparison) -> tuple[str, str]:
    ours, theirs = one.reference_text, one.candidate_text
    if ours is None or theirs is None:  # without a tokenizer the tokens are the text
        ours = " ".join(map(str, one.reference_tokens))
        theirs = " ".join(map(str, one.candidate_tokens))
    differ = (at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1])
    start = max(0, next(differ, 0) - _BEFORE)
    return _shortened(ours, start), _shortened(theirs, start)


def _shortened(written: str, start: int = 0) -> str:
    cut = written[start : start + _MOST]
    shown = text.clean(cut.replace("\n", "\\n"))
    return f"{'…' if start else ''}{shown}{'…' if start + _MOST < len(written) else ''}"
