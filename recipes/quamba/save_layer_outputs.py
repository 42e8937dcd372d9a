"""Saves what the first and the last layer of a mode return, as document 003 has it.

    python3 save_layer_outputs.py quamba-130m-w8a8 --mode 2-1 --quantize --output_dir layer_outputs

writes layer_outputs/mode_2-1_layer_0.npy, …_layer_23.npy (all samples along axis 0) and
mode_2-1_stats.json. Several modes, and groups of them, are saved in one go.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import recipe
from recipe import note, say

_RANGE = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Save the outputs of the first and the last layer of one mode, or of several.",
        epilog="Exit code: 0 saved, 2 trouble (a mode that failed; the others are saved).",
        allow_abbrev=False,
    )
    parser.add_argument("model", nargs="?", default=recipe.MODEL, help="default: %(default)s")
    parser.add_argument(
        "--mode",
        "--modes",
        nargs="+",
        default=["fp32"],
        metavar="MODE",
        help="fp32, fp16, 0, 2-0, 2-1, 2-2, 2-3, 2-4, 3, or a group: all, essential, quant_only, "
        "fp_only (default: fp32)",
    )
    parser.add_argument(
        "--quantize",
        action="store_true",
        help="say that the modes are quantised ones, as they are anyway",
    )
    parser.add_argument(
        "--output_dir", default=recipe.OUTPUT_DIR, metavar="DIR", help="default: %(default)s"
    )
    parser.add_argument(
        "--calib_data_num",
        type=recipe.count,
        default=recipe.SAMPLES,
        metavar="N",
        help="samples (default: %(default)s)",
    )
    parser.add_argument(
        "--calib_seqlen",
        type=recipe.count,
        default=recipe.SEQ_LEN,
        metavar="N",
        help="tokens a sample (default: %(default)s)",
    )
    parser.add_argument(
        "--layers",
        nargs="+",
        default=["first", "last"],
        metavar="LAYER",
        help="which blocks: 0, 4-7, all, first, last, or patterns of tensortap (default: first "
        "last)",
    )
    recipe.add_model_options(parser)
    return parser


def patterns(layers: Sequence[str]) -> list[str]:
    """tensortap's patterns for blocks by number; any other word is its own pattern."""
    named = {"all": "blocks"}
    return [
        "backbone.layers.{" + text + "}" if _RANGE.fullmatch(text) else named.get(text, text)
        for text in layers
    ]


def check_quantize(quantize: bool, modes: Sequence[str]) -> None:
    """--quantize beside a mode that computes in floats is a contradiction."""
    from tensortap.errors import OptionError

    floats = [mode for mode in modes if not recipe.is_quantised(mode)]
    if quantize and floats:
        raise OptionError(
            f"--quantize does not fit --mode {floats[0]}, which is not quantised. Leave it out, or "
            "choose a quantised mode, as --mode 2-1."
        )


def command() -> int:
    options = arguments().parse_args()
    from tensortap.errors import OptionError

    out = Path(options.output_dir)
    if out.exists() and not out.is_dir():
        raise OptionError(f"--output_dir {out} is a file. Name a folder.")
    words = [word for word in options.mode if word != recipe.MODEL]  # MODEL behind --mode MODE
    modes = recipe.modes_of(words or ["fp32"])
    check_quantize(options.quantize, modes)
    given = recipe.model_options(options, options.model)
    with recipe.scratch(out) as folder:
        recorded = recipe.record(
            modes,
            folder,
            layers=patterns(options.layers),
            inputs=False,
            samples=options.calib_data_num,
            seq_len=options.calib_seqlen,
            options=given,
        )
        for mode in recorded.modes:
            if mode.status != "failed":
                fused = mode.mode == "0"
                paths = recipe.fused_and_plain(options.calib_seqlen, given) if fused else None
                save(mode.path, mode.mode, out, options, paths)
    return recipe.TROUBLE if recorded.failed else recipe.DONE


def save(
    recording: str,
    mode: str,
    out: Path,
    options: argparse.Namespace,
    paths: Mapping[str, Any] | None = None,
) -> None:
    """Write one mode's files, and say which."""
    import tensortap as tap
    from tensortap.recording.layouts import ExportOptions, get

    run = tap.open(recording)
    about: dict[str, Any] = {
        "model": options.model,
        "pretrained_dir": options.pretrained_dir,
        **recipe.facts(run),
        **({} if paths is None else {"fused_minus_plain": paths}),
    }
    exported = get("npy").export(run, out, ExportOptions(mode, overwrite=True, about=about))
    for skipped in exported.skipped:
        note(f"{skipped.layer} of mode {mode} was not saved: {skipped.reason}")
    for left in exported.left_out:
        note(f"Mode {mode}: an .npy tree holds outputs of blocks alone, without {left}.")
    stats = json.loads((out / exported.files[-1]).read_text(encoding="utf-8"))
    for number, told in stats["layers"].items():
        if left_out := recipe.not_finite(told):
            note(f"Mode {mode}: layer {number} holds {left_out} values.")
    say(f"Mode {mode}: " + ", ".join(f"{out}/{name}" for name in exported.files))


if __name__ == "__main__":
    recipe.main(command)
