"""Rows, one layer, bars, plots: what they say is true, and nothing is hidden."""

from __future__ import annotations

import io
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tensortap.errors import RecordingError
from tensortap.numerics import summarize
from tensortap.recording import Manifest, Recording, Row, Structure, Writer
from tensortap.recording import open as open_recording
from tensortap.reporting import bars, console, text
from tensortap.reporting.layer import view_layer
from tensortap.reporting.tables import layer_rows, layers_table

TENSORS = {
    "features": torch.randn(2, 30, 200, generator=torch.Generator().manual_seed(0)),
    "conv": torch.randn(1, 4, 9, 7),
    "flat": torch.randn(300),
    "scalar": torch.tensor(3.5),
    "constant": torch.ones(4, 5),
    "ints": torch.arange(12).view(3, 4),
    "truth": torch.arange(12).view(3, 4) > 5,
    "complex": torch.randn(3, 7, dtype=torch.complex64),
    "half": torch.randn(3, 7).to(torch.bfloat16),
    "eighth": torch.randn(3, 7).to(torch.float8_e4m3fn),
    "nan": torch.full((3, 3), math.nan),
    "mixed": torch.tensor([[1.0, math.nan], [math.inf, 2.0]]),
    "huge": torch.tensor([-3e38, 3e38]),
    "hugest": torch.tensor([-1.7e308, 1.7e308, 0.0], dtype=torch.float64),
    "deep": torch.randn(2, 3, 4, 5, 6),
    "$dollar$": torch.randn(4, 4),
    "long." * 60: torch.randn(4, 4),
}


def write(path: Path, rows: list[tuple[Row, torch.Tensor]], **manifest: object) -> Recording:
    writer = Writer(str(path), Manifest(**manifest))  # type: ignore[arg-type]
    for row, tensor in rows:
        writer.add(row, tensor)
    writer.close()
    return open_recording(path)


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    rows = [(Row(n, "output", order=i), t) for i, (n, t) in enumerate(TENSORS.items())]
    return write(tmp_path_factory.mktemp("odd") / "run", rows)


