"""The model of this folder as a target of tensortap: `tensortap record target.py:build -o DIR`."""

from __future__ import annotations

import os
from pathlib import Path

from minimax.model import build_target, chosen, share_the_machine, tokens

from tensortap import Target


def build(
    seq_len: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    prompt: str | None = None,
    model_path: str | None = None,
    tiny: bool | None = None,
) -> Target:
    """MiniMax-M2 with 62 layers on a prompt, or a checkpoint (--set model_path=DIR)."""
    small = os.environ.get("TENSORTAP_TINY", "") not in ("", "0") if tiny is None else tiny
    wanted = chosen(None if model_path is None else Path(model_path), seed, small, seq_len)
    share_the_machine(wanted)  # as the scripts do, for the same bits
    return build_target(wanted, tokens(wanted, prompt), device)
