"""What a layer was given that is not a value to compute with: masks, ids, and what is not there.

Masks tell which tokens are looked at, and ids which row of a table is taken. What matters of them
is not how large a difference is, but where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .cause import Cause
from .fits import ranges
from .lookup import moved_ids

__all__ = [
    "allowed_by",
    "argument_cause",
    "hides_nothing",
    "ids_cause",
    "mask_cause",
    "missing_cause",
    "places_words",
]

_LOW = -50.0  # added to a score, it leaves nothing
_MOST_NAMED = 4
_STATES = ("hx", "state", "states", "hidden", "cx", "h", "past")


def allowed_by(tensor: Tensor, leaf: str = "") -> Tensor | None:
    """Where a mask lets look, as booleans; None of what is no mask.

    A mask is of booleans, of ones and zeros under a name that says so, or of zeros and of numbers
    so low that nothing is left after a softmax.
    """
    if not tensor.numel():
        return None
    if tensor.dtype == torch.bool:
        hidden = "padding_mask" in leaf  # in torch, true is what is left out
        return ~tensor if hidden else tensor
    if not tensor.is_floating_point():
        named = "mask" in leaf or not _name(leaf)
        return tensor.bool() if named and bool(((tensor == 0) | (tensor == 1)).all()) else None
    low = tensor <= _LOW
    if bool((low | (tensor == 0)).all()) and bool(low.any()):
        return ~low
    if "mask" in leaf and bool(((tensor == 0) | (tensor == 1)).all()):
        return tensor.bool() if bool(tensor.any()) else torch.ones_like(tensor, dtype=torch.bool)
    return None


def hides_nothing(tensor: Tensor, leaf: str = "") -> bool:
    """Whether a mask lets look at all there is, so that nothing is lost without it."""
    allowed = allowed_by(tensor, leaf)
    if allowed is None:
        return tensor.is_floating_point() and "mask" in leaf and not bool((tensor != 0).any())
    return bool(allowed.all())


def mask_cause(reference: Tensor, candidate: Tensor | None, leaf: str = "") -> Cause | None:
    """What another mask lets look at, or hides; without a candidate, a mask that is not given.

    None where the reference is no mask.
    """
    ours = allowed_by(reference, leaf)
    if ours is None:
        return None
    name = _name(leaf)
    if candidate is None:
        text = f"the mask{f' {name}' if name else ''} is not given"
        return Cause("mask", 1.0, f"{text}: {_masked_words(ours)}", {"argument": name})
    theirs = allowed_by(candidate, leaf)
    if theirs is None and candidate.is_floating_point() and not bool((candidate != 0).any()):
        theirs = torch.ones_like(candidate, dtype=torch.bool)
    if theirs is None or ours.shape != theirs.shape:
        return None
    words = [
        f"{places_words(part)} {what}"
        for part, what in (
            (theirs & ~ours, "should be hidden and are looked at"),
            (ours & ~theirs, "should be looked at and are hidden"),
        )
        if bool(part.any())
    ]
    if not words:
        return None
    return Cause("mask", 1.0, f"another mask: {' and '.join(words)}", {"argument": name})


def missing_cause(reference: Tensor, leaf: str) -> Cause:
    """What it means that an argument is not given, or is None."""
    mask = mask_cause(reference, None, leaf)
    if mask is not None:
        return mask
    name = _name(leaf)
    shape = list(reference.shape)
    state = " (a state is not carried)" if name in _STATES else ""
    text = f"{name or 'an argument'} is not given{state}: the reference's has the shape {shape}"
    return Cause("missing", 1.0, text, {"argument": name})


def argument_cause(reference: Tensor, candidate: Tensor, leaf: str = "") -> Cause | None:
    """What differs in a mask or in ids that a layer was given; None of values to compute with."""
    mask = mask_cause(reference, candidate, leaf)
    whole = not (reference.is_floating_point() or reference.is_complex())
    return ids_cause(reference, candidate, leaf) if mask is None and whole else mask


def ids_cause(reference: Tensor, candidate: Tensor, leaf: str = "") -> Cause | None:
    """How whole numbers differ: other ids, the same at other places, masks; None of the same."""
    if reference.shape != candidate.shape or torch.equal(reference, candidate):
        return None
    mask = mask_cause(reference, candidate, leaf)
    if mask is not None:
        return mask
    ours, theirs = (side.detach().cpu() for side in (reference, candidate))
    for axis in range(ours.dim()):
        size, name = ours.shape[axis], _axis_name(axis, ours.dim())
        if size > 1 and torch.equal(ours.flip(axis), theirs):
            return _ids("permutation", f"the ids have their {name}s reversed")
        for step in (1, -1):
            if size > 2 and torch.equal(ours.roll(step, axis), theirs):
                return _ids("offset", f"the ids are rolled by {step} {name}")
    steps = set((theirs.long() - ours.long()).reshape(-1).tolist())
    if len(steps) == 1:
        step = steps.pop()
        text = f"each id is {abs(step)} {'more' if step > 0 else 'less'}"
        return _ids("offset", text, {"offset": step, "of": "ids"})
    moved = moved_ids(ours, theirs)
    if moved is not None:
        return Cause(moved.kind, 1.0, moved.text, dict(moved.details))
    wrong = (ours != theirs).reshape(-1)
    return _ids("ids", f"{int(wrong.sum())} of {wrong.numel()} ids are others")


def _ids(kind: str, text: str, details: dict[str, Any] | None = None) -> Cause:
    return Cause(kind, 1.0, text, details or {"of": "ids"})


def _name(leaf: str) -> str:
    """An argument's name out of its leaf; empty where that tells its place alone."""
    name = leaf.strip("[]'\"")
    return "" if name.replace("][", "").isdigit() else name


