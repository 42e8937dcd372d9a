"""`tensortap record` with several modes: what is said of each, and how it ends."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from ..errors import TapError
from .aside import aside
from .common import DONE, INTERRUPTED, TROUBLE, UNHEALTHY, note, print_json, print_notes, say
from .plans import plan_of

if TYPE_CHECKING:
    from ..targets.modes.request import Request
    from ..targets.modes.results import ModesInterrupted, RecordedMode, RecordedModes

__all__ = ["plan", "record"]

_MOST_FAILURES = 5


def record(
    request: Request, output: str, wanted: Sequence[str], *, jobs: int, resume: bool, as_json: bool
) -> int:
    """Record every mode, and print the table of them."""
    from dataclasses import replace

    from ..reporting.progress import modes_progress
    from ..targets.modes.record import run_request
    from ..targets.modes.results import ModesInterrupted

    overwrite = request.settings.overwrite
    request = replace(request, settings=replace(request.settings, overwrite=overwrite or resume))
    try:
        with modes_progress(jobs) as tell, aside():
            recorded = run_request(
                request,
                output,
                wanted,
                overwrite=overwrite,
                resume=resume,
                jobs=jobs,
                progress=tell,
            )
    except ModesInterrupted as stopped:
        return _interrupted(stopped, as_json)
    return _report(recorded, as_json)


def plan(request: Request, wanted: Sequence[str], as_json: bool) -> int:
    """What each mode would come to; a mode that cannot be planned is said, and the others go on."""
    from ..targets.modes.declared import mode_names
    from ..targets.modes.surroundings import Surroundings

    start = Surroundings.now()
    plans = []
    code = DONE
    with aside():
        names = mode_names(request.target, wanted, device=request.device, note=note)
    start = start.imported()
    for mode in names:
        start.restore(request.seed(mode))
        try:
            with aside():
                target = request.load(mode, plan=True)
            planned = plan_of(target, request.settled(mode))
        except TapError as error:
            _complain(f"mode {mode}: {error}")
            code = TROUBLE
            continue
        print_notes(f"{mode}: {text}" for text in target.notes)
        if as_json:
            plans.append({"mode": mode, **planned.to_dict()})
            print_notes(f"{mode}: {text}" for text in planned.plan.notes)
        else:
            say(f"{mode}:")
            planned.show(label=f"{mode}: ")
            say("")
    if as_json:
        print_json({"modes": plans})
    return code


def _report(recorded: RecordedModes, as_json: bool) -> int:
    if as_json:
        print_json(recorded.to_dict())
    else:
        _print_table(recorded)
    _print_notes(recorded)
    _print_failed(recorded)
    there = [row for row in recorded if row]
    if not as_json and len(there) > 1:
        words = ["tensortap", "compare", recorded.folder]
        if all(row.mode != "fp32" for row in there):
            words += ["--reference", there[0].mode]
        typer.echo(f"next: {shlex.join(words)}", err=True)
    return _code(recorded)


def _code(recorded: RecordedModes) -> int:
    if recorded.failed:
        return TROUBLE
    differs = any(row.compared is not None and not row.compared["same"] for row in recorded)
    return UNHEALTHY if differs or any(row.failed_checks for row in recorded) else DONE


def _interrupted(stopped: ModesInterrupted, as_json: bool) -> int:
    """Say what is done: the rest is a matter of --resume."""
    recorded = stopped.recorded
    if as_json:
        print_json({**recorded.to_dict(), "interrupted": True, "left": list(stopped.left)})
    elif recorded.modes:
        _print_table(recorded)
    _print_notes(recorded)
    _print_failed(recorded)
    done = ", ".join(row.mode for row in recorded if row) or "no mode"
    _complain(
        f"interrupted. Done: {done}; not done: {', '.join(stopped.left) or 'none'}. The same "
        "command with --resume goes on."
    )
    return INTERRUPTED


def _print_table(recorded: RecordedModes) -> None:
    from ..reporting.console import print_table, stdout
    from ..reporting.recorded_modes import recorded_table

    print_table(stdout(), recorded_table(recorded))


def _print_notes(recorded: RecordedModes) -> None:
    """What is worth knowing, behind the modes it holds for; what failed a check is said louder."""
    print_notes(recorded.notes)
    modes_by_note: dict[str, list[str]] = {}
    for row in recorded:
        for text in dict.fromkeys(row.notes):
            modes_by_note.setdefault(text, []).append(row.mode)
    for text, modes in modes_by_note.items():
        note(f"{', '.join(modes)}: {text}")
    for row in recorded:
        if row.compared is not None:
            note(f"{row.mode}: {row.compared['sentence']}")
        _warn(row)


def _print_failed(recorded: RecordedModes) -> None:
    """Each problem once, with the modes that have it."""
    modes_by_problem: dict[str | None, list[str]] = {}
    for row in recorded.failed:
        modes_by_problem.setdefault(row.problem, []).append(row.mode)
    for problem, modes in modes_by_problem.items():
        some = f"mode {modes[0]}" if len(modes) == 1 else f"modes {', '.join(modes)}"
        _complain(f"{some} failed: {problem}")


def _warn(row: RecordedMode) -> None:
    for text in row.failed_checks[:_MOST_FAILURES]:
        typer.echo(f"warning: {row.mode}: self-check failed: {' '.join(text.split())}", err=True)
    more = len(row.failed_checks) - _MOST_FAILURES
    if more > 0:
        typer.echo(
            f"warning: {row.mode}: {more} more self-checks failed: tensortap check has all",
            err=True,
        )


def _complain(sentence: str) -> None:
    typer.echo(f"tensortap: {' '.join(sentence.split())}", err=True)
