"""The manifest of a run that trains."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .. import __version__
from ..recording.schema import Manifest, Structure
from ..recording.writer import now
from ..selection import structure as structure_of
from ..taps.describe import describe_environment, describe_module, device_of

__all__ = ["manifest_of"]


def manifest_of(
    model: nn.Module,
    *,
    layers: str | Sequence[str],
    ports: Sequence[str],
    keep: str,
    notes: Sequence[str] = (),
    mode: str | None = None,
    structure: Structure | None = None,
    about: dict[str, Any] | None = None,
) -> Manifest:
    """What `recording.json` says while training runs; `about` goes into its selection."""
    return Manifest(
        tool=f"tensortap {__version__}",
        torch=torch.__version__,
        python=platform.python_version(),
        created=now(),
        device=device_of(model),
        mode=mode,
        seed=torch.initial_seed(),
        target=describe_module(model),
        selection={
            "layers": [layers] if isinstance(layers, str) else list(layers),
            "ports": list(ports),
            "keep": keep,
            "histograms": False,
            "command": None,
            **(about or {}),
        },
        structure=structure_of(model) if structure is None else structure,
        environment=describe_environment(),
        notes=list(notes),
    )