@pytest.mark.parametrize("name", list(TENSORS))
def test_plot_has_three_panels(odd: Recording, tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    from tensortap.reporting.plots import plot_record

    out = tmp_path / "x.png"
    if name == "hugest":
        with pytest.raises(RecordingError, match=r"1\.7e\+308, too large"):
            plot_record(odd[name].first("output"), out)
        return
    plot_record(odd[name].first("output"), out)
    picture = imread(out)[..., :3]
    assert picture.shape[1] > 2 * picture.shape[0] > 600
    body = picture[picture.shape[0] // 6 :]
    for panel in np.array_split(body, 3, axis=1):
        ink = (np.abs(panel - 1).max(axis=2) > 0.05).mean()
        assert ink > 0.001


def test_plot_draws_what_was_recorded(odd: Recording) -> None:
    pytest.importorskip("matplotlib")
    from tensortap.reporting.plots import _draw

    tensor = TENSORS["features"]
    figure, notes = _draw(odd["features"].first("output"), tensor)
    distribution, first, heat = figure.axes[:3]
    counts = distribution.patches[0].get_data().values
    assert len(counts) == 100
    assert counts.sum() == tensor.numel()
    assert np.allclose(first.lines[0].get_ydata(), tensor.flatten()[:1000].double())
    assert np.allclose(heat.images[0].get_array(), tensor[0, :, :100].double())
    assert figure._suptitle.get_text().startswith("features · output   [2, 30, 200]   float32")
    assert notes == []
    figure, _ = _draw(odd["mixed"].first("output"), TENSORS["mixed"])
    assert "1 NaN   1 Inf" in figure._suptitle.get_text()
    assert figure.axes[0].patches[0].get_data().values.sum() == 2


def test_plot_of_a_large_tensor_is_sampled(odd: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from tensortap.reporting import plots

    monkeypatch.setattr(plots, "_SAMPLED", 1000)
    figure, notes = plots._draw(odd["features"].first("output"), TENSORS["features"])
    titles = [figure.axes[0].get_title(loc=loc) for loc in ("left", "center")]
    assert "Distribution (sampled, 100 bins)" in titles
    assert notes == ["The histogram is drawn from every 12th of 12,000 values."]


def test_nothing_to_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from tensortap.reporting.plots import plot_record

    recording = write(tmp_path / "run", [(Row("a", "output"), torch.empty(0, 3))])
    with pytest.raises(RecordingError, match="empty"):
        plot_record(recording["a"].first("output"), tmp_path / "x.png")


@pytest.mark.parametrize("name", list(TENSORS))
def test_every_layer_can_be_viewed(odd: Recording, name: str) -> None:
    view = view_layer(odd, odd[name], odd[name].records)
    (section,) = view.sections
    finite = summarize(TENSORS[name]).finite
    if finite:
        assert section.bars is not None
        drawn = sum(section.bars.counts) + section.bars.below + section.bars.above
        assert drawn == finite
        assert all(len(line) <= 60 for line in bars.draw(section.bars))
    else:
        assert section.note is not None
        assert section.quantiles is None


def test_rows_merge_and_say_every_shape(tmp_path: Path) -> None:
    tensors = [torch.randn(1, n, 4) for n in (5, 1, 2)]
    rows = [(Row("a", "output", call=i, order=i), t) for i, t in enumerate(tensors)]
    recording = write(tmp_path / "run", rows)
    (row,) = layer_rows(recording.records)
    assert row.records == 3
    assert row.shapes == ((1, 5, 4), (1, 1, 4), (1, 2, 4))
    assert row.to_dict()["shapes"] == [[1, 5, 4], [1, 1, 4], [1, 2, 4]]
    everything = torch.cat([t.flatten() for t in tensors]).double()
    assert row.summary.mean == pytest.approx(float(everything.mean()))
    assert len(layer_rows(recording.records, each=True)) == 3


def test_changes_follow_the_blocks(tmp_path: Path) -> None:
    """In order of execution a block's own parts come first; its neighbour is the next block."""
    structure = Structure(("b.0", "b.1", "b.2"), "emb", "norm")
    names = ["emb", "b.0.mlp", "b.0", "b.1.mlp", "b.1", "norm", "head"]
    values = {name: float(i) for i, name in enumerate(names)}
    rows = [
        (
            Row(n, "output", order=i),
            torch.full((2, 9) if n == "head" else (2, 3), v),
        )
        for i, (n, v) in enumerate(values.items())
    ]
    recording = write(tmp_path / "run", rows, structure=structure)

    def changes(name: str) -> list[tuple[str | None, float | None, str | None]]:
        view = view_layer(recording, recording[name], recording[name].records)
        return [(c.neighbour, c.value, c.reason) for c in view.changes]

    assert changes("b.0") == [("emb", 2.0, None), ("b.1", 2.0, None)]
    assert changes("b.1") == [("b.0", 2.0, None), ("b.2", None, "it was not recorded")]
    assert changes("b.0.mlp") == [("emb", 1.0, None), ("b.0", 1.0, None)]
    assert changes("emb")[0] == (None, None, "there is none")
    assert changes("head")[0][2] == "shapes differ: [2, 3] and [2, 9]"


def test_summaries_say_what_they_lack(tmp_path: Path) -> None:
    import tensortap as tap

    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    for histograms in (False, True):
        path = tmp_path / str(histograms)
        with tap.record(model, path, layers="0", keep="summary", histograms=histograms):
            model(torch.randn(50, 4))
        recording = open_recording(path)
        (section,) = view_layer(recording, recording["0"], recording["0"].records).sections
        assert section.note is not None
        if histograms:
            assert section.quantiles is not None
            assert not section.exact
            assert section.bars is not None
            assert abs(sum(section.bars.counts) - 200) <= 1
        else:
            assert section.quantiles is None
            assert "--histograms" in section.note


def test_bars_of_a_histogram_follow_the_tensor() -> None:
    tensor = torch.randn(100_000, generator=torch.Generator().manual_seed(1))
    low, high = float(tensor.min()), float(tensor.max())
    exact = bars.bars_of_tensor(tensor, low, high)
    close = bars.bars_of_summary(summarize(tensor, histogram=True), low, high)
    assert exact is not None
    assert close is not None
    moved = sum(abs(a - b) for a, b in zip(exact.counts, close.counts, strict=True)) / 2
    assert moved < 0.03 * tensor.numel()


def test_outliers_do_not_squeeze_the_bars() -> None:
    assert bars.span(-1.0, 100.0, -1.0, 1.0) == (-1.0, 2.0)
    assert bars.span(-3.0, 3.0, -2.0, 2.0) == (-3.0, 3.0)
    tensor = torch.cat([torch.linspace(-3, 3, 1000), torch.tensor([1e4, -1e4])])
    drawn = bars.bars_of_tensor(tensor, -4.0, 4.0)
    assert drawn is not None
    assert (drawn.below, drawn.above) == (1, 1)
    assert "(1 below, 1 above)" in bars.draw(drawn)[-1]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("no_color", [False, True])
def test_colour_on_a_terminal_alone(
    odd: Recording, monkeypatch: pytest.MonkeyPatch, no_color: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    rows = layer_rows(odd["nan"].records)
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr("sys.stdout", stream)
        console.print_table(console.stdout(), layers_table(rows))
        coloured = re.search(r"\x1b\[1;31m\s*9", stream.getvalue()) is not None
        assert coloured == (stream.isatty() and not no_color)


def test_a_pipe_loses_no_column(odd: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    stream = io.StringIO()
    monkeypatch.setattr("sys.stdout", stream)
    console.print_table(console.stdout(), layers_table(layer_rows(odd.records)))
    lines = stream.getvalue().splitlines()
    assert len(lines) == len(TENSORS) + 2
    assert "long." * 60 in stream.getvalue()
    assert "…" not in stream.getvalue()


@pytest.mark.parametrize("columns", [20, 80, 120])
def test_a_narrow_terminal_cuts_no_number(
    odd: Recording, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    monkeypatch.setattr("sys.stdout", stream)
    rows = layer_rows(odd.records)
    console.print_table(console.stdout(), layers_table(rows))
    for row in rows:
        assert text.number(row.summary.min) in stream.getvalue()
        assert text.shape(row.shapes[0]) in stream.getvalue()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0, "0"),
        (1.0, "1"),
        (-0.0074316, "-0.0074316"),
        (123456.0, "123456"),
        (1e-9, "1.000e-09"),
        (-2.5e12, "-2.500e+12"),
        (math.nan, "-"),
        (math.inf, "inf"),
        (None, "-"),
    ],
)
def test_numbers(value: float | None, expected: str) -> None:
    assert text.number(value) == expected


def test_sizes() -> None:
    assert text.size(0) == "0 B"
    assert text.size(1536) == "1.5 KiB"
    assert text.size(5 << 40) == "5.0 TiB"
    assert text.size(5 << 50) == "5120.0 TiB"
