"""What blame refuses, and what it warns of before its answer is believed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from ...errors import OptionError
from ...recording.reader import Recording
from ...taps.input_log import InputLog
from ...targets import Target
from .inputs import missing_inputs, recorded_inputs
from .stage import Put, Stage
from .trace import Trace

__all__ = [
    "check_calls",
    "check_inputs",
    "check_kept",
    "check_mode",
    "check_options",
    "target_of",
]


def check_options(layers: Any) -> None:
    several = isinstance(layers, Sequence) and all(isinstance(item, str) for item in layers)
    if not isinstance(layers, str) and not several:
        raise OptionError(f"layers must be a pattern or a list of patterns, got {layers!r}.")


def target_of(model: Any, inputs: Any, recording: Recording) -> Target:
    """The candidate with its inputs; without any, with those of the reference."""
    if isinstance(model, Target):
        if inputs is not None:
            raise OptionError("A Target has its own inputs. Give the target alone.")
        target = model
    else:
        if inputs is None:
            known = model if isinstance(model, nn.Module) else None
            inputs = recorded_inputs(recording, known)
        if inputs is None:
            raise missing_inputs(
                recording,
                "give the inputs that the reference was recorded with, as "
                "tap.blame(reference, model, inputs)",
            )
        target = Target(model, inputs)
    if not isinstance(target.model, nn.Module) or isinstance(target.model, torch.jit.ScriptModule):
        raise OptionError(
            f"blame puts tensors into layers, which a {type(target.model).__name__} does not let "
            "us do: it needs an eager torch.nn.Module."
        )
    return target


def check_kept(recording: Recording, modules: dict[str, nn.Module], kept: Sequence[str]) -> None:
    if set(kept) - {""} or (kept and recording.layers == [""]):
        return
    if not recording.layers:
        raise OptionError(f"{recording.path} has no layers: nothing was recorded.")
    here = ", ".join(repr(name) for name in list(modules)[1:4])
    there = ", ".join(repr(name) for name in recording.layers[:3])
    if any(name and name in modules for name in recording.layers):
        raise OptionError(
            f"{recording.path} has no tensors of the candidate's layers, only summaries. Record it "
            "again with --keep tensors --inputs."
        )
    raise OptionError(
        f"No layer of the candidate ({here}, …) is in {recording.path} ({there}, …). Pair them "
        "with --map 'regex=>template', or give the recording of the same model."
    )


def check_inputs(recording: Recording, trace: Trace, log: InputLog) -> list[str]:
    """Refuse other inputs than the reference's; a warning where that cannot be told for sure."""
    log.settle()
    inputs = recording.manifest.inputs
    ids = inputs.get("input_ids")
    if ids is not None and log.input_ids is not None and ids != log.input_ids:
        raise OptionError(
            f"The candidate runs on other token ids than {recording.path} was recorded "
            "with. Give it the same inputs."
        )
    ours, theirs = inputs.get("batches") or [], log.digests
    both = list(zip(ours, theirs, strict=False))
    if any(left != right and "unknown" not in (left, right) for left, right in both):
        root = Put("", "input")
        if trace.no_op(root):  # the same values in another dtype
            return []
        if root in trace.fitting:
            raise OptionError(
                f"The candidate's inputs are not those that {recording.path} was recorded "
                "with, also when they are cast to its dtype. Give it the same inputs."
            )
        return [
            "The candidate's inputs are not the same bytes as the reference's. If they are not "
            "the same values in another dtype, blame is wrong."
        ]
    return []


def check_mode(random: Collection[str]) -> list[str]:
    """Warn of layers that drop values at random: no two runs are the same."""
    if not random:
        return []
    return [
        f"The candidate is in training mode and drops values at random (as '{min(random)}' does): "
        "put it into eval mode (--eval), or blame is wrong."
    ]


def check_calls(stage: Stage, trace: Trace, kept: Sequence[str]) -> list[str]:
    """Say which layers the candidate lacks, does not call, or calls otherwise."""
    warnings = []
    known = stage.known
    lacking = [n for n in known.recording.layers if n not in known.names.values()]
    if lacking and not known.by_values:  # another implementation has code of its own for them
        warnings.append(
            f"The candidate has no layer '{lacking[0]}'{_more(lacking)}, which the reference "
            "has: what it should do is done by nobody."
        )
    silent = [name for name in kept if name not in trace.order]
    if silent:
        warnings.append(
            f"The candidate never called '{silent[0]}'{_more(silent)}, which ran in the reference."
        )
    batch = stage.batch
    for name in trace.order:
        calls = 0
        while known.at(name, "output", batch, calls):
            calls += 1
        if calls != stage.calls[name] and calls:
            warnings.append(
                f"'{name}' ran {_times(stage.calls[name])} in the candidate and "
                f"{_times(calls)} in the reference."
            )
            break
    misfits = [where for where in stage.problems if where not in trace.fitting]
    if misfits:
        where = misfits[0]
        warnings.append(
            f"At the {where.port} of '{where.layer}'{_more(misfits)} the reference's tensors "
            f"do not fit ({stage.problems[where]}): shares there are unknown."
        )
    return warnings


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _more(names: Sequence[object]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
