"""`tensortap demo --export`: the built-in model as compiled files, and its inputs."""

from __future__ import annotations

import time
from pathlib import Path

from ..errors import OptionError
from .common import print_json, print_notes, say

_DEFAULT = "models"


def demo_export(output: str | None, overwrite: bool, json: bool) -> None:
    """Write the files, and say what can be done with them."""
    from ..demo_export import INPUTS, export_demo

    folder = Path(output or _DEFAULT)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())) and not overwrite:
        raise OptionError(
            f"{folder} is there already and not empty. Choose another folder with -o DIR, or write "
            "into it with --overwrite."
        )
    start = time.monotonic()
    made, notes = export_demo(folder)
    seconds = time.monotonic() - start
    files = [str(folder / name) for name in made]
    if json:
        print_json({"path": str(folder), "files": files, "seconds": seconds, "notes": notes})
    else:
        say(f"Wrote the built-in model as {len(files) - 1} compiled files, {seconds:.1f} s:")
        for name in files:
            say(f"  {name}")
        say("\nTry next:")
        for line in (
            "tensortap record tensortap.demo:build -o runs/eager --layers all",
            f"tensortap record {files[1]} -o runs/script --layers all --inputs-from "
            f"{folder / INPUTS}",
            "tensortap compare runs/eager runs/script",
        ):
            say(f"  {line}")
    print_notes(notes)
