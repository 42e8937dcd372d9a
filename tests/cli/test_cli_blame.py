"""`blame`: the answer on stdout, all else on stderr, exit codes, and trouble as a sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from commands import Result, Run

from schemas import validate
from tensortap.cli.main import main
from tensortap.demo import BUG_LAYER

BLOCK = ".".join(BUG_LAYER.split(".")[:2])
TARGET = "tensortap.demo:build"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("blame") / "fp32"
    arguments = ["record", TARGET, "-o", str(path), "--layers", "all", "--inputs"]
    with pytest.raises(SystemExit) as caught:
        main([*arguments, "--seq-len", "12"])
    assert not caught.value.code
    return path


@pytest.fixture
def blame(run: Run, reference: Path) -> Run:
    def call(*arguments: object) -> Result:
        return run("blame", reference, TARGET, "--seq-len", "12", *arguments)

    return call


def test_the_planted_bug_is_blamed_and_exits_1(blame: Run) -> None:
    result = blame("--mode", "bug")
    assert result.code == 1
    assert result.err == ""
    lines = result.out.splitlines()
    assert re.match(rf"{re.escape(BUG_LAYER)} makes \d+ % of the final error", lines[0])
    assert lines[1].strip().endswith("output = 1.02 x reference")
    marked = [line for line in lines if line.startswith("►")]
    assert len(marked) == 1 and ".down" in marked[0] and "█" in marked[0]
    assert any(re.match(r"Ran the model \d+ times \(at most \d+\)\.", line) for line in lines)
    assert "\x1b" not in result.out


def test_the_same_model_has_nothing_to_blame_and_exits_0(blame: Run) -> None:
    result = blame()
    assert result.code == 0
    assert result.out.splitlines()[0].startswith("nothing to blame")
    assert "►" not in result.out


def test_rounding_is_nobodys_fault(blame: Run) -> None:
    result = blame("--mode", "bf16", "--json")
    assert result.code == 0
    assert result.json["culprit"] is None and result.json["same"] is True
    assert 0 < result.json["final_error"] <= result.json["final_floor"]


def test_json_is_as_the_schema_says(blame: Run) -> None:
    result = blame("--mode", "bug", "--json")
    assert result.code == 1
    validate(result.json, "blame")
    assert result.json["culprit"] == BUG_LAYER
    assert result.json["share"] == pytest.approx(1, abs=0.01)
    assert result.json["causes"][0]["kind"] == "factor"
    rows = {row["layer"]: row for row in result.json["layers"]}
    assert rows[BLOCK]["parent"] is None
    assert rows[BUG_LAYER]["parent"] == f"{BLOCK}.mlp"
    assert rows[BUG_LAYER]["made_here"] == pytest.approx(0.02, rel=0.01)
    assert result.json["forwards"] <= result.json["limit"]


def test_bisection_finds_the_same_with_fewer_runs(blame: Run) -> None:
    every = blame("--mode", "bug", "--json").json
    few = blame("--mode", "bug", "--bisect", "--json").json
    assert few["bisect"] and few["culprit"] == every["culprit"] == BUG_LAYER
    assert few["forwards"] < every["forwards"]


def test_layers_and_final_choose_where_to_look(blame: Run) -> None:
    some = blame("--mode", "bug", "--layers", "blocks.{3-5}", "--json").json
    first = [row["layer"] for row in some["layers"] if row["parent"] is None]
    assert first == ["blocks.3", "blocks.4", "blocks.5"]
    early = blame("--mode", "bug", "--layers", "blocks.{0-3}", "--final", "blocks.3", "--json")
    assert early.code == 0  # the bug is behind it
    assert early.json["final"] == "blocks.3" and early.json["final_error"] == 0


def test_a_floor_that_holds_the_error_takes_the_blame_away(
    run: Run, blame: Run, tmp_path: Path
) -> None:
    floor = tmp_path / "floor"
    words = ("-o", floor, "--layers", "all", "--seq-len", "12", "--mode", "bug")
    assert run("record", TARGET, *words).code == 0
    result = blame("--mode", "bug", "--floor", floor, "--json")
    assert result.code == 0
    assert result.json["culprit"] is None


def test_html_writes_the_page_and_says_where(blame: Run, tmp_path: Path) -> None:
    page = tmp_path / "out" / "blame.html"
    result = blame("--mode", "bug", "--html", page)
    assert result.code == 1
    assert f"note: The page is at {page}." in result.err
    assert f"<title>{BUG_LAYER} is to blame - tensortap</title>" in page.read_text()


def test_what_the_target_prints_is_no_data(run: Run, reference: Path, tmp_path: Path) -> None:
    file = tmp_path / "chatty.py"
    file.write_text(
        "from torch import nn\n"
        "from tensortap.demo import build as demo\n"
        "def build(mode='bug', seq_len=12):\n"
        "    print('building')\n"
        "    target = demo(mode=mode, seq_len=seq_len)\n"
        "    target.model.register_forward_pre_hook(lambda *_: print('running'))\n"
        "    return target\n"
    )
    result = run("blame", reference, f"{file}:build", "--json")
    assert result.code == 1
    assert result.json["culprit"] == BUG_LAYER
    assert "building" in result.err and "running" in result.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--layers", "nonsense"), "No layer matches 'nonsense'"),
        (("--final", "nonsense"), "There is no layer 'nonsense'"),
        (("--mode", "nonsense"), "no mode 'nonsense'"),
        (("--set", "width=3"), "does not take 'width'"),
        (("--floor", "no/such/run"), "There is no recording at no/such/run"),
        (("--map", "(=>x"), "(=>x"),
        (("--seed", "1"), "other token ids"),
    ],
)
def test_trouble_is_a_sentence(blame: Run, arguments: tuple[str, ...], said: str) -> None:
    result = blame(*arguments)
    assert result.code == 2
    assert result.out == ""
    assert said in result.err
    assert len(result.err.splitlines()) == 1


def test_a_reference_that_is_not_there(run: Run, tmp_path: Path) -> None:
    result = run("blame", tmp_path / "nothing", TARGET)
    assert result.code == 2 and "There is no recording" in result.err


def test_a_reference_without_inputs_is_said(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "outputs"
    assert run("record", TARGET, "-o", path, "--layers", "all", "--seq-len", "12").code == 0
    result = run("blame", path, TARGET, "--seq-len", "12", "--mode", "bug")
    assert result.code == 1
    assert result.out.startswith(f"{BUG_LAYER} makes")
    assert "note: The reference has no inputs of" in result.err and "--inputs" in result.err
