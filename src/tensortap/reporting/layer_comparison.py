"""One layer of a comparison in full: the screen of document 003, section for section.

The labels and number formats are the document's. A number that six decimals would show as zero
gets an exponent instead, and what is undefined is called that. What the document does not have
(the verdict and what it rests on, where the greatest difference is, hints and causes) stands below.
"""

from __future__ import annotations

import math
import re
import textwrap
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from . import text
from .provenance import sentence_of_both
from .verdicts import GOOD_GRADES, GRADES_ARE, STYLES, cosine

if TYPE_CHECKING:
    from rich.text import Text

    from ..comparing.results import Comparison, LayerComparison, Part
    from ..numerics.difference import Difference
    from ..numerics.summary import Summary

__all__ = ["display_name", "layer_screen"]

WIDTH = 80
_FORMAT = re.compile(r"(?:fp|bf|tf|nf|mxfp|int|uint|w\d+a)\d+|cpu|gpu|tpu|npu")
_MEDIAN = {50: "50th (Median)"}


def layer_screen(
    comparison: Comparison,
    layer: str | LayerComparison,
    *,
    width: int | None = None,
    title: str | None = None,
    icons: bool = False,
) -> Text:
    """The screen for a layer, given by its name on either side or as its row.

    Long lines are broken at `width`, behind their labels. `title` stands in the heading instead of
    the layer's own name, as "Layer 0"; `icons` puts the document's signs before its sections.
    """
    from rich.text import Text

    row = comparison[layer] if isinstance(layer, str) else layer
    part = row.main
    reference = display_name(comparison.reference)
    screen = _Screen(width, icons)
    called = f"Layer {text.layer_name(row.layer)}" if title is None else text.clean(title)
    screen.rule()
    screen.line(f"{called} - Comparison Results", "bold")
    screen.rule()
    if part is not None:
        before, after = part.reference_summary, part.candidate_summary
        screen.statistics(f"{reference} Reference Statistics:", before, "📊")
        screen.statistics("Mode Output Statistics:", after, "📊")
        if part.difference is not None:
            screen.metrics(part.difference, reference)
        elif before is not None and after is not None:
            screen.moments(before, after, reference)
    screen.verdict(row, part)
    if part is not None and part.difference is not None:
        screen.elements(part, part.difference)
    if part is not None and part.added:
        screen.head("Added Metrics:")
        for name, value in part.added:
            screen.item(text.clean(name), f" {text.number(value, 6)}")
    screen.hints(row)
    screen.causes(row)
    screen.others(row, part)
    screen.rule()
    return Text("\n").join(screen.lines)


def display_name(path: str) -> str:
    """How a run is called in a heading: its folder's name, a number format in capitals."""
    name = text.clean(PurePosixPath(path.rstrip("/")).name or path)
    return name.upper() if _FORMAT.fullmatch(name) else name


