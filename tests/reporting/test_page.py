"""The page and the notebook's table: whole, strict, small, and deaf to hostile names."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from typing import Any

import pytest
import torch

from tensortap.comparing.results import (
    Comparison,
    EnvironmentDifference,
    LayerComparison,
    Part,
)
from tensortap.numerics import summarize
from tensortap.numerics.difference import difference
from tensortap.reporting.page import notebook, render_page

HOSTILE = (
    "</script><img src=x onerror=alert(1)>",
    "<!--<script>",
    "\"quoted\" 'twice' & more",
    "ünï中文.层.0",
    "line\nbreak\r\u2028\u202e",
    "{{data}}",
    "\udcff lone",
    "",
    "constructor",
    "__proto__",
)


def part(
    port: str = "output", verdict: Any = "within", *, histogram: bool = True, **more: Any
) -> Part:
    """A part with real numbers in it."""
    generator = torch.Generator().manual_seed(3)
    reference = torch.randn(4, 32, generator=generator)
    candidate = reference + 1e-3 * torch.randn(4, 32, generator=generator)
    found = difference(reference, candidate)
    return Part(
        port,
        "",
        verdict,
        f"the {port} is {verdict}",
        difference=found,
        reference_summary=summarize(reference, histogram=histogram),
        candidate_summary=summarize(candidate, histogram=histogram),
        shape=(4, 32),
        candidate_shape=(4, 32),
        dtype="float32",
        candidate_dtype="float32",
        **{"error": found.error, "floor": 1e-3, "floor_ratio": found.error / 1e-3, **more},
    )


def layer(name: str, verdict: Any = "within", *parts: Part, **more: Any) -> LayerComparison:
    return LayerComparison(name, more.pop("candidate", name), "name", verdict, parts, **more)


def messy() -> Comparison:
    """Every verdict, every kind of gap, and names that would like to be markup."""
    empty = torch.empty(0)
    zeros = torch.zeros(3)
    nan = torch.full((3,), math.nan)
    undefined = [difference(empty, empty), difference(zeros, zeros + 1), difference(nan, zeros)]
    odd = tuple(
        Part(
            "output",
            leaf,
            "diverged",
            "NaN on one side",
            difference=found,
            reference_summary=summarize(empty),
            candidate_summary=None,
            error=math.nan,
            floor_ratio=math.inf,
            hints=("<b>hint</b>", "one bad token: 3"),
            moments=4,
            worst_moment=(0, 2, 1),
            nearer="reference",
        )
        for leaf, found in zip((".logits", "['mask']", "[0]"), undefined, strict=True)
    )
    rows = [
        *(layer(name, "within", part("input"), part()) for name in HOSTILE),
        layer("same", "identical", part(verdict="identical", error=0.0, floor_ratio=0.0)),
        layer("renamed", "within", part(transform="transpose (0, 2, 1)"), candidate="other.name"),
        layer("bad", "diverged", part("input"), *odd, origin="made here", input_verdict="within"),
        layer("gone", "missing", candidate=None, note="missing in the candidate"),
        layer("shape", "incomparable", Part("output", "", "incomparable", "[2] against [3]")),
        layer("hollow", "within", Part("output", "", "within", "", difference=None)),
        layer("plain", "within", part(), type="Linear", candidate_type="Int8Linear"),
    ]
    return Comparison(
        "runs/<reference>",
        "runs/candidate\udcff",
        tuple(rows),
        environment=(
            EnvironmentDifference("torch", "2.6", "2.6"),
            EnvironmentDifference("device", "cpu", "<neuron>"),
        ),
        same_input=False,
        floor="estimated from the dtypes",
        preset="device",
        truth="runs/fp64",
        warnings=("Few layers align.", "The inputs differ: <1> and <2>."),
        notes=("A note & another.",),
    )


class Reader(HTMLParser):
    """What elements a page has, and what its script elements hold."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self._inside = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts.append(data)
        if self._inside == "style":
            self.styles.append(data)


def blob(page: str) -> dict[str, Any]:
    """The page's data, read as a browser would find it."""
    found: dict[str, Any] = json.loads(Reader(page).scripts[0], parse_constant=pytest.fail)
    return found


def test_page_holds_every_layer_and_hostile_names_stay_text() -> None:
    comparison = messy()
    page = render_page(comparison)
    page.encode("utf-8")
    read = Reader(page)
    assert len(read.scripts) == 2
    assert "img" not in read.tags
    assert not [name for name, _ in read.attributes if name.startswith("on")]
    assert page.count("</script") == 2
    assert "<!--" not in read.scripts[0] and "&" not in read.scripts[0]
    names = [row["layer"] for row in blob(page)["layers"]]
    assert len(names) == len(comparison.layers)
    assert names[0] == HOSTILE[0]
    assert names[4] == "line�break���"
    assert names[5] == "{{data}}"
    assert names[7] == "(root)"
    assert "runs/&lt;reference&gt;" in page


