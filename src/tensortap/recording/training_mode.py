"""What of a recorded model depended on training mode, as the manifest has it, and in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .schema import Manifest

__all__ = ["EFFECTS", "effects_in_words", "effects_of", "training_note"]

EFFECTS = "training_effects"
"""The key of a manifest's target: what training mode does, and the layers that do it."""

_DOES = {
    "batch statistics": (
        "normalises by the statistics of its batch",
        "normalise by the statistics of their batch",
    ),
    "dropout": ("drops values at random", "drop values at random"),
    "noise": ("draws random values", "draw random values"),
}
_SHOWN = 3


def effects_of(manifest: Manifest) -> dict[str, list[str]]:
    """The layers that did something else than at inference, by what they did."""
    told = manifest.target.get(EFFECTS)
    if not isinstance(told, Mapping):
        return {}
    return {
        str(what): [str(name) for name in names]
        for what, names in told.items()
        if isinstance(names, list) and names
    }


def effects_in_words(effects: Mapping[str, Sequence[str]]) -> str:
    """What the layers do, in a clause."""
    return " and ".join(_one(what, names) for what, names in effects.items())


def _one(what: str, names: Sequence[str]) -> str:
    shown = ", ".join(f"'{name}'" if name else "the model itself" for name in names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    single, many = _DOES.get(what, (f"has {what}", f"have {what}"))
    if len(names) == 1:
        return f"1 layer {single} ({shown})"
    return f"{len(names)} layers {many} ({shown}{more})"


def training_note(manifest: Manifest) -> str | None:
    """That a model ran in training mode, where anything in it depends on that."""
    effects = effects_of(manifest)
    if not effects:
        return None
    return (
        f"The model was recorded in training mode: {effects_in_words(effects)}. For what it "
        "computes at inference, record it with --eval (model.eval() in Python)."
    )
