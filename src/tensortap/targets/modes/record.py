"""`tap.record_modes`: a recording a mode, side by side in one folder.

A mode that fails is a row with its problem, and the others go on. Every mode starts from the same
random state and the same defaults of torch, in this process as in one of its own.
"""

from __future__ import annotations

import functools
import gc
import os
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from ...errors import OptionError
from ...sizes import size_in_bytes
from ...taps.programs.base import Options
from ..running import Settings, run_target
from ..target import Target
from . import worker
from .declared import mode_names
from .places import check_room, left_from_before, places_of, whole
from .request import Request
from .results import ModesInterrupted, ModeStep, RecordedMode, RecordedModes
from .resume import DRAWN_FROM
from .rows import begun_otherwise, earlier_row, problem_of, row_of
from .surroundings import Surroundings, cuda_in_use

__all__ = ["Progress", "record_modes", "record_one", "run_request"]

Progress = Callable[[ModeStep], None]


def record_modes(
    target: str | Callable[..., Any],
    folder: str | os.PathLike[str],
    *,
    modes: str | Sequence[str] = "all",
    layers: str | Sequence[str] = "blocks",
    inputs: bool = False,
    outputs: bool = True,
    grads: bool = False,
    keep: Literal["tensors", "sketch", "summary"] = "tensors",
    budget: int | str = 1 << 30,
    histograms: bool = False,
    overwrite: bool = False,
    resume: bool = False,
    jobs: int = 1,
    calib: int | None = None,
    options: Mapping[str, Any] | None = None,
    sets: Sequence[str] = (),
    prompts: Sequence[str] = (),
    input_ids: str | os.PathLike[str] | None = None,
    inputs_from: Sequence[str | os.PathLike[str]] = (),
    early_stop: bool = True,
    strict: bool = False,
    progress: Progress | None = None,
    compiled: Options | None = None,
    against: str | os.PathLike[str] | None = None,
    stop: bool = False,
    full: bool = False,
    floor: str | os.PathLike[str] | None = None,
    rules: Sequence[str] = (),
    map: Sequence[str] = (),
    preset: str | None = None,
) -> RecordedModes:
    """Record a target in several modes, each into its own folder under `folder`.

        modes = tap.record_modes("model.py:build", "runs", modes="fp32,int8", layers="blocks")
        print(modes)

    Args:
        target: what `tensortap record` takes, or a function that takes `mode`, or one whose model
            the built-in modes are made of.
        folder: a folder or fsspec URL; a mode's recording lies at FOLDER/<folder_name(mode)>.
        modes: names, comma lists and groups, in one text or several: "all", "fp32,fake:w8a8".
        layers, inputs, outputs, grads, keep, budget, histograms, strict: as in `tap.record`.
        overwrite: replace recordings that are there. resume: keep those that are complete and were
            made from the same target with the same options; make the others.
        jobs: how many modes at a time, each in a process of its own; 1 runs them here.
        calib: on how many batches the built-in `fake:` modes are calibrated; all, if not given.
        options: what the target's function gets by name. sets, prompts, input_ids, inputs_from,
            compiled: as for the command line's `--set`, `--prompt` and so on.
        early_stop: run no further than the last selected layer.
        progress: is told a ModeStep whenever a mode or a batch begins or ends.
        against, stop, full, floor, rules, map, preset: compare each mode with a recording while it
            runs, as in `tap.record`.

    A mode that fails is a row with status "failed" and its problem; the others go on. What is wrong
    with the question itself (an unknown mode, a folder that is taken) raises before anything runs.
    """
    request = Request(
        target=target,
        settings=Settings(
            layers=_layers(layers),
            inputs=inputs,
            outputs=outputs,
            grads=grads,
            keep=keep,
            histograms=histograms,
            budget=size_in_bytes("--budget", budget, 1 << 20),
            overwrite=overwrite or resume,
            early_stop=early_stop,
            strict=strict,
            against=None if against is None else os.fspath(against),
            stop=stop,
            full=full,
            floor=None if floor is None else os.fspath(floor),
            rules=tuple(rules),
            maps=tuple(map),
            preset=preset,
            compiled=compiled or Options(),
        ),
        options={key: value for key, value in (options or {}).items() if value is not None},
        sets=tuple(sets),
        prompts=tuple(prompts),
        input_ids=None if input_ids is None else Path(input_ids),
        inputs_from=tuple(Path(file) for file in inputs_from),
        calib=calib,
    )
    return run_request(
        request,
        os.fspath(folder),
        [modes] if isinstance(modes, str) else list(modes or ()),
        overwrite=overwrite,
        resume=resume,
        jobs=jobs,
        progress=progress,
    )


