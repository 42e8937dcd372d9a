"""`tensortap instrument`: compile a model with taps in it, and its manifest beside it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from ..errors import OptionError
from .aside import aside
from .common import (
    DONE,
    UNHEALTHY,
    JsonOption,
    LayersOption,
    MaybePath,
    MaybeText,
    OverwriteOption,
    note,
    print_json,
    print_notes,
    say,
)
from .targeting import (
    CalibOption,
    DeviceOption,
    DtypeOption,
    InputIdsOption,
    ModeOption,
    PromptOption,
    SamplesOption,
    SeedOption,
    SeqLenOption,
    SetOption,
    TargetArgument,
    chosen_target,
)

if TYPE_CHECKING:
    from ..taps.instrument.write import Written

__all__ = ["instrument"]

_SHOWN = 8


def instrument(
    target: TargetArgument,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="FILE", help="The artefact; its manifest goes beside it."
        ),
    ],
    to: Annotated[
        MaybeText,
        typer.Option(
            "--to",
            help="torchscript, pt2, onnx, openvino or aoti; without it the name of FILE decides.",
        ),
    ] = None,
    layers: LayersOption = None,
    split: Annotated[
        int,
        typer.Option(
            "--split", metavar="N", help="N artefacts, each with taps on part of the layers."
        ),
    ] = 1,
    manifest: Annotated[
        MaybePath,
        typer.Option(
            "--manifest",
            metavar="FILE",
            help="The manifest's name, in the artefact's folder; else model.taps.json.",
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check/--no-check", help="Run what was written once, and compare its taps."),
    ] = True,
    plain: Annotated[
        Optional[bool],  # noqa: UP045
        typer.Option(
            "--plain/--no-plain",
            help="Also write the model without taps, which recordings compare the other with. "
            "Default: yes, but for aoti.",
        ),
    ] = None,
    overwrite: OverwriteOption = False,
    mode: ModeOption = None,
    calib: CalibOption = None,
    seq_len: SeqLenOption = None,
    samples: SamplesOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    seed: SeedOption = None,
    sets: SetOption = None,
    prompts: PromptOption = None,
    input_ids: InputIdsOption = None,
    json: JsonOption = False,
) -> int:
    """Compile a model that returns its layers' outputs too. Exit 1: it does not return the same."""
    from ..taps.instrument.formats import format_of
    from ..taps.instrument.write import ModuleSource, Source, write
    from ..taps.instrument.write import check as try_out
    from ..taps.programs.onnx.files import require

    if split < 1:
        raise OptionError(f"--split is {split}, expected a whole number from 1.")
    form = format_of(output, to)
    if check and form == "onnx":
        require()  # before anything is written
    chosen = layers or "blocks"
    source: Source
    if target.lower().endswith((".pt2", ".ep")):
        from ..taps.instrument.exported import ExportSource

        with aside():
            source = ExportSource(Path(target), chosen)
    else:
        loaded = chosen_target(
            target,
            mode=mode,
            calib=calib,
            seq_len=seq_len,
            samples=samples,
            device=device,
            dtype=dtype,
            seed=seed,
            sets=sets,
            prompts=prompts,
            input_ids=input_ids,
        )
        batch = loaded.batches[0]
        source = ModuleSource(loaded.model, batch.args, batch.kwargs, chosen)
    with aside():
        written = write(
            source,
            output,
            to=to,
            split=split,
            manifest_file=manifest,
            overwrite=overwrite,
            plain=form != "aoti" if plain is None else plain,
        )
        failed = try_out(written, source.args, source.kwargs) if check else None
    _report(written, failed, json)
    return UNHEALTHY if failed else DONE


def _report(written: Written, failed: list[str] | None, as_json: bool) -> None:
    if as_json:
        print_json(_facts(written, failed))
    else:
        say(_sentence(written))
        if failed is not None and not failed:
            say("Checked: its taps are the eager model's.")
    print_notes(written.manifest.notes)
    if failed:
        shown = "; ".join(failed[:_SHOWN]) + ("; …" if len(failed) > _SHOWN else "")
        note(f"Outputs or taps are not what the eager model computes, {len(failed)}: {shown}.")
    if not as_json:
        first = written.files[0] if len(written.files) == 1 else written.manifest_file
        typer.echo(f"next: tensortap record {first} -o DIR --inputs-from FILE", err=True)


def _sentence(written: Written) -> str:
    from ..reporting.text import plural, size

    manifest = written.manifest
    where = str(written.files[0])
    if len(written.files) > 1:
        where = f"{len(written.files)} artefacts, {written.files[0]} the first"
    return (
        f"Wrote {where} ({written.format}): taps on {plural(len(manifest.layers), 'layer')}, "
        f"{plural(len(manifest.entries), 'tensor')}, {size(written.nbytes)} a run. "
        f"Manifest: {written.manifest_file}"
    )


def _facts(written: Written, failed: list[str] | None) -> dict[str, Any]:
    manifest = written.manifest
    return {
        "files": [str(file) for file in written.files],
        "manifest": str(written.manifest_file),
        "format": written.format,
        "layers": len(manifest.layers),
        "tensors": len(manifest.entries),
        "nbytes": written.nbytes,
        "checked": failed is not None,
        "same": None if failed is None else not failed,
        "failed": failed or [],
        "notes": list(manifest.notes),
    }
