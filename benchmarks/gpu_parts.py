"""What the parts of benchmarks/gpu.py share: cells with an aim, tables, and careful timing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from timing import Timings, interleave

__all__ = ["Cell", "Measured", "Row", "Setting", "Table", "attempt", "measure", "progress", "why"]

MORE_IS_BETTER = ("TB/s", "GB/s")


@dataclass(frozen=True)
class Cell:
    """A number with its quartiles and its aim, or why there is none."""

    value: float | None = None
    low: float | None = None
    high: float | None = None
    unit: str = "x"
    aim: float | None = None
    missing: str | None = None

    @property
    def met(self) -> bool | None:
        """Whether the aim is met, as it is written in the table; None without an aim or a value."""
        if self.aim is None or self.value is None:
            return None
        shown = float(self.number(self.value))
        return shown >= self.aim if self.unit in MORE_IS_BETTER else shown <= self.aim

    def number(self, value: float) -> str:
        if self.unit == "x":
            return f"{value:.3f}" if value < 2 else f"{value:.2f}"
        return f"{value:.3f}" if value < 0.1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"

    def text(self) -> str:
        if self.missing is not None:
            return f"not available: {self.missing}"
        if self.value is None:
            return ""
        said = self.number(self.value)
        if self.unit not in ("x", "TB/s"):  # those stand in the table's title
            said += f" {self.unit}"
        if self.low is not None and self.high is not None:
            said += f" ({self.number(self.low)}–{self.number(self.high)})"
        if self.aim is not None:
            said += f", aim {self.aim:g}: {'met' if self.met else 'missed'}"
        return said


@dataclass(frozen=True)
class Row:
    """One line of a table; `ours` are those that have aims."""

    name: str
    cells: tuple[Cell, ...]
    ours: bool = False


@dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Setting:
    """Where and how large: `disk` and `memory` are folders of a run's own."""

    device: torch.device
    tiny: bool
    disk: Path
    memory: Path
    only: tuple[str, ...] = ()  # shapes such as "1 x 128"; none: all
    pace: float = 1.0

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def aim(self, value: float) -> float | None:
        """Aims are for the H200 and the large model."""
        return None if self.tiny or not self.cuda else value

    def seconds(self, value: float) -> float:
        """How long to measure; a tiny run only shows that it runs."""
        return 0.03 if self.tiny else value * self.pace

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


@dataclass
class Measured:
    """What an interleaved run found; variants that could not run, and why."""

    timings: Timings | None = None
    lost: dict[str, str] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)
    rounds: int = 0

    def absent(self, *names: str) -> Cell | None:
        """A cell that says why, unless all of these were timed."""
        for name in names:
            if name in self.lost or self.timings is None or name not in self.timings.seconds:
                return Cell(missing=self.lost.get(name, "it was not run"))
        return None

    def ratio(self, name: str, base: str = "plain", aim: float | None = None) -> Cell:
        gone = self.absent(name, base)
        if gone is not None or self.timings is None:
            return gone or Cell()
        low, high = self.timings.spread(name, base)
        return Cell(self.timings.ratio(name, base), low, high, aim=aim)

    def milliseconds(self, name: str) -> Cell:
        gone = self.absent(name)
        if gone is not None or self.timings is None:
            return gone or Cell()
        return Cell(self.timings.median(name) * 1e3, unit="ms")

    def speed(self, name: str, nbytes: float, unit: str, aim: float | None = None) -> Cell:
        """Bytes a second, with the quartiles of the times."""
        gone = self.absent(name)
        if gone is not None or self.timings is None:
            return gone or Cell()
        scale = nbytes / {"TB/s": 1e12, "GB/s": 1e9}[unit]
        ordered = sorted(self.timings.seconds[name])
        quarter = len(ordered) // 4
        return Cell(
            scale / self.timings.median(name),
            scale / ordered[-1 - quarter],
            scale / ordered[quarter],
            unit=unit,
            aim=aim,
        )


def progress(text: str) -> None:
    """How far it is, beside the tables."""
    print(f"  {text}", file=sys.stderr, flush=True)


def why(error: BaseException) -> str:
    """An error in one line, for a table."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:160].replace("|", "/")


def attempt(make: Callable[[], Any], lost: dict[str, str], name: str) -> Any:
    """What `make` gives, or None with the reason in `lost`."""
    try:
        return make()
    except Exception as error:
        lost[name] = why(error)
        return None


def measure(
    variants: Mapping[str, Callable[[], object]],
    *,
    seconds: float,
    most: int = 15,
    least: int = 3,
    warm: int = 2,
    repeat: int = 1,
    after: Mapping[str, Callable[[], object]] | None = None,
    lost: Mapping[str, str] | None = None,
) -> Measured:
    """Interleave the variants for about so many seconds; one that raises is left out and said.

    The first call of each, which compiles kernels and pins memory, is timed by itself. With `warm`
    0 there are no such calls and `least` rounds: for what takes seconds and is warm already.
    """
    found = Measured(lost=dict(lost or {}))
    settle = dict(after or {})
    usable: dict[str, Callable[[], object]] = {}
    expected = 0.0
    for name, call in variants.items():
        took = attempt(
            lambda name=name, call=call: _warm(call, settle.get(name, _nothing), warm),
            found.lost,
            name,
        )
        if took is not None:
            usable[name] = call
            found.first[name] = took[0]
            expected += took[-1] * repeat
    found.rounds = max(least, min(most, int(seconds / expected) if expected else least))
    try:
        found.timings = interleave(
            usable, rounds=found.rounds, warmup=0, repeat=repeat, after=settle
        )
    except Exception as error:
        found.lost.update(dict.fromkeys(usable, why(error)))
    return found


def _warm(call: Callable[[], object], settle: Callable[[], object], times: int) -> list[float]:
    """Seconds of each of the first calls; of the last one with what it leaves to others."""
    took = [] if times else [0.0]
    for turn in range(times):
        start = time.perf_counter()
        call()
        now = time.perf_counter()
        settle()
        took.append(now - start)
        if turn == times - 1:
            took.append(time.perf_counter() - start)
    return took


def _nothing() -> None: ...
