"""Comparisons in the terminal and as pictures, built by hand: what is shown is what is there."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tensortap.comparing.modes import ModeRow, Modes
from tensortap.comparing.results import (
    Comparison,
    EnvironmentDifference,
    LayerComparison,
    Part,
)
from tensortap.numerics import summarize
from tensortap.numerics.difference import Difference, difference
from tensortap.reporting import comparisons as shown
from tensortap.reporting import console
from tensortap.reporting.layer_comparison import display_name, fixed, layer_screen

GENERATOR = torch.Generator().manual_seed(0)
REFERENCE = torch.randn(2, 6, 8, generator=GENERATOR)
NOISE = torch.randn(2, 6, 8, generator=GENERATOR)


def part(candidate: torch.Tensor, verdict: Any = "within", **more: Any) -> Part:
    found = difference(REFERENCE, candidate)
    return Part(
        **{
            "port": "output",
            "leaf": "",
            "verdict": verdict,
            "why": "because",
            "difference": found,
            "reference_summary": summarize(REFERENCE),
            "candidate_summary": summarize(candidate),
            "shape": (2, 6, 8),
            "candidate_shape": (2, 6, 8),
            "dtype": "float32",
            "candidate_dtype": "float32",
            "error": found.error,
            "floor": 1e-3,
            "floor_ratio": found.error / 1e-3,
            "moments": 1,
            "worst_moment": (0, 0, 0),
            **more,
        }
    )


def row(layer: str, *parts: Part, **more: Any) -> LayerComparison:
    verdict = parts[0].verdict if parts else "missing"
    return LayerComparison(
        **{
            "layer": layer,
            "candidate_layer": layer if parts else None,
            "matched_by": "name" if parts else "",
            "verdict": verdict,
            "parts": parts,
            **more,
        }
    )


@pytest.fixture
def comparison() -> Comparison:
    bad = part(REFERENCE + 0.2 * NOISE, "diverged", hints=("token 3: error 0.5",))
    return Comparison(
        "runs/fp32",
        "runs/int8",
        (
            row("embedding", part(REFERENCE.clone(), "identical", floor=None, floor_ratio=None)),
            row("blocks.0", part(REFERENCE + 1e-4 * NOISE), input_verdict="identical"),
            row("blocks.1", bad, input_verdict="within", origin="made here"),
            row("", note="missing in the candidate"),
        ),
        environment=(EnvironmentDifference("torch", "2.6.0", "2.7.1"),),
        floor="estimated",
        warnings=("The two runs were given different inputs.",),
        notes=("runs/int8: was slow.",),
    )


def lines_of(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_the_text_has_warnings_first_and_the_answer_last(comparison: Comparison) -> None:
    text = shown.comparison_text(comparison)
    lines = text.splitlines()
    assert lines[0] == "warning: The two runs were given different inputs."
    places = [text.index(word) for word in ("2.7.1", "\nlayer ", "note: runs/int8: was slow.")]
    assert places == sorted(places)
    assert lines[-1] == comparison.sentence
    assert str(comparison) == text
    assert text == "\n".join(line.rstrip() for line in lines)


def test_a_row_a_layer_with_its_numbers(comparison: Comparison) -> None:
    lines = lines_of(shown.comparison_text(comparison))
    d = comparison["blocks.0"].difference
    assert d is not None
    cells = next(line for line in lines if line[:1] == ["blocks.0"])
    assert cells[1:3] == ["within", "identical"]
    for value in (d.max_abs, d.mae, d.mse):
        assert float(f"{value:.3g}") in [round_number(cell) for cell in cells]
    assert " ".join(["1", "-", f"{d.cosine_distance:.1e}"]) in " ".join(cells)
    bad = " ".join(next(line for line in lines if line[:1] == ["blocks.1"]))
    assert "diverged within made here" in bad
    assert "large token 3: error 0.5" in bad
    root = next(line for line in lines if line[:1] == ["(root)"])
    assert root[1] == "missing"
    assert " ".join(root).endswith("missing in the candidate")


def round_number(cell: str) -> float:
    try:
        return float(f"{float(cell):.3g}")
    except ValueError:
        return math.nan


def test_columns_that_say_nothing_are_left_out(comparison: Comparison) -> None:
    def titles(made: Comparison) -> list[str]:
        return [str(column.header) for column in shown.comparison_table(made).columns]

    assert "candidate layer" not in titles(comparison)
    assert "matched by" not in titles(comparison)
    good = replace(comparison, layers=comparison.layers[1:2])
    assert "origin" not in titles(good)
    assert "note" not in titles(good)
    renamed = row("h.0", part(REFERENCE), candidate_layer="layers.0", matched_by="structure")
    assert {"candidate layer", "matched by"} <= set(titles(replace(good, layers=(renamed,))))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Terminal]:
    def make(columns: int) -> Terminal:
        stream = Terminal()
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.delenv("NO_COLOR", raising=False)
        monkeypatch.setattr("sys.stdout", stream)
        return stream

    return make


@pytest.mark.parametrize("columns", [40, 60, 80, 100, 140])
def test_a_narrow_terminal_drops_columns_and_says_which(
    comparison: Comparison, terminal: Callable[[int], Terminal], columns: int
) -> None:
    stream = terminal(columns)
    shown.print_comparison(console.stdout(), comparison)
    text = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
    lines = text.splitlines()
    head = next(line for line in lines if line.startswith("layer "))
    at = lines.index(head)
    table = lines[at : next(i for i in range(at, len(lines)) if not lines[i].strip())]
    if columns >= 60:
        assert all(len(line) <= columns for line in table if not line.startswith("No room"))
    dropped = [t for t in ("grade", "MSE", "note", "cosine", "max abs") if t not in head]
    said = text[text.index("No room for: ") :].split("Widen")[0] if "No room for" in text else ""
    assert all(title in " ".join(said.split()) for title in dropped)
    assert bool(dropped) == bool(said)
    assert "verdict" in head


def test_colour_on_a_terminal_alone(
    comparison: Comparison, terminal: Callable[[int], Terminal], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = terminal(160)
    shown.print_comparison(console.stdout(), comparison)
    assert re.search(r"\x1b\[1;31mdiverged", stream.getvalue())
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" not in shown.comparison_text(comparison)
    assert "\x1b" not in str(layer_screen(comparison, "blocks.1"))


def test_names_cannot_drive_the_terminal(comparison: Comparison) -> None:
    evil = row("a\x1b[31m", part(REFERENCE), note="\x1b[2J[bold]x")
    text = shown.comparison_text(replace(comparison, layers=(evil,), candidate="\x1b]0;x\x07"))
    screen = str(layer_screen(replace(comparison, layers=(evil,)), evil))
    assert "\x1b" not in text + screen
    assert "[bold]x" in text


SCREEN = """\
================================================================================
Layer 0 - Comparison Results
================================================================================

