"""What every framework needs: a watch, a monitor or both, through one run of training."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ...errors import OptionError, TapError
from ...taps.session import TapWarning
from ..sinks import Sink, sinks_of
from ..telling import failure_of
from ..watch import Watcher, watch

if TYPE_CHECKING:
    from ..monitor import Monitor

__all__ = ["Companion"]

DEFAULT_PATH = "runs/train"
_OPTIONS = [name for name in inspect.signature(watch).parameters if name not in ("model", "path")]


class Companion:
    """Goes along with training: told when it begins, which epoch and batch runs, and how it ends.

    A watch is made when training begins, when the model is where it will train. The second
    training of one companion goes to a folder beside the first: runs/train, runs/train-2.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        monitor: Monitor | None,
        options: Mapping[str, Any],
    ) -> None:
        unknown = sorted(set(options) - set(_OPTIONS))
        if unknown:
            raise OptionError(
                f"tap.watch has no option {', '.join(map(repr, unknown))}. "
                f"Its options are: {', '.join(_OPTIONS)}."
            )
        if path is None and monitor is None:
            path = DEFAULT_PATH
        if path is None and options:
            raise OptionError(
                f"The options {', '.join(map(repr, sorted(options)))} are those of a watch, and "
                "with a monitor alone there is none. Give the path of the watch's recording too."
            )
        self.path = None if path is None else os.fspath(path)
        self.monitor = monitor
        self.options = dict(options)
        self.watcher: Watcher | None = None
        self._runs = 0
        self._open = False
        self._resting = False

    def start(self, model: Any, *, first: int = 0, sink: Sink | None = None) -> None:
        """Training begins, at step `first`; what is open from a run that broke off is closed."""
        self.close("training broke off and began anew")
        self._open = True
        if self.path is not None:
            self._runs += 1
            path = self.path if self._runs == 1 else f"{self.path}-{self._runs}"
            options = {"start": first, **self.options}
            if sink is not None:
                options["sinks"] = [*sinks_of(options.get("sinks", ())).sinks, sink]
            self.watcher = _watched(model, path, options)

    def epoch(self, number: int) -> None:
        if self.watcher is not None:
            self.watcher.epoch(number)
        if self.monitor is not None:
            self.monitor.set_epoch(number)

    def batch(self, index: int) -> None:
        """A batch of the loader is next; a watch counts steps by itself."""
        if self.monitor is not None:
            self.monitor.set_batch_idx(index)
            if self._resting:
                self._resting = False
                self.monitor.resume()

    def rest(self) -> None:
        """No training pass until the next `batch`. A watch knows an evaluation when it sees one; a
        monitor keeps whatever runs."""
        if self.monitor is not None and not self._resting:
            self._resting = True
            self.monitor.pause()

    def epoch_end(self) -> None:
        if self.monitor is not None:
            self.monitor.save_single_outputs()
            self.monitor.save_epoch_outputs()

    def log(self, values: Mapping[str, Any]) -> None:
        if self.watcher is not None:
            self.watcher.log(values)

    def close(self, failure: str | None = None) -> None:
        """Training is over: what was kept is written and no hook stays. Twice is harmless."""
        if not self._open:
            return
        self._open = False
        if self.monitor is not None:
            self.monitor.close(failure)  # saves what nobody saved
        if self.watcher is not None:
            self.watcher.close(failure)

    def __enter__(self) -> Companion:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(failure_of(error))


def _watched(model: Any, path: str, options: dict[str, Any]) -> Watcher | None:
    """The watch, if there can be one: what is not the user's to mend must not end training."""
    try:
        return watch(model, path, **options)
    except TapError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        text = f"tensortap does not watch (to {path}): {why}. Training runs on."
        warnings.warn(text, TapWarning, stacklevel=2)
        return None
