"""From the names of recorded leaves back to the arguments of a call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tensortap.comparing.replay.calls import access, parse_leaf, unrecorded, ways_to_call
from tensortap.taps.leaves import flatten_call

A, B, C = (torch.full((2,), float(n)) for n in range(3))


@pytest.mark.parametrize(
    ("leaf", "steps"),
    [
        ("", ()),
        ("[0]", (0,)),
        ("['attention_mask']", ("attention_mask",)),
        ("[1][0]", (1, 0)),
        ("['position_embeddings'][1]", ("position_embeddings", 1)),
        ("""["it's"]""", ("it's",)),
        (r"['a\'b\\']", ("a'b\\",)),
        ("['a'].dequantize()", None),
        (".logits", None),
        ("[x]", None),
        ("[__import__('os')]", None),
        ("[0", None),
        ("['a' 'b']", None),
        ("[b'a']", None),
        ("[-1]", None),
        ("[1.5]", None),
        ("[99999999999]", None),
        ("[0]…deadbeef", None),
    ],
)
def test_leaves_are_parsed_and_never_evaluated(leaf: str, steps: Any) -> None:
    assert parse_leaf(leaf) == steps


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        ("", ""),
        ("[0]", "[0]"),
        (".logits", ".logits"),
        ("['x'].cache[3]", "['x'].cache[3]"),
        ("[0].values()", None),
        (".__class__", None),
        (".a;b", None),
        ("[exit()]", None),
    ],
)
def test_a_place_in_an_output_is_written_as_python(leaf: str, text: str | None) -> None:
    assert access(leaf) == text


class One(nn.Module):
    def forward(self, x: Any) -> Any:
        return x


class Many(nn.Module):
    def forward(self, x: Any, mask: Any = None, flag: bool = True, tables: Any = None) -> Any:
        return x


class Any_(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args


CALLS = [
    (One, (A,), {}),
    (One, ((A, B),), {}),
    (One, ([A, (B, C)],), {}),
    (One, ({"a": A, "b": {"c": B}},), {}),
    (Many, (A,), {}),
    (Many, (A, B), {}),
    (Many, (A,), {"mask": B}),
    (Many, (A, None, True, B), {}),
    (Many, (), {"x": A, "tables": (B, C)}),
    (Many, (A,), {"tables": {"k": [B, C]}}),
    (Any_, (A, (B, C)), {"z": C}),
]


@pytest.mark.parametrize(("kind", "args", "kwargs"), CALLS)
def test_a_call_is_found_again(kind: type[nn.Module], args: Any, kwargs: Any) -> None:
    module = kind()
    leaves = {leaf: t for leaf, t in flatten_call(module, args, kwargs) if t is not None}
    found = ways_to_call(module, leaves)[0]
    assert as_tuples(found.args) == as_tuples(args)
    assert as_tuples(found.kwargs) == as_tuples(kwargs)


def as_tuples(value: Any) -> Any:
    """Tensors by identity; whether a list or a tuple held them was not recorded."""
    if isinstance(value, torch.Tensor):
        return id(value)
    if isinstance(value, tuple | list):
        return tuple(map(as_tuples, value))
    if isinstance(value, dict):
        return {key: as_tuples(item) for key, item in value.items()}
    return value


def test_what_cannot_be_a_call_is_none() -> None:
    assert ways_to_call(One(), {".field": A}) == []
    assert ways_to_call(One(), {"": A, "[0]": B}) == []
    assert ways_to_call(One(), {"[0]": A, "[0][1]": B}) == []
    assert ways_to_call(One(), {"[0][1]": B, "[0]": A}) == []
    assert ways_to_call(One(), {}) == []


def test_what_a_call_leaves_open_is_named() -> None:
    (given, *_) = ways_to_call(Many(), {"[0]": A, "['mask']": B})
    assert unrecorded(Many(), given) == ["flag", "tables"]
    (given, *_) = ways_to_call(nn.Linear(2, 2), {"": A})
    assert unrecorded(nn.Linear(2, 2), given) == []
    (given, *_) = ways_to_call(Any_(), {"": A})
    assert unrecorded(Any_(), given) == ["kwargs"]
