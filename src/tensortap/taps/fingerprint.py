"""A short fingerprint of each layer's own weights, so that two runs can tell whether they differ.

A few values of each tensor are read, so a model of any size costs next to nothing. Equal
fingerprints do not prove equal weights; different ones prove different weights.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

__all__ = ["fingerprints"]

_VALUES = 64  # of each tensor
_MOST = 4096  # layers with weights; of more, nothing is said
_PLAIN = (nn.Parameter, Tensor)


def fingerprints(model: nn.Module) -> dict[str, str]:
    """For each layer that owns weights 16 letters: 8 of its values, 8 of them rounded to bfloat16.

    The second half is the same for a model in float32 and its copy in bfloat16. Layers whose
    tensors cannot be read as they stand (on no device, distributed, packed) are left out.
    """
    found: dict[str, str] = {}
    owners = [(name, module) for name, module in model.named_modules() if _own(module)]
    if len(owners) > _MOST:
        return found
    for name, module in owners:
        made = _fingerprint(_own(module))
        if made:
            found[name] = made
    return found


def _fingerprint(own: list[Tensor]) -> str:
    exact, rounded = hashlib.blake2b(digest_size=4), hashlib.blake2b(digest_size=4)
    if not all(type(tensor) in _PLAIN and not tensor.is_meta for tensor in own):
        return ""
    try:
        for tensor in own:
            few = _few(tensor)
            exact.update(few.view(torch.uint8).numpy().tobytes())
            coarse = few.to(torch.bfloat16) if few.is_floating_point() else few
            rounded.update(coarse.view(torch.uint8).numpy().tobytes())
    except (RuntimeError, TypeError, NotImplementedError):  # fake, packed or of no known layout
        return ""
    return exact.hexdigest() + rounded.hexdigest()


def _own(module: nn.Module) -> list[Tensor]:
    """The parameters of a module itself, and the statistics that a batch norm keeps."""
    kept = [
        buffer
        for name, buffer in module._buffers.items()
        if name in ("running_mean", "running_var")
    ]
    own = [t for t in (*module._parameters.values(), *kept) if t is not None]
    return [t for t in own if not is_lazy(t) and t.numel()]


def _few(tensor: Tensor) -> Tensor:
    """Values from all over a tensor; nothing else of it is read."""
    count, last = min(_VALUES, tensor.numel()), tensor.numel() - 1
    steps = torch.arange(count, device=tensor.device)  # whole numbers: a float may round beyond
    index = torch.unravel_index(steps * last // max(1, count - 1), tensor.shape)
    few: Tensor = tensor.detach()[index] if tensor.dim() else tensor.detach().reshape(1)
    return few.cpu().contiguous()
