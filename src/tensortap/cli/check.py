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
        bool,
        typer.Option("--all", help="Of a run of many steps: every finding, not the first ones."),
    ] = False,
    partial: PartialOption = False,
    json: JsonOption = False,
) -> int:
    """List what is unhealthy, and where a run of many steps went wrong; exit 1 on errors."""
    from ..recording.health import Limits, first_abnormal, first_bad, onset
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
    first, abnormal = first_bad(findings), first_abnormal(findings)
    if json:
        print_json(
            {
                "path": recording.path,
                "errors": errors,
                "warnings": warnings,
                "limits": limits.to_dict(),
                "first": None if first is None else first.to_dict(),
                "first_abnormal": None if abnormal is None else abnormal.to_dict(),
                "findings": [finding.to_dict() for finding in findings],
                "notes": recording.notes,
            }
        )
    else:
        from ..reporting.console import print_table, stdout
        from ..reporting.tables import findings_table
        from ..reporting.text import clean, plural

        shown = findings
        several = len(recording.steps) > 1
        if several and not every:
            shown = onset(findings)[:_SHOWN]
        if findings:
            print_table(stdout(), findings_table(shown))
        if len(shown) < len(findings):
            say(f"… and {plural(len(findings) - len(shown), 'finding')} after these: see --all.")
        layers = plural(len(recording), "layer")
        found = (
            f"{plural(errors, 'error')}, {plural(warnings, 'warning')}" if findings else "healthy"
        )
        say(f"{layers}: {found}")
        if several and abnormal is not None:
            say(f"First abnormal: {clean(abnormal.text[:1].lower() + abnormal.text[1:])}")
        if several and first is not None:
            say(f"First NaN or Inf: {clean(first.text)}")
    print_notes(recording.notes)
    return UNHEALTHY if errors or (strict and warnings) else DONE
