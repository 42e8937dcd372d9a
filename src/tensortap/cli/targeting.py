"""How a verb that runs a model is told which one: the options of `record`, `blame` and `replay`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from ..errors import OptionError
from .aside import aside
from .common import MaybeInt, MaybeList, MaybePath, MaybeText, print_notes

if TYPE_CHECKING:
    from ..taps.programs.base import Options
    from ..targets import Target

__all__ = [
    "AcceptInferredOption",
    "AnyTargetArgument",
    "CalibOption",
    "Compiled",
    "CustomOpsOption",
    "DeviceOption",
    "DtypeOption",
    "EvalOption",
    "GenerateOption",
    "InputIdsOption",
    "InputsFromOption",
    "ManifestOption",
    "ManyModesOption",
    "ModeGroupsOption",
    "ModeOption",
    "NamesFromOption",
    "PromptOption",
    "RuntimeOption",
    "SamplesOption",
    "SeedOption",
    "SelfCheckOption",
    "SeqLenOption",
    "SetOption",
    "TargetArgument",
    "WeightsOption",
    "chosen_target",
]

_GIVEN = "given to the target's function"

TargetArgument = Annotated[
    str,
    typer.Argument(metavar="TARGET", help="file.py:function, package.module:function or hf:DIR."),
]
AnyTargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="file.py:function, package.module:function, hf:DIR, or a compiled model's file: "
        "model.pt, .pt2, .onnx, .xml.",
    ),
]
ManyModesOption = Annotated[
    MaybeList,
    typer.Option(
        "--mode",
        metavar="MODE",
        help=f"The variant, {_GIVEN}, or a built-in one. Repeated: a recording each, under DIR.",
    ),
]
ModeGroupsOption = Annotated[
    MaybeList,
    typer.Option(
        "--modes",
        metavar="MODES",
        help="Several modes, as a,b,c or a group: all, essential, quant_only, fp_only; a recording "
        "each, under DIR. Repeatable.",
    ),
]
CalibOption = Annotated[
    MaybeInt,
    typer.Option(
        "--calib", metavar="N", help="How many batches calibrate a fake: mode; all, if not given."
    ),
]
ModeOption = Annotated[
    MaybeText, typer.Option("--mode", help=f"The variant, {_GIVEN}, or a built-in one.")
]
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
EvalOption = Annotated[
    bool,
    typer.Option(
        "--eval", help="Run the model in eval mode: no dropout, and the stored batch statistics."
    ),
]
SeedOption = Annotated[MaybeInt, typer.Option("--seed", help=f"The seed, {_GIVEN}.")]
GenerateOption = Annotated[
    MaybeInt,
    typer.Option(
        "--generate",
        metavar="N",
        help="Generate N tokens after the prompt and record every step: the best token each time, "
        f"or --set do_sample=true. {_GIVEN[0].upper()}{_GIVEN[1:]}.",
    ),
]
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
InputsFromOption = Annotated[
    Optional[list[Path]],  # noqa: UP045
    typer.Option(
        "--inputs-from",
        metavar="FILE",
        help="The model's arguments by name, from .safetensors, .npz, .npy or .json: a batch a "
        "file. Repeatable.",
    ),
]
RuntimeOption = Annotated[
    MaybeText,
    typer.Option(
        "--runtime",
        metavar="NAME",
        help="compiled: what runs it, where file and type do not tell: torchscript, export, aoti, "
        "onnx, openvino; ops for TorchScript operator by operator.",
    ),
]
ManifestOption = Annotated[
    MaybePath,
    typer.Option(
        "--manifest",
        metavar="FILE",
        help="compiled: names for the extra outputs of an instrumented model. Default: "
        "model.taps.json beside model.pt.",
    ),
]
WeightsOption = Annotated[
    MaybePath,
    typer.Option(
        "--weights", metavar="FILE", help="compiled: a checkpoint that names layers by weights."
    ),
]
NamesFromOption = Annotated[
    MaybePath,
    typer.Option(
        "--names-from",
        metavar="FILE",
        help="compiled: the float model whose names a quantised one has lost.",
    ),
]
AcceptInferredOption = Annotated[
    bool,
    typer.Option("--accept-inferred", help="compiled: also record layers whose names are guesses."),
]
SelfCheckOption = Annotated[
    bool,
    typer.Option(
        "--self-check/--no-self-check",
        help="compiled: check that taps change nothing and linears are what they are called.",
    ),
]
CustomOpsOption = Annotated[
    Optional[list[Path]],  # noqa: UP045
    typer.Option(
        "--custom-ops",
        metavar="LIB",
        help="compiled: a library of operators that may be loaded, which runs its code. "
        "Repeatable.",
    ),
]


@dataclass(frozen=True)
class Compiled:
    """What was said about a compiled model."""

    runtime: str | None = None
    manifest: Path | None = None
    weights: Path | None = None
    names_from: Path | None = None
    accept_inferred: bool = False
    self_check: bool = True
    custom_ops: tuple[Path, ...] = ()

    def options(self) -> Options:
        from ..taps.programs.base import Options

        return Options(**vars(self))


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
    inputs_from: Sequence[Path] | None = None,
    compiled: Compiled | None = None,
    plan: bool = False,
    calib: int | None = None,
    evaluate: bool = False,
) -> Target:
    """The target with the options that were given; what it prints goes to stderr, as its notes.

    Without `compiled`, a verb calls single layers, which a compiled model does not let it do.
    """
    from ..targets import load_target
    from ..targets.artefacts import is_artefact
    from ..targets.modes.surroundings import begin_from
    from ..targets.running import check_eval

    if compiled is None and is_artefact(spec):
        raise OptionError(
            f"'{spec}' is a compiled model. This command calls layers one by one, or compiles them "
            "anew, and needs the eager model: name the function that builds it, as "
            "file.py:function, or hf:DIR."
        )

    begin_from(seed)  # as `record` does: what is drawn at random is what was recorded
    options: dict[str, Any] = {
        "mode": mode,
        "seq_len": seq_len,
        "samples": samples,
        "device": device,
        "dtype": dtype,
        "seed": seed,
    }
    with aside():  # what the target prints is no data of ours
        target = load_target(
            spec,
            options,
            sets or (),
            prompts=prompts or (),
            input_ids=input_ids,
            inputs_from=inputs_from or (),
            compiled=None if compiled is None else compiled.options(),
            plan=plan,
            calib=calib,
        )
    print_notes(target.notes)
    if evaluate:
        check_eval(target.model, evaluate)
        target.model.eval()
    return target
