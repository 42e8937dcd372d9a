"""Runs one layer of a live model on recorded inputs: alone, or inside a run of the whole model.

Alone is enough where a layer takes tensors and nothing else. What was not recorded, because it is
no tensor (flags, caches, functions), is only there when the whole model runs: then the recorded
tensors are put at the layer in that run.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...errors import TapError, TargetError
from ...recording.dtypes import torch_dtype
from ...recording.reader import Recording
from ...taps.describe import describe_module
from ...taps.isolation import unchanged
from ...taps.leaves import flatten
from ...taps.patching import cast_like, leaves_of_call, match_leaves, put_call, why_not_put
from ...taps.plain import Unrecordable, plain_parts
from ...targets import Target
from ...targets.failing import model_failed
from ..precision import coarsest, precision_of, roundoff
from .calls import Arguments, unrecorded, ways_to_call
from .recorded import RecordedCall

__all__ = [
    "CannotRunAlone",
    "Played",
    "Precisions",
    "precisions_of",
    "run_alone",
    "run_inside",
]

_LIMIT = 1 << 34


class CannotRunAlone(Exception):
    """The recorded tensors are not all that the layer needs; the message is the reason."""


@dataclass(frozen=True)
class Played:
    """One call that was run again: what the layer was given, and what it returned, by leaf."""

    recorded: RecordedCall
    given: Arguments
    inputs: Mapping[str, torch.Tensor]
    outputs: Mapping[str, torch.Tensor]
    unrecorded: tuple[str, ...] = ()


@dataclass(frozen=True)
class Precisions:
    """What both runs compute in; None where it is not known."""

    recorded: str | None
    live: str | None
    device: torch.device

    @classmethod
    def of(cls, recording: Recording, model: nn.Module, module: nn.Module) -> Precisions:
        tensors = [*module.parameters(), *module.buffers(), *model.parameters()]
        device = tensors[0].device if tensors else torch.device("cpu")
        return cls(_main(recording.manifest.target.get("dtypes")), _main(_dtypes(model)), device)

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """An empty tensor of the kind that the live layer would be given in this one's place.

        In a run of the same precision every tensor keeps its own. In another one, those in the
        precision of the recorded run get that of the live one; a float32 island in a 16-bit run
        stays what it is.
        """
        dtype = tensor.dtype
        if dtype.is_floating_point and self.live is not None and self.live != self.recorded:
            name = str(dtype).removeprefix("torch.")
            wider = roundoff(name) < roundoff(self.live)
            if self.recorded in (None, name) or not wider:
                dtype = torch_dtype(self.live, "the model")
        return torch.empty(0, dtype=dtype, device=self.device)


def _dtypes(module: nn.Module) -> Mapping[str, int]:
    counts: Mapping[str, int] = describe_module(module)["dtypes"]
    return counts


def _main(counts: object) -> str | None:
    """The dtype that most floating-point parameters have, of those that one computes in."""
    known = counts if isinstance(counts, Mapping) else {}
    floats = {
        name: count
        for name, count in known.items()
        if isinstance(count, int) and roundoff(name) and not name.startswith(("float8", "complex"))
    }
    return max(floats, key=floats.__getitem__, default=None)


def precisions_of(recording: Recording, module: nn.Module) -> tuple[str | None, str | None]:
    """The coarsest precision that each side computes in, for the floor."""
    return precision_of(recording), coarsest(_dtypes(module))


def run_alone(
    model: nn.Module,
    module: nn.Module,
    calls: Sequence[RecordedCall],
    precisions: Precisions,
) -> list[Played]:
    """Call the layer on its recorded tensors and nothing else."""
    with unchanged(model), torch.compiler.set_stance("force_eager"):
        return [_play_alone(module, call, precisions) for call in calls]


def _play_alone(module: nn.Module, call: RecordedCall, precisions: Precisions) -> Played:
    recorded = {leaf: record.tensor() for leaf, record in call.inputs.items()}
    reason = "some of its arguments are neither tensors nor tuples or dicts of them"
    for kinds in _kinds(module, recorded, precisions):
        kept = {leaf: cast_like(tensor, kinds[leaf]) for leaf, tensor in recorded.items()}
        for number, shown in enumerate(ways_to_call(module, kept)):
            fresh = {leaf: tensor.clone() for leaf, tensor in kept.items()}
            given = ways_to_call(module, fresh)[number]  # a layer may write to what it is given
            try:
                output = module(*given.args, **given.kwargs)
            except Exception as error:  # whatever a user's layer raises on half of its arguments
                lines = str(error).strip().splitlines() or ["no message"]
                reason = f"{type(error).__name__}: {lines[0]}"
                continue
            missing = tuple(unrecorded(module, given))
            return Played(call, shown, kept, dict(_outputs(output)), missing)
    raise CannotRunAlone(reason)


def _kinds(
    module: nn.Module, recorded: Mapping[str, torch.Tensor], precisions: Precisions
) -> Iterator[dict[str, torch.Tensor]]:
    """Empty tensors of the dtypes to try: the model's precision, then that of the layer itself."""
    first = {leaf: precisions.own(tensor) for leaf, tensor in recorded.items()}
    yield first
    weights = (p.dtype for p in module.parameters() if p.is_floating_point())
    layer = next((dtype for dtype in weights if dtype.itemsize > 1), None)
    if layer is not None:
        second = {leaf: t.to(layer) if t.is_floating_point() else t for leaf, t in first.items()}
        if any(second[leaf].dtype != t.dtype for leaf, t in first.items()):
            yield second


