"""`tensortap demo`: record the built-in model and look at it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import NotARecordingError, TapError
from .common import JsonOption, OverwriteOption, print_json, print_notes, say
from .running import Settings, record_target

if TYPE_CHECKING:
    from ..recording.reader import Recording

_SPEC = "tensortap.demo:build"


def demo(
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="DIR", help="The recording's folder.")
    ] = "runs/demo",
    overwrite: OverwriteOption = False,
    json: JsonOption = False,
) -> None:
    """Record the built-in model, show its layers, check them. Downloads nothing."""
    from ..reporting.progress import progress
    from ..reporting.tables import layer_rows
    from ..targets import load_target

    target = load_target(_SPEC)
    settings = Settings(
        layers=("embedding", "blocks", "final_norm"),
        inputs=True,
        overwrite=overwrite or _is_ours(output),
    )
    with progress("Recording") as advance:
        recording, seconds = record_target(target, output, settings, advance)
    findings = recording.check()
    if json:
        rows = layer_rows(recording.records)
        print_json(
            {
                "path": recording.path,
                "seconds": seconds,
                "layers": [row.to_dict() for row in rows],
                "findings": [finding.to_dict() for finding in findings],
            }
        )
    else:
        _print(recording, seconds)
    print_notes(recording.notes)


def _is_ours(path: str) -> bool:
    """Whether the folder holds an earlier demo, which may be replaced unasked."""
    from ..recording import reader

    try:
        return reader.open(path, partial=True).manifest.target.get("spec") == _SPEC
    except NotARecordingError:
        return False
    except TapError:
        return False


def _print(recording: Recording, seconds: float) -> None:
    from ..reporting.console import print_table, stdout
    from ..reporting.tables import findings_table, header, layer_rows, layers_table
    from ..reporting.text import size

    console = stdout()
    say(f"Recorded the built-in model in {seconds:.1f} s, {size(recording.nbytes)} on disk.")
    console.print(header(recording), style="dim")
    print_table(console, layers_table(layer_rows(recording.records)))
    findings = recording.check()
    if findings:
        print_table(console, findings_table(findings))
    say("Checked: healthy" if not findings else f"Checked: {len(findings)} findings")
    block = next(iter(recording.manifest.structure.blocks), recording.layers[0])
    say("\nTry next:")
    for line in (
        f"tensortap show {recording.path} {block}",
        f"tensortap plot {recording.path} {block} -o layer.png",
        f"tensortap export {recording.path} --layout pt -o out",
        f"tensortap record {_SPEC} -o runs/bf16 --mode bf16 --layers all --inputs --plan",
    ):
        say(f"  {line}")
