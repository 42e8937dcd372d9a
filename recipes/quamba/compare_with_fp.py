"""Compares the saved outputs of a mode with those of a reference, as document 003 has it.

    python3 compare_with_fp.py 2-1 --reference fp32 --output_dir layer_outputs

shows each saved layer in full and writes comparisons/mode_2-1_vs_fp32.json. Several modes, or
`all`, make the document's table instead. What is compared are the .npy files, whoever wrote them.
"""

from __future__ import annotations

import argparse
import glob
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import recipe
from quamba.mode_config import MODE_GROUPS, MODES
from recipe import note, say

if TYPE_CHECKING:
    from tensortap import Comparison, Modes
    from tensortap.recording.layouts import Tree


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Compare saved layer outputs of a mode with those of a reference mode.",
        epilog="Exit code of one mode: 0 the same or within rounding, 1 diverged, 2 trouble. Of "
        "several: 0 the table was made, 2 a mode could not be compared.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "mode", nargs="+", metavar="MODE", help="a saved mode; several, or all, make a table"
    )
    parser.add_argument("--reference", default="fp32", metavar="MODE", help="default: fp32")
    parser.add_argument(
        "--output_dir", default=recipe.OUTPUT_DIR, metavar="DIR", help="default: %(default)s"
    )
    parser.add_argument(
        "--save_comparison",
        metavar="FILE",
        help=f"where the JSON goes (default: {recipe.COMPARISONS}/mode_<MODE>_vs_<REFERENCE>.json)",
    )
    parser.add_argument(
        "--preset",
        choices=("documents", "device"),
        help="judge by fixed limits instead of by rounding: the document's MSE < 1e-2 and "
        "correlation > 0.99",
    )
    return parser


def command() -> int:
    options = arguments().parse_args()
    from tensortap.errors import OptionError

    several = len(options.mode) > 1 or options.mode[0] in MODE_GROUPS
    if several and options.save_comparison is not None:
        raise OptionError("--save_comparison names one file, and there are several modes.")
    trees = saved_modes(Path(options.output_dir))
    check_saved(options.reference, trees, options.output_dir, "reference ", *options.mode[:1])
    modes = wanted_modes(options.mode, options.reference, trees, options.output_dir)
    found = {mode: other_shape(mode, options.reference, options.output_dir) for mode in modes}
    problems = [problem for problem in found.values() if problem]
    modes = [mode for mode, problem in found.items() if not problem]
    if not modes:
        raise OptionError(problems[0])
    for problem in problems:
        note(problem)
    with recipe.scratch(Path()) as folder:
        for mode in (options.reference, *modes):
            take_in(trees[mode], mode, options.output_dir, folder)
        if not several:
            return screens(folder, modes[0], options)
        return max(table(folder, options), recipe.TROUBLE if problems else recipe.DONE)


def saved_modes(folder: Path) -> dict[str, Tree]:
    """The modes of which there are .npy files, in the order of the document."""
    from tensortap.errors import LayoutError
    from tensortap.recording.layouts import get

    npy = get("npy")
    if not npy.detect(folder):
        raise LayoutError(
            f"There are no files mode_<mode>_layer_<i>.npy in {folder}. Save them first, the "
            f"reference with: {recipe.save_command('fp32', str(folder))}"
        )
    trees = {str(tree.mode): tree for tree in npy.read(folder)}
    return {mode: trees[mode] for mode in sorted(trees)}


def check_saved(
    mode: str, trees: Mapping[str, Tree], folder: str, what: str = "", other: str = ""
) -> None:
    """A mode that was not saved is said with the command that saves it, as `other` was saved."""
    from tensortap.errors import OptionError

    if mode in trees:
        return
    there = f"{folder} holds {', '.join(trees)}"
    if mode not in MODES:
        raise OptionError(
            f"There is no {what}mode {mode!r}. The modes are {', '.join(MODES)}; {there}."
        )
    raise OptionError(
        f"The {what}mode {mode} is not saved; {there}. Save it first: "
        f"{recipe.save_command(mode, folder, a_shape(folder, other))}"
    )


def shapes(folder: str, mode: str) -> dict[str, tuple[int, ...]]:
    """The shapes of a mode's arrays, by file."""
    import numpy as np

    paths = sorted(Path(folder).glob(f"mode_{glob.escape(mode)}_layer_*.npy"))
    return {path.name: np.load(path, mmap_mode="r").shape for path in paths}


def a_shape(folder: str, mode: str) -> tuple[int, ...]:
    """How a mode was saved; empty where it was not."""
    return next(iter(shapes(folder, mode).values()), ())


def other_shape(mode: str, reference: str, folder: str) -> str | None:
    """Why a mode cannot be compared: its samples are not those of the reference."""
    theirs = shapes(folder, reference)
    for name, shape in shapes(folder, mode).items():
        twin = name.replace(f"mode_{mode}_", f"mode_{reference}_", 1)
        if twin in theirs and theirs[twin] != shape:
            command = recipe.save_command(mode, folder, theirs[twin])
            return (
                f"{name} holds {list(shape)} and {twin} {list(theirs[twin])}: they are not of the "
                f"same samples. Save mode {mode} again: {command}"
            )
    return None


