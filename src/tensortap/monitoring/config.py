"""A training configuration with our keys in it: `monitor_*` and `watch_*`, in JSON or TOML.

The file is the user's own, as in document 004: keys that are not ours are left alone. One that
looks like ours and is not (`monitor_epoch`) is refused, for it would be silent otherwise.
docs/monitor.schema.json is the formal twin of this module.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..errors import OptionError, TapError
from ..regular_files import read_regular
from ..taps.session import TapWarning
from .conditions import Action
from .config_keys import KEYS, Wrong

__all__ = ["Config", "MonitorConfig", "Reread", "WatchConfig", "monitor_arguments", "read_config"]

_LARGEST = 4 << 20  # bytes
_FRESH = 2.0  # seconds; a file this young may change again without a new time of change
_SETTLE = 0.25  # seconds; one this young may be half written, and half a TOML file is one too


@dataclass(frozen=True)
class MonitorConfig:
    """The arguments of a `Monitor`; None where the file does not say."""

    layers: list[str] | dict[str, dict[str, Any]] | None = None
    epochs: list[int] | None = None
    batches: list[int] | None = None
    output_dir: str | None = None
    save_format: Literal["pt", "npy"] | None = None
    sample_every: int | None = None
    memory_limit: int | None = None


@dataclass(frozen=True)
class WatchConfig:
    """The arguments of a `watch`; None where the file does not say."""

    layers: str | list[str] | None = None
    every: int | None = None
    outputs: bool | None = None
    grads: bool | None = None
    params: bool | str | list[str] | None = None
    updates: bool | Literal["sampled"] | None = None
    rules: list[str] | dict[str, Action] | None = None
    path: str | None = None
    ring: int | None = None


@dataclass(frozen=True)
class Config:
    """What a file says to `Monitor` and to `watch`."""

    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)


class Reread:
    """Looks after a file that may change while a model trains.

    `config` is what holds. What is wrong with the file when it is first read raises; later it is
    said once, and what held before holds on until the file is mended.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        every: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = Path(path)
        self._every = every
        self._clock = clock
        self._mark = _mark(self.path)
        self.config = read_config(self.path).watch
        self._looked = clock()
        self._trouble: str | None = None

    def changed(self) -> WatchConfig | None:
        """The new configuration when there is one; looks at the file once a second at most."""
        now = self._clock()
        if now - self._looked < self._every:
            return None
        self._looked = now
        mark = _mark(self.path)
        if mark is not None and mark == self._mark:
            return None
        if 0 <= _age(self.path) < min(_SETTLE, self._every):
            return None
        try:
            found = read_config(self.path).watch
        except TapError as error:
            self._say(str(error))
            return None
        self._mark, self._trouble = mark, None
        if found == self.config:
            return None
        self.config = found
        return found

    def _say(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._trouble = trouble
            warnings.warn(
                f"{trouble} Training runs on with the configuration as it was.",
                TapWarning,
                stacklevel=3,
            )


def read_config(source: str | os.PathLike[str] | Mapping[str, Any]) -> Config:
    """Read a JSON or TOML file, or a mapping that was read from one."""
    if isinstance(source, Mapping):
        return _config(source, "the configuration")
    if not isinstance(source, str | os.PathLike):
        raise OptionError(
            f"A configuration is a path to a .json or .toml file, or a mapping; got {source!r}."
        )
    path = Path(source)
    try:
        content = read_regular(path, _LARGEST)
    except OSError as error:
        raise OptionError(
            f"The configuration {path} cannot be read: {error.strerror or error}."
        ) from None
    return _parse(content, path)


def _parse(content: bytes, path: Path) -> Config:
    """Read what a file held; its name says what it is."""
    suffix = path.suffix.lower()
    if suffix not in (".json", ".toml"):
        raise OptionError(
            f"The configuration {path} is neither JSON nor TOML by its name. Call it "
            f"{path.name}.json or {path.name}.toml."
        )
    try:
        text = content.decode("utf-8-sig")
        data = json.loads(text) if suffix == ".json" else _toml(text)
    except OptionError:
        raise
    except ValueError as error:  # also TOMLDecodeError and UnicodeDecodeError
        raise OptionError(
            f"The configuration {path} is no {suffix[1:].upper()}: {error}."
        ) from None
    except RecursionError:
        raise OptionError(f"The configuration {path} is nested too deeply.") from None
    if not isinstance(data, dict):
        raise OptionError(
            f"The configuration {path} must be an object with keys, got {type(data).__name__}."
        )
    return _config(data, str(path))


def _toml(text: str) -> Any:
    name = next((name for name in ("tomllib", "tomli") if importlib.util.find_spec(name)), None)
    if name is not None:  # the first is there from Python 3.11
        return importlib.import_module(name).loads(text)
    raise OptionError(
        "Reading TOML on Python 3.10 needs tomli, which is not installed. Install it with "
        "'pip install tomli', or write the configuration as JSON."
    )


def _config(data: Mapping[Any, Any], where: str) -> Config:
    for key in data:
        if isinstance(key, str) and key.startswith(("monitor_", "watch_")) and key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=2)
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            raise OptionError(
                f"The key '{key}' in {where} is not known.{hint} The keys are: {', '.join(KEYS)}."
            )
    found: dict[str, dict[str, Any]] = {"monitor": {}, "watch": {}}
    for key, check in KEYS.items():
        if data.get(key) is not None:
            part, _, name = key.partition("_")
            try:
                found[part][name] = check(data[key])
            except Wrong as wrong:
                part = f"{wrong.part} of " if wrong.part else ""
                raise OptionError(f"In {where}, {part}'{key}' must be {wrong}.") from None
            except OptionError as error:
                raise OptionError(f"In {where}, '{key}': {error}") from None
    return Config(MonitorConfig(**found["monitor"]), WatchConfig(**found["watch"]))


def _mark(path: Path) -> tuple[int, int, int] | None:
    """What tells one state of a file from another; None when that cannot be relied on."""
    if not abs(_age(path)) >= _FRESH:
        return None
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _age(path: Path) -> float:
    """The seconds since a file changed; NaN without a file."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return math.nan


def monitor_arguments(
    config: str | os.PathLike[str] | Mapping[str, Any],
    output_dir: str | os.PathLike[str] | None,
    overrides: Mapping[str, Any],
) -> dict[str, Any]:
    """The arguments of a Monitor as a configuration says them; those given here win."""
    said = read_config(config).monitor
    given: dict[str, Any] = {
        "layers_to_monitor": said.layers,
        "epochs_to_record": said.epochs,
        "batch_indices": said.batches,
        "output_dir": said.output_dir,
        "save_format": said.save_format,
        "sample_every": said.sample_every,
        "memory_limit": said.memory_limit,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if output_dir is not None:
        given["output_dir"] = output_dir
    given.update(overrides)
    keys = {
        "layers_to_monitor": "monitor_layers",
        "epochs_to_record": "monitor_epochs",
        "output_dir": "monitor_output_dir",
    }
    for name, key in keys.items():
        if name not in given:
            raise OptionError(
                f"The configuration says no '{key}', and {name} was not given either."
            )
    return given
