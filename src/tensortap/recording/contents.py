"""What a manifest and a segment's document may hold, by the kinds of `kinds`.

This is the one place where the content of a recording's files is judged. What has passed here has
the types and ranges that the rest of tensortap relies on. Keys that are not named here are kept as
they are and must be plain.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from .kinds import (
    LONGEST_TEXT,
    Kind,
    Unfit,
    fields,
    flag,
    items,
    mapping,
    number,
    one_of,
    or_none,
    plain,
    text,
    whole,
)

__all__ = [
    "DOCUMENT",
    "INPUTS",
    "MANIFEST_KINDS",
    "PORTS",
    "PROVENANCES",
    "TARGET",
    "Port",
    "Provenance",
]

_name = text()
_long = text(LONGEST_TEXT)
_MOST_DIMENSIONS = 64
_MOST_ELEMENTS = 1 << 50

Port = Literal[
    "input", "output", "grad_input", "grad_output", "param", "grad_param", "update", "scalar"
]
PORTS: tuple[Port, ...] = get_args(Port)
Provenance = Literal["hook", "scope", "value-name", "weight", "inferred"]
PROVENANCES: tuple[Provenance, ...] = get_args(Provenance)
"""How a layer's name is known, the surest first (docs/compiled.md)."""


def _either(first: Kind, kind: type, second: Kind) -> Kind:
    """A value of the first kind; where it is an instance of a type, of the second."""

    def check(value: Any, what: str) -> Any:
        return (second if isinstance(value, kind) else first)(value, what)

    return check


def _token_ids(value: Any, what: str, depth: int = 0) -> Any:
    """Whole numbers in lists of lists, as deep as batches of sequences go."""
    if isinstance(value, list) and depth < 4:
        return [_token_ids(item, what, depth + 1) for item in value]
    return whole(-(1 << 63))(value, f"an item of {what}")


def _shape(value: Any, what: str) -> tuple[int, ...]:
    """A shape whose tensor could exist."""
    found = items(whole(), _MOST_DIMENSIONS)(value, what)
    count = 1
    for extent in found:
        count *= max(1, extent)
    if count > _MOST_ELEMENTS:
        raise Unfit(f"{what} has more than {_MOST_ELEMENTS} elements")
    return tuple(found)


def _generation(value: Any, what: str) -> dict[str, Any]:
    """One call of `generate()`; its texts and pieces must fit its tokens."""
    found: dict[str, Any] = _GENERATION(value, what)
    tokens = found.get("tokens")
    if tokens is None:
        return {**found, "text": None, "pieces": None}
    for key in ("text", "pieces"):
        said = found.get(key)
        if said is not None and len(said) != len(tokens):
            raise Unfit(f"the '{key}' of {what} is {len(said)} rows, and its tokens {len(tokens)}")
    rows = zip(tokens, found.get("pieces") or (), strict=False)
    if any(len(row) != len(pieces) for row, pieces in rows):
        raise Unfit(f"the 'pieces' of {what} are not as many as its tokens")
    return found


_GENERATION = fields(
    {
        "epoch": whole(),
        "batch": whole(),
        "before": whole(),
        "steps": whole(),
        "sampled": flag,
        "beams": whole(),
        "prompt": or_none(items(items(whole(-(1 << 63))))),
        "prompt_length": or_none(whole()),
        "tokens": or_none(items(items(whole(-(1 << 63))))),
        "text": or_none(items(_long)),
        "pieces": or_none(items(items(_long))),
    },
    ("epoch", "batch", "before", "steps"),
)

TARGET: dict[str, Kind] = {
    "class": _long,
    "spec": or_none(_long),
    "runtime": or_none(_long),
    "file": or_none(_long),
    "absent": or_none(_long),
    "parameters": or_none(whole()),
    "dtypes": or_none(mapping(whole())),
    "config": or_none(mapping(plain)),
    "fingerprints": or_none(mapping(_name)),
    "training_effects": or_none(mapping(items(_name))),
    "grids": or_none(mapping(mapping(plain))),
}