def _axis_name(axis: int, axes: int) -> str:
    return "token" if axis == axes - 1 else "sample" if axis == 0 else "place"


def _masked_words(allowed: Tensor) -> str:
    hidden = ~allowed
    if not bool(hidden.any()):
        return "in the reference it hides nothing"
    return f"in the reference it hides {places_words(hidden)}"


def places_words(places: Tensor) -> str:
    """The places of a mask in words: tokens of samples, what comes later, or how many."""
    if places.dim() >= 2 and places.shape[-1] == places.shape[-2] and places.shape[-1] > 1:
        after = torch.ones(places.shape[-2:], dtype=torch.bool).triu(1)
        flat = places.reshape(-1, *after.shape)
        if bool((flat == after).all()):
            return "the tokens that come after"
        rest = flat & ~after
        later = bool((flat | ~after).all())
        keys = rest.any(1)
        if bool((rest == (keys[:, None, :] & ~after)).all()) or bool((flat == keys[:, None]).all()):
            words = _tokens_words(_by_sample(keys, places.shape[0]))
            return f"{words} and the tokens that come after" if later else words
        before = ~after & ~torch.eye(after.shape[0], dtype=torch.bool)
        if bool((flat & ~before == (after if later else False)).all()) and bool(rest.any()):
            return "tokens that are far away"
    elif places.dim() >= 2:
        rows = places.reshape(places.shape[0], -1, places.shape[-1])
        if bool((rows == rows[:, :1]).all()):
            return _tokens_words(rows[:, 0])
    elif places.dim() == 1:
        return _tokens_words(places[None])
    return f"{int(places.sum())} of {places.numel()} places"


def _by_sample(keys: Tensor, samples: int) -> Tensor:
    return keys.reshape(samples, -1, keys.shape[-1]).any(1)


def _tokens_words(keys: Tensor) -> str:
    """The tokens of each sample that are meant, as padding is."""
    rows: Sequence[tuple[int, list[int]]] = [
        (sample, row.nonzero()[:, 0].tolist()) for sample, row in enumerate(keys) if bool(row.any())
    ]
    if not rows:
        return "no token"
    named = [
        f"token{'s' if len(tokens) > 1 else ''} {ranges(tokens)} of sample {sample}"
        for sample, tokens in rows[:_MOST_NAMED]
    ]
    more = f" and of {len(rows) - _MOST_NAMED} more samples" if len(rows) > _MOST_NAMED else ""
    last = all(
        tokens[-1] == keys.shape[1] - 1 and len(tokens) < keys.shape[1] for _, tokens in rows
    )
    return f"{', '.join(named)}{more}{' (padding)' if last else ''}"