class _Screen:
    """Collects lines; a method a section."""

    def __init__(self, width: int | None, icons: bool) -> None:
        self.lines: list[Text] = []
        self._width = width
        self._icons = icons

    def line(self, words: str = "", style: str = "") -> None:
        from rich.text import Text

        self.lines.append(Text(words, style=style))

    def rule(self) -> None:
        self.line("=" * WIDTH, "dim")

    def head(self, words: str, icon: str = "") -> None:
        if str(self.lines[-1]) != "=" * WIDTH or len(self.lines) > 2:
            self.line()
        self.line(f"{icon} {words}" if icon and self._icons else words, "bold cyan")

    def item(self, label: str, value: str, style: str = "") -> None:
        from rich.text import Text

        made = Text(f"  {label + ':':<18}").append(self._broken(value, 21), style)
        self.lines.append(made)

    def _broken(self, value: str, indent: int) -> str:
        """The value on as many lines as it needs, each behind the label's column."""
        if self._width is None or indent + len(value) <= max(self._width, 60):
            return value
        room = max(self._width, 60) - indent
        lines = textwrap.wrap(value.strip(), room, break_on_hyphens=False)
        return " " + ("\n" + " " * indent).join(lines)

    def statistics(self, head: str, summary: Summary | None, icon: str) -> None:
        self.head(head, icon)
        if summary is None:
            self.line("  (no summary was kept)", "dim")
            return
        self.line(f"  {'Mean:':<10} {fixed(summary.mean)}")
        self.line(f"  {'Std:':<10} {fixed(summary.std)}")
        self.line(f"  {'Range:':<10} [{fixed(summary.min)}, {fixed(summary.max)}]")

    def metrics(self, d: Difference, reference: str) -> None:
        if d.disagreeing:
            self.line()
            self.line(
                f"What follows is of the {d.finite:,} values that are finite on both sides; "
                f"{d.disagreeing:,} are not.",
                "bold red",
            )
        self.head(f"Difference (Mode - {reference}):", "📏")
        self.item("Mean Diff", fixed(d.mean))
        self.item("Std Diff", fixed(d.std))
        self.item("Mean Abs Diff", fixed(d.mae))
        self.item("Max Abs Diff", fixed(d.max_abs))
        self.head("Error Metrics:", "❌")
        self.item("MSE", f" {scientific(d.mse)}")
        self.item("RMSE", fixed(d.rmse))
        self.item("MAE", fixed(d.mae))
        self.head("Relative Metrics:", "📈")
        self.item("Relative MSE", f" {_share(d.relative_mse)}")
        self.item("Relative MAE", f" {_share(d.relative_mae)}")
        self.item("Correlation", fixed(d.correlation))
        self.head("Absolute Difference Percentiles:", "📊")
        if not d.percentiles:
            self.line("  (not computed)", "dim")
            return
        for percent, value in d.percentiles.items():
            self.item(_MEDIAN.get(percent, f"{percent}th"), fixed(value))
        if not d.percentiles_exact:
            self.line("  (to within a bucket of the histogram)", "dim")

    def moments(self, reference: Summary, candidate: Summary, name: str) -> None:
        """What two summaries tell without the tensors."""
        self.head(f"Difference (Mode - {name}):", "📏")
        for label, field in (
            ("Mean", "mean"),
            ("Std", "std"),
            ("Min", "min"),
            ("Max", "max"),
            ("L2", "l2"),
        ):
            a, b = getattr(reference, field), getattr(candidate, field)
            self.item(label, fixed(b - a))
        self.line("  Summaries alone were kept: errors, correlation and percentiles cannot be")
        self.line("  known from them.")

    def verdict(self, row: LayerComparison, part: Part | None) -> None:
        self.head("Verdict: ")
        unknown = "unknown whether made here (its inputs were not recorded on both sides)"
        origin = f", {unknown if row.origin == 'unknown' else row.origin}" if row.origin else ""
        self.lines[-1].append(row.verdict + origin, STYLES[row.verdict])
        self.item("Why", f" {text.clean(row.why) or '-'}")
        self.item("Input", f" {row.input_verdict or 'not recorded on both sides'}")
        if part is not None:
            if not math.isnan(part.error):
                self.item("Error", f" {text.number(part.error)} of the reference's norm")
            if part.floor is not None:
                times = text.number(part.floor_ratio, 3)
                worst = " at the worst moment" if part.moments > 1 else ""
                self.item("Floor", f" {text.number(part.floor)}; error / floor {times}{worst}")
            if part.nearer is not None or not math.isnan(part.reference_error):
                far = f"reference {text.number(part.reference_error)} off"
                far += f", candidate {text.number(part.candidate_error)}"
                self.item("Nearer to truth", f" {part.nearer or 'neither'} ({far})")
            self._what(part)
        if row.matched_by not in ("", "name") or row.candidate_layer not in (row.layer, None):
            other = text.layer_name(row.candidate_layer or "")
            self.item("Paired with", f" {other} (by {row.matched_by})")
        known = sentence_of_both(row)
        if known:
            self.item("Name", f" {known}", "yellow" if row.guessed else "")
        if row.note:
            self.item("Note", f" {text.clean(row.note)}")

    def _what(self, part: Part) -> None:
        leaf = f" {text.clean(part.leaf)}" if part.leaf else ""
        shape, dtype = text.shape(part.shape), part.dtype
        if part.candidate_shape and part.candidate_shape != part.shape:
            shape += f" and {text.shape(part.candidate_shape)}"
        if part.candidate_dtype and part.candidate_dtype != part.dtype:
            dtype += f" and {part.candidate_dtype}"
        self.item("Compared", f" {part.port}{leaf}, {shape}, {dtype}")
        if part.transform:
            self.item("Aligned by", f" {text.clean(part.transform)}")
        if part.moments > 1 and part.worst_moment is not None:
            self.item("Moments", f" {part.moments}, the worst {_moment(part.worst_moment)}")
        elif part.moments:
            self.item("Moments", f" {part.moments}")

    def elements(self, part: Part, d: Difference) -> None:
        self.head("Elements:")
        share = f" ({100 * d.mismatched / d.count:.1f}%)" if d.count else ""
        allowed = f", beyond rtol {d.rtol:g} and atol {d.atol:g}" if d.mismatched else ""
        self.item("Mismatched", f" {d.mismatched:,} / {d.count:,}{share}{allowed}")
        self.item(
            "Not finite",
            f" {d.disagreeing:,} on one side or of another kind, {d.agreeing:,} alike",
            "bold red" if d.disagreeing else "",
        )
        if d.max_abs_index is not None and d.max_abs_pair is not None and d.max_abs:
            index = ", ".join(str(i) for i in d.max_abs_index)
            when = part.max_abs_moment if part.moments > 1 else None
            where = f"index ({index})" + (f" of {_moment(when)}" if when is not None else "")
            a, b = (text.number(value, 6) for value in d.max_abs_pair)
            greatest = f"{text.number(d.max_abs, 6)} at {where}: reference {a}, mode {b}"
            self.item("Greatest", f" {greatest}")
        relative = f"{text.number(d.max_relative)} greatest, {text.number(d.mean_relative)} mean"
        self.item("Relative", f" {relative}")
        self.item("Cosine", f" {cosine(d)}")
        self.item("SQNR", f" {text.number(d.sqnr_db, 4)} dB")
        self.item("Rel", f" {text.number(d.rel, 4)}")
        device = "within" if d.device_good else "beyond"
        self.item(
            "Grades",
            f" {d.grade} (MSE), {d.correlation_grade} (correlation), {device} the device limits",
        )
        if part.verdict == "diverged" and d.grade in GOOD_GRADES:
            self.line("  " + self._broken(GRADES_ARE, 2).strip())

    def hints(self, row: LayerComparison) -> None:
        if row.hints:
            self.head("Hints:")
            for hint in row.hints:
                self.line(f"  {text.clean(hint)}")

    def causes(self, row: LayerComparison) -> None:
        """What kind of error it is; a row that is no first divergence has none."""
        if row.causes:
            self.head("Causes:")
            for cause in row.causes:
                self.line("  " + self._broken(text.clean(str(cause)), 4).strip())

    def others(self, row: LayerComparison, shown: Part | None) -> None:
        """The layer's other ports and leaves, a line each."""
        rest = [part for part in row.parts if part is not shown]
        if not rest:
            return
        self.head("Other ports and leaves:")
        names = [f"{part.port} {text.clean(part.leaf)}".strip() for part in rest]
        room = max(18, *(len(name) + 2 for name in names))
        for name, part in zip(names, rest, strict=True):
            why = f" ({text.clean(part.why)})" if part.verdict != "identical" and part.why else ""
            self.line(f"  {name + ':':<{room}} ")
            self.lines[-1].append(part.verdict, STYLES[part.verdict])
            if why:
                self.lines[-1].append(self._broken(why, room + 3 + len(part.verdict)))


def _moment(moment: tuple[int, int, int]) -> str:
    epoch, batch, call = moment
    return f"epoch {epoch}, batch {batch}, call {call}"


def fixed(value: float) -> str:
    """Six decimals, as the document has it; an exponent where they would hide the number."""
    if math.isnan(value):
        return " undefined"
    if math.isinf(value) or value == 0 or 1e-6 <= abs(value) < 1e9:
        return f"{value:9.6f}"
    return f"{value:9.6e}" if value < 0 else f" {value:.6e}"


def scientific(value: float) -> str:
    return "undefined" if math.isnan(value) else f"{value:.6e}"


def _share(value: float) -> str:
    if math.isnan(value):
        return "undefined"
    percent = f"{100 * value:6.3f}%" if abs(value) < 1e6 else f"{100 * value:.3e}%"
    return f"{value:.6e} ({percent})"
