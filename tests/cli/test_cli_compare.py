"""`compare`, and `plot` with several recordings: what is printed where, and the exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from commands import Run

from schemas import validate
from tensortap.demo import BUG_LAYER as PLANTED
from tensortap.recording import Manifest, Row, Writer
from tensortap.recording import open as open_recording

BUG_LAYER = ".".join(PLANTED.split(".")[:2])  # the block that holds it
LAYERS = ["embedding", *(f"blocks.{i}" for i in range(8))]

# No transform leads from one to the other.
ODD, ODDER = torch.arange(2000.0).view(40, 50), torch.arange(231.0).view(3, 7, 11)


def write(path: Path, tensors: dict[str, torch.Tensor], close: bool = True) -> Path:
    writer = Writer(str(path), Manifest())
    for order, (name, tensor) in enumerate(tensors.items()):
        writer.add(Row(name, "output", order=order), tensor)
    if close:
        writer.close()
    else:
        writer.flush()
    return path


def test_a_row_a_layer_in_order_and_the_answer_last(run: Run, modes: Path) -> None:
    result = run("compare", modes / "fp32", modes / "bf16")
    assert result.code == 0
    assert result.err == ""
    lines = result.out.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("layer "))
    for title in ("verdict", "input", "max abs", "MAE", "MSE", "cosine", "× floor", "grade"):
        assert title in lines[head]
    assert [line.split()[0] for line in lines[head + 2 : head + 2 + len(LAYERS)]] == LAYERS
    assert all("within" in line for line in lines[head + 2 : head + 2 + len(LAYERS)])
    assert any(line.startswith("target.dtypes") for line in lines[:head])
    assert lines[-1].startswith("No divergence: 9 compared layers")
    assert "\x1b" not in result.out


def test_the_bug_is_found_and_exits_1(run: Run, modes: Path) -> None:
    result = run("compare", modes / "fp32", modes / "bug")
    assert result.code == 1
    assert f"\nFirst divergence at {BUG_LAYER}" in result.out
    rows = {line.split()[0]: line for line in result.out.splitlines() if line.startswith("blocks")}
    assert "made here" in rows[BUG_LAYER]
    assert "inherited" in rows["blocks.7"]
    assert "identical" in rows["blocks.0"]


def test_json_is_as_the_schema_says(run: Run, modes: Path) -> None:
    result = run("compare", modes / "fp32", modes / "bug", "--json")
    assert result.code == 1
    data = result.json
    validate(data, "comparison")
    assert data["same"] is False
    assert data["first_divergence"]["layer"] == BUG_LAYER
    assert [row["layer"] for row in data["layers"]] == LAYERS
    a, b = (open_recording(modes / name)[BUG_LAYER].output.double() for name in ("fp32", "bug"))
    row = next(row for row in data["layers"] if row["layer"] == BUG_LAYER)
    assert row["mse"] == pytest.approx(float((b - a).square().mean()), rel=1e-9)
    assert row["max_abs"] == pytest.approx(float((b - a).abs().max()), rel=1e-12)
    assert row["cosine"] == pytest.approx(float(torch.cosine_similarity(a.ravel(), b.ravel(), 0)))
    validate(run("compare", modes / "fp32", modes / "fp32", "--json").json, "comparison")


def test_only_bad(run: Run, modes: Path) -> None:
    bug = ("compare", modes / "fp32", modes / "bug", "--only-bad")
    bad = [f"blocks.{i}" for i in range(int(BUG_LAYER.split(".")[1]), 8)]
    lines = [line.split()[0] for line in run(*bug).out.splitlines() if line.startswith("blocks.")]
    assert lines == bad
    data = run(*bug, "--json").json
    assert [row["layer"] for row in data["layers"]] == bad
    assert data["counts"]["identical"] == len(LAYERS) - len(bad)
    clean = run("compare", modes / "fp32", modes / "bf16", "--only-bad")
    assert clean.code == 0
    assert "blocks.0 " not in clean.out
    assert "No divergence" in clean.out


def test_one_layer_in_full(run: Run, modes: Path) -> None:
    result = run("compare", modes / "fp32", modes / "bug", BUG_LAYER)
    assert result.code == 1
    a, b = (open_recording(modes / name)[BUG_LAYER].output.double() for name in ("fp32", "bug"))
    d = b - a
    for part in (
        f"Layer {BUG_LAYER} - Comparison Results",
        "FP32 Reference Statistics:",
        f"  Mean:      {a.mean():9.6f}",
        f"  Range:     [{a.min():9.6f}, {a.max():9.6f}]",
        "Mode Output Statistics:",
        f"  Std:       {b.std(correction=0):9.6f}",
        "Difference (Mode - FP32):",
        f"  Max Abs Diff:     {d.abs().max():9.6f}",
        "Error Metrics:",
        f"  MSE:               {d.square().mean():.6e}",
        "Relative Metrics:",
        "Absolute Difference Percentiles:",
        f"  95th:             {torch.quantile(d.abs(), 0.95):9.6f}",
        "Verdict: diverged, made here",
    ):
        assert part in result.out
    alias = run("compare", modes / "fp32", modes / "bug", BUG_LAYER, "--json").json
    assert [row["layer"] for row in alias["layers"]] == [BUG_LAYER]
    assert run("compare", modes / "fp32", modes / "bug", "blocks.0").code == 0


def test_different_inputs_are_at_the_top_of_every_output(run: Run, modes: Path) -> None:
    for layer in ([], ["blocks.0"]):
        text = run("compare", modes / "fp32", modes / "other", *layer)
        assert text.out.startswith("warning: ")
        assert "different inputs" in text.out.splitlines()[0]
    data = run("compare", modes / "fp32", modes / "other", "--json")
    assert any("different inputs" in warning for warning in data.json["warnings"])
    assert data.json["same_input"] is False
    assert data.err.startswith("warning: ")


def test_html_and_json_together(run: Run, modes: Path, tmp_path: Path) -> None:
    page = tmp_path / "report" / "index.html"
    result = run("compare", modes / "fp32", modes / "bug", "--html", page, "--json")
    assert result.code == 1
    assert result.json["same"] is False
    assert str(page) in result.err
    assert BUG_LAYER in page.read_text()


def test_floor_rules_and_presets_are_handed_on(run: Run, modes: Path) -> None:
    bug = ("compare", modes / "fp32", modes / "bug")
    with_floor = run(*bug, "--floor", modes / "bf16", "--json")
    assert with_floor.code == 0
    assert with_floor.json["floor"].startswith("measured")
    assert run(*bug, "--rule", ".*: max_abs < 1").code == 0
    assert run(*bug, "--rule", "blocks.7: max_abs < 1e-9", "--rule", ".*: max_abs < 1").code == 1
    assert run("compare", modes / "fp32", modes / "bf16", "--preset", "documents").code == 0
    device = run("compare", modes / "fp32", modes / "bf16", "--preset", "device", "--json")
    assert device.code == 1
    assert device.json["preset"] == "device"
    truth = run("compare", modes / "bf16", modes / "bug", "--truth", modes / "fp32", "--json")
    assert {row["nearer"] for row in truth.json["layers"]} == {"candidate"}
    for role in ("--floor", "--truth"):
        refused = run(*bug, role, modes / "bug")
        assert refused.code == 2
        assert "is the candidate itself" in refused.err
    chosen = run(*bug, "--layers", "blocks.{0,7}", "--json").json
    assert [row["layer"] for row in chosen["layers"]] == ["blocks.0", "blocks.7"]


def test_an_added_metric(run: Run, modes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensortap.comparing import metrics

    monkeypatch.setattr(metrics, "_registered", {})
    metrics.register_metric("worst_sign", lambda a, b: float((a.sign() != b.sign()).sum()))
    bug = ("compare", modes / "fp32", modes / "bug", "--metric", "worst_sign")
    data = run(*bug, "--json").json
    validate(data, "comparison")
    a, b = (open_recording(modes / name)["blocks.7"].output for name in ("fp32", "bug"))
    expected = float((a.sign() != b.sign()).sum())
    assert data["layers"][-1]["parts"][-1]["added"] == {"worst_sign": expected}
    assert "worst_sign" in run(*bug).out
    assert "worst_sign:" in run(*bug, BUG_LAYER).out
    assert run("compare", modes / "fp32", modes / "bug", "--metric", "none_such").code == 2


def test_map_pairs_by_hand(run: Run, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(2, 3, 5, generator=generator) for _ in range(2)]
    a = write(tmp_path / "a", {f"h.{i}": value for i, value in enumerate(values)})
    b = write(tmp_path / "b", {f"layers.{i}": value for i, value in enumerate(values)})
    data = run("compare", a, b, "--map", r"h\.(\d)=>layers.\1", "--json").json
    validate(data, "comparison")
    assert [(r["candidate_layer"], r["matched_by"]) for r in data["layers"]] == [
        ("layers.0", "map"),
        ("layers.1", "map"),
    ]
    text = run("compare", a, b, "--map", r"h\.(\d)=>layers.\1").out
    assert "candidate layer" in text
    assert "matched by" in text


def test_missing_and_incomparable_layers_are_rows(run: Run, tmp_path: Path) -> None:
    ones = torch.ones(2, 3)
    a = write(tmp_path / "a", {"x": ones, "only.here": ones, "odd": ODD})
    b = write(tmp_path / "b", {"x": ones, "odd": ODDER})
    result = run("compare", a, b)
    assert result.code == 1
    rows = {line.split()[0]: line for line in result.out.splitlines() if line}
    assert "missing in the candidate" in rows["only.here"]
    assert "incomparable" in rows["odd"]
    validate(run("compare", a, b, "--json").json, "comparison")
    alone = write(tmp_path / "c", {"x": ones, "odd": ODD})
    assert run("compare", a, alone).code == 0
    assert run("compare", a, b, "odd").code == 2


def test_summaries_alone(run: Run, tmp_path: Path) -> None:
    import tensortap as tap

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    for name in ("a", "b"):
        with tap.record(model, tmp_path / name, layers="all", keep="summary"):
            model(torch.ones(3, 4))
    result = run("compare", tmp_path / "a", tmp_path / "b")
    assert result.code == 0
    assert "identical " not in result.out
    data = run("compare", tmp_path / "a", tmp_path / "b", "--json").json
    validate(data, "comparison")
    assert {row["verdict"] for row in data["layers"]} == {"within"}
    screen = run("compare", tmp_path / "a", tmp_path / "b", "0").out
    assert "Summaries alone were kept" in screen
    assert "MSE:" not in screen


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{m}/fp32", "{m}/nowhere"], "There is no recording at"),
        (["{m}/fp32", "{m}"], "holds recordings, but is none itself"),
        (["{m}/fp32", "{m}/bf16", "blocks.33"], "Did you mean 'blocks.3'"),
        (["{m}/fp32", "{m}/bf16", "blocks.3", "--layers", "blocks"], "Give one of them"),
        (["{m}/fp32", "{m}/bf16", "--layers", "typo.*"], "There is no layer 'typo.*'"),
        (["{m}/fp32", "{m}/bf16", "--preset", "strict"], "The presets are: documents, device"),
        (["{m}/fp32", "{m}/bf16", "--rule", ".*: max_abz < 1"], "Did you mean max_abs?"),
        (["{m}/fp32", "{m}/bf16", "--rule", "nothing: mse < 1"], "matches none of the 9 layers"),
        (["{m}/fp32", "{m}/bf16", "--map", "no arrow"], "=>"),
    ],
)
def test_mistakes(run: Run, modes: Path, arguments: list[str], said: str) -> None:
    result = run("compare", *(argument.format(m=modes) for argument in arguments))
    assert result.code == 2
    assert said in result.err
    assert result.out == ""
    assert len(result.err.strip().splitlines()) == 1


def test_an_unfinished_recording_needs_partial(run: Run, modes: Path, tmp_path: Path) -> None:
    values = {"x": torch.ones(2, 3)}
    whole = write(tmp_path / "a", values)
    broken = write(tmp_path / "b", values, close=False)
    refused = run("compare", whole, broken)
    assert refused.code == 2
    assert "--partial" in refused.err
    taken = run("compare", whole, broken, "--partial")
    assert taken.code == 0
    assert "note: " in taken.err


def test_plot_of_several_recordings(run: Run, modes: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "d.png"
    runs = [modes / name for name in ("fp32", "bf16", "bug")]
    result = run("plot", *runs, "--layer", BUG_LAYER, "-o", out)
    assert result.code == 0
    assert result.out.strip() == str(out)
    assert out.read_bytes().startswith(b"\x89PNG")
    data = run("plot", *runs, "--layer", BUG_LAYER, "-o", out, "--port", "input", "--json").json
    assert data["port"] == "input"
    bf16, bug = data["candidates"]
    a, b = (open_recording(path)[BUG_LAYER].input.double() for path in runs[:2])
    assert bf16["difference"]["low"] == pytest.approx(float((b - a).min()), rel=1e-12)
    assert sum(bf16["difference"]["counts"]) == a.numel()
    assert len(bf16["difference"]["counts"]) == 100
    assert [row["layer"] for row in bug["errors"]] == LAYERS
    one = run("plot", runs[0], "--layer", BUG_LAYER, "-o", out, "--json").json
    assert one["layer"] == BUG_LAYER


def test_plot_lays_both_sides_out_alike(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    image = torch.randn(2, 3, 8, 9, generator=torch.Generator().manual_seed(0))
    a = write(tmp_path / "nchw", {"conv": image})
    b = write(tmp_path / "nhwc", {"conv": image.permute(0, 2, 3, 1).contiguous()})
    out = tmp_path / "d.png"
    (candidate,) = run("plot", a, b, "--layer", "conv", "-o", out, "--json").json["candidates"]
    assert candidate["errors"] == [{"layer": "conv", "verdict": "identical", "error": 0.0}]
    assert candidate["difference"]["finite"] == image.numel()
    assert candidate["difference"]["high"] - candidate["difference"]["low"] == 1.0  # all are 0
    assert max(candidate["difference"]["counts"]) == image.numel()
    assert "permute (0, 3, 1, 2)" in run("compare", a, b).out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{m}/fp32"], "no --layer"),
        (["{m}/fp32", "{m}/bf16", "blocks.0"], "no --layer"),
        (["{m}/fp32", "{m}/bf16", "--layer", "nothing"], "There is no layer 'nothing'"),
        (["{m}/fp32", "{m}/bf16", "--layer", "blocks.0", "--batch", "7"], "no batch 7"),
    ],
)
def test_plot_mistakes(
    run: Run, modes: Path, tmp_path: Path, arguments: list[str], said: str
) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "x.png"
    result = run("plot", *(argument.format(m=modes) for argument in arguments), "-o", out)
    assert result.code == 2
    assert said in result.err
    assert not out.exists()


def test_two_recordings_without_a_layer_are_told_what_is_missing(run: Run, modes: Path) -> None:
    result = run("plot", modes / "fp32", modes / "bug", "-o", "x.png")
    assert result.code == 2
    assert "is a recording, and no layer was named" in result.err
    assert "--layer LAYER" in result.err


def test_plot_says_what_it_cannot_subtract(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    a = write(tmp_path / "a", {"x": ODD, "y": torch.ones(2), "z": torch.randn(3)})
    b = write(tmp_path / "b", {"x": ODDER, "y": torch.ones(2)})
    for layer, said in (("x", "cannot be compared with b"), ("z", "has nothing to set beside")):
        result = run("plot", a, b, "--layer", layer, "-o", tmp_path / "x.png")
        assert result.code == 2
        assert said in result.err
