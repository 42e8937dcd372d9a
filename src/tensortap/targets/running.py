"""Runs a target under a recorder: what every recording of a target goes through."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ..errors import OptionError, RecordingError, TapError, TargetError
from ..taps.programs.base import Options
from .target import Batch, Target, describe

if TYPE_CHECKING:
    from ..recording.reader import Recording
    from ..taps import Recorder

__all__ = ["Outcome", "Settings", "check_eval", "record_target", "run_target"]

_BACKWARD = (
    "Gradients are those of the output's loss where it has one, else of the mean of its first "
    "floating-point tensor."
)

_PERTURBED = (
    "What the layers were given was moved by single roundings (--perturb): this run is a floor for "
    "comparisons, and no measure of the model."
)


@dataclass(frozen=True)
class Settings:
    """How to record; `made_with` is kept in the manifest, so that the same can be known again."""

    layers: tuple[str, ...] = ()
    inputs: bool = False
    outputs: bool = True
    grads: bool = False
    keep: Literal["tensors", "sketch", "summary"] = "tensors"
    histograms: bool = False
    budget: int = 1 << 30
    overwrite: bool = False
    early_stop: bool = True
    strict: bool = False
    perturb: bool = False
    eval: bool = False
    command: str | None = None
    against: str | None = None
    stop: bool = False
    full: bool = False
    floor: str | None = None
    rules: tuple[str, ...] = ()
    maps: tuple[str, ...] = ()
    preset: str | None = None
    compiled: Options = field(default_factory=Options)
    made_with: dict[str, Any] | None = None


@dataclass(frozen=True)
class Outcome:
    """A recording that was made, and how it compares, when it was made against another."""

    recording: Recording
    seconds: float
    seen: int = 0
    kept: int = 0
    comparison: Any = None  # a Comparison; what compares stands above targets

    @property
    def failed_checks(self) -> list[str]:
        """What the self-check of a compiled model found wrong."""
        checks = self.recording.manifest.self_checks
        return [str(check.get("text")) for check in checks if not check.get("passed")]


def record_target(
    target: Target, path: str, settings: Settings, progress: Callable[[int, int | None], None]
) -> tuple[Recording, float]:
    """Run every batch of a target under a recorder: the recording, and the seconds it took."""
    outcome = run_target(target, path, settings, progress)
    return outcome.recording, outcome.seconds


def run_target(
    target: Target, path: str, settings: Settings, progress: Callable[[int, int | None], None]
) -> Outcome:
    """Run the batches of a target under a recorder, until they end or the recorder stops them."""
    if not settings.perturb:
        return _run_target(target, path, settings, progress)
    from .perturbing import perturbed

    with perturbed(target) as moved:
        return _run_target(moved, path, settings, progress)


def _run_target(
    target: Target, path: str, settings: Settings, progress: Callable[[int, int | None], None]
) -> Outcome:
    import torch

    from ..recording import reader
    from ..taps import TapWarning, record
    from ..taps.training_mode import in_eval

    about: dict[str, Any] = {
        "spec": target.name,
        "prompt": target.prompt,
        "command": settings.command,
    }
    if target.config is not None:
        about["config"] = target.config
    if settings.made_with is not None:
        about["made_with"] = settings.made_with
    check_eval(target.model, settings.eval)
    recorder = record(
        target.model,
        path,
        layers=list(settings.layers) or "blocks",
        inputs=settings.inputs,
        outputs=settings.outputs,
        grads=settings.grads,
        keep=settings.keep,
        budget=settings.budget,
        histograms=settings.histograms,
        overwrite=settings.overwrite,
        against=settings.against,
        stop=settings.stop,
        full=settings.full,
        floor=settings.floor,
        rules=settings.rules,
        map=settings.maps,
        preset=settings.preset,
        strict=settings.strict,
        mode=target.mode,
        target=about,
        **vars(settings.compiled),
    )
    if settings.perturb:
        recorder.tap.notes.append(_PERTURBED)
    recorder.decode = target.decode
    if settings.grads:
        recorder.tap.notes.append(_BACKWARD)
    start = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TapWarning)  # a failure is said once, as the exit's reason
        with (
            _no_empty_folder(recorder),
            torch.set_grad_enabled(settings.grads),
            in_eval(target.model) if settings.eval else contextlib.nullcontext(),
            recorder,
        ):
            for index, batch in enumerate(target.batches):
                progress(index, len(target.batches))
                _run(recorder, target, batch, settings, index)
                if recorder.failure is not None or recorder.stopped is not None:
                    break
                recorder.step()
    progress(len(target.batches), len(target.batches))
    if recorder.failure is not None:
        raise RecordingError(f"The recording to {path} failed: {recorder.failure}.")
    recording = reader.open(path)
    if not recording.layers:
        raise RecordingError(f"Nothing was recorded to {path}. {' '.join(recording.notes)}")
    seconds = time.monotonic() - start
    compared = None if settings.against is None else recorder.comparison
    return Outcome(recording, seconds, recorder.tally.seen, recorder.tally.kept, compared)


def check_eval(model: object, wanted: bool) -> None:
    """Refuse `--eval` for what has no training mode."""
    from torch import nn

    if wanted and not isinstance(model, nn.Module):
        raise OptionError(
            f"--eval puts a torch.nn.Module in eval mode, and the target's model is "
            f"{describe(model)}. Leave --eval out, or call eval() where the target is made."
        )


@contextlib.contextmanager
def _no_empty_folder(recorder: Recorder) -> Iterator[None]:
    """A run that fails before anything is recorded leaves no recording behind."""
    try:
        yield
    except Exception:
        from ..recording.store import open_store
        from ..recording.writer import discard
        from ..taps.describe import rank

        if not _heard(recorder) and rank() == 0:
            with contextlib.suppress(OSError, TapError):
                discard(open_store(recorder.path))
        raise


def _heard(recorder: Recorder) -> bool:
    """Whether anything was recorded so far."""
    return any(slot.seen for slot in recorder.tap.slots)


def _run(recorder: Recorder, target: Target, batch: Batch, settings: Settings, index: int) -> None:
    """Run one batch; what the user's model raises is said with its place."""
    from .failing import LEAVING, model_failed

    try:
        if target.run is not None:
            output = target(batch)
        else:
            stop = settings.early_stop and not settings.grads
            output = recorder.run(*batch.args, early_stop=stop, **batch.kwargs)
        if settings.grads:
            _backward(output)
            target.model.zero_grad(set_to_none=True)
    except TapError:
        raise
    except LEAVING as error:  # whatever a user's model raises
        raise model_failed(error, index, kept=_heard(recorder)) from error


def _backward(output: Any) -> None:
    import torch

    from ..taps.leaves import flatten

    tensors = [(leaf, tensor) for leaf, tensor in flatten(output) if tensor is not None]
    losses = [
        tensor
        for leaf, tensor in tensors
        if leaf in (".loss", "['loss']") and tensor.numel() == 1 and tensor.is_floating_point()
    ]
    floats = losses or [tensor for _, tensor in tensors if tensor.is_floating_point()]
    if not floats:
        raise TargetError("The model returned no floating-point tensor, so there are no gradients.")
    value = floats[0].sum() if losses else floats[0].mean()
    if not value.requires_grad:
        raise TargetError(
            "The model's output does not depend on anything that requires gradients. "
            "Check that its parameters require them and that it does not run under no_grad."
        )
    torch.autograd.backward(value)
