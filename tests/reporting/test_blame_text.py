"""A blame in the terminal: the answer first, nothing cut, nothing left out in silence."""

from __future__ import annotations

import io
import math
import re
from dataclasses import replace

import blames
import pytest
from rich.console import Console

from tensortap.comparing.blame.results import Blame
from tensortap.reporting.blame import MOST, bar, blame_table, blame_text, print_blame
from tensortap.reporting.blame_rows import most_telling, percent, rows_of


def on_a_terminal(blame: Blame, width: int, *, full: bool = False, colour: bool = False) -> str:
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=True,
        no_color=not colour,
        color_system="standard" if colour else None,
        highlight=False,
        emoji=False,
        markup=False,
    )
    print_blame(console, blame, full=full)
    shown: str = console.file.getvalue()  # type: ignore[attr-defined]
    return shown


def line_of(shown: str, word: str) -> str:
    (found,) = [line for line in shown.splitlines() if word in line]
    return found


def test_the_answer_comes_first_then_the_causes_then_the_layers() -> None:
    blame = blames.planted()
    lines = str(blame).splitlines()
    assert lines[0] == blame.sentence
    assert "blocks.4.mlp.down" in lines[0]
    assert lines[1].strip() == str(blame.causes[0])
    assert "runs/fp32" in lines[2] and "final error 0.0121 (rounding explains 3.0e-06)" in lines[2]
    head = next(at for at, line in enumerate(lines) if line.strip().startswith("layer"))
    titles = ("type", "made here", "accumulated", "handed", "amplification", "share", "note")
    assert all(title in lines[head] for title in titles)
    assert "Ran the model 14 times (at most 19)." in lines
    assert lines[-1] == "note: The reference has no inputs for 'head'."


def test_children_stand_indented_below_their_parent_and_the_culprit_is_marked() -> None:
    lines = str(blames.planted()).splitlines()
    head = next(at for at, line in enumerate(lines) if line.strip().startswith("layer"))
    width = lines[head].index("type")
    names = [line[1:width].rstrip() for line in lines[head + 2 : head + 17]]
    assert names[3:13] == [
        "  blocks.3",
        "  blocks.4",
        "    .norm1",
        "    .attention",
        "    .norm2",
        "    .mlp",
        "      .up",
        "      .activation",
        "      .down",
        "  blocks.5",
    ]
    marked = [line for line in lines if line.startswith("►")]
    assert len(marked) == 1 and ".down" in marked[0]
    assert "96.4 %" in marked[0] and "█████████▋" in marked[0] and "within its block" in marked[0]
    assert "patched" not in str(blames.planted())


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160])
def test_a_narrow_terminal_keeps_the_share_and_says_what_it_leaves_out(width: int) -> None:
    shown = on_a_terminal(blames.planted(), width)
    lines = shown.splitlines()
    head = line_of(shown, "layer  ")
    assert "share" in head
    assert all(len(line) <= width for line in lines)
    assert re.search(r"►.*\.down.*96\.4 %", shown)
    left = [t for t in ("type", "made here", "accumulated", "handed", "note") if t not in head]
    assert bool(left) == ("No room for: " in shown)
    if left:
        said = " ".join(shown[shown.index("No room for: ") :].split())
        for title in left:
            assert title in said.split(". Widen")[0]


def test_nothing_is_coloured_without_colour() -> None:
    assert "\x1b[1;31m" in on_a_terminal(blames.planted(), 120, colour=True)
    assert "\x1b[1;31m" not in on_a_terminal(blames.planted(), 120)
    assert "\x1b" not in str(blames.planted())


def test_a_long_model_shows_the_largest_shares_and_counts_the_rest() -> None:
    blame = blames.even(90)
    shown = blame_text(blame)
    listed = re.findall(r"^model\.layers\.(\d+) ", shown, re.MULTILINE)
    assert len(listed) == MOST
    assert [int(at) for at in listed] == sorted(int(at) for at in listed)
    assert all(int(at) % 2 == 0 for at in listed)  # those with the larger share
    assert "50 layers with no larger share are left out" in shown and "--all" in shown
    whole = blame_text(blame, full=True)
    assert len(re.findall(r"^model\.layers\.", whole, re.MULTILINE)) == 90
    assert "left out" not in whole
    assert blame_table(blame).row_count == 90


def test_what_is_shown_of_a_long_model_stands_below_what_holds_it() -> None:
    rows = rows_of(blames.planted())
    few = most_telling(rows, 3)
    assert [row.name for row in few] == ["blocks.4", ".mlp", ".down"]
    assert few[-1].culprit
    assert most_telling(rows, 100) == rows


def test_a_long_model_with_one_culprit_shows_what_is_around_it() -> None:
    rows = [blames.layer(f"layers.{at}", float(at == 60), 0.1 * (at == 60)) for at in range(90)]
    shown = str(replace(blames.even(), layers=tuple(rows), culprit="layers.60", share=1.0))
    listed = [int(at) for at in re.findall(r"layers\.(\d+) +Block", shown)]
    assert listed == list(range(48, 73))
    assert "65 layers with no larger share are left out" in shown


def test_no_row_is_lost_or_doubled_whatever_the_parents_say() -> None:
    rows = rows_of(blames.messy(), full_names=True)
    named = [row.layer.layer for row in rows]
    assert sorted(named) == sorted(row.layer for row in blames.messy().layers)


def test_what_comes_in_outside_the_chain_is_said() -> None:
    assert "Outside the chain of layers: 1.8 % behind its last one." in str(blames.planted())
    shown = str(blames.messy())
    assert "-10.0 % before its first layer, 20.0 % behind its last one, 30.0 % beside it" in shown
    assert "Outside" not in str(blames.even())


def test_hostile_names_drive_no_terminal_and_undefined_numbers_are_dashes() -> None:
    shown = on_a_terminal(blames.messy(), 400)
    assert "line�break���" in shown
    assert "\udcff" not in shown and "\u202e" not in shown
    assert "warning: Beware of <this>." in shown
    unknown = line_of(shown, "nothing known").split()
    assert unknown[2:] == ["-"] * 5
    assert "cannot be run alone: <b>past</b>" in line_of(shown, "alone")
    assert "rounding; inferred" in line_of(shown, "inferred")
    assert "inf at the output.logits of <head>" in shown


def test_nothing_to_blame_is_said_without_shares() -> None:
    shown = str(blames.same())
    assert blames.same().sentence == shown.splitlines()[0]
    assert "%" not in shown and "Ran the model 1 time (at most 9)." in shown


@pytest.mark.parametrize(
    ("share", "said", "drawn"),
    [
        (math.nan, "-", ""),
        (0.0, "0 %", ""),
        (1e-5, "<0.1 %", "▏"),
        (-1e-5, "-<0.1 %", ""),
        (0.5, "50.0 %", "█████"),
        (1.0, "100.0 %", "██████████"),
        (1.25, "125.0 %", "██████████"),
        (-0.25, "-25.0 %", ""),
        (40.0, ">1000 %", "██████████"),
        (-math.inf, "<-1000 %", ""),
    ],
)
def test_shares_in_words_and_bars(share: float, said: str, drawn: str) -> None:
    assert percent(share) == said
    assert bar(share) == drawn
