"""`tensortap check`: what is unhealthy in a recording."""

from __future__ import annotations

from typing import Annotated

import typer

from .common import (
    DONE,
    UNHEALTHY,
    Folder,
    JsonOption,
    PartialOption,
    open_recording,
    print_json,
    print_notes,
    say,
)

_SHOWN = 20


def check(
    folder: Folder,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 on warnings too.")] = False,
    max_mean: Annotated[
        float, typer.Option(help="Warn of a mean beyond ± this.", show_default=True)
    ] = 10.0,
    max_jump: Annotated[
        float, typer.Option(help="Warn of adjacent blocks that differ by more than this.")
    ] = 10.0,
    max_abs: Annotated[
        float, typer.Option(help="Warn of a value whose magnitude is beyond this.")
    ] = float("inf"),
    max_saturated: Annotated[
        float, typer.Option(help="Warn of more than this share at the dtype's largest value.")
    ] = 0.01,
    max_underflow: Annotated[
        float, typer.Option(help="Warn of more than this share of subnormal values.")
    ] = 0.5,
    every: Annotated[
        bool, typer.Option("--all", help="Every finding of a run that trained, not the first ones.")
    ] = False,
    partial: PartialOption = False,
    json: JsonOption = False,
) -> int:
    """List what is unhealthy; exit 1 when there are errors."""
    from ..recording.health import Limits, first_bad, in_time
    from ..reporting.progress import progress

    recording = open_recording(folder, partial=partial)
    limits = Limits(
        max_mean=max_mean,
        max_jump=max_jump,
        max_abs=max_abs,
        max_saturated=max_saturated,
        max_underflow=max_underflow,
    )
    with progress(f"Checking {len(recording)} layers"):
        findings = recording.check(limits)
    errors = sum(finding.severity == "error" for finding in findings)
    warnings = len(findings) - errors
    first = first_bad(findings)
    if json:
        print_json(
            {
                "path": recording.path,
                "errors": errors,
                "warnings": warnings,
                "limits": limits.to_dict(),
                "first": None if first is None else first.to_dict(),
                "findings": [finding.to_dict() for finding in findings],
                "notes": recording.notes,
            }
        )
    else:
        from ..reporting.console import print_table, stdout
        from ..reporting.tables import findings_table
        from ..reporting.text import clean, plural

        shown = findings
        if len(recording.steps) > 1 and not every:  # NaN spreads: what came first is what counts
            shown = in_time(findings)[:_SHOWN]
        if findings:
            print_table(stdout(), findings_table(shown))
        if len(shown) < len(findings):
            say(f"… and {len(findings) - len(shown)} findings behind these: --all shows them.")
        layers = plural(len(recording), "layer")
        found = (
            f"{plural(errors, 'error')}, {plural(warnings, 'warning')}" if findings else "healthy"
        )
        say(f"{layers}: {found}")
        if first is not None and errors > 1 and len(recording.steps) > 1:
            say(f"First in time: {clean(first.text)}")
    print_notes(recording.notes)
    return UNHEALTHY if errors or (strict and warnings) else DONE
