"""What `tensortap record` says when it is done, and how it ends."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import typer

from .common import DONE, UNHEALTHY, note, print_json, print_notes, say
from .compare import DIFFERS, print_answer

if TYPE_CHECKING:
    from ..comparing.streaming import Window
    from ..recording.reader import Recording
    from .running import Outcome

__all__ = ["facts", "recorded", "report", "report_against"]

_MOST_FAILURES = 5


def facts(outcome: Outcome) -> dict[str, object]:
    """What `--json` says of a recording."""
    recording = outcome.recording
    failed = len(outcome.failed_checks)
    return {
        "path": recording.path,
        "status": recording.status,
        "mode": recording.manifest.mode,
        "runtime": recording.manifest.target.get("runtime", "eager"),
        "layers": len(recording),
        "records": len(recording.records),
        "nbytes": recording.nbytes,
        "seconds": outcome.seconds,
        "self_checks": {
            "passed": len(recording.manifest.self_checks) - failed,
            "failed": failed,
        },
        "notes": recording.notes,
    }


def report(outcome: Outcome, as_json: bool, *, kept: bool = False) -> int:
    """Print what was recorded, or `kept`; a self-check that failed makes it unhealthy."""
    from ..recording.training_mode import training_note
    from ..targets.modes.rows import without_gradients

    recording = outcome.recording
    if as_json:
        print_json({**facts(outcome), **({"kept": True} if kept else {})})
    else:
        say(_kept(outcome) if kept else recorded(outcome))
    in_training = training_note(recording.manifest)
    quiet = [text for text in _quiet(recording) if text != in_training]
    print_notes([*quiet, *_stopped(recording), *without_gradients(recording)])
    if in_training is not None:
        typer.echo(f"warning: {in_training}", err=True)
    code = _warn(outcome)
    if not as_json:
        verb = "check" if code else "show"
        typer.echo(f"next: tensortap {verb} {shlex.quote(recording.path)}", err=True)
    return code


def recorded(outcome: Outcome) -> str:
    """What was recorded, in a sentence."""
    from ..reporting.text import plural, size

    recording = outcome.recording
    return (
        f"Recorded {plural(len(recording), 'layer')}, {plural(len(recording.records), 'record')}, "
        f"{size(recording.nbytes)} to {recording.path} in {outcome.seconds:.1f} s"
    )


def _kept(outcome: Outcome) -> str:
    from ..reporting.text import plural

    recording = outcome.recording
    return (
        f"Kept {recording.path}, which is complete and was made with the same options: "
        f"{plural(len(recording), 'layer')}, {plural(len(recording.records), 'record')}"
    )


def report_against(outcome: Outcome, as_json: bool, window: Window | None = None) -> int:
    """Print how the run compares, and what was kept of it."""
    from ..reporting.text import size

    comparison = outcome.comparison
    assert comparison is not None
    if as_json:
        print_json(
            {
                **facts(outcome),
                "bytes_seen": outcome.seen,
                "bytes_kept": outcome.kept,
                "stopped_at": outcome.recording.manifest.selection.get("stopped_at"),
                **({} if window is None else {"window": window.to_dict()}),
                "comparison": comparison.to_dict(),
            }
        )
        for warning in comparison.warnings:
            typer.echo(f"warning: {' '.join(warning.split())}", err=True)
    else:
        print_answer(comparison)
    print_notes([*comparison.notes, *_stopped(outcome.recording)])
    note(f"Kept {size(outcome.kept)} of the {size(outcome.seen)} of tensors that were seen.")
    note(recorded(outcome) + ".")
    code = _warn(outcome)
    return code if comparison.same else DIFFERS


def _warn(outcome: Outcome) -> int:
    """Say which self-checks failed: the recording is there, and not to be believed as it is."""
    failed = outcome.failed_checks
    for text in failed[:_MOST_FAILURES]:
        typer.echo(f"warning: self-check failed: {' '.join(text.split())}", err=True)
    if len(failed) > _MOST_FAILURES:
        more = len(failed) - _MOST_FAILURES
        typer.echo(f"warning: {more} more self-checks failed: tensortap check has all", err=True)
    return UNHEALTHY if failed else DONE


def _quiet(recording: Recording) -> list[str]:
    """The notes without the self-check's, which are said louder."""
    return [text for text in recording.notes if not text.startswith("Self-check failed:")]


def _stopped(recording: Recording) -> list[str]:
    """That the model did not run to its end, and what that may have cost."""
    behind = recording.manifest.selection.get("stopped_behind")
    if not behind:  # the root module is the last of all: nothing was left out
        return []
    return [
        f"Each forward was stopped behind '{behind}', the last call that was asked for. "
        "--no-early-stop runs on."
    ]
