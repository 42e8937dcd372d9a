"""Two trees of .pt files compared by the library, and the document's figures of each layer.

The trees may be anybody's: they are imported as recordings, tensors alone and nothing unpickled
otherwise, and kept beside the report, so that `tensortap plot` and `compare` go on from there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tensortap as tap
from tensortap.errors import OptionError
from tensortap.recording.layouts import import_tree

if TYPE_CHECKING:
    from tensortap import Comparison, Difference, LayerComparison

__all__ = ["Compared", "compare_trees", "layer_block", "screen", "write_reports"]

GOOD_RANGE = (
    "良好范围：",
    "- Max abs diff < 0.01",
    "- Mean abs diff < 0.001",
    "- Cosine similarity > 0.99",
)
_HEADS = ("abs max", "abs mean", "abs median", "rel max", "rel mean", "cosine")


@dataclass(frozen=True)
class Compared:
    """A comparison of two trees, and the names that the layers' files have."""

    gpu: Path
    neuron: Path
    comparison: Comparison
    names: dict[str, str]
    warnings: tuple[str, ...]

    @property
    def whole(self) -> bool:
        """Whether both trees have the same layers, and the same tensors in them."""
        return not self.lacking

    @property
    def lacking(self) -> tuple[str, ...]:
        """The layers that one tree alone has, in whole or in part."""
        rows = self.comparison.layers
        missing = (r for r in rows if "missing" in (r.verdict, *(p.verdict for p in r.parts)))
        return tuple(self.name(row) for row in missing)

    def name(self, row: LayerComparison) -> str:
        found = row.layer or row.candidate_layer or ""
        return self.names.get(found, found or "root")


def compare_trees(gpu: Path, neuron: Path, pattern: str, reports: Path) -> Compared:
    """The layers of two trees whose names match, the GPU's as the reference, judged as devices."""
    if reports.exists() and not reports.is_dir():
        raise OptionError(f"--report-path is '{reports}', a file. Give a folder.")
    for flag, tree in (("--gpu-path", gpu), ("--neuron-path", neuron)):
        if not tree.is_dir():
            script = f"test_layer_by_layer{'_gpu' if flag == '--gpu-path' else ''}.py"
            raise OptionError(
                f"{flag} is '{tree}', which is no folder. Make it with {script}, or name the "
                "folder that holds the layer_<i>_output.pt files."
            )
    runs = []
    for name, tree in (("gpu", gpu), ("neuron", neuron)):
        place = reports / "recordings" / name
        import_tree(tree, str(place), layout="pt", only=pattern, overwrite=True)
        runs.append(tap.open(place))
    comparison = tap.compare(runs[0], runs[1], preset="device")
    names = {layer: alias for run in runs for alias, layer in run.aliases.items()}
    ids = [run.manifest.inputs.get("input_ids") for run in runs]
    other = ids[0] is not None and ids[1] is not None and ids[0] != ids[1]
    told = ("The two trees were made from other token ids, so they must differ.",) if other else ()
    return Compared(gpu, neuron, comparison, names, (*told, *comparison.warnings))


def screen(compared: Compared) -> str:
    """A row a layer, the document's block for the layer that matters, and the answer."""
    return "\n".join(_lines(compared))


def _lines(compared: Compared) -> Iterator[str]:
    comparison = compared.comparison
    yield f"GPU:    {compared.gpu}"
    yield f"Neuron: {compared.neuron}"
    yield ""
    room = max([5, *(len(compared.name(row)) for row in comparison.layers)]) + 2
    yield f"{'layer':<{room}}" + "".join(f"{head:>13}" for head in _HEADS) + "  verdict"
    for row in comparison.layers:
        yield f"{compared.name(row):<{room}}{_figures(row.difference)}  {_verdict(row)}"
    shown = comparison.first_divergence or _worst(comparison)
    if shown is not None and shown.difference is not None:
        first = comparison.first_divergence is not None
        yield ""
        yield f"{'First divergence' if first else 'Largest difference'}: {compared.name(shown)}"
        yield layer_block(shown.difference)
    yield ""
    yield from GOOD_RANGE
    yield ""
    yield comparison.sentence
    if compared.lacking:
        one, *others = compared.lacking
        more = f" and {len(others)} more" if others else ""
        yield f"The trees differ: only one of them has all of {one}{more}."


def layer_block(difference: Difference) -> str:
    """The document's figures of one layer, label by label."""
    figures = [_number(value) for value in _values(difference)]
    return "\n".join(
        (
            "绝对差异:",
            f"  Max: {figures[0]}",
            f"  Mean: {figures[1]}",
            f"  Median: {figures[2]}",
            "",
            "相对差异:",
            f"  Max: {figures[3]}",
            f"  Mean: {figures[4]}",
            "",
            f"Cosine Similarity: {figures[5]}",
        )
    )


def write_reports(compared: Compared, folder: Path) -> list[Path]:
    """The comparison as JSON, as a page and as text."""
    comparison = compared.comparison
    files = [folder / f"comparison.{suffix}" for suffix in ("json", "html", "txt")]
    comparison.to_json(files[0])
    comparison.to_html(files[1])
    files[2].write_text(screen(compared) + "\n", encoding="utf-8")
    return files


def _values(d: Difference) -> tuple[float, ...]:
    """The document's six; none where one side alone is NaN or infinite, as torch would say."""
    if d.disagreeing:
        return (math.nan,) * len(_HEADS)
    median = (d.percentiles or {}).get(50, math.nan)
    return (d.max_abs, d.mae, median, d.max_relative, d.mean_relative, d.cosine)


def _figures(difference: Difference | None) -> str:
    if difference is None:
        return "".join(f"{'-':>13}" for _ in _HEADS)
    return "".join(f"{_number(value):>13}" for value in _values(difference))


def _number(value: float) -> str:
    """Six decimals, as the document has it; an exponent where they would hide the number."""
    if math.isnan(value):
        return "undefined"
    plain = value == 0 or 1e-6 <= abs(value) < 1e5 or math.isinf(value)
    return f"{value:.6f}" if plain else f"{value:.3e}"


def _verdict(row: LayerComparison) -> str:
    if row.verdict in ("identical", "within"):
        return row.verdict
    why = (row.note or row.why).partition(" of the documents' limits")[0]  # which stand below
    return f"{row.verdict}: {why}".rstrip(": ")


def _worst(comparison: Comparison) -> LayerComparison | None:
    found = [row for row in comparison.compared if row.difference is not None]
    return max(found, key=lambda row: row.difference.max_abs if row.difference else 0, default=None)
