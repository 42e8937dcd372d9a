"""How alike two layers are by their types and their shapes alone."""

from __future__ import annotations

import functools
import math
import re

__all__ = ["shape_likeness", "type_likeness"]

# Words that different authors use for the same part of a model.
_SYNONYMS = {
    "attn": "attention",
    "selfattention": "attention",
    "mha": "attention",
    "ff": "mlp",
    "ffn": "mlp",
    "feedforward": "mlp",
    "feed": "mlp",
    "forward": "mlp",
    "block": "layer",
    "emb": "embedding",
    "embed": "embedding",
    "embeddings": "embedding",
    "ln": "norm",
    "layernorm": "norm",
    "rmsnorm": "norm",
    "batchnorm": "norm",
    "act": "activation",
    "swish": "silu",
    "fc": "linear",
    "proj": "linear",
    "dense": "linear",
    "projection": "linear",
}
_CLASSES = {"Conv1D": "Linear"}  # what transformers calls a linear layer with its weight transposed
# Words that say nothing about what a layer does.
_FILLER = {"new", "fast", "quantized", "quant", "dynamic", "fused", "int8", "fp8", "activation"}


@functools.lru_cache(maxsize=4096)
def _words(type_name: str) -> frozenset[str]:
    plain = _class(type_name)
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*|[a-z0-9]+", plain)
    plain_words = (re.sub(r"(?<=[a-z])[123]d$", "", part.lower()) for part in parts)
    words = {_SYNONYMS.get(word, word) for word in plain_words if len(word) > 1} or {plain.lower()}
    if "norm" in words:
        words.discard("layer")
    return frozenset(words - _FILLER or words)


def _class(type_name: str) -> str:
    plain = type_name.rsplit(".", 1)[-1]
    return _CLASSES.get(plain, plain)


@functools.lru_cache(maxsize=65536)
def type_likeness(ours: str, theirs: str) -> float:
    """From 0, different things, to 1, the same class; an unknown type is half alike to all."""
    if not ours or not theirs:
        return 0.5
    if _class(ours) == _class(theirs):
        return 1.0
    left, right = _words(ours), _words(theirs)
    if left <= right or right <= left:
        return 0.8
    shared = left & right
    return 0.5 * len(shared) / min(len(left), len(right)) if shared else 0.0


@functools.lru_cache(maxsize=65536)
def shape_likeness(ours: tuple[int, ...] | None, theirs: tuple[int, ...] | None) -> float:
    """1 for equal shapes, less for those that a layout, a batch or padding may explain, else 0."""
    if ours is None or theirs is None:
        return 0.5
    if ours == theirs:
        return 1.0
    left, right = ([n for n in shape if n != 1] for shape in (ours, theirs))
    if sorted(left) == sorted(right):
        return 0.9
    if math.prod(left) == math.prod(right):
        return 0.7 if set(left) & set(right) else 0.0
    if len(ours) != len(theirs) or not ours:
        return 0.0
    differing = [i for i in range(len(ours)) if ours[i] != theirs[i]]
    if differing == [0] and len(ours) > 1:
        return 0.8
    pairs = [(ours[i], theirs[i]) for i in differing if i]
    padded = len(pairs) == 1 and 2 * max(pairs[0]) <= 3 * min(pairs[0])
    return 0.6 if padded else 0.0
