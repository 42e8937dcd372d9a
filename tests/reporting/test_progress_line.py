"""How far a long command is, and how long it still takes."""

from __future__ import annotations

import time

from tensortap.reporting.progress import ProgressLine


def test_the_time_left_is_told_by_what_was_done_since_the_first() -> None:
    line = ProgressLine("Running the model")
    line(1, 11)
    assert "left" not in line._text()  # whatever came before the first one
    time.sleep(0.01)
    line(6, 11)
    assert line._text().startswith("Running the model: 6 of 11, 0 s, about 0 s left")
    line(6, None)
    assert "left" not in line._text()