def wanted_modes(
    words: Sequence[str], reference: str, trees: Mapping[str, Tree], folder: str
) -> list[str]:
    """The modes to compare; those of a group that are not saved are left out, and told of."""
    from tensortap.errors import OptionError

    found: dict[str, None] = {}
    for word in words:
        if word not in MODE_GROUPS:
            check_saved(word, trees, folder, "", reference)
            if word == reference:
                raise OptionError(f"Mode {word} is the reference itself. Name another mode.")
            found[word] = None
            continue
        for mode in dict.fromkeys((*MODE_GROUPS[word], *(trees if word == "all" else ()))):
            if mode in trees and mode != reference:
                found[mode] = None
            elif mode != reference:
                like = a_shape(folder, reference)
                note(f"Mode {mode} is not saved: {recipe.save_command(mode, folder, like)}")
    if not found:
        raise OptionError(
            f"There is nothing to compare with {reference} in {folder}. Save another mode first: "
            f"{recipe.save_command('2-1', folder)}"
        )
    return list(found)


def take_in(tree: Tree, mode: str, source: str, folder: Path) -> None:
    """One mode's files as a recording."""
    from tensortap.recording.layouts import import_tree
    from tensortap.targets.modes.declared import folder_name

    import_tree(source, f"{folder}/{folder_name(mode)}", layout="npy", mode=tree.mode)


def screens(folder: Path, mode: str, options: argparse.Namespace) -> int:
    """One mode: the document's screen for each layer."""
    import tensortap as tap
    from tensortap.reporting.comparisons import layer_screen
    from tensortap.reporting.console import stdout
    from tensortap.targets.modes.declared import folder_name

    runs = [tap.open(folder / folder_name(name)) for name in (options.reference, mode)]
    blocks = runs[0].manifest.structure.blocks
    result = named(tap.compare(*runs, preset=options.preset), options.reference, mode)
    console = stdout()
    for warning in result.warnings:
        note(warning)
    for row in result.layers:
        title = f"Layer {blocks.index(row.layer)}" if row.layer in blocks else None
        screen = layer_screen(result, row, width=console.width, title=title, icons=True)
        console.print(screen, soft_wrap=True)
    save(result, mode, options.reference, options.save_comparison)
    if not result.compared:
        return recipe.TROUBLE
    return recipe.DONE if result.same else recipe.DIFFERS


def named(result: Comparison, reference: str, mode: str) -> Comparison:
    """The comparison with the modes' names in place of the folders it was made from."""
    return replace(result, reference=reference, candidate=mode)


def save(result: Comparison, mode: str, reference: str, path: str | None = None) -> None:
    """Write the JSON to the documents' place, or to the one that was asked for."""
    from tensortap.comparing.mode_files import comparison_text, save_comparison

    if path is None:
        path = save_comparison(result, recipe.COMPARISONS, mode, reference)
    else:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(comparison_text(result, mode, reference), encoding="utf-8")
    note(f"The comparison is saved in {path}.")


def table(folder: Path, options: argparse.Namespace) -> int:
    """Several modes: the document's table, and which of them are the same bits."""
    import tensortap as tap
    from tensortap.reporting.comparisons import modes_document_text

    modes = tap.compare_modes(folder, reference=options.reference, preset=options.preset)
    rows = tuple(
        replace(
            row,
            path=f"{options.output_dir}/mode_{row.mode}",
            comparison=None
            if row.comparison is None
            else named(row.comparison, modes.reference, row.mode),
        )
        for row in modes.modes
    )
    modes = replace(modes, folder=options.output_dir, modes=rows)
    for warning in modes.warnings:
        note(warning)
    say(modes_document_text(modes))
    for line in in_words(modes, folder):
        say(line)
    for row in modes.modes:
        if row.comparison is not None:
            save(row.comparison, row.mode, modes.reference)
    return recipe.TROUBLE if any(row.problem for row in modes.modes) else recipe.DONE


def in_words(modes: Modes, folder: Path) -> list[str]:
    """What the table does not show: modes that are the same bits, and mode 0 against 2-1."""
    import tensortap as tap
    from tensortap.targets.modes.declared import folder_name

    digests: dict[str, list[str]] = {}
    for name in (modes.reference, *(row.mode for row in modes.modes)):
        digest = hashlib.blake2b()
        for record in tap.open(folder / folder_name(name)).records:
            digest.update(record.tensor().contiguous().numpy().tobytes())
        digests.setdefault(digest.hexdigest(), []).append(name)
    equal = [" = ".join(group) for group in digests.values() if len(group) > 1]
    lines = [f"The same bits at every saved layer: {'; '.join(equal) or 'no two modes'}."]
    if (folder / "0").exists() and (folder / "2-1").exists():
        result = tap.compare(folder / "0", folder / "2-1")
        told = [
            f"{row.layer} the same bits"
            if row.verdict == "identical"
            else f"{row.layer} at most {row.difference.max_abs:.3e}, MSE {row.difference.mse:.3e}"
            for row in result.compared
            if row.difference is not None
        ]
        lines.append(f"Mode 0 (fused) minus mode 2-1 (plain PyTorch): {'; '.join(told)}.")
    stats = Path(modes.folder) / "mode_0_stats.json"
    if stats.exists():
        told_of = json.loads(stats.read_text(encoding="utf-8")).get("fused_minus_plain")
        lines += [told_of["text"]] if isinstance(told_of, dict) else []
    return lines


if __name__ == "__main__":
    recipe.main(command)
