"""Leaves run alone on the reference's inputs, inside the candidate's own run.

A leaf needs nothing but its arguments, so it can be tried at the moment of its call: what it makes
of good inputs costs one forward pass for all leaves together. It tells which of them do exactly
what the reference does, and how large an error is usual in this candidate.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...selection.sites import is_leaf
from ...taps.patching import leaves_of, leaves_of_call, put_call

__all__ = ["mark_ours", "run_alone", "runs_alone"]

_OURS = "_tensortap_blame"
_LISTENING = tuple(f"{__name__.partition('.')[0]}.{part}." for part in ("taps", "monitoring"))


def mark_ours(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Tell a hook of ours from those of the user, which belong to what a layer does."""
    setattr(hook, _OURS, True)
    return hook


def runs_alone(module: nn.Module) -> bool:
    """Whether a module is a leaf that keeps nothing of a call and is not random."""
    return is_leaf(module) and not module.training


def run_alone(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    wanted: dict[str, torch.Tensor],
) -> dict[str, torch.Tensor] | None:
    """What a leaf makes of the reference's inputs; None where they are not all there."""
    own = leaves_of_call(module, args, kwargs)
    if any(t.is_floating_point() and leaf not in wanted for leaf, t in own.items()):
        return None
    with contextlib.suppress(Exception):  # a user's layer can raise anything
        new_args, new_kwargs = put_call(module, args, kwargs, wanted)
        new_args, new_kwargs = _after_hooks(module, new_args, new_kwargs)
        return leaves_of(module.forward(*new_args, **new_kwargs))
    return None


def _listens(hook: Any) -> bool:
    """Whether a hook is a recorder's, which would take the trial for a call of the layer."""
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith(_LISTENING)


def _after_hooks(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the user's own hooks make of the arguments: a quantiser may be one."""
    for number, hook in module._forward_pre_hooks.items():
        if hasattr(hook, _OURS) or _listens(hook):
            continue
        if number in module._forward_pre_hooks_with_kwargs:
            changed = hook(module, args, kwargs)
            args, kwargs = (args, kwargs) if changed is None else changed
        else:
            made = hook(module, args)
            if made is not None:
                args = made if isinstance(made, tuple) else (made,)
    return args, kwargs