FP32 Reference Statistics:
  Mean:       0.123456
  Std:        0.234567
  Range:     [-1.234567,  2.345678]

Mode Output Statistics:
  Mean:       0.123450
  Std:        0.234560
  Range:     [-1.234500,  2.345600]

Difference (Mode - FP32):
  Mean Diff:         0.000006
  Std Diff:          0.000007
  Mean Abs Diff:     0.012345
  Max Abs Diff:      0.123456

Error Metrics:
  MSE:               1.234567e-04
  RMSE:              0.011111
  MAE:               0.012345

Relative Metrics:
  Relative MSE:      1.234567e-03 ( 0.123%)
  Relative MAE:      5.678901e-03 ( 0.568%)
  Correlation:       0.999999

Absolute Difference Percentiles:
  50th (Median):     0.008765
  90th:              0.023456
  95th:              0.034567
  99th:              0.056789
"""


def example() -> Part:
    """The numbers of document 003's example."""
    sides = [summarize(REFERENCE), summarize(REFERENCE + NOISE)]
    stored = [
        replace(sides[0], mean=0.123456, std=0.234567, min=-1.234567, max=2.345678),
        replace(sides[1], mean=0.123450, std=0.234560, min=-1.2345, max=2.3456),
    ]
    found = replace(
        difference(REFERENCE, REFERENCE + NOISE),
        mean=0.000006,
        std=0.000007,
        mae=0.012345,
        max_abs=0.123456,
        mse=1.234567e-04,
        rmse=0.011111,
        relative_mse=1.234567e-03,
        relative_mae=5.678901e-03,
        correlation=0.999999,
        percentiles={50: 0.008765, 90: 0.023456, 95: 0.034567, 99: 0.056789},
    )
    made = part(REFERENCE + NOISE, difference=found)
    return replace(made, reference_summary=stored[0], candidate_summary=stored[1])


