"""`live.json`: the last step of a watched run, for somebody who looks while it trains.

It stands beside the recording and is replaced whole, at most once a second, so a reader never
meets half of one. Readers check all of it: a file comes from outside.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import DamagedError
from ..recording.kinds import parse, plain
from ..recording.schema import LIVE, PORTS
from ..recording.segment import Segment, read_segment
from ..recording.store import Store, open_store
from .step import Step

__all__ = [
    "LIVE",
    "Live",
    "LiveAlarm",
    "LiveRow",
    "latest_of",
    "live_text",
    "read_live",
    "write_live",
]

_LARGEST = 64 << 20
_COUNTS = ("count", "nan", "posinf", "neginf", "zeros")
_NUMBERS = ("mean", "std", "min", "max", "absmax", "l2", "rms")
_ALARM = ("rule", "layer", "port", "leaf", "text")


@dataclass(frozen=True)
class LiveRow:
    """One place at the last step; what is not finite is NaN."""

    layer: str
    port: str
    leaf: str
    count: int
    nan: int
    posinf: int
    neginf: int
    zeros: int
    mean: float
    std: float
    min: float
    max: float
    absmax: float
    l2: float
    rms: float

    @property
    def bad(self) -> int:
        """How many values are NaN or infinite."""
        return self.nan + self.posinf + self.neginf

    def to_dict(self) -> dict[str, Any]:
        return {name: _plain(value) for name, value in vars(self).items()}


@dataclass(frozen=True)
class LiveAlarm:
    """A rule that became true."""

    rule: str
    layer: str
    port: str
    leaf: str
    batch: int
    value: float
    text: str

    def to_dict(self) -> dict[str, Any]:
        return {name: _plain(value) for name, value in vars(self).items()}


@dataclass(frozen=True)
class Live:
    """The last step as `live.json` has it."""

    epoch: int
    batch: int
    time: float
    every: int
    steps_per_second: float
    rows: tuple[LiveRow, ...] = field(default=(), repr=False)
    scalars: Mapping[str, float] = field(default_factory=dict)
    alarms: tuple[LiveAlarm, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The document, as it stands in the file."""
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "time": self.time,
            "every": self.every,
            "steps_per_second": _plain(self.steps_per_second),
            "layers": [row.to_dict() for row in self.rows],
            "scalars": {name: _plain(value) for name, value in self.scalars.items()},
            "alarms": [alarm.to_dict() for alarm in self.alarms],
        }


def live_text(step: Step, alarms: Sequence[Any], *, every: int, rate: float) -> str:
    """What `live.json` says of a step; `rate` is in steps a second, `alarms` those that stand."""
    live = Live(
        epoch=step.epoch,
        batch=step.batch,
        time=time.time(),
        every=every,
        steps_per_second=rate,
        rows=tuple(_row(*key, summary) for key, summary in step.merged.items()),
        scalars={name: float(value) for name, value in step.scalars.items()},
        alarms=tuple(
            LiveAlarm(
                **{name: str(getattr(alarm, name)) for name in _ALARM},
                batch=alarm.batch,
                value=float(alarm.value),
            )
            for alarm in alarms
        ),
    )
    return json.dumps(live.to_dict(), allow_nan=False)  # ASCII: no name can fail to be written


def write_live(place: Store | str | os.PathLike[str], text: str) -> None:
    """Replace the file in a recording's folder, in one stroke."""
    _store(place).write_text(LIVE, text)


def read_live(place: Store | str | os.PathLike[str]) -> Live | None:
    """The last step of the recording in a folder; None where nobody wrote one."""
    store = _store(place)
    where = f"{store.url}/{LIVE}"
    try:
        size = store.size(LIVE)
        if size > _LARGEST:
            raise DamagedError(
                f"{where} has {size} bytes, more than {_LARGEST}: no tensortap wrote it. Remove it."
            )
        data = plain(parse(store.read_text(LIVE, _LARGEST)), "it")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedError(f"{where} cannot be read: {error.strerror or error}.") from None
    except ValueError as error:
        raise DamagedError(f"{where} is corrupt: it is not JSON ({error}). Remove it.") from None
    try:
        return _checked(data)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise DamagedError(
            f"{where} is corrupt: it is not what a watched run writes ({type(error).__name__}: "
            f"{error}). Remove it."
        ) from None


