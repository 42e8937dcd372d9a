"""Hugging Face: a `TrainerCallback` that watches `trainer.train`.

callback = TapTrainerCallback("runs/train", layers="blocks", every=10)
trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[callback])
with callback:
    trainer.train()
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ...errors import MissingExtraError
from .companion import Companion

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise MissingExtraError("transformers", "hf", "The Trainer callback") from error

if TYPE_CHECKING:
    from ..monitor import Monitor

__all__ = ["TapTrainerCallback"]


class TapTrainerCallback(TrainerCallback):
    """Watches the model that a `Trainer` trains; evaluation passes are not.

    What the trainer logs is kept with the step that has the trainer's own number, which begins
    when the step before it is over: what is logged at global step 10 stands at batch 10. A trainer
    does not tell its callbacks of an exception; `with callback:` around `trainer.train()` does, and
    leaves no hook behind. `monitor` goes along instead of a watch, or beside one when a path is
    given too; its batch indices count the loader's batches, micro-batches of a step one by one.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        monitor: Monitor | None = None,
        **watch_options: Any,
    ) -> None:
        self.companion = Companion(path, monitor, watch_options)
        self._batch = 0

    @property
    def watcher(self) -> Any:
        """The watch of the last training, None before there is one."""
        return self.companion.watcher

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        self.companion.rest()
        self.companion.start(model, first=state.global_step)

    def on_epoch_begin(
        self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kwargs: Any
    ) -> None:
        done = state.epoch or 0.0
        epoch = int(done + 1e-6)
        self._batch = 0
        if not args.ignore_data_skip and hasattr(train_dataloader, "__len__"):
            self._batch = round(max(done - epoch, 0.0) * len(train_dataloader))  # resumed inside it
        self.companion.epoch(epoch)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.companion.batch(self._batch)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A micro-batch is over, and the step goes on with the next."""
        self._batch += 1
        self.companion.batch(self._batch)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._batch += 1
        self.companion.rest()  # an evaluation may come; nobody says when one begins

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.companion.epoch_end()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        numbers = {name: value for name, value in (logs or {}).items() if name != "epoch"}
        self.companion.log(numbers)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.companion.close()

    def __enter__(self) -> TapTrainerCallback:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.companion.__exit__(kind, error, trace)
