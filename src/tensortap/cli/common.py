"""What every verb shares: how it ends, how it prints, what it takes."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from .. import __version__
from ..errors import TapError

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
    "json_text",
    "note",
    "open_recording",
    "print_json",
    "say",
]

DONE, UNHEALTHY, TROUBLE, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 130, 141
TRACEBACK = "TENSORTAP_TRACEBACK"
_LONGEST = 6000  # letters of a sentence on the terminal

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
    """A verb whose every end has its exit code, and no traceback unless it is asked for."""

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
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except Exception as error:  # nobody's but ours: 1 would say that there is a finding
            if os.environ.get(TRACEBACK):
                raise
            _drop_stdout()
            _complain(_our_fault(error))
            code = TROUBLE
        if code:
            raise typer.Exit(code)

    return run


def _our_fault(error: Exception) -> str:
    """A bug of ours in a line: what it is, where it happened, where to tell of it."""
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())[:200]
    return (
        f"an unexpected {type(error).__name__}: {text}{at}. That is a mistake in tensortap "
        f"{__version__}, unless it comes from your own code. Please report it to {_reports()}, "
        f"with the command and the traceback that {TRACEBACK}=1 shows."
    )


def _reports() -> str:
    """Where to report a mistake: what the installed package says of itself."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        for entry in metadata.metadata("tensortap").get_all("Project-URL") or ():
            name, _, url = entry.partition(",")
            if name.strip().lower() in ("issues", "bug tracker", "tracker"):
                return str(url.strip())
    return "the tensortap authors, where you got the package from"


def _drop_stdout() -> None:
    """Let what is still buffered go nowhere, so that the interpreter does not complain at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(sentence: str) -> None:
    text = _one_line(sentence)
    if len(text) > _LONGEST:  # a name from a file may be of any length; the end says what to do
        text = f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 2 :]}"
    print(f"tensortap: {text}", file=sys.stderr)  # noqa: T201


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
    """Strict JSON on stdout: what is undefined is null, what is no letter is an escape."""
    say(json_text(data, indent=2))


def json_text(data: Any, *, indent: int | None = None) -> str:
    """Strict JSON that a terminal can be shown: control and bidi characters are escapes."""
    text = json.dumps(_strict(data), indent=indent, ensure_ascii=False, allow_nan=False)
    return _NO_LETTER.sub(_escaped, text)


# What is not ASCII; line feeds are our own: JSON has none within texts.
_NO_LETTER = re.compile(r"[^\x20-\x7e\n]")


def _escaped(found: re.Match[str]) -> str:
    letter = found[0]
    return letter if letter.isprintable() else json.dumps(letter)[1:-1]


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
    for text in dict.fromkeys(notes):
        note(text)
