"""Accelerate: a tracker that is a watch, and a sink into the other trackers.

tracker = TapTracker(model, "runs/train", layers="blocks")
accelerator = Accelerator(log_with=tracker)
accelerator.init_trackers("project")
...
accelerator.log({"loss": loss.item()}, step=step)
accelerator.end_training()
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from ...errors import MissingExtraError, OptionError
from ..sinks import Sink, TensorBoardSink, WandbSink
from ..sinks.values import without_scalars
from .companion import Companion

try:
    from accelerate.tracking import GeneralTracker
except ImportError as error:
    raise MissingExtraError("accelerate", "hf", "The Accelerate tracker") from error

__all__ = ["AccelerateSink", "TapTracker"]


class TapTracker(GeneralTracker):  # type: ignore[misc]
    """Watches a model that is trained with an `Accelerator`.

    `init_trackers` begins to listen where the model is known; otherwise `start(model)` does. What
    `accelerator.log` gets is kept with the step that runs. `end_training` closes; `with tracker:`
    around the loop closes by exception too. Accelerate starts trackers on the main process alone;
    to watch the others as well, call `start()` there.
    """

    name = "tensortap"
    requires_logging_directory = False
    main_process_only = True

    def __init__(
        self,
        model: Any = None,
        path: str | os.PathLike[str] | None = None,
        **watch_options: Any,
    ) -> None:
        super().__init__()
        self.model = model
        self.companion = Companion(path, None, watch_options)
        self._config: dict[str, Any] = {}

    @property
    def tracker(self) -> Any:
        """The watch, None before there is one."""
        return self.companion.watcher

    def start(self, model: Any = None) -> None:
        """Begin to listen, if there is a model to listen to; `init_trackers` calls this."""
        if model is not None:
            self.model = model
        if self.model is not None:
            self.companion.start(self.model)
            self._note_config()

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._config.update(values)
        self._note_config()

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep numbers with the step that runs; whose number it is, the watch knows."""
        if self.model is None:
            raise OptionError(
                "The tensortap tracker has no model to watch: give it to TapTracker(model, …), or "
                "call tracker.start(model) before accelerator.log."
            )
        self.companion.log(values)

    def finish(self) -> None:
        self.companion.close()

    def epoch(self, number: int) -> None:
        """Say which epoch runs: an `Accelerator` does not know."""
        self.companion.epoch(number)

    def _note_config(self) -> None:
        if self.tracker is not None and self._config:
            words = ", ".join(f"{name}={value!r}" for name, value in self._config.items())
            self.tracker.notes.append(f"Configuration: {words}.")
            self._config = {}

    def __enter__(self) -> TapTracker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.companion.__exit__(kind, error, trace)


class AccelerateSink:
    """A watch's numbers into an accelerator's trackers: `tap.watch(…, sinks=AccelerateSink(acc))`.

    Under "tensortap/", and without the numbers that the user logged, which they have had. The
    trackers are looked up at the first step, so `init_trackers` may come after the watch.
    """

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator
        self._sinks: list[Sink] | None = None

    def log(self, values: Mapping[str, float], step: int) -> None:
        if self._sinks is None:
            trackers = self.accelerator.trackers
            self._sinks = [_sink(tracker) for tracker in trackers if tracker.name != "tensortap"]
        numbers = without_scalars(values)
        for sink in self._sinks if numbers else ():
            sink.log(numbers, step)

    def close(self) -> None:
        for sink in self._sinks or ():
            sink.close()


class _TrackerSink:
    def __init__(self, tracker: Any) -> None:
        self.tracker = tracker

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.tracker.log(dict(values), step=step)

    def close(self) -> None:
        pass  # the accelerator ends its trackers


class _Prefixed:
    def __init__(self, sink: Sink) -> None:
        self.sink = sink

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.sink.log({f"tensortap/{name}": value for name, value in values.items()}, step)

    def close(self) -> None:
        self.sink.close()


def _sink(tracker: Any) -> Sink:
    """The cheap way into a tracker where there is one, and into wandb the harmless one."""
    if tracker.name == "wandb":
        return WandbSink(tracker.tracker)
    if tracker.name == "tensorboard":
        return _Prefixed(TensorBoardSink(tracker.tracker))
    return _Prefixed(_TrackerSink(tracker))
