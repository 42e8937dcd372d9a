"""`tensortap show`: the layers of a recording, or one of them in detail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import OptionError
from .common import (
    DONE,
    BatchOption,
    CallOption,
    EpochOption,
    Folder,
    JsonOption,
    LayersOption,
    MaybeText,
    PartialOption,
    PortOption,
    open_recording,
    print_json,
    print_notes,
)

if TYPE_CHECKING:
    from ..recording.reader import Recording


def show(
    folder: Folder,
    layer: Annotated[
        MaybeText, typer.Argument(metavar="LAYER", help="One layer, in detail.")
    ] = None,
    layers: LayersOption = None,
    port: PortOption = None,
    epoch: EpochOption = None,
    batch: BatchOption = None,
    call: CallOption = None,
    each: Annotated[
        bool, typer.Option("--each", help="A row a record, instead of merged rows.")
    ] = False,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            "-f",
            help="Show the last step of a run that is being watched, until it is over. Exit 1 "
            "when it failed or has NaN or Inf.",
        ),
    ] = False,
    timeout: Annotated[
        float,
        typer.Option("--timeout", help="With --follow: wait so many seconds for it to begin."),
    ] = 60.0,
    partial: PartialOption = False,
    json: JsonOption = False,
) -> int:
    """Show the layers of a recording, or one layer in detail; --follow one that trains."""
    if follow:
        if each or any(wish is not None for wish in (epoch, batch, call)):
            raise OptionError("--follow shows the last step alone: give no moment and no --each.")
        return _follow(folder, layer, layers or [], port, timeout, json)
    recording = open_recording(folder, partial=partial)
    moment = {"epoch": epoch, "batch": batch, "call": call}
    if layer is None:
        _all(recording, layers or [], port, moment, each, json)
    else:
        _one(recording, layer, port, moment, json)
    print_notes(recording.notes)
    return DONE


def _follow(
    folder: str,
    layer: str | None,
    layers: list[str],
    port: str | None,
    timeout: float,
    as_json: bool,
) -> int:
    from .follow import follow

    patterns = [*layers, *([layer] if layer is not None else [])]
    return follow(folder, patterns, port, timeout=timeout, as_json=as_json)


def _all(
    recording: Recording,
    patterns: list[str],
    port: str | None,
    moment: dict[str, Any],
    each: bool,
    as_json: bool,
) -> None:
    from ..recording.series import is_watched
    from ..reporting.progress import progress
    from ..reporting.provenance import self_check_line
    from ..reporting.tables import header, layer_rows, layers_table
    from ..reporting.watched import scalars_table, watched_rows, watched_table, ways
    from ..selection.recorded import choose_layers, choose_port, choose_records

    wanted = set(choose_layers(recording, patterns))
    records = choose_records(
        (record for record in recording.records if record.layer in wanted),
        port=choose_port(port),
        **moment,
    )
    watched = is_watched(recording) and not each and not _is_one(moment)
    with progress("Reading") as advance:
        found = ways(records) if watched else []
        rows = watched_rows(found) or layer_rows(records, each=each, progress=advance)
    checks = recording.manifest.self_checks
    if as_json:
        print_json(
            {
                "path": recording.path,
                "status": recording.status,
                "mode": recording.manifest.mode,
                "notes": recording.notes,
                **({"watched": True} if watched else {}),
                **({"self_checks": checks} if checks else {}),
                "layers": [row.to_dict() for row in rows],
            }
        )
        return
    from ..reporting.console import print_table, stdout

    console = stdout()
    console.print(header(recording), style="dim")
    if checks:
        failed = any(check.get("passed") is False for check in checks)
        console.print(self_check_line(recording), style="bold red" if failed else "dim")
    if not watched:
        print_table(console, layers_table(rows, each=each))
    for made in (scalars_table(found), watched_table(found)):
        if made is not None:
            print_table(console, made)
            console.print()


def _one(
    recording: Recording,
    name: str,
    port: str | None,
    moment: dict[str, Any],
    as_json: bool,
) -> None:
    from ..recording.series import is_watched
    from ..reporting.layer import print_layer, view_layer
    from ..reporting.progress import progress
    from ..reporting.watched import watched_rows, ways
    from ..selection.recorded import choose_port, choose_records, find_layer

    layer = find_layer(recording, name)
    records = choose_records(layer.records, port=choose_port(port), **moment)
    watched = is_watched(recording) and not _is_one(moment)
    if watched and not as_json:
        _over_steps(recording, layer.name, port, moment)
        return
    with progress("Reading") as advance:
        view = view_layer(recording, layer, records, progress=advance)
    if as_json:
        data = {"path": recording.path, "notes": recording.notes, **view.to_dict()}
        if watched:
            data["over_steps"] = [row.to_dict() for row in watched_rows(ways(records))]
        print_json(data)
        return
    from ..reporting.console import stdout

    print_layer(stdout(), view)


def _is_one(moment: dict[str, Any]) -> bool:
    """Whether a single step is asked for; an epoch is many."""
    return moment["batch"] is not None or moment["call"] is not None


def _over_steps(recording: Recording, layer: str, port: str | None, moment: dict[str, Any]) -> None:
    """One layer of a watched run and what is inside it, over the steps."""
    from ..reporting.console import print_table, stdout
    from ..reporting.tables import header
    from ..reporting.watched import scalars_table, watched_table, ways
    from ..selection.recorded import choose_port, choose_records

    inside = [r for r in recording.records if r.layer == layer or r.layer.startswith(f"{layer}.")]
    found = ways(choose_records(inside, port=choose_port(port), **moment))
    console = stdout()
    console.print(header(recording), style="dim")
    for made in (scalars_table(found), watched_table(found)):
        if made is not None:
            print_table(console, made)
            console.print()
    console.print("One step in detail: --batch STEP.", style="dim")
