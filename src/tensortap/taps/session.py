"""`tap.record`: one recording from its first hook to its closed manifest."""

from __future__ import annotations

import contextlib
import os
import platform
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from .. import __version__
from ..errors import OptionError, RecordingError, RecordingExistsError, TapError
from ..recording import reader
from ..recording.schema import COMPARISON, MANIFEST, Manifest
from ..recording.store import open_store
from ..recording.training_mode import EFFECTS, training_note
from ..recording.writer import Writer, now
from ..sizes import size_in_bytes
from .base import Ports, Tap
from .choose import choose_tap
from .describe import describe_environment, device_of, rank
from .eager import StopForward
from .generations import Decode, Generations
from .input_log import InputLog
from .judging import Divergence, Judge
from .programs.base import Options
from .sink import Keep, Sink, Tally
from .training_mode import training_effects, training_of
from .unseen import unseen

if TYPE_CHECKING:
    from ..comparing.results import Comparison
    from ..recording.reader import Recording

__all__ = ["Recorder", "TapWarning", "record"]


class TapWarning(UserWarning):
    """Something a user should know that does not stop the model."""


def record(
    model: Any,
    path: str | os.PathLike[str],
    *,
    layers: str | Sequence[str] = "blocks",
    inputs: bool = False,
    outputs: bool = True,
    grads: bool = False,
    keep: Keep = "tensors",
    budget: int | str = 1 << 30,
    histograms: bool = False,
    overwrite: bool = False,
    against: str | os.PathLike[str] | Recording | None = None,
    stop: bool = False,
    full: bool = False,
    floor: str | os.PathLike[str] | Recording | None = None,
    rules: str | Sequence[str] = (),
    map: str | Sequence[str] = (),
    preset: str | None = None,
    strict: bool = False,
    mode: str | None = None,
    target: dict[str, Any] | None = None,
    runtime: str | None = None,
    manifest: str | os.PathLike[str] | None = None,
    weights: str | os.PathLike[str] | None = None,
    names_from: str | os.PathLike[str] | None = None,
    accept_inferred: bool = False,
    self_check: bool = True,
    custom_ops: Sequence[str | os.PathLike[str]] = (),
) -> Recorder:
    """Record the layers of a model while it runs.

        with tap.record(model, "runs/fp32", layers="blocks", inputs=True) as rec:
            model(**batch)  # or model.generate(**batch): a call a token, and what it wrote
            rec.step()

    Args:
        model: a `torch.nn.Module`, compiled or not; TorchScript, an exported program, an ONNX
            Runtime session, an OpenVINO model, or the path of such a model's file; a Python object
            that holds one of them; or anything that can be called (docs/compiled.md).
        path: the folder, or an fsspec URL, that the recording is written to.
        layers: what to record (see docs/selection.md). By default the repeated blocks, and on a
            model without any, the leaves.
        inputs: also what each layer receives; `outputs`: what it returns; `grads`: the gradients of
            the outputs, and with `inputs` of the inputs, when a backward pass is run.
        keep: "tensors", "summary" for statistics alone, or "sketch" for statistics and a thousand
            sampled values of each tensor.
        budget: the most extra memory, in bytes or as "64MiB"; then the model waits for the disk.
        histograms: also keep a histogram in each summary.
        overwrite: replace a recording that is there.
        against: a recording to compare with while the model runs. Tensors are kept only where they
            differ, and of the first divergence with what went in; `rec.comparison` is the answer.
        stop: end the model at the first divergence. full: keep every tensor all the same.
        floor, rules, map, preset: how to judge, as in `tap.compare`.
        strict: a recorder that fails raises. Otherwise it warns once and the model runs on.
        mode: the name of the variant, kept in the manifest.
        target: what else the manifest should say of the target.
        runtime: of a compiled model, where its type or file does not tell.
        manifest: names for the extra outputs of a model that was instrumented before compiling.
        weights: a checkpoint that gives names to the layers of a graph that has lost them.
        names_from: the float model whose names a quantised one has lost.
        accept_inferred: also record layers of a compiled model whose names are guesses.
        self_check: check on the first inputs of each shape that a compiled model gives the same
            output with taps and without, and that linear layers are what they are called.
        custom_ops: libraries of custom operators that a compiled model may load.
    """
    if not isinstance(path, str | os.PathLike):
        raise OptionError(f"path must be a folder's path or URL, got {path!r}.")
    for name, run in (("against", against), ("floor", floor)):
        if run is not None and not isinstance(run, str | os.PathLike | reader.Recording):
            raise OptionError(f"{name} must be a recording or its path, got {run!r}.")
    if manifest is not None and not isinstance(manifest, str | os.PathLike):
        raise OptionError(
            f"manifest must be the path of a manifest's file, got a {type(manifest).__name__}. "
            "Write it first, as in wrapped.manifest.save('model.taps.json')."
        )
    judge: Judge | None = None
    if against is not None:
        from ..comparing.streaming import Stream  # the one place where taps reach for comparing

        judge = Stream(against, path, floor=floor, rules=rules, map=map, preset=preset, full=full)
    elif stop or full or floor is not None or rules or map or preset is not None:
        raise OptionError(
            "stop, full, floor, rules, map and preset say how to judge a run against another. Name "
            "the other one: against=RUN (--against RUN)."
        )
    return Recorder(
        model,
        os.fspath(path),
        layers=layers,
        default_layers=layers == "blocks",
        ports=Ports(inputs=inputs, outputs=outputs, grads=grads),
        keep=keep,
        budget=budget,
        histograms=histograms,
        overwrite=overwrite,
        strict=strict,
        mode=mode,
        target=target or {},
        judge=judge,
        stop=stop,
        options=Options(
            runtime=runtime,
            manifest=None if manifest is None else Path(manifest),
            weights=None if weights is None else Path(weights),
            names_from=None if names_from is None else Path(names_from),
            accept_inferred=accept_inferred,
            self_check=self_check,
            custom_ops=tuple(Path(library) for library in custom_ops),
        ),
    )


