"""A replay in the terminal: the layer in full, and the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import text
from .console import plain, written
from .layer_comparison import layer_screen

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from ..comparing.replay import Replay

__all__ = ["print_replay", "replay_screen", "replay_text"]


def replay_screen(replay: Replay, *, width: int | None = None) -> Text:
    """The screen of the layer, as a comparison shows it."""
    return layer_screen(replay.comparison, replay.row, width=width)


def print_replay(console: Console, replay: Replay, *, notes: bool = False) -> None:
    """The numbers first, the answer last."""
    console.print(
        f"reference {text.clean(replay.run)} · live {text.clean(replay.target)}", style="dim"
    )
    console.print(replay_screen(replay, width=console.width))
    if notes:
        for note in replay.notes:
            console.print(f"note: {text.clean(note)}", style="dim")
    console.print(text.clean(replay.sentence), style="bold green" if replay.same else "bold red")


def replay_text(replay: Replay) -> str:
    """All of it as plain text: what `print(result)` shows."""
    console = plain()
    print_replay(console, replay, notes=True)
    return written(console)