def test_the_screen_is_the_documents_section_for_section(comparison: Comparison) -> None:
    layer = row("0", example(), input_verdict="identical")
    text = str(layer_screen(replace(comparison, layers=(layer,)), "0"))
    assert text.startswith(SCREEN)
    assert text.endswith("=" * 80)
    for original in documents():
        assert SCREEN.rstrip() in re.sub(r"[^\x00-\x7f]+\s", "", original)


SIGNS = {
    "FP32 Reference Statistics:": "📊",
    "Mode Output Statistics:": "📊",
    "Difference (Mode - FP32):": "📏",
    "Error Metrics:": "❌",
    "Relative Metrics:": "📈",
    "Absolute Difference Percentiles:": "📊",
}


def documents() -> list[str]:
    """Document 003, where it is at hand."""
    return [path.read_text() for path in Path("/work/shared/seeds").glob("003*")]


def digits(words: str) -> str:
    """The shape of a text: what is left when numbers are made equal."""
    return re.sub(r"\d", "d", words)


def test_the_documents_title_and_signs(comparison: Comparison) -> None:
    layer = row("backbone.layers.0", example())
    seen = str(
        layer_screen(replace(comparison, layers=(layer,)), layer, title="Layer 0", icons=True)
    )
    expected = SCREEN
    for head, sign in SIGNS.items():
        expected = expected.replace(head, f"{sign} {head}")
    assert seen.startswith(expected)
    for original in documents():
        assert expected.rstrip() in original


def test_other_numbers_keep_the_documents_shape(comparison: Comparison) -> None:
    """Line for line, for what is really measured; below stands what the document has not."""
    seen = digits(str(layer_screen(comparison, row("0", part(REFERENCE + 0.1 * NOISE)))))
    lines, expected = seen.splitlines(), digits(SCREEN).splitlines()
    for line, shape in zip(lines, expected, strict=False):
        # a minus takes the place of the space before a number
        assert line.replace("-d", " d") == shape.replace("-d", " d")
    assert lines[len(expected) + 1].startswith("Verdict: ")


def test_the_screen_says_what_the_verdict_rests_on(comparison: Comparison) -> None:
    text = str(layer_screen(comparison, "blocks.1"))
    d = comparison["blocks.1"].difference
    assert d is not None and d.max_abs_pair is not None
    assert "Verdict: diverged, made here" in text
    assert "Why:               because" in text
    assert "Input:             within" in text
    assert f"/ {REFERENCE.numel()} (" in text
    assert f"at index {d.max_abs_index}: reference {d.max_abs_pair[0]:.6g}" in text
    assert "token 3: error 0.5" in text
    missing = str(layer_screen(comparison, ""))
    assert "Verdict: missing" in missing
    assert "missing in the candidate" in missing
    assert "MSE" not in missing


def test_the_screen_lists_other_ports_transforms_and_partners(comparison: Comparison) -> None:
    given = part(REFERENCE.clone(), "identical", port="input", leaf="[0]")
    out = part(
        REFERENCE + NOISE,
        transform="transpose (0, 2, 1)",
        candidate_shape=(2, 8, 6),
        candidate_dtype="bfloat16",
        moments=3,
        worst_moment=(0, 2, 1),
        max_abs_moment=(0, 1, 0),
        nearer="candidate",
    )
    layer = row("a.0", out, given, candidate_layer="b.0", matched_by="content")
    text = str(layer_screen(comparison, layer))
    assert re.search(r"input \[0\]: +identical", text)
    assert "output, [2, 6, 8] and [2, 8, 6], float32 and bfloat16" in text
    assert "transpose (0, 2, 1)" in text
    assert "b.0 (by content)" in text
    assert "3, the worst epoch 0, batch 2, call 1" in text
    assert "of epoch 0, batch 1, call 0: reference" in text
    assert "Nearer to truth:   candidate" in text


def test_the_screen_of_summaries_alone_says_what_cannot_be_known(comparison: Comparison) -> None:
    other = summarize(REFERENCE * 2)
    only = part(REFERENCE, difference=None, candidate_summary=other, error=math.nan)
    text = str(layer_screen(comparison, row("x", replace(only, floor=None, floor_ratio=None))))
    assert "Summaries alone were kept" in text
    assert f"L2:               {fixed(other.l2 - summarize(REFERENCE).l2)}" in text
    assert "Correlation" not in text


def test_undefined_and_not_finite_are_said(comparison: Comparison) -> None:
    constant, broken = torch.ones(4), torch.tensor([1.0, math.nan, 1.0, math.inf])
    found = difference(constant, broken)
    text = str(layer_screen(comparison, row("x", part(REFERENCE, difference=found))))
    assert "Correlation:       undefined" in text
    assert "2 on one side or of another kind, 0 alike" in text


