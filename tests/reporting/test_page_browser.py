"""The page in a real Chromium with the network off: it is found, sorted, filtered and opened."""

from __future__ import annotations

import copy
from collections.abc import Callable

import chromium
import pytest
import torch
from chromium import POOR_CONTRAST, TOO_WIDE
from test_page import HOSTILE, layer, messy, part

import tensortap as tap
from support import Net
from tensortap.comparing.results import Comparison

PLANTED = "blocks.1.up"


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """A model against itself with one layer's weights two per cent too large."""
    folder = tmp_path_factory.mktemp("runs")
    torch.manual_seed(0)
    good = Net().eval()
    bad = copy.deepcopy(good)
    with torch.no_grad():
        bad.get_submodule(PLANTED).weight.mul_(1.02)  # type: ignore[union-attr,operator]
    for name, model in (("good", good), ("bad", bad)):
        with tap.record(model, folder / name, layers="all", inputs=True, histograms=True):
            model(torch.arange(12).view(2, 6))
    return tap.compare(folder / "good", folder / "bad")


def column(page: chromium.Page, name: str) -> list[str]:
    """What a column says, from top to bottom."""
    if name == "layer":
        cells = "tr.row > th"
    else:
        cells = f'tr.row > td[data-column="{name}"]'
    found: list[str] = page.run(
        f"[...document.querySelectorAll('{cells}')].map(e => e.textContent)"
    )
    return found


def test_the_planted_bug_is_found_sorted_filtered_and_opened(
    show: Callable[..., chromium.Page], planted: Comparison
) -> None:
    page = show(planted)
    names = [row.layer or "(root)" for row in planted.layers]
    assert column(page, "layer") == names
    first = page.run("document.querySelector('tr.row.first > th').textContent")
    assert first == PLANTED
    assert PLANTED in page.run("document.querySelector('h1').textContent")
    at = names.index(PLANTED)
    assert column(page, "verdict")[at] == "diverged"
    assert column(page, "origin")[at] == "made here"
    assert set(column(page, "verdict")[:at]) == {"identical"}

    page.click('th[data-column="max_abs"] button')
    assert page.run("document.querySelector('[data-column=max_abs]').ariaSort") == "descending"
    shown = [float(cell) for cell in column(page, "max_abs")]
    assert shown == sorted(shown, reverse=True) and shown[0] > 0
    page.click('th[data-column="max_abs"] button')
    assert page.run("document.querySelector('[data-column=max_abs]').ariaSort") == "ascending"
    shown = [float(cell) for cell in column(page, "max_abs")]
    assert shown == sorted(shown)

    page.click("#filter")
    page.type(PLANTED)
    assert column(page, "layer") == [PLANTED]
    assert page.run("shown.textContent") == f"1 of {len(names)} layers"

    page.click(f'[data-row="{at}"] > th button')
    assert page.run("document.querySelector('tr.row button').ariaExpanded") == "true"
    detail = page.run(f"document.getElementById('detail-{at}').innerText")
    row = planted[PLANTED]
    assert row.why in detail
    for words in ("relative L2 error", "0.02", "correlation", "Percentiles", "First values"):
        assert words in detail
    assert page.run("document.querySelectorAll('.detail figure svg').length") == 2
    page.click('.detail [data-part="input[0]"] summary, .detail [data-part="input"] summary')
    assert page.run("document.querySelectorAll('.detail details[open] .cards').length") == 2
    page.click(f'[data-row="{at}"] > th button')
    assert page.run(f"document.getElementById('detail-{at}')") is None


def test_chips_filter_and_nothing_left_says_so(
    show: Callable[..., chromium.Page], planted: Comparison
) -> None:
    page = show(planted)
    page.click('.chip[data-verdict="diverged"]')
    assert set(column(page, "verdict")) == {"diverged"}
    assert len(column(page, "verdict")) == planted.counts["diverged"]
    page.click("#filter")
    page.type("there is no such layer")
    assert column(page, "layer") == []
    assert page.run("nothing.checkVisibility()")
    assert "No layer passes the filter" in page.run("nothing.innerText")
    page.click("#clear")
    assert len(column(page, "layer")) == len(planted.layers)
    assert not page.run("nothing.checkVisibility()")


def test_a_point_of_the_chart_names_its_layer_and_opens_it(
    show: Callable[..., chromium.Page], planted: Comparison
) -> None:
    page = show(planted)
    at = [row.layer for row in planted.layers].index(PLANTED)
    page.hover(f'[data-point="{at}"]')
    assert PLANTED in page.run("tip.innerText") and "diverged" in page.run("tip.innerText")
    page.click(f'[data-point="{at}"]')
    assert page.run(f"document.getElementById('detail-{at}').checkVisibility()")
    assert page.run("document.activeElement.dataset.open") == str(at)
    assert page.run("document.querySelectorAll('.floor').length") == 1