def run_request(
    request: Request,
    folder: str,
    modes: Sequence[str],
    *,
    overwrite: bool = False,
    resume: bool = False,
    jobs: int = 1,
    progress: Progress | None = None,
) -> RecordedModes:
    """The modes of a request, in this process or in others; the rows in the order of the modes."""
    _check(request, overwrite=overwrite, resume=resume, jobs=jobs)
    start = Surroundings.now()
    try:
        notes: list[str] = []
        names = mode_names(request.target, modes, device=request.device, note=notes.append)
        start = start.imported()
        start.restore()
        notes += request.unused(names)
        places = places_of(folder, names, free=not (overwrite or resume))
        tell = _numbered(progress, names)
        rows: dict[str, RecordedMode] = {}
        try:
            if resume and not overwrite:
                for mode, path in places.items():
                    row = earlier_row(request, mode, path)
                    if row is not None:
                        rows[mode] = row
                        tell(mode, row.status)
            left = {mode: path for mode, path in places.items() if mode not in rows}
            if left:
                check_room(folder)
                notes += begun_otherwise(request, rows.values(), start)
            if jobs > 1:
                from .workers import record_in_workers

                record_in_workers(request, left, start, jobs=jobs, tell=tell, rows=rows)
            else:
                for mode, path in left.items():
                    tell(mode, "loading")
                    told = functools.partial(tell, mode, "running")
                    rows[mode] = record_one(request, mode, path, start, told)
                    tell(mode, rows[mode].status)
        except KeyboardInterrupt:
            done = tuple(rows[mode] for mode in names if mode in rows)
            waiting = tuple(mode for mode in names if mode not in rows)
            raise ModesInterrupted(RecordedModes(folder, done, tuple(notes)), waiting) from None
    finally:
        start.restore()
    return RecordedModes(folder, tuple(rows[mode] for mode in names), tuple(notes))


def record_one(
    request: Request,
    mode: str,
    path: str,
    start: Surroundings,
    progress: Callable[[int, int | None], None],
) -> RecordedMode:
    """One mode, from loading to its row; whatever it raises is its own problem."""
    began = time.monotonic()
    loaded: list[Target] = []
    try:
        seed = request.seed(mode)
        start.restore(seed)
        place, settings = whole(path), request.settled(mode)  # the target may go to another folder
        made_with = {**(settings.made_with or {}), DRAWN_FROM: start.drawn_from(seed)}
        settings = replace(settings, made_with=made_with)
        loaded.append(replace(request.load(mode), mode=mode))  # by the name that was asked for
        outcome = run_target(loaded[0], place, settings, progress)
        row = row_of(outcome, mode, notes=loaded[0].notes)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever a mode does, the others go on
        if os.environ.get("TENSORTAP_TRACEBACK"):
            traceback.print_exc()
        notes = () if loaded else left_from_before(path)
        row = RecordedMode(mode, path, "failed", problem=problem_of(error), notes=notes)
    model = _watched(loaded[0].model) if loaded else None
    loaded.clear()
    _free(model)
    return replace(row, path=path, seconds=time.monotonic() - began)


def _watched(model: object) -> weakref.ref[object] | None:
    try:
        return weakref.ref(model)
    except TypeError:  # some objects of compiled runtimes cannot be
        return None


def _free(model: weakref.ref[object] | None) -> None:
    """One mode's model goes before the next one comes: a whole collection only if it must be."""
    gc.collect(1)
    if model is None or model() is not None:
        gc.collect()
    if cuda_in_use():
        torch.cuda.empty_cache()


def _numbered(progress: Progress | None, names: Sequence[str]) -> Callable[..., None]:
    numbers = {mode: number for number, mode in enumerate(names, start=1)}

    def tell(
        mode: str,
        state: Literal["waiting", "loading", "running", "recorded", "kept", "failed"],
        batch: int | None = None,
        batches: int | None = None,
    ) -> None:
        if progress is not None:
            progress(ModeStep(mode, numbers[mode], len(names), state, batch, batches))

    for mode in names:
        tell(mode, "waiting")
    return tell


def _layers(layers: str | Sequence[str]) -> tuple[str, ...]:
    if isinstance(layers, str):
        return () if layers == "blocks" else (layers,)
    return tuple(layers)


def _check(request: Request, *, overwrite: bool, resume: bool, jobs: int) -> None:
    if not isinstance(jobs, int) or isinstance(jobs, bool) or jobs < 1:
        raise OptionError(f"--jobs must be a whole number from 1, got {jobs!r}.")
    calib = request.calib
    if calib is not None and not (type(calib) is int and calib >= 1):
        raise OptionError(f"--calib must be a whole number from 1, got {calib!r}.")
    if request.settings.keep not in ("tensors", "sketch", "summary"):
        raise OptionError(
            f"keep must be 'tensors', 'sketch' or 'summary', got {request.settings.keep!r}."
        )
    if overwrite and resume:
        raise OptionError(
            "--overwrite makes every mode anew, and --resume keeps those that are there. Give one "
            "of them."
        )
    if worker.inside:
        raise OptionError(
            "record_modes was called while a process for one mode imports this script. Put the "
            "call under: if __name__ == '__main__':"
        )
    if "mode" in request.options:
        raise OptionError("options has a 'mode'. Name the modes with modes=… instead.")
