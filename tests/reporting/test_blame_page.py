"""The page of a blame: whole without its script, strict, and deaf to hostile names."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import blames
import pytest
from blames import HOSTILE
from test_page import Reader

from schemas import validate
from tensortap.comparing.blame.results import Blame
from tensortap.reporting.blame_page import blame_notebook, render_blame_page


def blob(page: str) -> list[dict[str, Any]]:
    """The rows that the charts are drawn from, read as a browser would find them."""
    found: list[dict[str, Any]] = json.loads(Reader(page).scripts[0], parse_constant=pytest.fail)[
        "layers"
    ]
    return found


def cells(page: str, column: str) -> list[str]:
    found = re.findall(rf'<td[^>]*data-column="{column}">(.*?)</td>', page)
    return [re.sub(r"<[^>]*>", "", cell) for cell in found]


def test_the_table_stands_in_the_page_without_a_script() -> None:
    blame = blames.planted()
    page = render_blame_page(blame)
    body = page[: page.index('<script type="application/json"')]
    for row in blame.layers:
        assert row.layer.replace(".", ".<wbr>") in body
    assert len(cells(body, "share")) == len(blame.layers)
    assert cells(body, "share")[4] == "96.4 %"
    assert cells(body, "made")[4] == "0.0141"
    assert cells(body, "handed")[13] == "0.0117"
    assert blame.sentence in body
    assert str(blame.causes[0]) in body
    assert "ran the model 14 times (at most 19)" in body


def test_what_was_descended_into_stands_as_nested_bars() -> None:
    page = render_blame_page(blames.planted())
    descent = page[page.index('<ul class="descent"') :].split("</ul>")[0]
    depths = re.findall(r'class="who depth(\d)"', descent)
    assert depths == ["0", "1", "1", "1", "1", "2", "2", "2"]
    assert descent.count('class="tag">culprit') == 1
    widths = re.findall(r'class="share[^"]*" x="[^"]*" width="([\d.]+)%"', descent)
    assert [float(width) for width in widths] == pytest.approx(
        [96.4, 0, 0, 0, 96.4, 0, 0, 96.4], abs=0.01
    )
    assert '<ul class="descent"' not in render_blame_page(blames.even())


def test_hostile_names_stay_text() -> None:
    page = render_blame_page(blames.messy())
    page.encode("utf-8")
    read = Reader(page)
    assert len(read.scripts) == 2 and page.count("</script") == 2
    assert "img" not in read.tags and page.count("<!--") == 0
    assert not [name for name, _ in read.attributes if name.startswith("on")]
    assert "&lt;b&gt;past" in page and "<b>past" not in page
    assert "&lt;b&gt;2" in page and "runs/&lt;reference&gt;" in page
    names = [row["layer"] for row in blob(page)]
    assert names[0] == HOSTILE[0]
    assert {"line�break���", "{{data}}", "(root)"} <= set(names)
    assert "{{data}}" in page


def test_page_can_fetch_nothing() -> None:
    page = render_blame_page(blames.messy())
    read = Reader(page)
    policy = next(value for name, value in read.attributes if name == "content")
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"

    def digest(content: str) -> str:
        return base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()

    assert rules["script-src"] == f"'sha256-{digest(read.scripts[1])}'"
    assert rules["style-src"] == f"'sha256-{digest(read.styles[0])}'"
    assert not re.search(r"https?:|//[a-z]|url\(|@import", page.replace("// ", ""))
    assert not {name for name, _ in read.attributes} & {"src", "href", "style", "action"}
    for forbidden in ("innerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
        assert forbidden not in page


def test_numbers_are_those_of_the_blame_and_zero_is_not_nothing() -> None:
    blame = blames.planted()
    rows = {row["layer"]: row for row in blob(render_blame_page(blame))}
    for layer in blame.layers:
        shown = rows[layer.layer]
        assert shown["share"] == pytest.approx(layer.share, rel=1e-7)
        assert shown["made"] == pytest.approx(layer.made_here, rel=1e-7)
        assert shown["accumulated"] == pytest.approx(layer.accumulated, rel=1e-7)
    assert rows["blocks.0"]["share"] == 0
    path = [name for name, row in rows.items() if row.get("path")]
    assert path == ["blocks.4", "blocks.4.mlp", "blocks.4.mlp.down"]
    messy = {row["layer"]: row for row in blob(render_blame_page(blames.messy()))}
    assert not {"share", "made", "accumulated"} & set(messy["nothing known"])
    assert messy["far.plus"]["made"] == "inf"


def test_bars_beyond_the_edge_end_there() -> None:
    page = render_blame_page(blames.messy())
    found = re.findall(r'class="share[^"]*" x="(-?[\d.]+)%" width="([\d.]+)%"', page)
    assert len(found) > 17
    for x, width in found:
        assert float(x) >= 0 and float(x) + float(width) <= 100.02


@pytest.mark.parametrize(
    ("blame", "state", "title"),
    [
        (blames.planted(), "bad", "blocks.4.mlp.down is to blame"),
        (blames.even(), "void", "No single culprit"),
        (blames.same(), "good", "Nothing to blame"),
    ],
    ids=("planted", "even", "same"),
)
def test_state_is_in_the_head(blame: Blame, state: str, title: str) -> None:
    page = render_blame_page(blame)
    assert f'class="answer {state}"' in page
    assert f"<title>{title} - tensortap</title>" in page


def test_columns_of_words_that_say_nothing_are_left_out() -> None:
    page = render_blame_page(blames.even())
    assert 'data-column="note"' not in page.split("<script")[0]
    assert 'data-column="type"' in page
    assert 'data-column="note"' in render_blame_page(blames.planted())


def test_notebook_is_a_plain_escaped_table() -> None:
    blame = blames.messy()
    shown = blame_notebook(blame)
    read = Reader(shown)
    assert set(read.tags) <= {"p", "b", "table", "thead", "tbody", "tr", "th", "td"}
    assert not read.attributes
    assert "&lt;/script&gt;&lt;img" in shown
    assert shown.index("Beware of") < shown.index("<table")
    assert blame._repr_html_() == shown
    many = blame_notebook(blames.even(203))
    assert many.count("<tr>") == 201 and "and 3 more layers" in many


def test_to_html_writes_the_same_page(tmp_path: Path) -> None:
    target = tmp_path / "report" / "index.html"
    page = blames.planted().to_html(target)
    assert target.read_bytes().decode("utf-8") == page == render_blame_page(blames.planted())


@pytest.mark.parametrize(
    "blame", [blames.planted(), blames.even(), blames.same()], ids=("planted", "even", "same")
)
def test_json_is_as_the_schema_says(blame: Blame) -> None:
    validate(json.loads(blame.to_json()), "blame")


def test_undefined_and_infinite_numbers_are_strict_json() -> None:
    told = json.loads(blames.messy().to_json(), parse_constant=pytest.fail)
    validate(told, "blame")
    assert told["final_error"] == "inf" and told["final_floor"] is None
    assert told["culprit"] == blames.messy().culprit