def test_everything_works_from_the_keyboard(
    show: Callable[..., chromium.Page], planted: Comparison
) -> None:
    page = show(planted)
    at = [row.layer for row in planted.layers].index(PLANTED)
    page.run("document.querySelector('[data-point][tabindex=\"0\"]').focus()")
    assert page.run("document.activeElement.dataset.point") == str(at)
    page.press("ArrowLeft", 37)
    assert page.run("document.activeElement.dataset.point") == str(at - 1)
    page.press("Enter", 13)
    assert page.run(f"document.getElementById('detail-{at - 1}') !== null")
    page.run("document.querySelector('th[data-column=layer] button').focus()")
    page.press("Enter", 13)
    assert page.run("document.querySelector('th[data-column=layer]').ariaSort") == "ascending"


@pytest.mark.parametrize("width", [375, 1600])
@pytest.mark.parametrize("dark", [False, True])
def test_page_fits_and_is_legible(
    show: Callable[..., chromium.Page], width: int, dark: bool
) -> None:
    page = show(messy(), width, dark)
    page.run("document.querySelectorAll('tr.row > th button').forEach(b => b.click())")
    page.settle()
    assert page.run("document.documentElement.scrollWidth") <= width
    assert page.run(TOO_WIDE) == []
    assert page.run(POOR_CONTRAST) == []


def test_hostile_names_do_nothing(show: Callable[..., chromium.Page]) -> None:
    page = show(messy())
    shown = column(page, "layer")
    assert shown[0] == HOSTILE[0]
    assert page.run("document.images.length") == 0
    page.run("document.querySelectorAll('tr.row > th button').forEach(b => b.click())")
    page.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    page.settle()
    assert page.run("document.images.length") == 0
    assert page.run("document.querySelectorAll('.hints b').length") == 0
    assert "<b>hint</b>" in page.run("body.innerText")


def test_undefined_numbers_sort_last_both_ways(show: Callable[..., chromium.Page]) -> None:
    page = show(messy())
    undefined = column(page, "sqnr").count("-")
    assert undefined >= 4
    for _ in range(2):
        page.click('th[data-column="sqnr"] button')
        assert column(page, "sqnr")[-undefined:] == ["-"] * undefined
        assert "-" not in column(page, "sqnr")[:-undefined]


def test_every_column_sorts(show: Callable[..., chromium.Page]) -> None:
    page = show(messy())
    heads = page.run("[...head.children].map(e => e.dataset.column)")
    assert {"order", "layer", "candidate", "verdict", "mse", "transform", "note"} <= set(heads)
    everyone = sorted(column(page, "layer"))
    for name in heads:
        page.run(f"document.querySelector('th[data-column=\"{name}\"] button').click()")
        assert sorted(column(page, "layer")) == everyone
        assert page.run("[...head.children].filter(e => e.ariaSort !== 'none').length") == 1


def test_thousands_of_layers_are_drawn_as_they_are_seen(
    show: Callable[..., chromium.Page],
) -> None:
    both = (part("input", histogram=False), part(histogram=False))
    rows = [layer(f"model.layers.{n}.mlp", "within", *both) for n in range(3000)]
    rows[2500] = layer("the.bad.one", "diverged", part(verdict="diverged"), origin="unknown")
    page = show(Comparison("a", "b", tuple(rows)))
    assert page.run("shown.textContent") == "3,000 layers"
    assert page.run("document.querySelectorAll('tr.row').length") < 600
    page.run(
        "document.querySelector('[data-point=\"2500\"]').dispatchEvent("
        "new KeyboardEvent('keydown', {key: 'Enter', bubbles: true}))"
    )
    page.settle()
    assert page.run("document.activeElement.textContent") == "the.bad.one"
    assert page.run("document.querySelectorAll('tr.row').length") < 600
    page.run("scroller.scrollTop = 0")
    page.wait("document.querySelector('[data-row=\"2400\"]') !== null")
    page.run("scroller.scrollTop = scroller.scrollHeight")
    page.wait("document.querySelector('[data-row=\"2700\"]') !== null")
    page.click("#filter")
    page.type("bad.one")
    assert column(page, "layer") == ["the.bad.one"]


def test_a_comparison_of_nothing_is_a_page(show: Callable[..., chromium.Page]) -> None:
    page = show(Comparison("a", "b", ()))
    assert page.run("document.querySelector('.answer').className") == "answer void"
    assert not page.run("document.getElementById('layers').checkVisibility()")


@pytest.mark.parametrize("bad", [3, 60, 2500])
def test_a_long_table_opens_at_the_first_divergence(
    show: Callable[..., chromium.Page], bad: int
) -> None:
    rows = [layer(f"model.layers.{n}.mlp", "within", part()) for n in range(3000)]
    rows[bad] = layer("the.bad.one", "diverged", part(verdict="diverged"), origin="made here")
    page = show(Comparison("a", "b", tuple(rows)))
    top, bottom, low, high = page.run(
        f"(() => {{ const row = document.querySelector('[data-row=\"{bad}\"]')"
        ".getBoundingClientRect(), box = scroller.getBoundingClientRect();"
        " return [row.top, row.bottom, box.top + head.offsetHeight, box.bottom]; })()"
    )
    assert low <= top < bottom <= high
    assert page.run("window.scrollY") == 0


def test_the_error_is_on_a_narrow_screen(show: Callable[..., chromium.Page]) -> None:
    page = show(messy(), 420)
    right = page.run(
        "document.querySelector('td[data-column=error]').getBoundingClientRect().right"
    )
    assert 0 < right <= 420
