"""Every mode starts from the same state, whichever ran before it and in whichever process.

What a model draws at random, and what its function may set for the whole process, would otherwise
make the modes of one process differ from each other, and from those of a process each.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.modules import module as nn_module

__all__ = ["Surroundings", "begin_from", "cuda_in_use"]

_FLAGS = (
    "cudnn.enabled",
    "cudnn.benchmark",
    "cudnn.deterministic",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "mkldnn.enabled",
    "mkldnn.deterministic",
)
_PRECISIONS = (
    "fp32_precision",
    "cuda.matmul.fp32_precision",
    "cudnn.fp32_precision",
    "cudnn.conv.fp32_precision",
    "cudnn.rnn.fp32_precision",
    "mkldnn.fp32_precision",
    "mkldnn.matmul.fp32_precision",
    "mkldnn.conv.fp32_precision",
    "mkldnn.rnn.fp32_precision",
)
_OLDER_PRECISIONS = ("cuda.matmul.allow_tf32", "cudnn.allow_tf32")  # before torch 2.9
_AUTOCAST = ("cpu", "cuda")


@dataclass(frozen=True)
class Surroundings:
    """What one mode could leave behind for the next, at one moment.

    `environment`, `threads` and `hooks` are this process's own: None leaves them alone.
    """

    random: _Random
    folder: str | None
    dtype: torch.dtype
    device: torch.device
    matmul: str | None
    flags: Mapping[str, Any]
    deterministic: bool
    warn_only: bool
    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    threads: int | None
    environment: Mapping[str, str] | None
    hooks: Mapping[str, Mapping[Any, Any]] | None

    @classmethod
    def now(cls) -> Surroundings:
        return cls(
            random=_Random.now(),
            folder=_folder(),
            dtype=torch.get_default_dtype(),
            device=torch.get_default_device(),
            matmul=_matmul(),
            flags=_flags(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            grad=torch.is_grad_enabled(),
            autocast=_autocast(),
            autocast_cache=torch.is_autocast_cache_enabled(),
            threads=torch.get_num_threads(),
            environment=dict(os.environ),
            hooks={name: dict(hooks) for name, hooks in _hooks().items()},
        )

    def imported(self) -> Surroundings:
        """The same behind the target's import, which has the effect that an import has.

        Only what is drawn at random and the folder, from which the target's file is found again,
        are as they were before it.
        """
        return replace(Surroundings.now(), random=self.random, folder=self.folder)

    def drawn_from(self, seed: int | None) -> str:
        """What torch's numbers are drawn from when a mode begins: a seed, or a state."""
        if seed is not None:
            return f"seed {seed}"
        return hashlib.sha256(self.random.torch_state).hexdigest()[:16]

    def elsewhere(self) -> Surroundings:
        """For another process, which is given its environment and its threads; can be pickled."""
        return replace(self, threads=None, environment=None, hooks=None)

    def restore(self, seed: int | None = None) -> None:
        """Put everything back; a `seed` that the user gave then counts for torch."""
        if self.folder is not None and _folder() != self.folder:
            with contextlib.suppress(OSError):  # somebody has removed it
                os.chdir(self.folder)
        _set_environment(self.environment)
        _set_hooks(self.hooks)
        _set_device(self.device)
        torch.set_default_dtype(self.dtype)
        if self.matmul is not None and _matmul() != self.matmul:
            torch.set_float32_matmul_precision(self.matmul)
        _set_flags(self.flags)
        now = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        if now != (self.deterministic, self.warn_only):  # setting it imports torch's compiler
            torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warn_only)
        torch.set_grad_enabled(self.grad)
        for kind, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.autocast_cache)
        torch.clear_autocast_cache()
        if self.threads is not None and torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        self.random.restore()
        if seed is not None:
            torch.manual_seed(seed)


@dataclass(frozen=True)
class _Random:
    """The states of all that numbers are drawn from."""

    torch_state: bytes
    cuda_states: tuple[bytes, ...] | None
    python_state: Any
    numpy_state: Any

    @classmethod
    def now(cls) -> _Random:
        cuda = None
        if cuda_in_use():
            cuda = tuple(_bytes(state) for state in torch.cuda.get_rng_state_all())
        return cls(_bytes(torch.get_rng_state()), cuda, random.getstate(), np.random.get_state())

    def restore(self) -> None:
        random.setstate(self.python_state)
        np.random.set_state(self.numpy_state)
        torch.set_rng_state(_tensor(self.torch_state))
        if not cuda_in_use():
            return
        if self.cuda_states is None:  # it was not in use yet: as torch seeds it when it is
            torch.cuda.manual_seed_all(torch.initial_seed())
        else:
            torch.cuda.set_rng_state_all([_tensor(state) for state in self.cuda_states])


def begin_from(seed: int | None) -> None:
    """Begin a command at a known random state: what it makes, another command can go on with."""
    number = 0 if seed is None else seed
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


def cuda_in_use() -> bool:
    """Whether this process has touched a GPU; asking does not."""
    cuda: Any = torch.cuda  # untyped in part
    return bool(cuda.is_available() and cuda.is_initialized())


def _folder() -> str | None:
    try:
        return str(Path.cwd())
    except OSError:  # it is there no more
        return None


def _matmul() -> str | None:
    """None where it was set by backend, in a way that has no such word."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _flags() -> dict[str, Any]:
    newer = hasattr(torch.backends, "fp32_precision")
    found = {}
    for path in (*_FLAGS, *(_PRECISIONS if newer else _OLDER_PRECISIONS)):
        with contextlib.suppress(AttributeError, RuntimeError):  # not in this torch
            holder, name = _holder(path)
            found[path] = getattr(holder, name)
    return found


def _set_flags(flags: Mapping[str, Any]) -> None:
    for path, value in flags.items():
        with contextlib.suppress(AttributeError, RuntimeError):
            holder, name = _holder(path)
            if getattr(holder, name) != value:
                setattr(holder, name, value)


def _holder(path: str) -> tuple[Any, str]:
    *parts, name = path.split(".")
    holder: Any = torch.backends
    for part in parts:
        holder = getattr(holder, part)
    return holder, name


def _set_device(device: torch.device) -> None:
    """Set the default device back; that none was set is not the same as that it was the CPU."""
    if torch.get_default_device() != device:
        torch.set_default_device(None)
        if torch.get_default_device() != device:
            torch.set_default_device(device)


def _autocast() -> tuple[tuple[str, bool, torch.dtype], ...]:
    return tuple(
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in _AUTOCAST
    )


def _set_environment(environment: Mapping[str, str] | None) -> None:
    if environment is None or environment == dict(os.environ):
        return
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)


def _hooks() -> dict[str, dict[Any, Any]]:
    """The hooks on all modules, by the name of the dict in torch that holds them."""
    return {
        name: hooks
        for name, hooks in vars(nn_module).items()
        if name.startswith("_global_") and isinstance(hooks, dict)
    }


def _set_hooks(before: Mapping[str, Mapping[Any, Any]] | None) -> None:
    for name, hooks in _hooks().items() if before is not None else ():
        then = (before or {}).get(name, {})
        if dict(hooks) != then:
            hooks.clear()
            hooks.update(then)


def _bytes(state: torch.Tensor) -> bytes:
    return state.cpu().numpy().tobytes()


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
