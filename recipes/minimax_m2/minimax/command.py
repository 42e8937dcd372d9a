"""How a command of this folder is started, and how it ends: its options and its exit code."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from . import HERE

__all__ = ["COMPILED", "DONE", "TROUBLE", "leave", "model_options", "note", "parser"]

DONE, TROUBLE = 0, 2
TINY = "TENSORTAP_TINY"
COMPILED = HERE / "traced_model"
_NEEDED = ("tensortap", "torch", "transformers", "numpy", "safetensors", "typer")


def note(text: str) -> None:
    """Progress, or something worth knowing, on stderr."""
    print(text, file=sys.stderr, flush=True)


def leave(command: Callable[[], int]) -> NoReturn:
    """Run a command and leave with its exit code; trouble is a sentence."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:  # a terminal that cannot show a letter gets an escape for it
            reconfigure(errors="backslashreplace")
    try:
        import typer

        from tensortap.cli.common import guarded

        try:
            guarded(command)()
        except typer.Exit as left:
            sys.exit(left.exit_code)
    except ModuleNotFoundError as error:
        package = (error.name or "tensortap").partition(".")[0]
        if package not in _NEEDED:
            traceback.print_exc()
        else:
            note(f"{package} is not installed. Install it with: pip install 'tensortap[hf]'")
        sys.exit(TROUBLE)
    except Exception:  # an error of ours: Python's own exit code would say that something differs
        traceback.print_exc()
        sys.exit(TROUBLE)
    sys.exit(DONE)


def parser(description: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        description=(description or "").partition("\n")[0], allow_abbrev=False
    )


def model_options(made: argparse.ArgumentParser, *, output: Path) -> None:
    """What says which model runs on what, the same for both ways of running it."""
    made.add_argument(
        "--prompt", metavar="TEXT", help="what the model reads; cut or padded to --seq-len"
    )
    made.add_argument("--seq-len", type=_whole, metavar="N", help="tokens (default: 128)")
    made.add_argument(
        "--output-dir",
        type=Path,
        default=output,
        metavar="DIR",
        help=f"where the .pt files go; the recording goes beside it (default: {_shown(output)})",
    )
    made.add_argument(
        "--model-path",
        type=Path,
        metavar="DIR",
        help="a local checkpoint, safetensors (default: a small model, seeded random weights)",
    )
    made.add_argument(
        "--seed", type=_seed, default=0, metavar="N", help="of the random weights (default: 0)"
    )
    made.add_argument(
        "--tiny",
        action="store_true",
        default=os.environ.get(TINY, "") not in ("", "0"),
        help=f"an even smaller model, of 62 layers too; {TINY}=1 says the same",
    )


def _shown(path: Path) -> str:
    return str(path.relative_to(HERE)) if path.is_relative_to(HERE) else str(path)


def _whole(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1 << 20:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 to {1 << 20}")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 1 << 63:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0")
    return int(text)