def test_long_lines_break_behind_their_labels(comparison: Comparison) -> None:
    layer = row("x", part(REFERENCE, why="word " * 60))
    lines = str(layer_screen(comparison, layer, width=90)).splitlines()
    assert max(map(len, lines)) <= 90
    assert sum(line.startswith(" " * 21 + "word") for line in lines) >= 3
    whole = str(layer_screen(comparison, layer)).splitlines()
    assert any(line.count("word") == 60 for line in whole)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0, " 0.000000"),
        (0.000006, " 0.000006"),
        (-1.234567, "-1.234567"),
        (3e-9, " 3.000000e-09"),
        (-3e-9, "-3.000000e-09"),
        (1e300, " 1.000000e+300"),
        (math.nan, " undefined"),
        (math.inf, "      inf"),
    ],
)
def test_six_decimals_hide_no_number(value: float, expected: str) -> None:
    assert fixed(value) == expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("runs/fp32", "FP32"),
        ("/x/bf16/", "BF16"),
        ("runs/w8a8", "W8A8"),
        ("runs/gpu", "GPU"),
        ("runs/baseline", "baseline"),
        ("mine", "mine"),
    ],
)
def test_names_in_headings(path: str, expected: str) -> None:
    assert display_name(path) == expected


def mode(name: str, **more: Any) -> ModeRow:
    return ModeRow(
        **{
            "mode": name,
            "path": f"runs/{name}",
            "same": True,
            "same_input": True,
            "first_layer": "blocks.0",
            "first_layer_mse": 1.234567e-04,
            "first_layer_mae": 0.012345,
            "last_layer": "blocks.23",
            "last_layer_mse": 2.345678e-04,
            "last_layer_mae": 0.023456,
            "mean_correlation": 0.999999,
            "grade": "good",
            **more,
        }
    )


def test_the_table_of_modes_is_the_documents() -> None:
    problem = "There is no layer in common."
    modes = Modes(
        "fp32",
        "runs",
        (
            mode("0"),
            mode("2-1", same=False, same_input=False, first_divergence="blocks.3"),
            ModeRow("3", "runs/3", problem=problem),
        ),
        ("2-1 was given other inputs than fp32.",),
    )
    lines = shown.modes_text(modes).splitlines()
    assert lines[0] == "warning: 2-1 was given other inputs than fp32."
    assert lines[1:4] == ["=" * 80, "SUMMARY TABLE - All Modes vs fp32", "=" * 80]
    assert re.split(r"  +", lines[4])[:6] == [
        "Mode",
        "Layer 0 MSE",
        "Layer 0 MAE",
        "Last Layer MSE",
        "Last Layer MAE",
        "Avg Corr",
    ]
    cells = [line.split() for line in lines[6:9]]
    numbers = ["1.234567e-04", "0.012345", "2.345678e-04", "0.023456", "0.999999"]
    assert cells[0] == ["0", *numbers, "good", "yes", "none"]
    assert cells[1] == ["2-1", *numbers, "good", "no", "blocks.3"]
    assert lines[8].endswith(problem)
    assert "The grade is the documents' word for the MSE alone." in lines[-2]  # of 2-1, "good"
    assert lines[-1] == "Layer 0 is blocks.0, the last layer blocks.23."
    assert str(modes) == shown.modes_text(modes)


TABLE = """\
================================================================================
SUMMARY TABLE - All Modes vs fp32
================================================================================

Mode       Layer 0 MSE     Layer 0 MAE  Last Layer MSE  Last Layer MAE  Avg Corr
----------------------------------------------------------------------------------------------------
0          1.234567e-04    0.012345     2.345678e-04    0.023456        0.999999
2-0        1.234568e-04    0.012346     2.345679e-04    0.023457        0.999998
2-1        2.345678e-04    0.023456     3.456789e-04    0.034567        0.999997
2-2        3.456789e-04    0.034567     4.567890e-04    0.045678        0.999996
2-3        1.234567e-04    0.012345     2.345678e-04    0.023456        0.999999
2-4        1.234568e-04    0.012346     2.345679e-04    0.023457        0.999998
3          2.345678e-04    0.023456     3.456789e-04    0.034567        0.999997
================================================================================"""
COLUMNS = ("first_layer_mse", "first_layer_mae", "last_layer_mse", "last_layer_mae")


