"""PyTorch Lightning: a callback that watches `trainer.fit`.

Trainer(callbacks=[TapCallback("runs/train", layers="blocks", every=10)])
"""

from __future__ import annotations

import os
import sys
import warnings
from collections import deque
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ...errors import MissingExtraError
from ...taps.session import TapWarning
from ..sinks import Sinks, TensorBoardSink
from ..sinks.values import without_scalars
from ..telling import failure_of
from .companion import Companion

if TYPE_CHECKING:
    from ..monitor import Monitor

__all__ = ["TapCallback"]

_HOMES = ("lightning.pytorch", "pytorch_lightning")  # one library under two names


def _base() -> type[Any]:
    """The `Callback` to be: of each library that is in use, since each trainer wants its own."""
    names = [name for name in _HOMES if name in sys.modules]
    for name in [] if names else _HOMES:
        try:
            import_module(name)
        except ImportError:
            continue
        names = [name]
        break
    if not names:
        raise MissingExtraError("lightning", "lightning", "The Lightning callback")
    found = tuple(import_module(name).Callback for name in names)
    return found[0] if len(found) == 1 else type("Callback", found, {})


_Callback: Any = _base()


class TapCallback(_Callback):  # type: ignore[misc]
    """Watches the module that a Lightning trainer fits; validation and test passes are not.

    Listening begins when training does, with the module on its device, and ends with it, by
    exception too. What the module logs (`self.log`) is kept with the step. `to_logger` sends the
    numbers of each written step to the trainer's loggers, under "tensortap/". `monitor` goes
    along instead of a watch, or beside one when a path is given too.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        monitor: Monitor | None = None,
        to_logger: bool = False,
        **watch_options: Any,
    ) -> None:
        super().__init__()
        self.companion = Companion(path, monitor, watch_options)
        self.to_logger = to_logger
        self._relay: _Relay | None = None
        self._seen: dict[str, Any] = {}

    @property
    def watcher(self) -> Any:
        """The watch of the last fit, None before there is one."""
        return self.companion.watcher

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.companion.rest()  # the sanity check is no training

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._seen = dict(trainer.callback_metrics)
        self._relay = _Relay(trainer.loggers) if self.to_logger and trainer.loggers else None
        self.companion.start(pl_module, first=trainer.global_step, sink=self._relay)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.companion.epoch(trainer.current_epoch)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.companion.batch(batch_idx)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """The step's own numbers: logged in `training_step`, before the step is over."""
        self._log(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._log(trainer)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.companion.rest()
        self._pass_on()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.companion.epoch_end()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._log(trainer, last=True)
        self._end(None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._end(failure_of(exception))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._end(None)

    def _end(self, failure: str | None) -> None:
        self.companion.close(failure)
        self._pass_on()
        self._seen = {}

    def _log(self, trainer: Any, last: bool = False) -> None:
        """What was logged since the last time: old numbers stay in `callback_metrics`.

        An old number is known by its tensor, and at the end, when waiting for it costs nothing, by
        its value: the epoch's average of a number that has none is the step's own.
        """
        metrics, seen = dict(trainer.callback_metrics), self._seen
        self._seen = metrics
        new = {name: value for name, value in metrics.items() if seen.get(name) is not value}
        if last:
            new = {name: value for name, value in new.items() if seen.get(name) != value}
        self.companion.log(new)

    def _pass_on(self) -> None:
        if self._relay is not None:
            for problem in self._relay.pass_on():
                warnings.warn(problem, TapWarning, stacklevel=2)


class _Relay:
    """A sink that hands numbers to a trainer's loggers.

    Sinks are called from a thread of their own, and loggers are not made for that: what comes waits
    here until the training loop passes it on. TensorBoard's writer takes it at once, for it may be
    called from any thread and a call a number would cost the loop dearly.
    """

    def __init__(self, loggers: list[Any]) -> None:
        writers = [logger.experiment for logger in loggers if _has_writer(logger)]
        self._at_once = [TensorBoardSink(writer) for writer in writers]
        self._later = Sinks(_LoggerSink(logger) for logger in loggers if not _has_writer(logger))
        self._waiting: deque[tuple[dict[str, float], int]] = deque()

    def log(self, values: Mapping[str, float], step: int) -> None:
        numbers = {f"tensortap/{name}": value for name, value in without_scalars(values).items()}
        if not numbers:
            return
        for sink in self._at_once:
            sink.log(numbers, step)
        if len(self._later):
            self._waiting.append((numbers, step))

    def close(self) -> None:
        for sink in self._at_once:
            sink.close()

    def pass_on(self) -> list[str]:
        problems = []
        while self._waiting:
            problems += self._later.log(*self._waiting.popleft())
        return problems


class _LoggerSink:
    def __init__(self, logger: Any) -> None:
        self.logger = logger

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.logger.log_metrics(dict(values), step=step)

    def close(self) -> None:
        pass


def _has_writer(logger: Any) -> bool:
    return type(logger).__name__ == "TensorBoardLogger" and hasattr(
        logger.experiment, "file_writer"
    )
