"""Following a run from another process: what is there now, asked again and again.

`live.json` says the last step; where nobody wrote one, the sealed segments do. The manifest says
when it is over. Nothing here waits or prints.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..recording.owner import life_of
from ..recording.reader import read_manifest
from ..recording.schema import LIVE, MANIFEST, Manifest
from ..recording.store import Store, open_store
from .live import Live, LiveAlarm, latest_of, read_live

__all__ = ["Follower", "State", "alarms_of"]

_SILENCE = 30.0  # seconds; without news for as long, somebody should look
_SILENT_STEPS = 10
_TEXTS = ("rule", "layer", "port", "leaf", "text")


@dataclass(frozen=True)
class State:
    """A run at this moment. `live` is None until there is a first step."""

    status: str  # waiting, recording, complete, failed
    live: Live | None = None
    new: bool = False  # whether the step is another than last time
    silence: float = 0.0  # seconds since the last news
    alarms: tuple[LiveAlarm, ...] = ()
    failure: str | None = None
    manifest: Manifest | None = None
    dead: bool = False  # whether the process that wrote it has ended without closing it

    @property
    def over(self) -> bool:
        return self.dead or self.status in ("complete", "failed")

    @property
    def silent(self) -> bool:
        """Whether there has been no news for so long that the process may have died."""
        if self.live is None or self.over:
            return False
        rate = self.live.steps_per_second
        usual = _SILENT_STEPS / rate if rate > 0 and math.isfinite(rate) else 0.0
        return self.silence > max(_SILENCE, usual)

    @property
    def unhealthy(self) -> bool:
        """Whether it failed, a rule about NaN or Inf became true, or the last step has some."""
        if self.status == "failed" or self.dead or any(_is_fatal(alarm) for alarm in self.alarms):
            return True
        live = self.live
        if live is None:
            return False
        scalars = (not math.isfinite(value) for value in live.scalars.values())
        return any(row.bad for row in live.rows) or any(scalars)


class Follower:
    """Looks at a run whenever it is asked to."""

    def __init__(self, path: str, clock: Callable[[], float] = time.time) -> None:
        self._store: Store = open_store(path)
        self._clock = clock
        self._live: Live | None = None
        self._segments: list[str] = []
        self._news = clock()

    def look(self) -> State:
        names = self._store.names()
        manifest = self._manifest() if MANIFEST in names else None
        if manifest is None:
            return State("waiting")
        dead = manifest.status == "recording" and life_of(manifest.writer) == "dead"
        live = self._latest(names)
        if live is None:
            failure = manifest.failure
            return State(manifest.status, failure=failure, manifest=manifest, dead=dead)
        before, self._live = self._live, live
        new = before is None or (before.epoch, before.batch) != (live.epoch, live.batch)
        if before is None:
            self._news = min(self._clock(), live.time)  # it may have been silent for long
        elif new or live.time != before.time:
            self._news = self._clock()
        return State(
            manifest.status,
            live,
            new,
            max(0.0, self._clock() - self._news),
            live.alarms or alarms_of(manifest),
            manifest.failure,
            manifest,
            dead,
        )

    def _manifest(self) -> Manifest | None:
        try:
            return read_manifest(self._store)
        except FileNotFoundError:
            return None

    def _latest(self, names: Sequence[str]) -> Live | None:
        if LIVE in names:
            found = read_live(self._store)
            if found is not None:
                return found
        segments = [name for name in names if name.startswith("segment-r")]
        if segments == self._segments:
            return self._live
        try:
            found = latest_of(self._store, segments)
        except FileNotFoundError:  # joined under our eyes: next time
            return self._live
        self._segments = segments
        return found


def _is_fatal(alarm: LiveAlarm) -> bool:
    return not math.isfinite(alarm.value) or any(word in alarm.rule for word in ("nan", "inf"))


def alarms_of(manifest: Manifest) -> tuple[LiveAlarm, ...]:
    """The alarms that a closed run has in its manifest, as far as they can be read."""
    found = manifest.selection.get("alarms")
    alarms = []
    for item in found if isinstance(found, list) else []:
        if not isinstance(item, dict):
            continue
        texts = {
            name: str(item.get(name, "")) for name in ("rule", "layer", "port", "leaf", "text")
        }
        batch, value = item.get("batch"), item.get("value")
        number = float(value) if isinstance(value, int | float) else math.nan
        alarms.append(
            LiveAlarm(**texts, batch=batch if isinstance(batch, int) else 0, value=number)
        )
    return tuple(alarms)
