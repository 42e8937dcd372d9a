"""How two tensors of one value in different layouts become views of equal shape."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Transform"]


@dataclass(frozen=True)
class Transform:
    """A change of layout, with its name for the report; both sides stay views."""

    name: str

    def reference(self, tensor: torch.Tensor) -> torch.Tensor:
        """The reference's tensor in the common layout."""
        return tensor

    def candidate(self, tensor: torch.Tensor) -> torch.Tensor:
        """The candidate's tensor in the common layout."""
        return tensor