def test_the_documents_table_to_the_letter() -> None:
    rows = [line.split() for line in TABLE.splitlines()[6:-1]]
    modes = tuple(
        mode(
            name,
            **dict(zip((*COLUMNS, "mean_correlation"), map(float, values), strict=True)),
        )
        for name, *values in rows
    )
    assert shown.modes_document_text(Modes("fp32", "runs", modes)) == TABLE
    turned = shown.modes_document_text(Modes("fp32", "runs", modes[::-1]))
    assert turned.splitlines()[6:-1] == TABLE.splitlines()[6:-1][::-1]
    for original in documents():
        assert TABLE in original


def test_the_documents_table_says_in_words_what_has_no_number(comparison: Comparison) -> None:
    nothing = dict.fromkeys((*COLUMNS, "mean_correlation"), math.nan)
    only = row("x", part(REFERENCE, difference=None))
    modes = Modes(
        "fp16",
        "runs",
        (
            mode("fake:w8a8:0.9999", first_layer_mae=3e-9),
            mode("constant", mean_correlation=math.nan),
            mode("summaries", comparison=replace(comparison, layers=(only,)), **nothing),
            ModeRow("3", "runs/3", problem="It was\nnot closed. Record it again."),
        ),
    )
    lines = shown.modes_document_text(modes).splitlines()
    assert lines[1] == "SUMMARY TABLE - All Modes vs fp16"
    assert lines[6].split() == [
        "fake:w8a8:0.9999",
        "1.234567e-04",
        "3.000000e-09",
        "2.345678e-04",
        "0.023456",
        "0.999999",
    ]
    assert lines[7].split()[-1] == "undefined"
    assert lines[8].split() == ["summaries", *["n/a"] * 5]
    assert lines[9] == f"{'3':<16} not compared: It was not closed."
    places = {line.index(cell) for line, cell in ((lines[4], "Layer 0 MSE"), (lines[8], "n/a"))}
    assert places == {17}


def test_modes_on_a_narrow_terminal(terminal: Callable[[int], Terminal]) -> None:
    modes = Modes("fp32", "runs", (mode("0"), ModeRow("3", "runs/3", problem="It is empty.")))
    stream = terminal(100)
    shown.print_modes(console.stdout(), modes)
    text = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
    assert all(len(line) <= 100 for line in text.splitlines())
    assert "3 was not compared: It is empty." in text
    assert "1.234567e-04" in text


def pairs_of(*pairs: tuple[torch.Tensor, torch.Tensor]) -> Callable[[], Any]:
    return lambda: iter(pairs)


def test_spread_counts_what_numpy_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensortap.reporting import difference_plots as plots

    a = torch.randn(7, 11, 13, generator=GENERATOR)
    b = (a + 0.1 * torch.randn(13, 11, 7, generator=GENERATOR).permute(2, 1, 0)).bfloat16()
    whole = (b.double() - a.double()).flatten().numpy()
    expected, edges = np.histogram(whole, bins=100)
    for chunk in (1 << 21, 64, 5):
        monkeypatch.setattr(plots, "_CHUNK", chunk)
        found = plots.spread(pairs_of((a, b)))
        assert found is not None
        assert np.array_equal(found.counts, expected)
        assert np.allclose(found.edges, edges)
        assert (found.finite, found.left_out) == (a.numel(), 0)
    twice = plots.spread(pairs_of((a, b), (a, b)))
    assert twice is not None
    assert np.array_equal(twice.counts, 2 * expected)


def test_spread_leaves_out_what_is_not_finite() -> None:
    from tensortap.reporting.difference_plots import spread

    a = torch.tensor([1.0, math.nan, math.inf, 2.0])
    b = torch.tensor([1.5, 1.0, math.inf, 2.0])
    found = spread(pairs_of((a, b)))
    assert found is not None
    assert (found.finite, found.left_out, found.counts.sum()) == (2, 2, 2)
    assert spread(pairs_of((torch.full((2,), math.nan), torch.ones(2)))) is None
    same = spread(pairs_of((a[3:], b[3:])))
    assert same is not None
    assert same.zero
    complexes = spread(pairs_of((torch.zeros(3), torch.full((3,), 1 + 2j))))
    assert complexes is not None
    assert complexes.finite == 6
    ends = (float(complexes.edges[0]), float(complexes.edges[-1]))
    assert ends == (1.0, 2.0)


