"""Saves what goes into the first layer and what comes out, of every mode, as document 002 has it.

    python3 save_first_layer_io.py --modes fp32 0 2-1 --output_file first_layer_io_all_modes.npz

writes one .npz with the keys mode_<mode>_input and mode_<mode>_output, the statistics of each
beside it as <name>_stats.json, and shows them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import recipe
from recipe import note, say

if TYPE_CHECKING:
    import torch

    from tensortap import Recording

_RULE = "=" * 98
_DEFAULT = "first_layer_io_all_modes.npz"
_MODES = ("fp32", "0", "2-0", "2-1", "2-2", "2-3", "2-4", "3")
_PORTS = {"input": "📥 INPUT", "output": "📤 OUTPUT"}


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Save the input and the output of the first layer, all modes in one .npz.",
        epilog="Exit code: 0 saved, 2 trouble (a mode that failed; the others are saved).",
        allow_abbrev=False,
    )
    parser.add_argument("--model", default=recipe.MODEL, help="default: %(default)s")
    parser.add_argument(
        "--modes",
        nargs="+",
        default=list(_MODES),
        metavar="MODE",
        help=f"or all, essential, quant_only, fp_only (default: {' '.join(_MODES)})",
    )
    parser.add_argument(
        "--output_file", default=_DEFAULT, metavar="FILE", help="default: %(default)s"
    )
    parser.add_argument(
        "--seq_len",
        type=recipe.count,
        default=recipe.SEQ_LEN,
        metavar="N",
        help="default: %(default)s",
    )
    recipe.add_model_options(parser)
    return parser


def command() -> int:
    options = arguments().parse_args()
    from tensortap.errors import OptionError

    out = Path(options.output_file)
    if out.suffix != ".npz" or out.is_dir():
        raise OptionError(f"--output_file {out} is no .npz file. Name one, as {_DEFAULT}.")
    modes = recipe.modes_of(options.modes)
    with recipe.scratch(out.parent) as folder:
        recorded = recipe.record(
            modes,
            folder / "runs",
            layers=["first"],
            inputs=True,
            samples=1,
            seq_len=options.seq_len,
            options={**recipe.model_options(options, options.model), "depth": 1},
        )
        saved = {mode.mode: mode.path for mode in recorded.modes if mode.status != "failed"}
        if saved:
            show(save(saved, folder / out.name, options))
            for name in (out.name, f"{out.stem}_stats.json"):
                (folder / name).replace(out.parent / name)
            say(f"Saved {out} and {out.with_name(f'{out.stem}_stats.json')}.")
        else:
            note(f"No mode could be recorded; {out} was not written.")
    return recipe.TROUBLE if recorded.failed else recipe.DONE


def save(saved: Mapping[str, str], file: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Write every mode into one new file; the statistics beside it."""
    import tensortap as tap
    from tensortap.recording.layouts import ExportOptions, get

    runs = {mode: tap.open(path) for mode, path in saved.items()}
    about = {
        "model": options.model,
        "pretrained_dir": options.pretrained_dir,
        **recipe.facts(next(iter(runs.values()))),
        "first_layer_input": same_input(runs),
    }
    for mode, run in runs.items():
        get("npz").export(run, file, ExportOptions(mode, about=about))
    stats = file.with_name(f"{file.stem}_stats.json")
    told: dict[str, Any] = json.loads(stats.read_text(encoding="utf-8"))
    return told


def same_input(runs: Mapping[str, Recording]) -> str:
    """Whether the first layer was given the same bits in every mode: later errors are its own."""
    inputs = {mode: run[run.layers[0]].input for mode, run in runs.items()}
    first, *others = inputs
    other = [mode for mode in others if not same_bits(inputs[first], inputs[mode])]
    if len(inputs) == 1:
        return f"of mode {first} alone"
    if not other:
        return f"the same bits in all {len(inputs)} modes"
    return f"not the same bits as in mode {first}: {', '.join(other)}"


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    import torch

    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    pair = [tensor.contiguous().view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*pair)


def show(stats: Mapping[str, Any]) -> None:
    """The document's screen."""
    for mode, told in stats["modes"].items():
        say(f"{_RULE}\nMODE {mode}\n{_RULE}\n")
        for port, title in _PORTS.items():
            say(_section(title, told[port]) + "\n")
    say(_RULE)
    say(f"Input of the first layer: {stats['first_layer_input']}.")


def _section(title: str, told: Mapping[str, Any]) -> str:
    first = [_number(value) for value in told["first_10"]]
    left_out = recipe.not_finite(told)
    return "\n".join(
        (
            f"{title} (Shape: {_shape(told['shape'])}):",
            f"  First 10 values: {first}",
            f"  Mean: {_number(told['mean'])}",
            f"  Std:  {_number(told['std'])}",
            f"  Range: [{_number(told['min'])}, {_number(told['max'])}]",
            *([f"  Not finite, and left out above: {left_out}"] if left_out else []),
        )
    )


def _shape(shape: Sequence[int]) -> str:
    return str(list(shape))


def _number(value: object) -> str:
    """Six decimals, as the document has it; JSON has no NaN, and an infinity is a word there."""
    return f"{value:.6f}" if isinstance(value, (int, float)) else str(value or "undefined")


if __name__ == "__main__":
    recipe.main(command)
