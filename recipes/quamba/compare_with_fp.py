"""Compares the saved outputs of a mode with those of a reference, as document 003 has it.

    python3 compare_with_fp.py 2-1 --reference fp32 --output_dir layer_outputs

shows each saved layer in full and writes comparisons/mode_2-1_vs_fp32.json. Several modes, or
`all`, make the document's table instead. What is compared are the .npy files, whoever wrote them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import recipe
from quamba.mode_config import MODE_GROUPS, MODES
from recipe import note, say

if TYPE_CHECKING:
    from tensortap import Comparison, Modes
    from tensortap.recording.layouts import Tree


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Compare saved layer outputs of a mode with those of a reference mode.",
        epilog="Exit code: 0 the modes were compared, however far apart they are, 2 a mode could "
        "not be compared. For a code that says whether they differ: tensortap compare.",
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
    saved = saved_modes(Path(options.output_dir))
    check_saved(options.reference, saved, "reference ", *options.mode[:1])
    reference = saved[options.reference]
    if reference.problem:
        raise OptionError(reference.problem)
    modes = wanted_modes(options.mode, options.reference, saved)
    found = {mode: saved[mode].problem or unlike(saved[mode], reference) for mode in modes}
    problems = [problem for problem in found.values() if problem]
    modes = [mode for mode, problem in found.items() if not problem]
    if not modes:
        raise OptionError(problems[0])
    for text in (*problems, *other_models([reference, *(saved[mode] for mode in modes)])):
        note(text)
    with recipe.scratch(Path()) as folder:
        for mode in (options.reference, *modes):
            take_in(saved[mode], folder)
        if not several:
            return screens(folder, modes[0], options)
        return max(table(folder, options), recipe.TROUBLE if problems else recipe.DONE)


@dataclass(frozen=True)
class Saved:
    """The files of one mode: its tree, or why it cannot be read, and what it says of its model."""

    mode: str
    folder: str
    tree: Tree | None
    problem: str = ""
    shapes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        found = {} if self.tree is None else self.tree.target.get("config")
        return found if isinstance(found, dict) else {}

    def again(self, mode: str) -> str:
        """The command that saves another mode as this one was saved."""
        shape = next(iter(self.shapes.values()), ())
        return recipe.save_command(mode, self.folder, shape, tuple(self.shapes), self.config)


def saved_modes(folder: Path) -> dict[str, Saved]:
    """The modes of which there are .npy files, by name."""
    from tensortap.errors import LayoutError
    from tensortap.recording.layouts.npy import NpyLayout, open_npy

    npy = NpyLayout()
    if not npy.detect(folder):
        raise LayoutError(
            f"There are no files mode_<mode>_layer_<i>.npy in {folder}. Save them first, the "
            f"reference with: {recipe.save_command('fp32', str(folder))}"
        )
    saved: dict[str, Saved] = {}
    files = npy.files(folder)
    for name, tree in npy.read_each(folder).items():
        if isinstance(tree, LayoutError):
            saved[name] = Saved(name, str(folder), None, f"Mode {name} cannot be read: {tree}")
        else:
            shapes = {number: open_npy(folder / file).shape for number, file in files[name].items()}
            mode = str(tree.mode)
            saved[mode] = Saved(mode, str(folder), tree, "", dict(sorted(shapes.items())))
    return {mode: saved[mode] for mode in sorted(saved)}


def check_saved(mode: str, saved: Mapping[str, Saved], what: str = "", other: str = "") -> None:
    """A mode that was not saved is said with the command that saves it, as `other` was saved."""
    from tensortap.errors import OptionError

    if mode in saved:
        return
    like = saved.get(other) or next(iter(saved.values()))
    there = f"{like.folder} holds {', '.join(saved)}"
    if mode not in MODES:
        raise OptionError(
            f"There is no {what}mode {mode!r}. The modes are {', '.join(MODES)}; {there}."
        )
    raise OptionError(
        f"The {what}mode {mode} is not saved; {there}. Save it first: {like.again(mode)}"
    )


def unlike(saved: Saved, reference: Saved) -> str:
    """Why a mode cannot be compared: it has no layer, or other samples, than the reference."""
    mode = saved.mode
    again = "." if mode not in MODES else f". Save mode {mode} again: {reference.again(mode)}"
    both = [number for number in saved.shapes if number in reference.shapes]
    if not both:
        here, there = (", ".join(map(str, side.shapes)) for side in (saved, reference))
        return (
            f"Mode {mode} is saved at layer {here} and the reference {reference.mode} at layer "
            f"{there}: they have none in common{again}"
        )
    for number in both:
        ours, theirs = (list(side.shapes[number]) for side in (saved, reference))
        if ours != theirs:
            return (
                f"mode_{mode}_layer_{number}.npy holds {ours} and mode_{reference.mode}_layer_"
                f"{number}.npy {theirs}: they are not of the same samples{again}"
            )
    return ""


def other_models(saved: Sequence[Saved]) -> list[str]:
    """What makes a comparison one of models rather than of modes: other weights, other scales."""
    told: list[str] = []
    reference = saved[0]
    quantised = [each for each in saved if recipe.is_quantised(each.mode) and each.config]
    for each in saved[1:]:
        told += _differing(each, reference, ("model", "weights", "tiny"))
    for each in quantised[1:]:
        told += _differing(each, quantised[0], ("percentile", "calib", "hadamard"))
    return told


def _differing(one: Saved, other: Saved, keys: Sequence[str]) -> list[str]:
    if not one.config or not other.config:
        return []
    return [
        f"Mode {one.mode} was saved with {key} {one.config.get(key)}, mode {other.mode} "
        f"with {other.config.get(key)}: they are not the same but for the mode."
        for key in keys
        if one.config.get(key) != other.config.get(key)
    ]


def wanted_modes(words: Sequence[str], reference: str, saved: Mapping[str, Saved]) -> list[str]:
    """The modes to compare; those of a group that are not saved are left out, and told of."""
    from tensortap.errors import OptionError

    like = saved[reference]
    found: dict[str, None] = {}
    for word in words:
        if word not in MODE_GROUPS:
            check_saved(word, saved, "", reference)
            if word == reference:
                raise OptionError(f"Mode {word} is the reference itself. Name another mode.")
            found[word] = None
            continue
        for mode in dict.fromkeys((*MODE_GROUPS[word], *(saved if word == "all" else ()))):
            if mode in saved and mode != reference:
                found[mode] = None
            elif mode != reference:
                note(f"Mode {mode} is not saved: {like.again(mode)}")
    if not found:
        raise OptionError(
            f"There is nothing to compare with {reference} in {like.folder}. Save another mode "
            f"first: {like.again('2-1')}"
        )
    return list(found)


def take_in(saved: Saved, folder: Path) -> None:
    """One mode's files as a recording."""
    from tensortap.recording.layouts import import_read
    from tensortap.targets.modes.declared import folder_name

    if saved.tree is not None:
        import_read(saved.tree, f"{folder}/{folder_name(saved.mode)}", "npy", saved.folder)


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
    lacking = [row.layer for row in result.layers if row.verdict == "missing" and row.layer]
    for layer in lacking:
        note(f"Mode {mode} has no {layer}: it was not compared.")
    return recipe.DONE if result.compared else recipe.TROUBLE


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
    import torch

    import tensortap as tap
    from tensortap.targets.modes.declared import folder_name

    digests: dict[str, list[str]] = {}
    for name in (modes.reference, *(row.mode for row in modes.modes)):
        digest = hashlib.blake2b()
        run = tap.open(folder / folder_name(name))
        blocks = run.manifest.structure.blocks
        for record in run.records:
            tensor = record.tensor().contiguous()
            number = blocks.index(record.layer) if record.layer in blocks else record.layer
            digest.update(f"{number} {list(tensor.shape)} {tensor.dtype};".encode())
            digest.update(tensor.view(torch.uint8).numpy().tobytes())
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