class Recorder:
    """A recording that is being made. Use it as a context manager."""

    def __init__(
        self,
        model: Any,
        path: str,
        *,
        layers: str | Sequence[str],
        default_layers: bool,
        ports: Ports,
        keep: Keep,
        budget: int | str,
        histograms: bool,
        overwrite: bool,
        strict: bool,
        mode: str | None,
        target: dict[str, Any],
        judge: Judge | None = None,
        stop: bool = False,
        options: Options | None = None,
    ) -> None:
        _check_options(layers, ports, keep)
        budget = size_in_bytes("budget", budget, 1 << 20)
        self.path = path
        self.model = model
        self.tap: Tap = choose_tap(model, layers, ports, default=default_layers, options=options)
        self._ports = ports
        self._keep: Keep = keep
        self._budget = budget
        self._histograms = histograms
        self._overwrite = overwrite
        self._strict = strict
        self._mode = mode
        self._target = target
        self._judge = judge
        self._stop = stop
        self._answer: Comparison | TapError | None = None
        self.tally = Tally()
        self._layers = [layers] if isinstance(layers, str) else list(layers)
        self._inputs = InputLog()
        self._generations = Generations(model, _weakly(self._fail))
        self._writer: Writer | None = None
        self._sink: Sink | None = None
        self._finalizer: weakref.finalize[Any, Recorder] | None = None
        self._trouble: str | None = None
        self._reported = False
        self._training: bool | None = None  # the mode in which the model was last called
        self._effects: dict[str, list[str]] = {}
        if not overwrite and MANIFEST in open_store(path).names():
            raise RecordingExistsError(
                f"{path} already holds a recording. Choose another folder, or replace it with "
                "--overwrite (overwrite=True in Python)."
            )

    # Reading off.

    @property
    def layers(self) -> list[str]:
        """The names of the layers that are listened to."""
        return [slot.name for slot in self.tap.slots]

    @property
    def failure(self) -> str | None:
        """Why nothing more is recorded, or None while all is well."""
        return self._trouble or (self._writer.failure if self._writer else None)

    @property
    def notes(self) -> list[str]:
        """What a user should know about this recording."""
        return list(self.tap.notes)

    @property
    def stopped(self) -> str | None:
        """The layer at which the model was stopped, because it diverged there; else None."""
        found = None if self._judge is None else self._judge.divergence
        return found.layer if found is not None and self._stop and self.tap.can_stop else None

    @property
    def comparison(self) -> Comparison:
        """How this run compares with the one it is recorded against, as far as it has run."""
        if self._judge is None:
            raise OptionError(
                "This recording is compared with nothing. Name a reference: tap.record(…, "
                "against=RUN)."
            )
        if isinstance(self._answer, TapError):
            raise self._answer
        if self._answer is not None:
            return self._answer
        if self._sink is not None:
            self._settle(self._sink)
        with unseen(), torch.no_grad():  # a user's default device is no business of the judge's
            found: Comparison = self._judge.conclude(self._so_far(), self.stopped is not None)
        return found

    @property
    def decode(self) -> Decode | None:
        """Turns the tokens that `generate` writes into text, which the manifest then has too."""
        return self._generations.decode

    @decode.setter
    def decode(self, decode: Decode | None) -> None:
        self._generations.decode = decode

    # Starting and ending.

    def start(self) -> Recorder:
        """Begin to record; `with` does this."""
        if self._writer is not None:
            raise OptionError("This recorder was started before. Make a new one: tap.record(…).")
        manifest = self._manifest()
        if self._judge is not None:
            candidate = reader.Recording(open_store(self.path), manifest, [], [])
            self._judge.begin(candidate, self.tap.slots, self._all_layers(), rank())
            if self._stop and not self._judge.sure:
                self._stop = False
                self.tap.notes.append(
                    "The model was not stopped at the first divergence: so few layers pair with "
                    "one of the reference that it may lie in another. Pair them with --map."
                )
        self._writer = Writer(
            self.path,
            manifest,
            budget=self._budget,
            overwrite=self._overwrite,
            histograms=self._histograms,
            rank=rank(),
        )
        self._sink = Sink(
            self._writer,
            self._keep,
            self._budget // 4,
            judge=self._judge,
            stop=self._stop,
            both_grads=self._ports.grads and self._ports.inputs,
            tally=self.tally,
        )
        self._finalizer = weakref.finalize(
            self, _let_go, self.tap, self._generations, self._writer, self.path
        )
        self._finalizer.atexit = False  # then the writer keeps what it has
        self.tap.on_root_call(_weakly(self._see_inputs))
        root = self._ports.outputs and "" in self.layers
        try:
            self.tap.attach(self._sink, _weakly(self._fail))
            self._generations.attach(self._sink, logits=not root)
        except Exception as error:  # leave neither hooks nor a thread behind
            self.close(f"{type(error).__name__}: {error}")
            raise RecordingError(
                f"Cannot listen to {type(self.model).__name__}: {type(error).__name__}: {error}"
            ) from error
        return self

    def close(self, failure: str | None = None) -> None:
        """Stop listening, write what is left, close the manifest. Closing twice is harmless.

        In a forked child it only stops listening: the recording is the parent's.
        """
        if self._writer is None or self._sink is None:
            return
        if self._finalizer is not None:
            self._finalizer.detach()
        if not self._writer.is_ours:
            self._bring_to_an_end(self._generations.detach)
            self._bring_to_an_end(self.tap.detach)
            self._sink = None
            return
        self._bring_to_an_end(self._generations.detach)
        self._bring_to_an_end(self.tap.detach)
        self._bring_to_an_end(self._sink.settle)
        if self._judge is not None and self._generations.found:
            self.tap.notes.append(
                "Text was generated while this run was compared: after the first token that "
                "differs the two runs have different inputs. Record it alone, and compare then."
            )
        reason = self._trouble or failure
        missed = [] if reason else self._missed()
        if self._training is None:  # the model was not called as a whole
            self._see_mode()
        about = self._about_run()
        told = training_note(about)
        missed += [] if told is None else [told]
        self._writer.close(
            status="failed" if reason else "complete",
            failure=reason,
            inputs=about.inputs,
            target=about.target,
            skipped=[
                {"layer": layer, "port": port, "leaf": leaf, "reason": why, "count": count}
                for (layer, port, leaf, why), count in sorted(self._sink.skipped.items())
            ],
            self_checks=[check.to_dict() for check in getattr(self.tap, "self_checks", ())],
            generations=self._generations.found,
            selection={
                **self._writer.manifest.selection,
                "stopped_behind": self.tap.stopped_behind,
                **self._about_judging(),
            },
            notes=[*self.notes, *missed],
        )
        self.tap.notes += missed
        self._sink = None
        if self._judge is not None and self._answer is None:
            self._conclude(self._judge)
        self._report()

    def _all_layers(self) -> list[str]:
        """Every layer that the model has, as they are named in recordings."""
        known: list[str] | None = getattr(self.tap, "names", None)
        if known is not None or not isinstance(self.model, torch.nn.Module):
            return known or []
        return [name.replace("_orig_mod.", "") for name, _ in self.model.named_modules()]

    def _about_judging(self) -> dict[str, Any]:
        """What the manifest says of the run that this one was compared with."""
        if self._judge is None:
            return {}
        found = self._first_divergence(self._judge)
        return {
            "against": self._judge.reference,
            "first_divergence": None if found is None else found.to_dict(),
            "stopped_at": self.stopped,
        }

    def _first_divergence(self, judge: Judge) -> Divergence | None:
        """The first in order of execution: that a gradient came first does not make it so."""
        heard = judge.divergence
        if heard is None or self.stopped is not None:
            return heard
        try:
            with unseen(), torch.no_grad():
                found: Comparison = judge.conclude(self._so_far(), False)
        except TapError:
            return heard
        first = found.first_divergence
        main = None if first is None else first.main
        if first is None or first.candidate_layer in (None, heard.layer) or main is None:
            return heard
        moment = main.diverged_at[0] if main.diverged_at else (heard.epoch, heard.batch, heard.call)
        return Divergence(str(first.candidate_layer), *moment)

    def _settle(self, sink: Sink) -> None:
        """Judge what still waits for more of its call."""
        try:
            with unseen():
                sink.settle()
        except Exception as error:  # ours, and not the model's
            self._fail(error)

    def _bring_to_an_end(self, act: Callable[[], None]) -> None:
        """One thing that closing does: what goes wrong is said once the rest is written."""
        try:
            with unseen():
                act()
        except Exception as error:  # ours, or that of a device that has failed
            self._keep_trouble(error)

    def _so_far(self) -> Recording:
        """The recording as far as its manifest goes: what a judge knows while the model runs."""
        assert self._writer is not None
        manifest = replace(self._about_run(), status="complete")
        return reader.Recording(self._writer.store, manifest, [], [])

    def _about_run(self) -> Manifest:
        """The manifest with what is known since the model was called: its inputs and its mode."""
        assert self._writer is not None
        manifest = self._writer.manifest
        effects = {EFFECTS: self._effects} if self._effects else {}
        return replace(
            manifest,
            inputs={**manifest.inputs, **self._inputs.to_dict()},
            target={**manifest.target, **effects},
        )

    def _conclude(self, judge: Judge) -> None:
        """Draw the comparison and put it beside the recording."""
        try:
            recording = reader.open(self.path, partial=True)
            with unseen(), torch.no_grad():
                found: Comparison = judge.conclude(recording, self.stopped is not None)
        except TapError as error:
            self._answer = error
            return
        self._answer = found
        if rank() == 0:
            try:
                open_store(self.path).write_text(COMPARISON, found.to_json() + "\n")
            except OSError as error:
                self.tap.notes.append(f"The comparison was not written: {error.strerror or error}.")

    def __enter__(self) -> Recorder:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if isinstance(error, StopForward) and self.stopped is not None:
            self.close()  # the block is left where the model diverged, as was asked
            return True
        text = f": {error}" if error is not None and str(error) else ""
        self.close(None if kind is None else f"the run raised {kind.__name__}{text}")
        return False

    # While it runs.

    def run(self, *args: Any, early_stop: bool = False, **kwargs: Any) -> Any:
        """Run the model once; with `early_stop` no further than the last selected layer.

        A recording that was stopped at the first divergence runs no more: None comes back.
        """
        self._must_run()
        if self.stopped is not None:
            return None
        output = self.tap.run(args, kwargs, early_stop=early_stop)
        self._report()
        return output

    def step(self) -> None:
        """The next batch begins: calls count from 0 again."""
        sink = self._must_run()
        self.moment(epoch=sink.epoch, batch=sink.batch + 1)

    def moment(self, *, epoch: int | None = None, batch: int | None = None) -> None:
        """Say which epoch and batch come now. A new epoch without a batch begins at batch 0."""
        sink = self._must_run()
        if epoch is None:
            epoch = sink.epoch
        if batch is None:
            batch = 0 if epoch != sink.epoch else sink.batch
        for name, value in (("epoch", epoch), ("batch", batch)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise OptionError(f"{name} must be a whole number from 0, got {value!r}.")
        self.tap.settle()
        sink.advance(self.tap.slots, epoch=epoch, batch=batch)
        self._report()

    def flush(self) -> None:
        """Return when everything recorded so far is on disk, open to any reader."""
        self._must_run()
        self.tap.drain()
        if self._sink is not None:
            self._settle(self._sink)
        if self._writer is not None:
            self._writer.flush(sync=True)
        self._report()

    # Inside.

    def _must_run(self) -> Sink:
        if self._sink is None:
            raise OptionError(
                "This recorder is not running. Use it inside: with tap.record(…) as rec: …"
            )
        return self._sink

    def _see_inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._sink is not None:
            self._inputs.see((self._sink.epoch, self._sink.batch), args, kwargs)
            if training_of(self.model) is not self._training:
                self._see_mode()

    def _see_mode(self) -> None:
        """What depends on training mode, in the mode that the model is in now."""
        self._training = training_of(self.model)
        for what, names in training_effects(self.model).items():
            known = self._effects.setdefault(what, [])
            known += [name for name in names if name not in known]

    def _fail(self, error: Exception) -> None:
        """A hook of ours went wrong: record no more, say it once, let the model run on."""
        self._keep_trouble(error)
        self._report()

    def _keep_trouble(self, error: Exception) -> None:
        if self._trouble is None:
            self._trouble = f"{type(error).__name__}: {error}"

    def _report(self) -> None:
        failure = self.failure
        if failure is None or self._reported:
            return
        self._reported = True
        text = f"tensortap stopped recording to {self.path}: {failure}."
        if self._strict:
            raise RecordingError(text)
        warnings.warn(f"{text} The model runs on.", TapWarning, stacklevel=3)

    def _missed(self) -> list[str]:
        """Selected layers from which nothing was heard, and why, where we stopped the model."""
        found = None if self._judge is None else self._judge.divergence
        refused = 0 if self._sink is None else self._sink.snapshots.refused
        left = "are known by their summaries alone"
        if not self._ports.inputs:
            left = "could not be kept, should their layer be the first divergence"
        large = (
            [
                f"{refused} inputs were too large to hold until their layer had run, and {left}. A "
                "larger --budget holds them."
            ]
            if refused
            else []
        )
        if self.stopped is not None and found is not None:
            return [
                *large,
                f"The model was stopped at the first divergence, '{found.layer}' in batch "
                f"{found.batch}: what runs behind it was not recorded.",
            ]
        return large + self._unheard()

    def _unheard(self) -> list[str]:
        unheard = [slot for slot in self.tap.slots if slot.seen == 0]
        heard = len(self.tap.slots) - len(unheard)
        reasons, unheard = self.tap.explain_silence(unheard)
        silent = [slot.name for slot in unheard]
        if not silent:
            return reasons
        shown = ", ".join(f"'{name}'" for name in silent[:8]) + (", …" if len(silent) > 8 else "")
        if heard == 0:
            return [
                *reasons,
                f"None of the {len(silent)} selected layers ran while recording. Call the model "
                "inside the with block, as model(…) and not model.forward(…) of a layer.",
            ]
        return [
            *reasons,
            f"Nothing was heard from {len(silent)} of {len(self.tap.slots)} selected layers: "
            f"{shown}. They did not run, or were called by .forward() directly, which skips hooks.",
        ]

    def _manifest(self) -> Manifest:
        described = {**self.tap.describe(), **self._target}
        made_with = described.pop("made_with", None)
        return Manifest(
            tool=f"tensortap {__version__}",
            torch=torch.__version__,
            python=platform.python_version(),
            created=now(),
            device=described.pop("device", None) or _device(self.model),
            mode=self._mode,
            seed=torch.initial_seed(),
            target=described,
            selection={
                "layers": self._layers,
                "ports": self._ports.names(),
                "keep": self._keep,
                "histograms": self._histograms,
                "command": described.pop("command", None),
                **({} if made_with is None else {"made_with": made_with}),
            },
            structure=replace(self.tap.structure),
            inputs={"prompt": described.pop("prompt", None)},
            environment=describe_environment(),
            notes=self.notes,
        )


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Calls a method as long as there is its object: a hook must not keep the recorder alive."""
    known = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        found = known()
        if found is not None:
            found(*args)

    return call


def _let_go(tap: Tap, generations: Generations, writer: Writer, path: str) -> None:
    """A recorder was dropped without `close`: take its hooks away, and write what it has.

    This may run anywhere, also while the garbage collector is at work inside one of our own locks:
    so only what waits for nothing is done here, and the rest in a thread.
    """
    if not writer.is_ours:
        return
    tap.let_go()
    why = "the recorder was dropped without close()"

    def end() -> None:
        generations.detach()
        tap.detach()
        writer.close("failed", failure=why, notes=list(tap.notes))

    with contextlib.suppress(RuntimeError):  # the interpreter ends, and starts no thread
        threading.Thread(target=end, name="tensortap-closing").start()
    warnings.warn(
        f"tensortap stopped recording to {path}: {why}. Keep it as long as it should listen, and "
        "close it; best in a with block: with tap.record(…) as rec.",
        TapWarning,
        stacklevel=2,
    )


def _check_options(layers: Any, ports: Ports, keep: str) -> None:
    if not isinstance(layers, str) and not (
        isinstance(layers, Sequence) and all(isinstance(item, str) for item in layers)
    ):
        raise OptionError(f"layers must be a pattern or a list of patterns, got {layers!r}.")
    if not (ports.inputs or ports.outputs or ports.grads):
        raise OptionError("Nothing to record: inputs, outputs and grads are all off.")
    if keep not in ("tensors", "sketch", "summary"):
        raise OptionError(f"keep must be 'tensors', 'sketch' or 'summary', got {keep!r}.")


def _device(model: Any) -> str:
    return device_of(model) if isinstance(model, torch.nn.Module) else "cpu"
