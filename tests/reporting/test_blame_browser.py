"""The page of a blame in a real Chromium with the network off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import blames
import chromium
import pytest
from chromium import POOR_CONTRAST

Show = Callable[..., chromium.Page]

# What stands beyond the right edge and cannot be scrolled to.
CUT = """[...document.querySelectorAll('body *')]
  .filter(e => !e.closest('.scroller') && !e.closest('.unseen') && !e.closest('svg'))
  .filter(e => e.checkVisibility() && e.getBoundingClientRect().right > innerWidth + 1)
  .map(e => e.outerHTML.slice(0, 200))"""

LABELS_OVERLAP = """(() => {
  const boxes = [...document.querySelectorAll('#errors .axis text, #drawing .axis text')]
    .filter(e => e.getAttribute('text-anchor') === 'middle')
    .map(e => [e.closest('svg').id, e.textContent, e.getBoundingClientRect()]);
  return boxes.filter(([id, name, box], at) => boxes.slice(at + 1)
    .some(([other, , next]) => other === id && next.left < box.right)).map(([, name]) => name);
})()"""


def column(page: chromium.Page, name: str) -> list[str]:
    """What a column says, from top to bottom, where it is to be seen."""
    kind = "th" if name == "layer" else f'td[data-column="{name}"]'
    found: list[str] = page.run(
        f"[...document.querySelectorAll('tr.row > {kind}')].filter(e => e.checkVisibility())"
        ".map(e => e.innerText)"
    )
    return found


def test_the_culprit_stands_out_in_both_charts(show: Show) -> None:
    page = show(blames.planted())
    tall = page.run(
        "[...document.querySelectorAll('#drawing .slot')].map(slot => {"
        " const bar = slot.querySelector('rect.share');"
        " return [slot.getAttribute('aria-label'), +bar.getAttribute('height'),"
        " bar.classList.contains('path')]; })"
    )
    assert len(tall) == 8
    label, height, path = tall[4]
    assert label.startswith("blocks.4: share 96.4 %, made here 0.0141")
    assert path and height > 50 * max(other for _, other, _ in tall[:4] + tall[5:])
    assert page.run("document.querySelectorAll('#errors .made').length") == 8
    assert page.run("document.querySelectorAll('#errors .accumulated').length") == 8
    places = page.run(
        "['.made.path', '.accumulated'].map(s => [...document.querySelectorAll('#errors ' + s)]"
        ".map(e => e.getAttribute('transform')))"
    )
    assert places[0][0] == places[1][4]  # a diamond on its circle: made here
    names = page.run("[...document.querySelectorAll('#drawing .axis text')].map(e => e.innerHTML)")
    assert {"blocks.4", "50 %"} <= set(names)


def test_pointing_names_the_layer_and_a_click_finds_its_row(show: Show) -> None:
    page = show(blames.planted())
    page.hover('#errors .hit[data-slot="6"]')
    assert "blocks.6" in page.run("tip2.innerText")
    assert "accumulated 0.0117" in page.run("tip2.innerText")
    assert page.run("document.querySelectorAll('.hit.lit').length") == 2
    page.click('#drawing .hit[data-slot="6"]')
    assert page.run("document.activeElement.dataset.row") == "13"
    assert page.run("document.activeElement.querySelector('th').innerText") == "blocks.6"


def test_everything_works_from_the_keyboard(show: Show) -> None:
    page = show(blames.planted())
    page.run("document.querySelector('.slot[tabindex=\"0\"]').focus()")
    assert page.run("document.activeElement.dataset.slot") == "4"
    page.press("ArrowRight", 39)
    assert page.run("document.activeElement.dataset.slot") == "5"
    assert "blocks.5" in page.run("tip.innerText")
    page.press("Home", 36)
    assert page.run("document.activeElement.dataset.slot") == "0"
    page.press("Enter", 13)
    assert page.run("document.activeElement.dataset.row") == "0"
    page.run("document.querySelector('th[data-column=layer] button').focus()")
    page.press("Enter", 13)
    assert page.run("document.querySelector('th[data-column=layer]').ariaSort") == "ascending"


def test_every_column_sorts_and_undefined_numbers_come_last(show: Show) -> None:
    page = show(blames.messy())
    everyone = sorted(column(page, "layer"))
    heads = page.run("[...document.querySelectorAll('thead th')].map(e => e.dataset.column)")
    assert {"order", "layer", "share", "made", "note"} <= set(heads)
    for name in heads:
        page.run(f"document.querySelector('th[data-column=\"{name}\"] button').click()")
        assert sorted(column(page, "layer")) == everyone
        assert page.run("document.querySelectorAll('[aria-sort=ascending]').length") < 2
    for _ in range(2):
        page.click('th[data-column="share"] button')
        assert column(page, "share")[-2:] == ["-", "-"]
    page.click('th[data-column="share"] button')
    direction = page.run("document.querySelector('th[data-column=share]').ariaSort")
    assert direction == "descending"
    assert column(page, "share")[0] == "750.0 %" and column(page, "share")[-3] == "<-1000 %"
    assert page.run("document.querySelector('table').classList.contains('flat')")
    page.click('th[data-column="order"] button')
    assert not page.run("document.querySelector('table').classList.contains('flat')")


def test_filter_and_nothing_left_says_so(show: Show) -> None:
    page = show(blames.planted())
    page.click("#filter")
    page.type("linear")
    names = [name.split()[0] for name in column(page, "layer")]
    assert names == ["blocks.4.mlp.up", "blocks.4.mlp.down"]
    assert page.run("shown.textContent") == "2 of 15 rows"
    page.type("there is no such layer")
    assert page.run("nothing.checkVisibility()")
    page.click("#clear")
    assert len(column(page, "layer")) == 15
    assert not page.run("nothing.checkVisibility()")


@pytest.mark.parametrize("width", [375, 1600])
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("kind", ["planted", "messy"])
def test_page_fits_and_is_legible(show: Show, kind: str, width: int, dark: bool) -> None:
    page = show(getattr(blames, kind)(), width, dark)
    assert page.run("document.documentElement.scrollWidth") <= width
    assert page.run(CUT) == []
    assert page.run(POOR_CONTRAST) == []
    assert page.run(LABELS_OVERLAP) == []


def test_a_share_beyond_the_edge_is_cut_and_says_so(show: Show) -> None:
    page = show(blames.messy())
    assert page.run("document.querySelectorAll('#drawing .cut').length") == 2
    assert "goes on beyond the edge" in page.run("key.textContent")
    assert "30.0 % beside it" in page.run("key.textContent")
    assert "of 2 layers it is not known what part of the error" in page.run("key.textContent")
    inside = page.run(
        "(() => { const box = plot.getBoundingClientRect();"
        " return [...document.querySelectorAll('#drawing rect.share')].every(e => {"
        " const r = e.getBoundingClientRect(); return r.top >= box.top && r.bottom <= box.bottom;"
        " }); })()"
    )
    assert inside
    assert page.run("document.images.length") == 0


def test_small_shares_are_drawn_large_enough_to_tell(show: Show) -> None:
    page = show(blames.even(80))
    assert "The axis ends at 10 %" in page.run("key.textContent")
    assert page.run("document.querySelectorAll('#drawing .half').length") == 0
    assert page.run("document.querySelectorAll('#drawing rect.share').length") == 80
    assert page.run("document.querySelector('.answer').className") == "answer void"
    assert page.run(LABELS_OVERLAP) == []


def test_nothing_to_blame_is_a_page_without_shares(show: Show) -> None:
    page = show(blames.same())
    assert page.run("document.querySelector('.answer').className") == "answer good"
    assert not page.run("shares.checkVisibility()")
    assert page.run("document.querySelectorAll('#errors .made').length") == 3


def test_without_scripts_the_page_reads(running: chromium.Chromium, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    blames.planted().to_html(path)
    page = running.page()
    page.look(1400, 900)
    page.call("Emulation.setScriptExecutionDisabled", value=True)
    page.call("Page.navigate", url=path.resolve().as_uri())
    page.wait("document.readyState === 'complete'")
    assert len(column(page, "layer")) == 15
    assert column(page, "share")[4] == "96.4 %"
    assert not page.run("charts.checkVisibility()") and not page.run("tools.checkVisibility()")
    assert page.run("document.querySelectorAll('thead button').length") == 0
    bars = page.run(
        "[...document.querySelectorAll('.descent rect.share')].map(e => e.clientWidth"
        " || e.getBoundingClientRect().width)"
    )
    assert len(bars) == 8 and bars[0] > 100 and bars[1] == 0
