"""How a verb that runs a model is told which one: the options of `record`, `blame` and `replay`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import MaybeInt, MaybeList, MaybePath, MaybeText, print_notes

if TYPE_CHECKING:
    from pathlib import Path

    from ..targets import Target

__all__ = [
    "DeviceOption",
    "DtypeOption",
    "InputIdsOption",
    "ModeOption",
    "PromptOption",
    "SamplesOption",
    "SeedOption",
    "SeqLenOption",
    "SetOption",
    "TargetArgument",
    "chosen_target",
]

_GIVEN = "given to the target's function"

TargetArgument = Annotated[
    str,
    typer.Argument(metavar="TARGET", help="file.py:function, package.module:function or hf:DIR."),
]
ModeOption = Annotated[MaybeText, typer.Option("--mode", help=f"The variant, {_GIVEN}.")]
SeqLenOption = Annotated[
    MaybeInt, typer.Option("--seq-len", help=f"The sequence length, {_GIVEN}.")
]
SamplesOption = Annotated[MaybeInt, typer.Option("--samples", help=f"How many samples, {_GIVEN}.")]
DeviceOption = Annotated[MaybeText, typer.Option("--device", help=f"Where, {_GIVEN}.")]
DtypeOption = Annotated[
    MaybeText,
    typer.Option(
        "--dtype", help=f"fp32, bf16, fp16, fp64, {_GIVEN}; cast behind one that takes none."
    ),
]
SeedOption = Annotated[MaybeInt, typer.Option("--seed", help=f"The seed, {_GIVEN}.")]
SetOption = Annotated[
    MaybeList,
    typer.Option("--set", metavar="KEY=VALUE", help=f"Any option, {_GIVEN}. Repeatable."),
]
PromptOption = Annotated[
    MaybeList, typer.Option("--prompt", metavar="TEXT", help="hf: a batch. Repeatable.")
]
InputIdsOption = Annotated[
    MaybePath, typer.Option("--input-ids", metavar="FILE", help="hf: token ids.")
]


def chosen_target(
    spec: str,
    *,
    mode: str | None = None,
    seq_len: int | None = None,
    samples: int | None = None,
    device: str | None = None,
    dtype: str | None = None,
    seed: int | None = None,
    sets: Sequence[str] | None = None,
    prompts: Sequence[str] | None = None,
    input_ids: Path | None = None,
) -> Target:
    """The target with the options that were given; what it prints goes to stderr, as its notes."""
    from ..targets import load_target

    if seed is not None:
        import torch

        torch.manual_seed(seed)
    options: dict[str, Any] = {
        "mode": mode,
        "seq_len": seq_len,
        "samples": samples,
        "device": device,
        "dtype": dtype,
        "seed": seed,
    }
    with redirect_stdout(sys.stderr):  # what the target prints is no data of ours
        target = load_target(spec, options, sets or (), prompts=prompts or (), input_ids=input_ids)
    print_notes(target.notes)
    return target
