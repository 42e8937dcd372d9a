"""Every mode starts from the same state, whichever ran before it and in whichever process.

What a model draws at random, and torch's defaults that its function may change, would otherwise
make the modes of one process differ from each other, and from those of a process each.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

__all__ = ["Surroundings", "cuda_in_use"]


@dataclass(frozen=True)
class Surroundings:
    """The random states and torch's defaults at one moment; can be pickled."""

    torch_state: bytes
    cuda_states: tuple[bytes, ...] | None
    python_state: Any
    numpy_state: Any
    dtype: torch.dtype
    matmul: str
    deterministic: bool
    warn_only: bool
    grad: bool

    @classmethod
    def now(cls) -> Surroundings:
        cuda = None
        if cuda_in_use():
            cuda = tuple(_bytes(state) for state in torch.cuda.get_rng_state_all())
        return cls(
            torch_state=_bytes(torch.get_rng_state()),
            cuda_states=cuda,
            python_state=random.getstate(),
            numpy_state=np.random.get_state(),
            dtype=torch.get_default_dtype(),
            matmul=torch.get_float32_matmul_precision(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            grad=torch.is_grad_enabled(),
        )

    def restore(self, seed: int | None = None) -> None:
        """Put everything back; a `seed` that the user gave then counts for torch."""
        torch.set_default_dtype(self.dtype)
        torch.set_float32_matmul_precision(self.matmul)
        now = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        if now != (self.deterministic, self.warn_only):  # setting it imports torch's compiler
            torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warn_only)
        torch.set_grad_enabled(self.grad)
        random.setstate(self.python_state)
        np.random.set_state(self.numpy_state)
        torch.set_rng_state(_tensor(self.torch_state))
        if cuda_in_use():
            if self.cuda_states is None:  # it was not in use yet: as torch seeds it when it is
                torch.cuda.manual_seed_all(torch.initial_seed())
            else:
                torch.cuda.set_rng_state_all([_tensor(state) for state in self.cuda_states])
        if seed is not None:
            torch.manual_seed(seed)


def cuda_in_use() -> bool:
    """Whether this process has touched a GPU; asking does not."""
    cuda: Any = torch.cuda  # untyped in part
    return bool(cuda.is_available() and cuda.is_initialized())


def _bytes(state: torch.Tensor) -> bytes:
    return state.cpu().numpy().tobytes()


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
