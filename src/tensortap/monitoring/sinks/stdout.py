"""Numbers on the terminal: a line a step."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import TextIO

from ...errors import OptionError
from .values import without_scalars

__all__ = ["StdoutSink", "line_of"]

FORMS = ("line", "json")


class StdoutSink:
    """A line for every `every`-th step that comes: short to read, or JSON with every number.

    These numbers are the data, so they go to stdout; a stream given instead is not closed.
    """

    def __init__(self, every: int = 1, *, form: str = "line", stream: TextIO | None = None) -> None:
        if every < 1:
            raise OptionError(f"every is at least 1, but got {every}.")
        if form not in FORMS:
            raise OptionError(f"The stdout sink writes {' or '.join(FORMS)}, but got {form!r}.")
        self.every = every
        self.form = form
        self.stream = stream
        self.seen = 0

    def log(self, values: Mapping[str, float], step: int) -> None:
        due = self.seen % self.every == 0
        self.seen += 1
        if due:
            text = line_of(values, step) if self.form == "line" else _json(values, step)
            stream = self.stream or sys.stdout  # as it is now: tests and notebooks swap it
            stream.write(f"{text}\n")
            stream.flush()

    def close(self) -> None:
        pass


def line_of(values: Mapping[str, float], step: int) -> str:
    """One line: the scalars, the range of each port's rms over its layers, and what is bad.

    "step 120  loss 0.31  grad_norm 1.2  output rms 0.4..1.8  nan 12 (first: output/blocks.3)"
    """
    watched = without_scalars(values)
    parts = [f"step {step}"]
    parts += [f"{name} {value:.4g}" for name, value in values.items() if name not in watched]
    parts += [f"{name} {value:.4g}" for name, value in watched.items() if "/" not in name]
    ranges: dict[str, list[float]] = {}
    bad: dict[str, tuple[float, str]] = {}
    for name, value in watched.items():
        place, _, statistic = name.rpartition("/")
        if statistic == "rms":
            ranges.setdefault(place.partition("/")[0], []).append(value)
        elif statistic in ("nan", "inf") and place and value:
            count, first = bad.get(statistic, (0.0, place))
            bad[statistic] = (count + value, first)
    parts += [f"{port} rms {min(found):.3g}..{max(found):.3g}" for port, found in ranges.items()]
    parts += [f"{name} {count:.0f} (first: {first})" for name, (count, first) in bad.items()]
    return "  ".join(parts)


def _json(values: Mapping[str, float], step: int) -> str:
    return json.dumps({"step": step, "values": dict(values)})
