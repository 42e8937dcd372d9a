"""What a replay says, as data."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..results import Comparison, LayerComparison, Verdict, json_text

if TYPE_CHECKING:
    from ...numerics.difference import Difference
    from ..causes.cause import Cause

__all__ = ["Replay"]


@dataclass(frozen=True)
class Replay:
    """A live layer on its recorded inputs; true when it returns what was recorded.

    `row` holds the numbers, as a row of a comparison does: the recording is the reference, the
    live layer the candidate. `how` says whether the layer was called `alone` on the recorded
    tensors, or `inside` a run of the whole model with them put in place.
    """

    run: str
    target: str
    layer: str
    row: LayerComparison = field(repr=False)
    how: Literal["alone", "inside"]
    notes: tuple[str, ...] = ()
    _to_script: Callable[[Path, bool], list[Path]] | None = field(
        default=None, repr=False, compare=False
    )

    @property
    def verdict(self) -> Verdict:
        return self.row.verdict

    @property
    def same(self) -> bool:
        """Whether the layer returns what was recorded, but for rounding."""
        return self.verdict in ("identical", "within")

    def __bool__(self) -> bool:
        return self.same

    @property
    def difference(self) -> Difference | None:
        return self.row.difference

    @property
    def error(self) -> float:
        """The relative L2 error of the live output; NaN where nothing could be compared."""
        return self.row.error

    @property
    def floor(self) -> float | None:
        """What rounding explains of the error."""
        return self.row.floor

    @property
    def causes(self) -> tuple[Cause, ...]:
        """What explains the difference, where it diverged, best first."""
        return self.row.causes

    @property
    def why(self) -> str:
        return self.row.why

    @property
    def moments(self) -> int:
        """How many calls were run again."""
        return max((part.moments for part in self.row.parts), default=0)

    @property
    def sentence(self) -> str:
        """The answer in a sentence."""
        name = self.layer or "(root)"
        where = "" if self.how == "alone" else ", run inside the model,"
        calls = f" in {self.moments} calls" if self.moments > 1 else ""
        if self.verdict == "identical":
            return f"{name}{where} returns the same bits as in {self.run}{calls}."
        if self.verdict == "within":
            return f"{name}{where} returns what {self.run} has{calls}: {self.why}."
        if self.verdict == "diverged":
            cause = f" {_capital(str(self.causes[0]))}." if self.causes else ""
            return f"{name}{where} does not return what {self.run} has{calls}: {self.why}.{cause}"
        return f"{name}{where} cannot be compared with {self.run}: {self.why.rstrip('.')}."

    @property
    def comparison(self) -> Comparison:
        """The same as a comparison of one layer, for whatever shows comparisons."""
        floor = "estimated from the dtypes and from what the layer does"
        return Comparison(self.run, self.target, (self.row,), floor=floor, notes=self.notes)

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": 1,
            "same": self.same,
            "sentence": self.sentence,
            "run": self.run,
            "target": self.target,
            "how": self.how,
            "notes": list(self.notes),
            **{key: value for key, value in self.row.to_dict().items() if key not in _NOT_HERE},
        }

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Strict JSON; also written to `path`."""
        return json_text(self.to_dict(), path)

    def to_script(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> list[Path]:
        """Write a script that shows the same without tensortap, its tensors beside it.

        Returns the files: `out.py`, `out.safetensors`, and `out.pt2` where the layer's class could
        not be imported and the layer was exported instead.
        """
        assert self._to_script is not None
        return self._to_script(Path(path), overwrite)

    def __rich__(self) -> Any:
        from ...reporting.replays import replay_screen

        return replay_screen(self)

    def __str__(self) -> str:
        from ...reporting.replays import replay_text

        return replay_text(self)


# What a row says of two runs; a replay has no second one.
_NOT_HERE = {
    *("candidate_layer", "matched_by", "origin", "order"),
    *("nearer", "reference_error", "candidate_error"),
}


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
