"""A model and the one that it was made from: a quantiser loses scopes, but keeps values' names.

With one exception: a ReLU or a clip before a quantised value is left out, since the range of the
integers does its work, and its name goes to the value that it read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .graph import Block, Chain
from .layers import Layers
from .scopes import DROPPED

__all__ = ["Twin", "renamed"]

LOST = "the model no longer holds its value"
LEFT_OUT = "the quantiser left it out: the range of the integers does its work"


@dataclass(frozen=True)
class Twin:
    """The layers by the other model's names, and how many of its values bear their names here."""

    layers: Layers
    alike: int


def renamed(layers: Layers, blocks: Sequence[Block], theirs: Sequence[Block]) -> Twin:
    """The layers of a float model, as far as another graph holds the same values."""
    known = {name: block for block in theirs for name in block.maker}
    here = {name: block for block in blocks for name in block.maker}
    held: dict[str, tuple[str, Chain]] = {}
    left_out: set[str] = set()
    for name, block in here.items():
        if name not in known or not _same_type(name, block, known[name]):
            continue
        if not _is_left_out(name, block, known[name]):
            held.setdefault(name, (name, block.chain))
            continue
        left_out.add(name)
        source = known[name].maker[name].inputs[0]
        maker = known[name].maker.get(source)
        if source not in here and maker is not None and maker.op == block.maker[name].op:
            held[source] = (name, block.chain)
    given = {value.name for value in blocks[0].graph.input}
    result = replace(layers, calls=[], gone=dict(layers.gone), notes=list(layers.notes))
    for call in layers.calls:
        main = held.get(call.outputs[0])
        if main is None or len(main[1]) != len(call.chain):
            reason = LEFT_OUT if call.outputs[0] in left_out else LOST
            result.gone.setdefault(call.layer, reason)
            continue
        chain = main[1]
        kept = [n for n in call.outputs if n in held and held[n][1] == chain]
        places = dict(zip(call.outputs, call.leaves, strict=False))
        result.calls.append(
            replace(
                call, outputs=tuple(held[n][0] for n in kept),
                inputs=_inputs(call.inputs, held, given), chain=chain, nodes=(),
                leaves=tuple(places[n] for n in kept if n in places),
            )
        )  # fmt: skip
    lost = set(result.gone)
    result.calls = [call for call in result.calls if call.layer not in lost]
    names = [call.outputs[0] for call in layers.calls]
    alike = sum(n in held or n in here or f"{n}_quantized" in here for n in names)
    return Twin(result, alike)


def _inputs(
    names: Sequence[str], held: Mapping[str, tuple[str, Chain]], given: set[str]
) -> tuple[str, ...]:
    """What a call reads, or nothing where a part of it is not there."""
    if any(name not in held and name not in given for name in names):
        return ()
    return tuple(held[name][0] if name in held else name for name in names)


def _same_type(name: str, here: Block, there: Block) -> bool:
    return len({here.types.get(name), there.types.get(name)} - {None}) <= 1


def _is_left_out(name: str, here: Block, there: Block) -> bool:
    mine, theirs = here.maker[name], there.maker[name]
    foreign = mine.proto.domain or mine.op in (theirs.op, "DequantizeLinear")
    return theirs.op in DROPPED and not foreign
