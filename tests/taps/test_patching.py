"""Tensors go back where they were heard, and nothing else is touched."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tensortap.taps.leaves import flatten, flatten_call
from tensortap.taps.patching import (
    cast_like,
    leaves_of,
    match_leaves,
    put,
    put_call,
    why_not_put,
)

Pair = collections.namedtuple("Pair", "left right")


@dataclass
class Output:
    logits: Any
    hidden: Any = None


@dataclass(frozen=True)
class Frozen:
    value: Any


def values() -> st.SearchStrategy[Any]:
    tensor = st.builds(lambda n: torch.full((2,), float(n)), st.integers(0, 99))
    leaf = tensor | st.none() | st.integers() | st.text(max_size=3)
    return st.recursive(
        leaf,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner, max_size=3)
            | st.builds(Pair, inner, inner)
            | st.builds(Output, inner, inner)
            | st.builds(Frozen, inner)
        ),
        max_leaves=8,
    )


@given(values())
def test_what_is_put_is_what_is_found(value: Any) -> None:
    before = leaves_of(value)
    kept = {leaf: tensor.clone() for leaf, tensor in before.items()}
    wanted = {leaf: tensor + 1000 for leaf, tensor in before.items()}
    made = put(value, wanted)
    assert type(made) is type(value)
    found = leaves_of(made)
    assert list(found) == list(before)
    assert all(found[leaf] is wanted[leaf] for leaf in wanted)
    others = [(leaf, None) for leaf, tensor in flatten(value) if tensor is None]
    assert others == [(leaf, None) for leaf, tensor in flatten(made) if tensor is None]
    for leaf, tensor in leaves_of(value).items():  # the original is as it was
        assert tensor is before[leaf]
        assert torch.equal(tensor, kept[leaf])


@given(values())
def test_nothing_to_put_is_the_same_object(value: Any) -> None:
    assert put(value, {}) is value
    assert put(value, {"['nowhere']": torch.ones(1)}) is value


def test_a_model_output_keeps_its_two_faces() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    value = outputs.CausalLMOutput(logits=torch.ones(2), hidden_states=(torch.ones(1),))
    made = put(value, {".logits": torch.zeros(2), ".hidden_states[0]": torch.full((1,), 7.0)})
    assert torch.equal(made["logits"], torch.zeros(2))
    assert torch.equal(made.logits, torch.zeros(2))
    assert made.hidden_states[0].item() == 7.0
    assert torch.equal(value.logits, torch.ones(2))


class Layer(nn.Module):
    def forward(self, x: Any, mask: Any = None, *, extra: Any = None) -> Any:
        return x


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((torch.ones(1),), {}),
        ((torch.ones(1),), {"mask": None}),
        ((torch.ones(1), torch.zeros(1)), {}),
        ((torch.ones(1),), {"mask": torch.zeros(1), "extra": (torch.ones(2), 3)}),
        ((), {"x": torch.ones(1), "mask": torch.zeros(1)}),
        (((torch.ones(1), torch.ones(2)),), {}),
    ],
)
def test_calls_are_put_together_as_they_were_taken_apart(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    layer = Layer()
    own = dict(flatten_call(layer, args, kwargs))
    wanted = {leaf: tensor + 5 for leaf, tensor in own.items() if tensor is not None}
    new_args, new_kwargs = put_call(layer, args, kwargs, wanted)
    assert len(new_args) == len(args)
    assert list(new_kwargs) == list(kwargs)
    found = dict(flatten_call(layer, new_args, new_kwargs))
    assert list(found) == list(own)
    assert all(found[leaf] is wanted[leaf] for leaf in wanted)


def test_an_argument_is_known_by_place_by_keyword_and_alone() -> None:
    layer, t = Layer(), torch.ones(1)
    assert match_leaves(layer, {"": t}, {"[0]": 1, "['mask']": 2}) == {"": "[0]"}
    assert match_leaves(layer, {"[0]": t, "[1]": t}, {"['x']": 1, "['mask']": 2}) == {
        "[0]": "['x']",
        "[1]": "['mask']",
    }
    assert match_leaves(layer, {"['x']": t}, {"": 1}) == {"['x']": ""}
    assert match_leaves(layer, {"['mask']": t}, {"": 1}) == {}
    assert match_leaves(layer, {"[0][1]": t}, {"['x'][1]": 1}) == {"[0][1]": "['x'][1]"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_a_mask_stays_finite(dtype: torch.dtype) -> None:
    mask = torch.tensor([0.0, torch.finfo(torch.float32).min, 1e38])
    made = cast_like(mask, torch.zeros(3, dtype=dtype))
    assert made.dtype == dtype
    assert made.float().isfinite().all()
    assert made[0] == 0
    assert made.float()[1] == torch.finfo(dtype).min


def test_infinities_and_nan_stay() -> None:
    made = cast_like(
        torch.tensor([float("inf"), -float("inf"), float("nan")]), torch.zeros(3).half()
    )
    assert made[0] == float("inf")
    assert made[1] == -float("inf")
    assert made[2].isnan()


@given(st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64]))
def test_a_cast_is_always_fresh(dtype: torch.dtype) -> None:
    given_tensor = torch.ones(4).to(dtype)
    made = cast_like(given_tensor, torch.zeros(4, dtype=dtype))
    assert torch.equal(made, given_tensor)
    made.zero_()
    assert torch.equal(given_tensor, torch.ones(4).to(dtype))


def test_what_does_not_fit_is_said() -> None:
    assert "[3]" in why_not_put(torch.ones(3), torch.ones(4))
    assert "no float" in why_not_put(torch.ones(3), torch.ones(3, dtype=torch.int8))
    assert why_not_put(torch.ones(3), torch.ones(3, dtype=torch.bfloat16)) == ""
    assert why_not_put(torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.int32)) == ""