def run_inside(
    target: Target, module: nn.Module, name: str, calls: Sequence[RecordedCall]
) -> list[Played]:
    """Run the whole model, with the recorded tensors put at every wanted call of the layer.

    Batches run one behind the other from the first on, as they did when they were recorded: what a
    model keeps from one to the next is then what it was.
    """
    last = max(call.step for call in calls)
    if last >= len(target.batches):
        raise TargetError(
            f"The recording has batch {last} of layer '{name}', but the target has only "
            f"{len(target.batches)} batches. Choose an earlier one with --batch, or give the "
            "target as many inputs as were recorded."
        )
    played: list[Played] = []
    with unchanged(target.model), torch.compiler.set_stance("force_eager"):
        for step in range(last + 1):
            here = {call.moment[2]: call for call in calls if call.step == step}
            played += _play_inside(target, module, name, step, here)
    return played


def _play_inside(
    target: Target, module: nn.Module, name: str, step: int, calls: Mapping[int, RecordedCall]
) -> list[Played]:
    counter: Counter[str] = Counter()
    waiting: list[tuple[RecordedCall, Arguments, dict[str, torch.Tensor]] | None] = []
    played: list[Played] = []

    def before(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = calls.get(counter["calls"])
        counter["calls"] += 1
        if call is None:
            waiting.append(None)
            return None
        own = leaves_of_call(layer, args, kwargs)
        leaves = _replacements(layer, name, call, own)
        args, kwargs = put_call(layer, args, kwargs, leaves)
        kept = {leaf: tensor.clone() for leaf, tensor in leaves.items()}
        given = Arguments(*put_call(layer, args, kwargs, kept))
        names = match_leaves(layer, own, call.inputs)
        waiting.append((call, given, {names[leaf]: tensor for leaf, tensor in kept.items()}))
        return args, kwargs

    def after(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        found = waiting.pop()
        if found is not None:
            played.append(Played(*found, dict(_outputs(output))))

    handles = (
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, with_kwargs=True),
    )
    try:
        target(copy.deepcopy(target.batches[step]))
    except TapError:
        raise
    except Exception as error:  # whatever a user's model raises
        raise model_failed(error, step) from error
    finally:
        for handle in handles:
            handle.remove()
    if len(played) < len(calls):
        raise TargetError(
            f"Layer '{name}' was called {counter['calls']} times when the target ran its batch "
            f"{step}; the recording has its call {max(calls)}. Run the target as it was recorded."
        )
    return sorted(played, key=lambda one: one.recorded.moment)


def _replacements(
    module: nn.Module, name: str, call: RecordedCall, own: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    names = match_leaves(module, own, call.inputs)
    lost = [leaf or "input" for leaf in call.inputs if leaf not in names.values()]
    if lost:
        raise TargetError(
            f"The recorded {', '.join(lost)} of layer '{name}' has no place in the live call, "
            f"which has {', '.join(leaf or 'one input' for leaf in own) or 'no tensors'}. Is this "
            "the model that was recorded?"
        )
    found = {}
    for leaf, theirs in names.items():
        reference = call.inputs[theirs].tensor()
        reason = why_not_put(reference, own[leaf])
        if reason:
            raise TargetError(
                f"The recorded {leaf or 'input'} of layer '{name}' does not fit the live call: "
                f"{reason}. Run the target on the inputs that were recorded."
            )
        found[leaf] = cast_like(reference, own[leaf])
    return found


def _outputs(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of an output as a recording would have them, copied to the CPU."""
    for leaf, tensor in flatten(value):
        if tensor is None:
            continue
        try:
            for suffix, part in plain_parts(tensor, _LIMIT):
                yield leaf + suffix, part.detach().to("cpu", copy=True)
        except Unrecordable:
            continue
