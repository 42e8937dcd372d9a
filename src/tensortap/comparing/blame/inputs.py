"""The inputs that the reference was recorded with, to run the candidate on."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from ...errors import OptionError
from ...recording.reader import Recording
from ...taps.input_log import InputLog
from ...taps.patching import cast_like

__all__ = ["missing_inputs", "recorded_inputs"]

_ARGUMENT = re.compile(r"\[(?:(\d+)|'([^'\]]+)')\]")


def recorded_inputs(
    recording: Recording, model: nn.Module | None = None
) -> list[dict[str, Any] | tuple[Any, ...]] | None:
    """What the model was given, a dict or a tuple for each batch; None where some of it is missing.

    With a `model`, numbers come in its dtype and on its device. Arguments that hold several
    tensors, as a cache does, cannot be made again. Where the tensors were not recorded, the token
    ids of a single batch are in the manifest.
    """
    parameter = None
    if model is not None:
        parameter = next((p for p in model.parameters() if p.is_floating_point()), None)
    found = _from_records(recording, parameter)
    return _from_ids(recording, parameter) if found is None else found


def missing_inputs(recording: Recording, ways: str) -> OptionError:
    """That a reference does not say what to run a candidate on; `ways` are those to say it."""
    if recording.manifest.generations:
        return OptionError(
            f"{recording.path} holds the steps of generate(), which blame does not make again. "
            "Record one forward of the reference, without --generate, with --layers all --inputs."
        )
    return OptionError(
        f"blame runs the candidate, and {recording.path} does not have all inputs of the "
        f"model itself: {ways}, or record it with --layers all --inputs."
    )


def _from_ids(
    recording: Recording, like: torch.Tensor | None
) -> list[dict[str, Any] | tuple[Any, ...]] | None:
    """The token ids of the manifest, where its digest says that the model was given no more."""
    known = recording.manifest.inputs
    ids, batches = known.get("input_ids"), known.get("batches")
    if not isinstance(batches, list) or len(batches) != 1 or len(recording.steps) != 1:
        return None
    try:
        tokens = torch.tensor(ids, dtype=torch.int64)
    except (TypeError, ValueError, RuntimeError):  # none were kept, or the manifest is damaged
        return None
    ones, zeros = torch.ones_like(tokens), torch.zeros_like(tokens)
    named = {"input_ids": tokens}
    masked = {**named, "attention_mask": ones}
    typed = {**masked, "token_type_ids": zeros}
    for batch in (named, masked, typed, (tokens,)):
        log = InputLog()
        args, kwargs = ((), batch) if isinstance(batch, dict) else (batch, {})
        log.see((0, 0), args, kwargs)
        if log.to_dict()["batches"] == batches:
            if isinstance(batch, dict):
                return [{name: _as(tensor, like) for name, tensor in batch.items()}]
            return [tuple(_as(tensor, like) for tensor in batch)]
    return None


def _from_records(
    recording: Recording, parameter: torch.Tensor | None
) -> list[dict[str, Any] | tuple[Any, ...]] | None:
    if "" not in recording:
        return None
    records = [r for r in recording[""].records if r.port == "input" and r.rank == 0]
    steps: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
    for record in records:
        if record.call or not record.stored:
            return None
        steps.setdefault((record.epoch, record.batch), {})[record.leaf] = record.tensor()
    if not steps or sorted(steps) != sorted(recording.steps):
        return None
    found = []
    for step in sorted(steps):
        batch = _arguments(steps[step], parameter)
        if batch is None:
            return None
        found.append(batch)
    return found


def _arguments(
    leaves: dict[str, torch.Tensor], like: torch.Tensor | None
) -> dict[str, Any] | tuple[Any, ...] | None:
    values = {leaf: _as(tensor, like) for leaf, tensor in leaves.items()}
    if set(values) == {""}:
        return (values[""],)
    matches = {leaf: _ARGUMENT.fullmatch(leaf) for leaf in values}
    if any(match is None for match in matches.values()):
        return None
    named = {match[2]: values[leaf] for leaf, match in matches.items() if match and match[2]}
    placed = {int(match[1]): values[leaf] for leaf, match in matches.items() if match and match[1]}
    if named and placed:
        return None
    if placed:
        full = sorted(placed) == list(range(len(placed)))
        return tuple(placed[at] for at in sorted(placed)) if full else None
    return named


def _as(tensor: torch.Tensor, like: torch.Tensor | None) -> torch.Tensor:
    if like is None:
        return tensor.clone()
    if tensor.is_floating_point():
        return cast_like(tensor, like)
    return tensor.to(device=like.device, copy=True)
