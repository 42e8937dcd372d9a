"""The reference's choice of experts for the tokens that chose others in a run of the candidate."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...recording.reader import Record
from ...taps.patching import cast_like

__all__ = ["same_choice"]


def same_choice(
    own: Mapping[str, torch.Tensor], known: Mapping[str, Record]
) -> dict[str, torch.Tensor]:
    """What a router returns, with the reference's experts and their values for those tokens.

    The scores of all experts stay as they are, and so does every other token.
    """
    found: dict[str, torch.Tensor] = {}
    for leaf, chosen in own.items():
        record = known.get(leaf)
        if record is None or chosen.is_floating_point() or record.shape != tuple(chosen.shape):
            continue
        wanted = cast_like(record.tensor(), chosen)
        other = (wanted != chosen).any(dim=-1)
        if not other.any():
            continue
        for name, tensor in own.items():
            beside = known.get(name)
            if beside is None or beside.shape != tuple(tensor.shape):
                continue
            if tensor.shape == chosen.shape:
                found[name] = tensor.clone()
                found[name][other] = cast_like(beside.tensor(), tensor)[other]
    return found