INPUTS: dict[str, Kind] = {
    "digest": or_none(_name),
    "batches": or_none(items(_name)),
    "values": or_none(_name),
    "floats": or_none(items(_name)),
    "rounded": or_none(mapping(_name)),
    "prompt": or_none(_either(items(_long), str, _long)),
    "input_ids": or_none(_token_ids),
}

_MADE_WITH = fields(
    {
        "options": or_none(mapping(plain)),
        "files": or_none(mapping(or_none(mapping(plain)))),
        "mode_table": or_none(mapping(plain)),
    }
)

_SELECTION: dict[str, Kind] = {
    "layers": or_none(_either(items(_long), str, _long)),
    "ports": or_none(items(_name)),
    "keep": or_none(_name),
    "histograms": or_none(flag),
    "stopped_behind": or_none(_name),
    "command": or_none(_long),
    "made_with": or_none(_MADE_WITH),
    "watch": or_none(mapping(plain)),
    "monitor": or_none(mapping(plain)),
    "files": or_none(items(_long)),
    "alarms": or_none(items(mapping(plain))),
    "against": or_none(_long),
    "first_divergence": or_none(
        fields({"layer": _name, "epoch": whole(), "batch": whole(), "call": whole()})
    ),
    "stopped_at": or_none(_name),
}

MANIFEST_KINDS: dict[str, Kind] = {
    "format": whole(1),
    "status": one_of("recording", "complete", "failed"),
    "tool": _long,
    "torch": _long,
    "python": _long,
    "created": _long,
    "closed": or_none(_long),
    "device": _long,
    "mode": or_none(_name),
    "seed": or_none(whole(-(1 << 64), 1 << 64)),
    "target": fields(TARGET),
    "selection": fields(_SELECTION),
    "structure": or_none(
        fields({"blocks": items(_name), "embedding": or_none(_name), "final_norm": or_none(_name)})
    ),
    "inputs": fields(INPUTS),
    "environment": mapping(plain),
    "skipped": items(
        fields(
            {
                "layer": or_none(_name),
                "port": or_none(_name),
                "leaf": or_none(_name),
                "reason": or_none(_long),
                "count": whole(),
            }
        )
    ),
    "self_checks": items(
        fields(
            {
                "layer": or_none(_name),
                "check": _name,
                "passed": or_none(flag),
                "text": _long,
                "largest": or_none(number),
                "allowed": or_none(number),
            }
        )
    ),
    "generations": items(_generation),
    "notes": items(_long),
    "failure": or_none(_long),
    "writer": or_none(
        fields(
            {
                "host": or_none(_name),
                "space": or_none(_name),
                "pid": or_none(whole(0, 1 << 40)),
                "started": or_none(number),
                "token": or_none(_name),
            }
        )
    ),
}

_SITE = fields(
    {
        "layer": _name,
        "port": one_of(*PORTS),
        "leaf": _name,
        "alias": or_none(_name),
        "type": _name,
        "shape": _shape,
        "dtype": _name,
        "device": _name,
        "provenance": one_of(*PROVENANCES),
    },
    ("layer", "port", "leaf", "type", "shape", "dtype", "device"),
)


def _pair(value: Any, what: str) -> tuple[int, int]:
    row, length = items(whole(0, 1 << 40), 2)(value, what) if _is_pair(value) else (None, None)
    if row is None or length is None:
        raise Unfit(f"{what} is not a pair of a row and a length")
    return row, length


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2


def _as_it_is(value: Any, what: str) -> Any:
    """Rows: there may be millions of them, which are looked at all at once (`header`)."""
    if not isinstance(value, list):
        raise Unfit(f"{what} are no list")
    return value


DOCUMENT: Kind = fields(
    {
        "rank": whole(0, 1 << 31),
        "number": whole(0, 1 << 31),
        "merged": items(_name),
        "sites": items(_SITE),
        "rows": _as_it_is,
        "histograms": items(_pair),
        "sketches": items(_pair),
    },
    ("rank", "number", "sites", "rows"),
)
"""A segment's document: what is known of it, checked, and the rest as it is."""
