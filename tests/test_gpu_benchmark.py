"""benchmarks/gpu.py runs whole on a CPU with a tiny model, and its tables find their page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "benchmarks" / "gpu.py"
PARTS = {"recording", "summaries", "compiled", "kernels", "difference", "watch", "compare"}


def bench(*words: str | Path) -> subprocess.CompletedProcess[str]:
    source = f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, words)],
        capture_output=True,
        text=True,
        env={**os.environ, **own, "PYTHONPATH": source},
        timeout=300,
    )


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("bench") / "gpu.json"
    ran = bench("--tiny", "--device", "cpu", "--json", path, "--disk", path.parent)
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr
    assert [entry.name for entry in path.parent.iterdir()] == ["gpu.json"]  # it cleans up
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def cells(result: dict[str, Any], part: str, name: str) -> list[dict[str, Any]]:
    rows = [row for table in result["parts"][part] for row in table["rows"]]
    return [cell for row in rows if name in row["name"] for cell in row["cells"]]


def test_every_part_has_numbers(result: dict[str, Any]) -> None:
    assert set(result["parts"]) == PARTS
    assert result["where"]["device"] == "CPU"
    for part, name in [
        ("recording", "tap.record tensors, to disk"),
        ("recording", "detach().cpu()"),
        ("summaries", "tap.record summaries, 62 layers"),
        ("summaries", "tap.record summaries, 434 linears"),
        ("summaries", "computed floor"),
        ("compiled", "tap.record summaries, 4 layers"),
        ("kernels", "summary kernel"),
        ("difference", "tap.difference, everything"),
        ("watch", "tap.watch outputs and gradients"),
        ("compare", "on the CPU"),
    ]:
        found = cells(result, part, name)
        assert found, (part, name)
        assert all(cell["value"] is not None and cell["value"] > 0 for cell in found), (part, name)
        assert all(cell["aim"] is None for cell in found)  # they are the H200's


def test_what_needs_cuda_is_left_out_and_said(result: dict[str, Any]) -> None:
    for part, name in [
        ("recording", "side stream"),
        ("compare", "--device cuda"),
        ("kernels", "lean"),
    ]:
        for cell in cells(result, part, name):
            assert cell["value"] is None and "needs a CUDA device" in cell["missing"]


def test_without_cuda_it_asks_for_tiny() -> None:
    ran = bench("--only", "kernels")
    assert ran.returncode != 0
    assert "--tiny" in ran.stderr and "Traceback" not in ran.stderr


def invented(name: str, value: float, aim: float, unit: str = "x") -> dict[str, Any]:
    cell = {"value": value, "low": None, "high": None, "unit": unit, "aim": aim, "missing": None}
    row = {"name": f"**{name}**", "cells": [cell], "ours": True}
    table = {"title": f"Table of {name}", "columns": ["1 x 128"], "rows": [row], "notes": ["so"]}
    where = dict.fromkeys(["host", "torch", "triton", "driver", "when", "model"], "?")
    return {
        "where": {"device": "H200", **where},
        "parts": {name: [table]},
        "seconds": {name: 90.0},
    }


def test_results_are_put_between_the_markers_of_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    head = "# Costs\nbefore\n<!-- benchmarks/gpu.py begin -->"
    foot = "<!-- benchmarks/gpu.py end -->\nafter\n"
    page.write_text(f"{head}\nold\n{foot}")
    sources = []
    for number, data in enumerate(
        [
            invented("recording", 9.0, 1.15),
            invented("kernels", 3.59, 3.6, "TB/s"),
            invented("recording", 1.15, 1.15),
        ]
    ):
        sources.append(tmp_path / f"{number}.json")
        sources[-1].write_text(json.dumps(data))
    for _ in range(2):  # once more changes nothing
        ran = bench("--from", *sources, "--page", page)
        assert ran.returncode == 0, ran.stderr
        text = page.read_text()
        assert text.startswith(f"{head}\nMeasured on one H200 ") and text.endswith(foot)
        assert "old" not in text and "9.0" not in text
        assert "| **recording** | 1.150, aim 1.15: met |" in text
        assert "| **kernels** | 3.59, aim 3.6: missed |" in text
        assert "Of 2 aims 1 is met. Missed: kernels at 1 x 128 (3.59, aim 3.6)." in text
        assert "3.0 minutes" in text


def test_a_page_without_markers_is_left_alone(tmp_path: Path) -> None:
    page, source = tmp_path / "page.md", tmp_path / "r.json"
    page.write_text("nothing here\n")
    source.write_text(json.dumps(invented("kernels", 4.0, 3.6, "TB/s")))
    ran = bench("--from", source, "--page", page)
    assert ran.returncode != 0 and "benchmarks/gpu.py begin" in ran.stderr
    assert page.read_text() == "nothing here\n"


def test_the_page_in_docs_has_its_markers() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    begin, end = (f"<!-- benchmarks/gpu.py {word} -->" for word in ("begin", "end"))
    assert text.count(begin) == text.count(end) == 1 and text.index(begin) < text.index(end)
