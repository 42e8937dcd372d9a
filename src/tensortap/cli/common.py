"""What every verb shares: how it ends, how it prints, what it takes."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from ..errors import OptionError, TapError

if TYPE_CHECKING:
    from ..recording.reader import Recording

__all__ = [
    "BatchOption",
    "CallOption",
    "EpochOption",
    "Folder",
    "JsonOption",
    "LayersOption",
    "LeafOption",
    "OverwriteOption",
    "PartialOption",
    "PortOption",
    "guarded",
    "note",
    "open_recording",
    "parse_size",
    "print_json",
    "say",
]

DONE, UNHEALTHY, TROUBLE, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 130, 141
TRACEBACK = "TENSORTAP_TRACEBACK"

# typer before 0.12.4 does not know `X | None`.
MaybeText = Optional[str]  # noqa: UP045
MaybeInt = Optional[int]  # noqa: UP045
MaybePath = Optional[Path]  # noqa: UP045
MaybeList = Optional[list[str]]  # noqa: UP045

Folder = Annotated[str, typer.Argument(metavar="DIR", help="The recording's folder or URL.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
LayersOption = Annotated[
    MaybeList,
    typer.Option(
        "--layers",
        "-l",
        metavar="PATTERN",
        help="Which layers: a name, glob, range {0,4-7}, re:…, type:…, or all, leaves, blocks, "
        "first, last, embedding, final_norm; ! excludes. Repeatable.",
    ),
]
PortOption = Annotated[
    MaybeText,
    typer.Option(
        "--port",
        help="input, output, grad_input, grad_output; of a training run also param, grad_param, "
        "update, scalar.",
    ),
]
LeafOption = Annotated[
    MaybeText, typer.Option("--leaf", help="The leaf of a nested output, as [0] or .logits.")
]
EpochOption = Annotated[MaybeInt, typer.Option("--epoch", help="The epoch, from 0.")]
BatchOption = Annotated[MaybeInt, typer.Option("--batch", help="The batch, from 0.")]
CallOption = Annotated[MaybeInt, typer.Option("--call", help="The call in a batch, from 0.")]
PartialOption = Annotated[
    bool, typer.Option("--partial", help="Read what is whole of a damaged recording.")
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]


def guarded(verb: Callable[..., int | None]) -> Callable[..., None]:
    """A verb whose every end has its exit code, and no traceback unless it is a bug of ours."""

    @functools.wraps(verb)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            code = verb(*args, **kwargs)
            sys.stdout.flush()
        except TapError as error:
            if os.environ.get(TRACEBACK):
                raise
            _complain(str(error))
            code = TROUBLE
        except KeyboardInterrupt:
            _complain("interrupted.")
            code = INTERRUPTED
        except BrokenPipeError:  # whoever read our output has left
            _drop_stdout()
            code = BROKEN_PIPE
        except OSError as error:  # the machine's trouble: no permission, a full disk
            if os.environ.get(TRACEBACK):
                raise
            where = f"{error.filename}: " if error.filename else ""
            _drop_stdout()
            _complain(f"{where}{error.strerror or error}.")
            code = TROUBLE
        if code:
            raise typer.Exit(code)

    return run


def _drop_stdout() -> None:
    """Let what is still buffered go nowhere, so that the interpreter does not complain at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(sentence: str) -> None:
    print(f"tensortap: {_one_line(sentence)}", file=sys.stderr)  # noqa: T201


def _one_line(text: str) -> str:
    """One printable line, whatever names from a file are in it."""
    return "".join(c if c.isprintable() else "�" for c in " ".join(text.split()))


def note(text: str) -> None:
    """Something worth knowing, on stderr."""
    print(f"note: {_one_line(text)}", file=sys.stderr)  # noqa: T201


def say(text: str) -> None:
    """A result, on stdout."""
    print(text)  # noqa: T201


def print_json(data: Any) -> None:
    """Strict JSON on stdout: what is undefined is null."""
    say(json.dumps(_strict(data), indent=2, ensure_ascii=False, allow_nan=False))


def _strict(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    return value


def open_recording(path: str, *, partial: bool = False) -> Recording:
    """The recording at a path."""
    from ..recording import reader

    return reader.open(path, partial=partial)


def print_notes(notes: Iterable[str]) -> None:
    for text in notes:
        note(text)


_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(b?)\s*", re.IGNORECASE)


def parse_size(text: str) -> int:
    """`1GiB`, `512 MB`, `64M` or plain bytes."""
    match = _SIZE.fullmatch(text)
    if match is None or (match[3] and not match[2]):
        raise OptionError(f"{text!r} is no size. Write it as 1GiB, 512MB, or a number of bytes.")
    power = " kmgt".index(match[2].lower() or " ")
    base = 1000 if match[4] and not match[3] else 1024
    return int(float(match[1]) * base**power)
