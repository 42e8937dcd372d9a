"""Document 004's `Monitor`: whole outputs of chosen layers, in chosen epochs and batches.

    monitor = tap.Monitor(model, ["encoder.layers.0"], [1, 5], "runs/train", batch_indices=[0])
    for epoch in range(1, 6):
        monitor.set_epoch(epoch)
        for batch_idx, batch in enumerate(loader):
            monitor.set_batch_idx(batch_idx)
            ...
    monitor.remove_hooks()

What is heard is copied to CPU memory inside the hook, held for the epoch (`held`), saved to files
(`saving`), and recorded (`run`). What goes wrong on the way is said once; training runs on.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ..errors import OptionError, RecordingError
from ..numerics import summarize
from ..sizes import size_in_bytes
from ..taps.session import TapWarning
from ..taps.unseen import unseen
from .choice import check_options, choose_layers, whole_number, whole_numbers, with_single
from .config import monitor_arguments
from .held import Entry, Held, Shelf, named_shelves
from .listening import Heard, Listening
from .moments import Moments, When
from .outputs import put_together
from .run import Keep, Run
from .saving import Files, SaveFormat, save_custom
from .spill import Maps
from .telling import failure_of
from .words import Words

__all__ = ["Monitor"]

Condition = Callable[[str, Any], bool]

_BY = "the run raised"
_log = logging.getLogger("tensortap.monitor")
_live: weakref.WeakValueDictionary[Path, Monitor] = weakref.WeakValueDictionary()


class Monitor:
    """Records the outputs of some layers of a model in some epochs of its training.

    Args:
        model: the model that is trained; compiled or not.
        layers_to_monitor: names of layers (those of `model.named_modules()`) or selection patterns,
            as a list, or as a dict to `{"alias": …, "record_type": "single" | "epoch_full",
            "leaf": …}`. `single` keeps the batches in `batch_indices`, `epoch_full` every batch.
            `leaf` keeps one item of an output: `"[0]"`, `".logits"`, or a number.
        epochs_to_record: the epochs, as they are told to `set_epoch`.
        output_dir: the folder for files and for the recording; it is made. An earlier run that
            lies there is moved into a folder `earlier-1` inside it.
        batch_indices: the batches that `single` layers keep, as told to `set_batch_idx`.
        save_format: "pt", or "npy" for numpy files with a .json beside them.
        condition: `condition(layer, output)`: keep an output only where this is true.
        sample_every: of `epoch_full` layers, keep batches 0, n, 2n, … alone.
        memory_limit: how much to hold in memory, in bytes or as "64MiB"; the rest lies on disk.
        keep: what the recording keeps: "tensors", or "summary" for statistics alone.
        overwrite: an earlier run in output_dir is deleted instead.
        mode: the name of the variant, kept in the manifest.
    """

    def __init__(
        self,
        model: nn.Module,
        layers_to_monitor: Iterable[str] | Mapping[str, Mapping[str, Any] | None],
        epochs_to_record: Iterable[int],
        output_dir: str | os.PathLike[str],
        batch_indices: Iterable[int] | None = None,
        *,
        save_format: SaveFormat = "pt",
        condition: Condition | None = None,
        sample_every: int = 1,
        memory_limit: int | str = 1 << 30,
        keep: Keep = "tensors",
        overwrite: bool = False,
        mode: str | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise OptionError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
        epochs = whole_numbers("epochs_to_record", epochs_to_record)
        if not epochs:
            raise OptionError(
                "epochs_to_record must not be empty: list the epochs to record, such as [1, 5]."
            )
        chosen = choose_layers(model, layers_to_monitor)
        batches = None if batch_indices is None else whole_numbers("batch_indices", batch_indices)
        if not batches and (needing := with_single(chosen)):
            raise OptionError(
                "batch_indices must be given and must not be empty when a layer has the "
                f"record_type 'single': {needing}. List the batches to record, such as [0], or "
                "say 'epoch_full'."
            )
        check_options(output_dir, save_format, condition, keep)
        self.model = model
        self.epochs_to_record = list(epochs)
        self.batch_indices = None if batches is None else list(batches)
        self.output_dir = Path(output_dir).absolute()  # a run may change its folder
        self.sample_every = whole_number("sample_every", sample_every, least=1)
        self.memory_limit = _memory(memory_limit)
        self._chosen = chosen
        self._moments = Moments(epochs, batches or (), self.sample_every)
        self._words = Words(self.output_dir)
        self._condition = condition
        self._lock = threading.RLock()
        self._owner = os.getpid()
        self._failed: set[int] = set()
        self._heard: set[int] = set()
        self._paused = 0
        self._asking = False
        self._closed = False
        self._keep: Keep = keep
        self._make_folder()
        self._held = Held(chosen, self.output_dir, self.memory_limit)
        self._run = Run(
            model,
            self.output_dir,
            chosen,
            keep=keep,
            memory=self.memory_limit,
            overwrite=overwrite,
            mode=mode,
            about={
                "epochs": self.epochs_to_record,
                "batches": self.batch_indices,
                "sample_every": self.sample_every,
                "save_format": save_format,
            },
        )
        self._files = Files(
            self.output_dir,
            [one.key for one in chosen if one.single],
            [one.key for one in chosen if not one.single],
            save_format,
            self._run.rank,
        )
        self._custom: dict[str, None] = {}
        self._listening = Listening(
            model,
            chosen,
            begin=self._begin,
            wants=self._wants,
            take=self._take,
            fail=self._fail,
            moments=self._moments,
            passed=self._passed,
        )
        self._error_before = getattr(sys, "last_value", None)
        try:
            self._listening.attach()
            if self._run.earlier:
                self._words.once("earlier", self._run.earlier)
        except BaseException as error:  # leave neither hooks nor a thread behind
            self.close(f"{type(error).__name__}: {error}")
            raise
        atexit.register(self._at_exit)
        _live[self.output_dir.resolve()] = self

    @classmethod
    def from_config(
        cls,
        model: nn.Module,
        config: str | os.PathLike[str] | Mapping[str, Any],
        output_dir: str | os.PathLike[str] | None = None,
        **overrides: Any,
    ) -> Monitor:
        """A monitor as a JSON or TOML file says: `monitor_layers`, `monitor_epochs`, ….

        `config` may also be what was read from such a file. Arguments given here win.
        """
        return cls(model, **monitor_arguments(config, output_dir, overrides))

    @staticmethod
    def watch(*args: Any, **kwargs: Any) -> Any:
        """`tap.watch`: summaries of every step instead of whole outputs of some."""
        from .watch import watch

        return watch(*args, **kwargs)

    # When.

    @property
    def current_epoch(self) -> int | None:
        """The epoch that runs; None before the first `set_epoch`."""
        return self._moments.epoch

    @property
    def current_batch_idx(self) -> int | None:
        """The batch that runs; None where it was not said in this epoch."""
        return self._moments.batch

    def set_epoch(self, epoch: int) -> None:
        """An epoch begins. What is held of the one before is saved, if nobody did, and cleared.

        The same epoch again goes on with it, so this may be called before every batch too; what was
        saved of it is cleared.
        """
        number = whole_number("epoch", epoch)
        with self._lock:
            if number == self._moments.epoch and self._held.unsaved:
                return
            if not self._closed:
                self._save_unsaved()
            self.clear_current_epoch_data()
            self._moments.begin_epoch(number)
            recorded = "" if self._moments.recorded else ", not recorded"
            _log.debug("epoch %d begins%s", number, recorded)

    def set_batch_idx(self, batch_idx: int) -> None:
        """A batch begins: its position in the epoch, from 0."""
        self._moments.begin_batch(whole_number("batch_idx", batch_idx))

    def create_epoch_callback(self) -> Callable[[int], None]:
        """A function for a training function to call when an epoch begins."""

        def epoch_callback(epoch: int) -> None:
            self.set_epoch(epoch)

        return epoch_callback

    def create_batch_callback(self) -> Callable[[int], None]:
        """A function for a training function to call when a batch begins."""

        def batch_callback(batch_idx: int) -> None:
            self.set_batch_idx(batch_idx)

        return batch_callback

    def pause(self) -> None:
        """Hear nothing until `resume`: for a validation pass inside an epoch."""
        self._paused += 1

    def resume(self) -> None:
        self._paused = max(0, self._paused - 1)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """`with monitor.paused(): validate(model)`."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    # What is held.

    def get_single_data(self, layers: str | Iterable[str] | None = None) -> dict[str, Any]:
        """Copies of what `single` layers gave in this epoch; layers that gave nothing are left out.

        `{alias: {"layer", "alias", "output_shape", "data": {(epoch, batch_idx): output}}}`, by the
        layer's name where it has no alias. `layers`: aliases or names; by default all.
        """
        return self._described(layers, single=True, copy=True)

    def get_epoch_data(self, layers: str | Iterable[str] | None = None) -> dict[str, Any]:
        """The same of `epoch_full` layers."""
        return self._described(layers, single=False, copy=True)

    @property
    def single_data(self) -> dict[str, Any]:
        """What `get_single_data` gives, without copying tensors: to look at, not to change."""
        return self._described(None, single=True, copy=False)

    @property
    def epoch_data(self) -> dict[str, Any]:
        """What `get_epoch_data` gives, without copying tensors: to look at, not to change."""
        return self._described(None, single=False, copy=False)

    def get_single_outputs(self, layers: str | Iterable[str] | None = None) -> dict[str, list[Any]]:
        """Copies of the outputs of `single` layers alone: `{alias: [output, …]}` by batch."""
        data = self.get_single_data(layers)
        return {key: list(info["data"].values()) for key, info in data.items()}

    def get_epoch_buffers(self, layers: str | Iterable[str] | None = None) -> dict[str, list[Any]]:
        """Copies of the outputs of `epoch_full` layers alone: `{alias: [output, …]}` by batch."""
        data = self.get_epoch_data(layers)
        return {key: list(info["data"].values()) for key, info in data.items()}

    def clear_current_epoch_data(self) -> None:
        """Forget what is held, saved or not; the recording keeps it."""
        with self._lock:
            self._clear(self._held.shelves)

    def clear_epoch_data(self) -> None:
        """Forget what is held of `epoch_full` layers, saved or not."""
        with self._lock:
            self._clear([shelf for shelf in self._held.shelves if not shelf.chosen.single])

    # Saving.

    def save_single_outputs(self, layers: str | Iterable[str] | None = None) -> list[Path]:
        """Save what `single` layers gave in this epoch, one file an output; the files."""
        with self._lock:
            shelves = self._shelves(layers, single=True)
            return [path for shelf in shelves for path in self._save_single(shelf)]

    def save_epoch_outputs(self, layers: str | Iterable[str] | None = None) -> list[Path]:
        """Save what `epoch_full` layers gave in this epoch, in one file a layer; the files."""
        with self._lock:
            shelves = self._shelves(layers, single=False)
            return [path for shelf in shelves for path in self._save_epoch(shelf)]

    def save_custom_output(self, obj: Any, name: str | os.PathLike[str]) -> Path:
        """`torch.save` something of your own under a name inside output_dir."""
        path = save_custom(self.output_dir, obj, name)
        self._custom[path.relative_to(self.output_dir.resolve()).as_posix()] = None
        return path

    # Ending.

    def remove_hooks(self) -> None:
        """Training is over: listen no more, save what nobody saved, close the recording.

        What is held can still be read and saved. Twice is harmless.
        """
        self.close()

    def close(self, failure: str | None = None) -> None:
        """`remove_hooks`; with the reason, where training failed."""
        if os.getpid() != self._owner:  # a forked child: the run is its parent's
            if not self._closed:
                self._closed = True
                self._listening.detach()
            return
        with self._lock, self._words.at_the_end(failing=_failing(failure)):
            if self._closed:
                return
            self._closed = True
            if hasattr(self, "_listening"):
                self._listening.detach()
            atexit.unregister(self._at_exit)
            if _live.get(self.output_dir.resolve()) is self:
                del _live[self.output_dir.resolve()]
            try:
                self._save_unsaved()
            except BaseException as error:  # a second Ctrl-C
                failure = failure or failure_of(error, _BY)
                raise
            finally:
                notes = [*self._listening.notes, *self._silent()]
                self._run.close(failure, notes, [*self._files.written, *self._custom])
            if failure is None:
                for note in self._silent():
                    self._words.once("silent", note)
            self._report()

    @property
    def closed(self) -> bool:
        """Whether the hooks were removed."""
        return self._closed

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(failure_of(error, _BY))

    def __copy__(self) -> Monitor:
        """A monitor is one: copies of what holds it (a configuration) hold the same."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Monitor:
        return self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """In a saved configuration None stands for it: it belongs to the run, not to the file."""
        return type(None), ()

    def _at_exit(self) -> None:
        """The interpreter ends and nobody called remove_hooks: what was recorded is kept."""
        if os.getpid() == self._owner:
            error = getattr(sys, "last_value", None)
            self.close(failure_of(None if error is self._error_before else error, _BY))

    # Inside the forward pass.

    def _begin(self, args: Any, kwargs: Mapping[str, Any]) -> None:
        """A forward of the whole model begins."""
        if not self._hears():
            return
        with self._lock:
            self._moments.begin_forward()
            if self._moments.epoch is None:
                self._words.epoch_unsaid()
                return
            batch = self._position()
            if self._moments.recorded:
                kept = any(self._moments.keeps(one, batch) for one in self._chosen)
                if kept and (args or kwargs):
                    self._run.see_inputs((self._moments.epoch, batch), args, kwargs)

    def _wants(self, index: int) -> When | None:
        """When this call of a layer is, if it is to be kept."""
        moments, one = self._moments, self._chosen[index]
        if not moments.recorded and moments.epoch is not None:  # as it is most of the time
            moments.fresh = False
            if moments.batch is None and self._hears():
                self._words.batch_unsaid()
            _log.debug("'%s' fired in epoch %d: not kept", one.key, moments.epoch)
            return None
        if not self._hears() or index in self._failed:
            return None
        with self._lock:
            moments.hear(index)
            if moments.epoch is None:
                self._words.epoch_unsaid()
                return None
            batch = self._position(index)
            if not moments.keeps(one, batch):
                _log.debug(
                    "'%s' fired in epoch %d, batch %d: not kept", one.key, moments.epoch, batch
                )
                return None
            when = moments.next_call(index, batch)
            _log.debug("'%s' fired in epoch %d, batch %d, call %d", one.key, *when)
            return when

    def _position(self, index: int | None = None) -> int:
        if self._moments.batch is None:
            self._words.batch_unsaid()
        return self._moments.position(index)

    def _take(self, index: int, when: When, heard: Heard) -> None:
        one = self._chosen[index]
        with self._lock:
            if not self._hears() or not self._meets_condition(one.layer, heard):
                return
            self._heard.add(index)
            if heard.form[0] == "none" and one.leaf:
                self._run.skip(one, "", "None stands where a tensor could")
                self._words.leaf_is_none(one.layer)
                return
            with unseen():
                tensors = heard.tensors
                needed = self._keep == "summary" or not one.single
                summaries = [summarize(tensor) for tensor in tensors] if needed else []
                self._run.add(one, heard.form, tensors, summaries, heard.devices, when)
                entry = Entry(heard.form, list(tensors), summaries)
                self._held.put(self._held.shelves[index], when[:2], entry, self._words.memory)
            self._report()

    def _meets_condition(self, layer: str, heard: Heard) -> bool:
        if self._condition is None:
            return True
        self._asking = True
        try:
            with torch.no_grad():
                tensors = [tensor.clone() for tensor in heard.tensors]  # it may write to them
                return bool(self._condition(layer, put_together(heard.form, tensors)))
        except TapWarning:  # where the user made warnings errors
            raise
        except Exception as error:  # a user's mistake must not end their training
            self._words.condition(error)
            return True
        finally:
            self._asking = False

    def _hears(self) -> bool:
        return not (self._closed or self._paused or self._asking or os.getpid() != self._owner)

    def _fail(self, index: int | None, error: Exception) -> None:
        """Something of ours went wrong with a layer: hear it no more, say so, train on."""
        if index is not None:
            self._failed.add(index)
        self._words.not_kept(None if index is None else self._chosen[index].layer, error)

    def _passed(self, reason: str) -> None:
        if self._moments.recorded and self._hears():
            self._words.passed_over(reason)

    def _report(self) -> None:
        if self._run.failure is not None:
            self._words.recording_stopped(self._run.failure)

    def _silent(self) -> list[str]:
        """Layers that were never heard although training went on."""
        silent = [index for index in range(len(self._chosen)) if index not in self._heard]
        epoch = self._moments.epoch
        if epoch is None or not silent or self._failed:
            return []
        if len(silent) == len(self._chosen):
            return [self._words.nothing(self.epochs_to_record, self.batch_indices, epoch)]
        names = [self._chosen[index].layer for index in silent]
        return self._listening.explain(silent) or [self._words.silent(names, len(self._chosen))]

    # Shelves.

    def _shelves(self, layers: str | Iterable[str] | None, *, single: bool) -> list[Shelf]:
        shelves = self._held.shelves
        if layers is not None:
            shelves = named_shelves(shelves, layers)
        return [s for s in shelves if s.chosen.single == single and s.entries]

    def _described(
        self, layers: str | Iterable[str] | None, *, single: bool, copy: bool
    ) -> dict[str, Any]:
        with self._lock, torch.inference_mode(False), torch.no_grad():
            shelves = self._shelves(layers, single=single)
            maps = Maps(private=True)  # one for all: it takes a file descriptor a file
            return {shelf.key: shelf.described(maps, copy=copy) for shelf in shelves}

    def _clear(self, shelves: Iterable[Shelf]) -> None:
        shelves = [shelf for shelf in shelves if shelf.entries]
        for shelf in shelves:
            self._files.cleared(shelf.key)
        self._held.clear(shelves)

    def _save_unsaved(self) -> None:
        for shelf in self._held.shelves:
            if shelf.unsaved:
                (self._save_single if shelf.chosen.single else self._save_epoch)(shelf)

    def _save_single(self, shelf: Shelf) -> list[Path]:
        def save() -> Iterator[Path]:
            maps = Maps(private=False)
            for (epoch, batch), entry in shelf.ordered():
                item = {
                    "epoch": epoch,
                    "batch_idx": batch,
                    "layer": shelf.chosen.layer,
                    "alias": shelf.chosen.alias,
                    "output_shape": entry.shape,
                    "output": entry.output(maps),
                }
                yield self._files.single(shelf.key, item)
                entry.saved = True

        return self._saving(shelf, save)

    def _save_epoch(self, shelf: Shelf) -> list[Path]:
        def save() -> Iterator[Path]:
            self._held.room_to_join(shelf)
            (epoch, _), _ = shelf.ordered()[0]
            yield self._files.epoch(shelf.key, {"epoch": epoch, **shelf.whole_epoch()})
            for entry in shelf.entries.values():
                entry.saved = True

        return self._saving(shelf, save)

    def _saving(self, shelf: Shelf, save: Callable[[], Iterator[Path]]) -> list[Path]:
        """Save one layer; a full disk is said, and does not end training."""
        paths: list[Path] = []
        try:
            with torch.no_grad():
                for path in save():
                    paths.append(path)
                    _log.debug("saved '%s' to %s", shelf.key, path)
        except TapWarning:  # where the user made warnings errors
            raise
        except Exception as error:  # the disk's trouble, or ours, and not the model's
            self._words.not_saved(shelf.key, error)
        return paths

    def _make_folder(self) -> None:
        try:
            self.output_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecordingError(
                f"Cannot create output_dir {self.output_dir}: {error.strerror or error}. Choose "
                "another place."
            ) from None
        other = _live.get(self.output_dir.resolve())
        if other is not None:
            other.close()
            self._words.still_writing()


def _failing(failure: str | None) -> bool:
    """Whether an exception is on its way, which a warning of ours must not replace."""
    return failure is not None or sys.exc_info()[0] is not None


def _memory(limit: Any) -> int:
    """A limit of memory: text with a unit, or any kind of whole number."""
    if isinstance(limit, str):
        return size_in_bytes("memory_limit", limit)
    return whole_number("memory_limit", limit)
