"""Remakes the numbers and pictures of docs/quamba.md, from the model at its real size.

    python tools/quamba_pictures.py [--samples 1] [--tiny] [-o docs]

Prints the tables of the page, and writes quamba-blocks.png, quamba-inside.png, quamba-scales.png.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "recipes" / "quamba")]

import torch  # noqa: E402
from quamba.target import build  # noqa: E402

import tensortap as tap  # noqa: E402
from tensortap.reporting.figures import GRID, new_figure, save, styled  # noqa: E402

BLOCK = "backbone.layers.0.mixer"
PARTS = ("in_proj", "ssm_input", "x_proj", "dt_proj", "scan", "out_proj")
SHOWN = {"0": "0 = 2-0 = 2-1 = 2-3", "2-2": "2-2", "2-4": "2-4", "3": "3"}
COLOURS = ("#2563a8", "#d9730d", "#2f8f5b", "#8b4fc6")
PERCENTILES = (0.999, 0.9999, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("-o", "--out", type=Path, default=ROOT / "docs")
    given = parser.parse_args()
    options = {"samples": given.samples, "tiny": given.tiny}
    with tempfile.TemporaryDirectory() as folder, styled():
        runs = Path(folder)
        say("Recording the modes", sys.stderr)
        record(runs, "all", options, layers=["blocks", *(f"{BLOCK}.{part}" for part in PARTS)])
        say(str(tap.compare_modes(runs, layers="blocks")))
        blocks(runs, given.out / "quamba-blocks.png")
        inside(runs, given.out / "quamba-inside.png", options)
        found = {}
        for percentile in PERCENTILES:
            for hadamard in (False, True):
                say(f"Percentile {percentile}, Hadamard {hadamard}", sys.stderr)
                how = {**options, "percentile": percentile, "hadamard": hadamard}
                record(runs / "other", "0,2-4", how, layers=["last"])
                for mode in ("0", "2-4"):
                    found[mode, percentile, hadamard] = last_mse(runs, runs / "other" / mode)
        scales(found, given.out / "quamba-scales.png")


def say(text: str, stream: TextIO = sys.stdout) -> None:
    stream.write(f"{text}\n")
    stream.flush()


def record(folder: Path, modes: str, options: Mapping[str, Any], layers: Sequence[str]) -> None:
    done = tap.record_modes(
        build,
        folder,
        modes=modes,
        layers=list(layers),
        options=dict(options),
        early_stop=False,
        overwrite=True,
    )
    assert done, done


def blocks(runs: Path, path: Path) -> None:
    """The relative error behind each block, a line a mode."""
    figure = new_figure(7.2, 3.4)
    panel = figure.subplots()
    for (mode, label), colour, style in zip(SHOWN.items(), COLOURS, ("-", ":") * 2, strict=True):
        compared = tap.compare(runs / "fp32", runs / mode, layers="blocks").compared
        errors = [100 * row.error for row in compared]
        panel.plot(range(len(errors)), errors, style, color=colour, label=label, linewidth=2)
        say(f"mode {mode}: {errors[0]:.3f} % behind block 0, {errors[-1]:.3f} % behind the last")
    panel.set(title="Error behind each block", xlabel="block", ylabel="% of the fp32 output's norm")
    panel.set_ylim(bottom=0)
    finish(figure, panel, path)


def inside(runs: Path, path: Path, options: Mapping[str, Any]) -> None:
    """The relative error of the first block's inner tensors, a bar a mode."""
    figure = new_figure(7.2, 3.4)
    panel = figure.subplots()
    reference = {part: values(runs / "fp32", part) for part in PARTS}
    for place, ((mode, label), colour) in enumerate(zip(SHOWN.items(), COLOURS, strict=True)):
        scale = step_of(mode, options)
        errors = []
        for part in PARTS:
            found = values(runs / mode, part, scale)
            errors.append(100 * float((found - reference[part]).norm() / reference[part].norm()))
        at = [index + 0.2 * (place - 1.5) for index in range(len(PARTS))]
        panel.bar(at, errors, width=0.19, color=colour, label=label)
        told = ", ".join(f"{part} {error:.2f}" for part, error in zip(PARTS, errors, strict=True))
        say(f"mode {mode}, % inside block 0: {told}")
    scanned = reference["scan"]
    lost = float(((scanned / (scanned.abs().max() / 127)).round() == 0).double().mean())
    say(f"{100 * lost:.0f} % of what the fp32 scan returns is code 0, scaled by its largest value")
    panel.set_xticks(range(len(PARTS)), PARTS)
    panel.set(title="Error inside the first block", ylabel="% of the fp32 tensor's norm")
    finish(figure, panel, path)


def values(run: Path, part: str, scale: float = 1.0) -> torch.Tensor:
    """A part's outputs, all samples; int8 codes as the numbers they stand for."""
    records = tap.open(run)[f"{BLOCK}.{part}"].port("output")
    whole = torch.cat([record.tensor() for record in records])
    return whole.double() * scale if whole.dtype == torch.int8 else whole.double()


def step_of(mode: str, options: Mapping[str, Any]) -> float:
    """What one int8 code of the SSM input stands for; 1 where there are none."""
    scan = build(mode, **options).model.get_submodule(f"{BLOCK}.scan")
    return float(getattr(scan, "u_scale", 1.0))


def last_mse(runs: Path, other: Path) -> float:
    row = tap.compare(runs / "fp32", other, layers="last").compared[-1]
    assert row.difference is not None
    return row.difference.mse


def scales(found: Mapping[tuple[str, float, bool], float], path: Path) -> None:
    """The last block's MSE over the percentile, with and without the Hadamard transform."""
    figure = new_figure(7.2, 3.2)
    panel = figure.subplots()
    names = ["min-max" if p == 1 else f"{100 * p:g} %" for p in PERCENTILES]
    for mode, colour in (("0", COLOURS[0]), ("2-4", COLOURS[2])):
        for hadamard, style in ((False, "-"), (True, "--")):
            errors = [found[mode, p, hadamard] for p in PERCENTILES]
            label = f"mode {mode}{', Hadamard' if hadamard else ''}"
            panel.plot(names, errors, style, marker="o", color=colour, label=label)
            told = ", ".join(f"{n}: {e:.3e}" for n, e in zip(names, errors, strict=True))
            say(f"{label}: last MSE {told}")
    panel.set_yscale("log")
    panel.set(title="What calibration does to the last block", xlabel="SSM input and state clipped")
    panel.set_ylabel("MSE against fp32")
    finish(figure, panel, path)


def finish(figure: Any, panel: Any, path: Path) -> None:
    panel.grid(axis="y", color=GRID)
    panel.set_axisbelow(True)
    panel.legend(frameon=False, fontsize=8)
    save(figure, path)


if __name__ == "__main__":
    main()
