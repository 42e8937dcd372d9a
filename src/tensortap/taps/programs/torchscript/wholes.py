"""Whether an op that reads a layer's weights is also the last thing that the layer does.

A checkpoint has the weights of a layer, not its code: `tanh(x @ weight + bias)` has those of a
linear. What tells them apart is where the op was written, which graphs keep as lines of source or
stacks of Python, and who reads the value: what another layer reads has left its own.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

__all__ = ["has_left", "is_whole"]

_FRAME = re.compile(r"^(\S.*)\((\d+)\): (\S+)$")
_FILE = re.compile(r'^\s*File "(.+)", line \d+')
_OWN = {
    "linear": ("linear",),
    "matmul": ("linear",),
    "mm": ("linear",),
    "embedding": ("sparse",),
    "conv1d": ("conv",),
    "conv2d": ("conv",),
    "conv3d": ("conv",),
    "_convolution": ("conv",),
    "convolution": ("conv",),
    "layer_norm": ("normalization",),
    "group_norm": ("normalization",),
    "rms_norm": ("normalization",),
    "batch_norm": ("batchnorm",),
    "prelu": ("activation",),
}


def is_whole(start: Any, end: Any) -> bool:
    """Whether the source says that a layer ends with this op.

    Of torch's own layers that is known by their file; of others a trace tells whether anything
    that reads the value ran in the same call.
    """
    frames = _frames(end)
    if not frames:
        return _is_torch(_file(end), start.kind())
    place = next((i for i, (_, name) in enumerate(frames) if name == "forward"), None)
    if place is None:
        return False
    if _is_torch(frames[place][0], start.kind()):
        return True
    if "/torch/nn/" in frames[place][0]:
        return False  # a layer of torch's that reads the weights of one which it never calls
    call = frames[place + 1 :]
    readers = [use.user for use in end.output().uses()]
    return bool(readers) and not any(
        reader.kind() != "prim::Return" and _is_in(_frames(reader), frames[place], call)
        for reader in readers
    )


def has_left(end: Any, elsewhere: Collection[Any]) -> bool:
    """Whether a value is read by another layer's op, and never written into."""
    readers = [use.user for use in end.output().uses()]
    written = any("!" in reader.schema() for reader in readers)
    return not written and any(reader in elsewhere for reader in readers)


def _is_in(
    frames: list[tuple[str, str]], forward: tuple[str, str], call: list[tuple[str, str]]
) -> bool:
    """Whether a stack goes through the same function, called from the same place.

    What has no stack may be from anywhere.
    """
    if not frames:
        return True
    deep = len(frames) - len(call)
    return deep > 0 and frames[deep:] == call and _function(frames[deep - 1]) == _function(forward)


def _function(frame: tuple[str, str]) -> tuple[str, str]:
    return frame[0].rpartition("(")[0], frame[1]


def _frames(node: Any) -> list[tuple[str, str]]:
    """The stack of Python that a traced op was called with: (file and line, function)."""
    own, _, _ = node.sourceRange().partition("Serialized ")
    found = [_FRAME.match(line) for line in own.splitlines()]
    return [(f"{match[1]}({match[2]})", match[3]) for match in found if match]


def _file(node: Any) -> str:
    own, _, _ = node.sourceRange().partition("Serialized ")
    match = _FILE.match(own)
    return match[1] if match else ""


def _is_torch(place: str, kind: str) -> bool:
    files = _OWN.get(kind.partition("::")[2], ())
    return any(f"/torch/nn/modules/{file}.py" in place.replace("\\", "/") for file in files)
