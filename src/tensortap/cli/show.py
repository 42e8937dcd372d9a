"""`tensortap show`: the layers of a recording, or one of them in detail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from .common import (
    DONE,
    BatchOption,
    CallOption,
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
        return _follow(folder, layer, layers or [], port, batch, call, each, timeout, json)
    recording = open_recording(folder, partial=partial)
    if layer is None:
        _all(recording, layers or [], port, batch, call, each, json)
    else:
        _one(recording, layer, port, batch, call, json)
    print_notes(recording.notes)
    return DONE


def _follow(
    folder: str,
    layer: str | None,
    layers: list[str],
    port: str | None,
    batch: int | None,
    call: int | None,
    each: bool,
    timeout: float,
    as_json: bool,
) -> int:
    from ..errors import OptionError
    from .follow import follow

    if batch is not None or call is not None or each:
        raise OptionError("--follow shows the last step: it takes no --batch, --call or --each.")
    patterns = [*layers, *([layer] if layer is not None else [])]
    return follow(folder, patterns, port, timeout=timeout, as_json=as_json)


def _all(
    recording: Recording,
    patterns: list[str],
    port: str | None,
    batch: int | None,
    call: int | None,
    each: bool,
    as_json: bool,
) -> None:
    from ..recording.series import is_watched
    from ..reporting.progress import progress
    from ..reporting.tables import header, layer_rows, layers_table
    from ..reporting.watched import scalars_table, watched_rows, watched_table, ways
    from ..selection.recorded import choose_layers, choose_port, choose_records

    wanted = set(choose_layers(recording, patterns))
    records = choose_records(
        (record for record in recording.records if record.layer in wanted),
        port=choose_port(port),
        batch=batch,
        call=call,
    )
    watched = is_watched(recording) and not each and batch is None and call is None
    with progress("Reading") as advance:
        found = ways(records) if watched else []
        rows = watched_rows(found) or layer_rows(records, each=each, progress=advance)
    if as_json:
        print_json(
            {
                "path": recording.path,
                "status": recording.status,
                "mode": recording.manifest.mode,
                "notes": recording.notes,
                **({"watched": True} if watched else {}),
                "layers": [row.to_dict() for row in rows],
            }
        )
        return
    from ..reporting.console import print_table, stdout

    console = stdout()
    console.print(header(recording), style="dim")
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
    batch: int | None,
    call: int | None,
    as_json: bool,
) -> None:
    from ..recording.series import is_watched
    from ..reporting.layer import print_layer, view_layer
    from ..reporting.progress import progress
    from ..reporting.watched import watched_rows, ways
    from ..selection.recorded import choose_port, choose_records, find_layer

    layer = find_layer(recording, name)
    records = choose_records(layer.records, port=choose_port(port), batch=batch, call=call)
    watched = is_watched(recording) and batch is None and call is None
    if watched and not as_json:
        _over_steps(recording, layer.name, port)
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


def _over_steps(recording: Recording, layer: str, port: str | None) -> None:
    """One layer of a watched run and what is inside it, over the steps."""
    from ..reporting.console import print_table, stdout
    from ..reporting.tables import header
    from ..reporting.watched import scalars_table, watched_table, ways
    from ..selection.recorded import choose_port, choose_records

    inside = [r for r in recording.records if r.layer == layer or r.layer.startswith(f"{layer}.")]
    found = ways(choose_records(inside, port=choose_port(port)))
    console = stdout()
    console.print(header(recording), style="dim")
    for made in (scalars_table(found), watched_table(found)):
        if made is not None:
            print_table(console, made)
            console.print()
    console.print("One step in detail: --batch STEP.", style="dim")
