"""`tensortap record --coarse`: one run to find the suspect window, and one to record it."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import RecordingExistsError
from .aside import aside
from .common import DONE, note, print_json, print_notes, say
from .compare import DIFFERS
from .running import Outcome, Settings, run_target

if TYPE_CHECKING:
    from ..comparing.streaming import Window
    from ..targets import Target

__all__ = ["record_window"]


def record_window(target: Target, path: str, settings: Settings, as_json: bool) -> int:
    """Find the window, record it in full, and say what is there."""
    from ..comparing.streaming import find_window
    from ..comparing.streaming.places import check_place
    from ..recording.schema import MANIFEST
    from ..recording.store import open_store
    from ..reporting.progress import progress

    assert settings.against is not None
    check_place(path, reference=settings.against, floor=settings.floor)
    if not settings.overwrite and MANIFEST in open_store(path).names():
        raise RecordingExistsError(
            f"{path} already holds a recording. Choose another folder, or replace it with "
            "--overwrite."
        )
    with progress("Looking") as advance, aside():
        window = find_window(
            target,
            against=settings.against,
            layers=list(settings.layers) or "all",
            floor=settings.floor,
            map=settings.maps,
            output=path,
            progress=advance,
            accept_inferred=settings.compiled.accept_inferred,
            self_check=settings.compiled.self_check,
        )
    if not window:
        return _nothing(window, as_json)
    if not as_json:
        say(window.sentence)
    judged = window.bad not in window.lacking
    with progress("Recording") as advance, aside():
        outcome = run_target(target, path, _narrowed(settings, window, judged), advance)
    if judged:
        return _answer(window, outcome, as_json)
    return _to_be_compared(window, outcome, as_json)


def _narrowed(settings: Settings, window: Window, judged: bool) -> Settings:
    """The settings of the second run: the window alone, in full."""
    settings = replace(
        settings,
        layers=window.layers,
        inputs=True,
        keep="tensors",
        full=True,
    )
    if judged:
        return settings
    return replace(
        settings, against=None, stop=False, full=False, floor=None, rules=(), maps=(), preset=None
    )


def _nothing(window: Window, as_json: bool) -> int:
    if as_json:
        print_json({"window": window.to_dict(), "comparison": window.comparison.to_dict()})
    else:
        say(window.sentence)
    note("There was no second run, and nothing was recorded.")
    print_notes(window.comparison.notes)
    return DONE


def _answer(window: Window, outcome: Outcome, as_json: bool) -> int:
    """The second run was compared as it ran."""
    from .recorded import report_against

    code = report_against(outcome, as_json, window)
    if code == DONE:
        note(
            "In the window itself nothing diverged, though its samples did: compare more layers "
            "(--layers), or look at the whole run without --coarse."
        )
    if window.lacking and window.command:
        few = ", ".join(repr(name) for name in window.lacking[:3])
        more = ", …" if len(window.lacking) > 3 else ""
        note(f"The reference has no tensors of {len(window.lacking)} layers in it: {few}{more}.")
        _next(window, outcome)
    return code


def _to_be_compared(window: Window, outcome: Outcome, as_json: bool) -> int:
    """The reference holds no tensors here: say how to get them."""
    from .recorded import facts, recorded

    if as_json:
        print_json(
            {
                **facts(outcome),
                "window": window.to_dict(),
                "comparison": window.comparison.to_dict(),
            }
        )
    print_notes(outcome.recording.notes)
    note(recorded(outcome) + ".")
    note("The reference has no tensors of these layers. Record them, and compare:")
    _next(window, outcome)
    return DIFFERS


def _next(window: Window, outcome: Outcome) -> None:
    folder, path = window.folder or "", outcome.recording.path
    for command in (
        window.command or "",
        f"tensortap compare {shlex.quote(folder)} {shlex.quote(path)}",
    ):
        print(f"next: {command}", file=sys.stderr)  # noqa: T201