def test_the_picture_of_differences(comparison: Comparison, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from tensortap.reporting import difference_plots as plots

    candidates = [
        plots.Candidate(f"mode{i}", comparison, pairs_of((REFERENCE, REFERENCE + i * NOISE)))
        for i in range(3)
    ]
    spreads = [plots.spread(candidate.pairs) for candidate in candidates]
    figure, notes = plots._draw(candidates, spreads, "fp32", "blocks.1", "output")
    *histograms, errors = figure.axes
    titles = [panel.get_title(loc="left") or panel.get_title() for panel in histograms]
    assert titles == ["mode0 - fp32", "mode1 - fp32", "mode2 - fp32"]
    counts = histograms[1].patches[0].get_data().values
    assert len(counts) == 100
    assert counts.sum() == REFERENCE.numel()
    assert "are 0" in histograms[0].texts[0].get_text()
    assert errors.get_yscale() == "log"
    labels = [label.get_text() for label in errors.get_xticklabels()]
    assert labels == ["embedding", "blocks.0", "blocks.1"]
    weights = [label.get_fontweight() for label in errors.get_xticklabels()]
    assert weights == ["normal", "normal", "bold"]
    line = errors.lines[0].get_ydata()
    assert np.isnan(line[0])
    assert line[2] == pytest.approx(comparison["blocks.1"].error)
    assert notes == []
    made, _ = plots.plot_differences(
        candidates, reference="fp32", layer="blocks.1", what="output", path=tmp_path / "d.png"
    )
    assert Path(made.path).read_bytes().startswith(b"\x89PNG")


def test_the_picture_names_errors_it_cannot_place(comparison: Comparison) -> None:
    pytest.importorskip("matplotlib")
    from tensortap.reporting import difference_plots as plots

    nothing = row("zeros", part(REFERENCE, error=math.nan, floor=None, floor_ratio=None))
    odd = replace(comparison, layers=(nothing, *comparison.layers))
    candidate = plots.Candidate("int8", odd, pairs_of((REFERENCE, REFERENCE)))
    _, notes = plots._draw([candidate], [plots.spread(candidate.pairs)], "fp32", "zeros", "output")
    assert notes == ["The error of int8 is undefined at zeros."]


def test_a_long_model_names_some_layers(comparison: Comparison) -> None:
    pytest.importorskip("matplotlib")
    from tensortap.reporting import difference_plots as plots

    rows = tuple(row(f"model.layers.{i}", part(REFERENCE + 1e-3 * NOISE)) for i in range(90))
    many = replace(comparison, layers=rows)
    candidate = plots.Candidate("int8", many, pairs_of((REFERENCE, REFERENCE)))
    spreads = [plots.spread(candidate.pairs)]
    figure, _ = plots._draw([candidate], spreads, "fp32", "model.layers.41", "output")
    labels = [label.get_text() for label in figure.axes[-1].get_xticklabels()]
    assert "model.layers.41" in labels
    assert len(labels) <= 20


def test_difference_has_what_the_screen_reads() -> None:
    """The screen reads attributes by name: a renamed one must fail here, not in a terminal."""
    found = difference(REFERENCE, REFERENCE + NOISE)
    assert isinstance(found, Difference)
    assert list(found.percentiles or ()) == [50, 90, 95, 99]


def test_a_verdict_that_is_not_known_to_be_made_here_says_what_is_unknown(
    comparison: Comparison,
) -> None:
    layer = row("blocks.9", part(REFERENCE * 1.001, "diverged"), origin="unknown")
    told = str(layer_screen(comparison, layer))
    assert "Verdict: diverged, unknown whether made here (its inputs were not recorded" in told


def test_a_good_grade_beside_a_divergence_is_explained(comparison: Comparison) -> None:
    """The grade is the MSE's own size; a layer of small values may be wrong and very close."""
    words = "The grade is the documents' word for the MSE alone."
    layer = row("blocks.9", part(REFERENCE + 1e-3 * NOISE, "diverged"), origin="made here")
    assert layer.grade == "very close"
    assert words in str(layer_screen(comparison, layer))
    assert words in shown.comparison_text(replace(comparison, layers=(layer,)))
    for other in (part(REFERENCE + 1e-3 * NOISE), part(REFERENCE + 9 * NOISE, "diverged")):
        layer = row("blocks.9", other)
        assert words not in str(layer_screen(comparison, layer))
        assert words not in shown.comparison_text(replace(comparison, layers=(layer,)))
