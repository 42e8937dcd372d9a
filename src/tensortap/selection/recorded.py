"""Which layers of a recording: the language of `record --layers`, on names instead of modules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..errors import OptionError, SelectionError

if TYPE_CHECKING:
    from ..recording.reader import Layer, Record, Recording
    from ..recording.schema import Port

__all__ = ["choose_layers", "choose_port", "choose_records", "find_layer"]


def choose_layers(recording: Recording, patterns: Sequence[str]) -> list[str]:
    """The recorded layers that the patterns name, in order of execution; no pattern means all."""
    from ..selection.patterns import split

    wanted = [part for text in patterns for part in split(text)]
    if not wanted:
        return recording.layers
    includes = [p for p in wanted if not p.startswith("!")] or ["all"]
    excludes = [p[1:].strip() for p in wanted if p.startswith("!")]
    chosen = {name for p in includes for name in _matching(recording, p)}
    chosen -= {name for p in excludes for name in _matching(recording, p)}
    if not chosen:
        raise SelectionError(
            f"Nothing is left to show: {', '.join(repr(p) for p in patterns)} excludes every layer "
            "that it selects."
        )
    return [name for name in recording.layers if name in chosen]


def _matching(recording: Recording, pattern: str) -> list[str]:
    layers = recording.layers
    if pattern in recording:
        return [recording.resolve(pattern)]
    structure = recording.manifest.structure
    blocks = [name for name in structure.blocks if name in layers]
    words: dict[str, list[str]] = {
        "all": layers,
        "leaves": [n for n in layers if n and not any(o.startswith(f"{n}.") for o in layers)],
        "blocks": blocks,
        "first": blocks[:1],
        "last": blocks[-1:],
        "embedding": [n for n in layers if n == structure.embedding],
        "final_norm": [n for n in layers if n == structure.final_norm],
    }
    found = words[pattern] if pattern in words else _patterned(recording, pattern)
    if not found:
        raise _no_match(recording, pattern)
    return found


def _patterned(recording: Recording, pattern: str) -> list[str]:
    from torch import nn

    from ..selection.patterns import matcher
    from ..selection.sites import Site

    test = matcher(pattern, [*recording.layers, *recording.aliases])
    found = []
    for name, layer in recording.items():
        names = (name,) if layer.alias is None else (name, layer.alias)
        if test(Site(name, nn.Identity(), layer.type, names)):
            found.append(name)
    return found


def _no_match(recording: Recording, pattern: str) -> SelectionError:
    try:
        recording.resolve(pattern)
    except SelectionError as error:
        return error
    return SelectionError(f"No layer of {recording.path} matches '{pattern}'.")


def find_layer(recording: Recording, name: str) -> Layer:
    """A layer by name or alias; the root module, which has no name, also as `(root)`."""
    return recording["" if name == "(root)" and name not in recording else name]


def choose_port(name: str | None) -> Port | None:
    """A port by its name, or a sentence that lists them."""
    from ..recording.schema import PORTS

    if name is None:
        return None
    for port in PORTS:
        if name == port:
            return port
    raise OptionError(f"There is no port '{name}'. The ports are: {', '.join(PORTS)}.")


def choose_records(
    records: Iterable[Record],
    *,
    port: str | None = None,
    leaf: str | None = None,
    epoch: int | None = None,
    batch: int | None = None,
    call: int | None = None,
) -> list[Record]:
    """The records that fit; a wish that nothing fits is said with what there is."""
    wishes = {"port": port, "leaf": leaf, "epoch": epoch, "batch": batch, "call": call}
    left = list(records)
    for field, value in wishes.items():
        if value is None:
            continue
        fitting = [record for record in left if getattr(record, field) == value]
        if not fitting and left:
            there = sorted({getattr(record, field) for record in left})
            shown = ", ".join(str(item) or "''" for item in there[:10])
            more = ", …" if len(there) > 10 else ""
            raise OptionError(f"There is no {field} {value!r} here, only: {shown}{more}.")
        left = fitting
    return left