def latest_of(place: Store | str | os.PathLike[str], names: Sequence[str]) -> Live | None:
    """The same from sealed segments, where there is no `live.json`: of each place its last row.

    A step may lie in two segments, so the last two of `names` are read.
    """
    store = _store(place)
    found: dict[tuple[str, str, str], LiveRow] = {}
    scalars: dict[str, float] = {}
    last = (-1, -1)
    for name in sorted(names)[-2:]:
        segment = read_segment(store, name)
        last = max(last, *((row[2], row[3]) for row in segment.rows), (-1, -1))
        _take_latest(segment, found, scalars)
    if last < (0, 0):
        return None
    rate = math.nan
    return Live(*last, time.time(), 1, rate, tuple(found.values()), scalars)


def _take_latest(
    segment: Segment, found: dict[tuple[str, str, str], LiveRow], scalars: dict[str, float]
) -> None:
    from ..numerics.summary import Summary

    rows = sorted(segment.rows, key=lambda row: row[1])
    latest = {row[0]: row[6] for row in rows if row[6] >= 0}
    table = segment.summaries()
    for number, row in latest.items():
        site = segment.sites[number]
        made = Summary.from_row(table[row].tolist())
        if site.port == "scalar":
            scalars[site.layer] = made.mean
        else:
            found[site.layer, site.port, site.leaf] = _row(site.layer, site.port, site.leaf, made)


def _row(layer: str, port: str, leaf: str, summary: Any) -> LiveRow:
    values = {name: getattr(summary, name) for name in (*_COUNTS, *_NUMBERS)}
    return LiveRow(layer, port, leaf, **values)


def _checked(data: Any) -> Live:
    """Every value as its type says, or an error that names it."""
    rows = tuple(_checked_row(item) for item in _list(data, "layers"))
    for row in rows:
        if row.port not in PORTS:
            raise ValueError(f"there is no port {row.port!r}")
    return Live(
        epoch=_whole(data, "epoch"),
        batch=_whole(data, "batch"),
        time=_number(data["time"]),
        every=_whole(data, "every"),
        steps_per_second=_number(data["steps_per_second"]),
        rows=rows,
        scalars={str(name): _number(value) for name, value in data["scalars"].items()},
        alarms=tuple(
            LiveAlarm(
                **{name: _text(item, name) for name in _ALARM},
                batch=_whole(item, "batch"),
                value=_number(item["value"]),
            )
            for item in _list(data, "alarms")
        ),
    )


def _checked_row(item: Any) -> LiveRow:
    values: dict[str, Any] = {name: _text(item, name) for name in ("layer", "port", "leaf")}
    values |= {name: _whole(item, name) for name in _COUNTS}
    values |= {name: _number(item[name]) for name in _NUMBERS}
    return LiveRow(**values)


def _list(data: Any, name: str) -> Iterable[Any]:
    found = data[name]
    if not isinstance(found, list):
        raise TypeError(f"{name} is {type(found).__name__}, expected a list")
    return found


def _text(item: Any, name: str) -> str:
    if not isinstance(item[name], str):
        raise TypeError(f"{name} is {type(item[name]).__name__}, expected text")
    return str(item[name])


def _whole(item: Any, name: str) -> int:
    value = item[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"{name} is {value!r}, expected a whole number from 0")
    return value


def _number(value: Any) -> float:
    if value is None:
        return math.nan
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{value!r} is no number")
    return float(value)


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _store(place: Store | str | os.PathLike[str]) -> Store:
    return open_store(place) if isinstance(place, str | os.PathLike) else place
