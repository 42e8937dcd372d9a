"""Numbers into Weights & Biases, beside what the user logs there."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from ...errors import MissingExtraError
from .values import ALARMS

__all__ = ["WandbSink"]


class WandbSink:
    """Scalars to a wandb run, against a step metric of their own, `tensortap/step`.

    wandb has one step counter a run and drops what comes with a smaller step, so in a run that is
    shared (the one given, or the active one) our numbers ride along in the row of the user's next
    `run.log` and never move its counter. Where the user logs more rarely than the watch, the
    latest numbers win, counts of NaN and Inf the largest. In a run of its own (`project`, or no
    run active) every step is a row.
    """

    def __init__(
        self, run: Any = None, *, project: str | None = None, prefix: str = "tensortap/"
    ) -> None:
        if run is None and find_spec("wandb") is None:
            raise MissingExtraError("wandb", "wandb", "The wandb sink")
        self.run = run
        self.project = project
        self.prefix = prefix
        self.own = False
        self._ready = False
        self._row = -1  # the user's row that our last numbers went to
        self._counts: dict[str, float] = {}

    def log(self, values: Mapping[str, float], step: int) -> None:
        run = self._started()
        numbers = {f"{self.prefix}{name}": value for name, value in values.items()}
        if not self.own:
            self._keep_counts(numbers, _row(run))
        run.log({**numbers, f"{self.prefix}step": step}, commit=self.own)

    def close(self) -> None:
        if self.own and self.run is not None:
            self.run.finish()

    def _started(self) -> Any:
        """The run: looked for at the first step, when the user's own is there if there is one."""
        if self._ready:
            return self.run
        if self.run is None:
            import wandb

            self.run = wandb.run if self.project is None else None
            if self.run is None:
                self.run = wandb.init(project=self.project, reinit="create_new")
                self.own = True
        self.run.define_metric(f"{self.prefix}step", hidden=True)
        self.run.define_metric(f"{self.prefix}*", step_metric=f"{self.prefix}step")
        self._ready = True
        return self.run

    def _keep_counts(self, numbers: dict[str, float], row: int) -> None:
        """Let a count of bad values not be overwritten by a later 0 in the same row."""
        if row != self._row:
            self._row, self._counts = row, {}
        for name, value in numbers.items():
            if name.endswith(("/nan", "/inf")) or name == f"{self.prefix}{ALARMS}":
                numbers[name] = self._counts[name] = max(value, self._counts.get(name, 0.0))


def _row(run: Any) -> int:
    try:
        return int(run.step)
    except Exception:  # a run that several processes write to has no steps
        return -1
