"""Recording every layer, and the document's tree of .pt files from the recording."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import tensortap as tap
from tensortap.errors import OptionError
from tensortap.recording.layouts import ExportOptions, get

from .compiled import Artefact, interpreted
from .model import LAYERS
from .prompt import Tokens

__all__ = ["record_compiled", "record_eager", "recording_of", "statistics_of", "write_tree"]


def recording_of(output: Path) -> Path:
    """Where the recording lies that a tree was written from: beside it."""
    return output.with_name(
        "recording" if output.name == "full_model" else f"{output.name}_recording"
    )


def record_compiled(artefact: Artefact, given: Tokens, folder: Path) -> tap.Recording:
    """Run the compiled model on the prompt, and record what its taps return."""
    with (
        interpreted(),
        tap.record(
            artefact.script,
            _empty(folder),
            layers=list(artefact.layers),
            manifest=artefact.manifest,
            target={
                **_about(artefact.config, given, "compiled", artefact.weights),
                "runtime": "torchscript",
                "file": str(artefact.file),
            },
            self_check=False,  # it was proven against the eager model when it was compiled
            overwrite=True,
            strict=True,
        ) as recorder,
    ):
        recorder.run(input_ids=given.ids)
    return tap.open(folder)


def record_eager(target: tap.Target, given: Tokens, folder: Path) -> tap.Recording:
    """Run the model as it is, with hooks on its layers."""
    weights = target.notes[0] if target.notes else target.name
    with (
        torch.no_grad(),
        tap.record(
            target.model,
            _empty(folder),
            layers=list(LAYERS),
            target=_about(target.config or {}, given, "eager", weights),
            overwrite=True,
            strict=True,
        ) as recorder,
    ):
        target(target.batches[0])
        recorder.step()
    return tap.open(folder)


def write_tree(recording: tap.Recording, output: Path) -> None:
    """`layer_<i>_output.pt` and the others, and metadata.pt; older ones there are replaced."""
    if output.exists() and not output.is_dir():
        raise OptionError(f"--output-dir is '{output}', a file. Give a folder.")
    get("pt").export(recording, output, ExportOptions(overwrite=True))


def statistics_of(output: Path) -> Mapping[str, Any]:
    """What metadata.pt says of each layer, read back as any reader of the tree would."""
    metadata = torch.load(output / "metadata.pt")
    found: Mapping[str, Any] = metadata["statistics"]
    return found


def _about(config: dict[str, Any], given: Tokens, how: str, weights: str) -> dict[str, Any]:
    return {"prompt": [given.prompt], "config": config, "run": how, "weights": weights}


def _empty(folder: Path) -> Path:
    if folder.exists() and not folder.is_dir():
        raise OptionError(f"The recording belongs into '{folder}', which is a file. Move it away.")
    return folder