def test_page_can_fetch_nothing() -> None:
    page = render_page(messy())
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


def test_undefined_numbers_stay_undefined() -> None:
    rows = {row["layer"]: row for row in blob(render_page(messy()))["layers"]}
    names = blob(render_page(messy()))["metrics"]
    empty, zeros, nan = rows["bad"]["parts"][1:]
    assert all(value in (0, None) for value in empty["metrics"])
    assert empty["metrics"][names.index("mse")] is None
    assert zeros["metrics"][names.index("cosine")] is None
    assert zeros["metrics"][names.index("mse")] == 1
    assert nan["metrics"][names.index("disagreeing")] == 3
    assert "error" not in empty and empty["ratio"] == "inf"
    assert "metrics" not in rows["hollow"]["parts"][0]
    assert "parts" not in rows["gone"]


def test_numbers_are_those_of_the_comparison() -> None:
    data = blob(render_page(messy()))
    row = data["layers"][0]
    shown = row["parts"][row["main"]]
    whole = messy().layers[0]
    assert whole.difference is not None
    for name, value in zip(data["metrics"], shown["metrics"], strict=True):
        assert value == pytest.approx(getattr(whole.difference, name), rel=1e-7), name
    assert shown["error"] == pytest.approx(whole.error, rel=1e-7)


def test_histogram_counts_every_difference_in_its_octave() -> None:
    reference = torch.zeros(6)
    candidate = torch.tensor([0.0, 0.25, 0.3, -0.49, 1.0, -3.9])
    found = Part("output", "", "within", "", difference=difference(reference, candidate))
    comparison = Comparison("a", "b", (layer("x", "within", found),))
    histogram = blob(render_page(comparison))["layers"][0]["parts"][0]["histogram"]
    assert histogram == {"low": -2, "counts": [3, 0, 1, 1], "zeros": 1, "sampled": False}


def test_both_sides_are_counted_over_the_same_steps() -> None:
    shown = blob(render_page(messy()))["layers"][0]["parts"][0]["bars"]
    for side in ("reference", "candidate"):
        assert len(shown[side]) == len(shown["reference"])
    assert sum(shown["reference"]) + sum(shown["candidate"]) + shown["beyond"] == 2 * 4 * 32


def test_different_inputs_are_the_first_warning() -> None:
    page = render_page(messy())
    assert page.index("The inputs differ") < page.index("Few layers align")
    bare = Comparison("a", "b", (layer("x", "within", part()),), same_input=False)
    assert "did not get the same inputs" in render_page(bare)
    assert "did not get the same inputs" in notebook(bare)


def test_what_differs_comes_before_what_does_not() -> None:
    page = render_page(messy())
    assert page.index(">device<") < page.index(">torch<")
    assert "1 thing the same on both sides" in page
    bare = Comparison("a", "b", (layer("x", "within", part()),))
    assert "Nothing that the recordings say" in render_page(bare)


@pytest.mark.parametrize(
    ("rows", "state", "title"),
    [
        ([layer("x", "within", part())], "good", "No divergence"),
        ([layer("x", "diverged", part(verdict="diverged"))], "bad", "Diverged at x"),
        ([layer("x", "incomparable")], "bad", "Nothing compared"),
        ([layer("x", "missing", candidate=None)], "void", "Nothing compared"),
        ([], "void", "Nothing compared"),
    ],
)
def test_state_is_in_the_head(rows: list[LayerComparison], state: str, title: str) -> None:
    page = render_page(Comparison("a", "b", tuple(rows)))
    assert f'class="answer {state}"' in page
    assert f"<title>{title} - tensortap</title>" in page


def test_thousands_of_layers_stay_small() -> None:
    both = (part("input", histogram=False), part(histogram=False))
    rows = tuple(layer(f"model.layers.{n}.self_attn.q_proj", "within", *both) for n in range(3000))
    comparison = Comparison("a", "b", rows)
    page = render_page(comparison)
    assert len(blob(page)["layers"]) == 3000
    assert len(page) < 9_000_000


def test_notebook_is_a_plain_escaped_table() -> None:
    shown = notebook(messy())
    read = Reader(shown)
    assert set(read.tags) <= {"p", "b", "table", "thead", "tbody", "tr", "th", "td"}
    assert not read.attributes
    assert "&lt;/script&gt;&lt;img" in shown
    assert (
        shown.index("The inputs differ") < shown.index("Few layers align") < shown.index("<table")
    )
    many = Comparison("a", "b", tuple(layer(f"l{n}", "identical") for n in range(203)))
    assert notebook(many).count("<tr>") == 201
    assert "and 3 more layers" in notebook(many)
    assert messy()._repr_html_() == shown


def test_to_html_writes_the_same_page(tmp_path: Any) -> None:
    target = tmp_path / "report" / "index.html"
    page = messy().to_html(target)
    assert target.read_bytes().decode("utf-8") == page == render_page(messy())
