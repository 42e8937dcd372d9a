"""From a recording, or from what went wrong, to a mode's row."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from ...errors import DamagedError, TapError
from ...recording.kinds import parse, plain
from ...recording.reader import Recording
from ...recording.reader import open as open_recording
from ...recording.schema import COMPARISON
from ...recording.store import open_store
from ..running import Outcome
from .request import Request
from .results import RecordedMode
from .resume import DRAWN_FROM, look
from .surroundings import Surroundings

__all__ = ["begun_otherwise", "earlier_row", "problem_of", "row_of", "without_gradients"]

_MANY = 4  # layers in a sentence
_STOPPED = (
    "Each forward was stopped behind '{}', the last call that was asked for. "
    "--no-early-stop runs on."
)


def row_of(
    outcome: Outcome,
    mode: str,
    *,
    notes: Sequence[str] = (),
    status: Literal["recorded", "kept"] = "recorded",
) -> RecordedMode:
    """What is in a recording, as a row."""
    recording = outcome.recording
    quiet = [text for text in recording.notes if not text.startswith("Self-check failed:")]
    behind = recording.manifest.selection.get("stopped_behind")
    stopped = [_STOPPED.format(behind)] if behind else []
    comparison = outcome.comparison
    return RecordedMode(
        mode=mode,
        path=recording.path,
        status=status,
        seconds=outcome.seconds,
        layers=len(recording),
        records=len(recording.records),
        nbytes=recording.nbytes,
        notes=(*notes, *quiet, *stopped, *without_gradients(recording)),
        checks=len(recording.manifest.self_checks),
        failed_checks=tuple(outcome.failed_checks),
        compared=_compared_before(recording) if comparison is None else _compared(outcome),
    )


def without_gradients(recording: Recording) -> list[str]:
    """That gradients were asked for and did not come to every layer, as in `int8`."""
    made_with = recording.manifest.selection.get("made_with") or {}
    if not made_with.get("grads"):
        return []
    ports: dict[str, set[str]] = {}
    for record in recording.records:
        ports.setdefault(record.layer, set()).add(record.port)
    lacking = [
        layer for layer, has in ports.items() if "output" in has and "grad_output" not in has
    ]
    if not lacking:
        return []
    names = ", ".join(repr(name or "(root)") for name in lacking[:_MANY])
    more = f" and {len(lacking) - _MANY} more" if len(lacking) > _MANY else ""
    return [
        f"No gradient came to {len(lacking)} of {len(ports)} layers ({names}{more}): something "
        "behind them lets none through, or they do not depend on what requires one."
    ]


def _compared(outcome: Outcome) -> dict[str, Any]:
    comparison = outcome.comparison
    first = comparison.first_divergence
    return {
        "same": comparison.same,
        "sentence": comparison.sentence,
        "first_divergence": None if first is None else first.layer,
        "stopped_at": outcome.recording.manifest.selection.get("stopped_at"),
        "bytes_seen": outcome.seen,
        "bytes_kept": outcome.kept,
    }


def _compared_before(recording: Recording) -> dict[str, Any] | None:
    """What was found when a recording that is kept was made against another."""
    if "against" not in recording.manifest.selection:
        return None
    try:
        data = plain(parse(open_store(recording.path).read_text(COMPARISON)), "it")
    except (OSError, ValueError, DamagedError):
        return None
    first = data.get("first_divergence") or {} if isinstance(data, dict) else None
    if not isinstance(first, dict):
        return None
    return {
        "same": bool(data.get("same")),
        "sentence": str(data.get("sentence", "")),
        "first_divergence": first.get("layer"),
        "stopped_at": recording.manifest.selection.get("stopped_at"),
    }


def earlier_row(request: Request, mode: str, path: str) -> RecordedMode | None:
    """The row of a mode that is there already; None where it is to be made."""
    try:
        found = look(path, request.made_with(mode))
    except (TapError, OSError) as error:
        return RecordedMode(mode, path, "failed", problem=problem_of(error))
    if found.problem is not None:
        return RecordedMode(mode, path, "failed", problem=found.problem)
    if found.recording is None:
        return None
    return row_of(Outcome(found.recording, 0.0), mode, notes=found.notes, status="kept")


def begun_otherwise(
    request: Request, rows: Iterable[RecordedMode], start: Surroundings
) -> list[str]:
    """That modes which are kept began with other random numbers than those that are made now."""
    modes = []
    for row in rows:
        if row.status == "kept":
            made_with = open_recording(row.path).manifest.selection.get("made_with") or {}
            then = made_with.get(DRAWN_FROM)
            if then not in (None, start.drawn_from(request.seed(row.mode))):
                modes.append(row.mode)
    if not modes:
        return []
    return [
        f"torch's random state was another one when {', '.join(modes)} began: what the target "
        "draws without a seed of its own (weights, inputs) is not the same in the modes that are "
        "made now. Call torch.manual_seed before record_modes, or overwrite them all."
    ]


def problem_of(error: BaseException) -> str:
    """What went wrong, in a sentence."""
    if isinstance(error, TapError):
        return str(error)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}."
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    message = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {message}{place}. Set TENSORTAP_TRACEBACK=1 for the traceback."
