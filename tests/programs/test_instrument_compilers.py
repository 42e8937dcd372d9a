"""An instrumented model in the hands of trace, export and compile."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from programs.heard import Heard, assert_taps, heard, hooks_on
from programs.models import MODELS
from support import Net
from tensortap.errors import OptionError
from tensortap.taps.instrument.wrapper import instrument
from tensortap.taps.leaves import flatten


@pytest.mark.parametrize("name", ["awkward", "llama", "mixtral", "t5"])
def test_non_strict_export_keeps_every_tap_again_and_again(name: str) -> None:
    """With lists of the module's own, all but the first export had no taps, without a word."""
    if name != "awkward":
        pytest.importorskip("transformers")
    model, args, kwargs = MODELS[name]()
    expected = heard(model, *args, **kwargs)
    wrapped = instrument(model, "all")
    with torch.no_grad():
        for _ in range(2):
            program = torch.export.export(wrapped, args, kwargs, strict=False)
            assert_taps(wrapped, program.module()(*args, **kwargs)[1], expected)
            assert_taps(wrapped, wrapped(*args, **kwargs)[1], expected)
    assert hooks_on(model) == 0


@pytest.mark.parametrize("name", ["awkward", "resnet", "demo"])
def test_a_trace_makes_the_manifest_itself(name: str) -> None:
    model, args, _ = MODELS[name]()
    expected = heard(model, *args)
    wrapped = instrument(model, "all")
    traced = torch.jit.trace(wrapped, args, strict=False, check_trace=False)
    assert_taps(wrapped, traced(*args)[1], expected)
    assert "aten::size" not in str(traced.graph)  # looking at shapes is no part of the model
    assert hooks_on(model) == 0


@pytest.mark.parametrize("name", ["awkward", "llama"])
def test_dynamo_traces_it_whole(name: str) -> None:
    if name == "llama":
        pytest.importorskip("transformers")
    model, args, kwargs = MODELS[name]()
    expected = heard(model, *args, **kwargs)
    wrapped = instrument(model, "all")
    torch._dynamo.reset()
    with torch.no_grad():
        plain = model(*args, **kwargs)
        compiled = torch.compile(wrapped, fullgraph=True, backend="aot_eager")
        for _ in range(2):
            assert_taps(wrapped, compiled(*args, **kwargs)[1], expected)
        assert hooks_on(model) > 0  # dynamo's guards look at them
        again = model(*args, **kwargs)
        for (_, left), (_, right) in zip(flatten(plain), flatten(again), strict=True):
            assert left is None or torch.equal(left, right)
        wrapped.remove()
        assert hooks_on(model) == 0
        assert_taps(wrapped, compiled(*args, **kwargs)[1], expected)
        wrapped.remove()
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:While compiling")
def test_strict_export_gives_manifest_and_taps() -> None:
    model, args, _ = MODELS["awkward"]()
    expected = heard(model, *args)
    wrapped = instrument(model, "all")
    program = torch.export.export(wrapped, args, strict=True)
    assert_taps(wrapped, program.module()(*args)[1], expected)
    wrapped.remove()


def test_shapes_that_vary_are_not_known() -> None:
    model = Net().eval()
    wrapped = instrument(model)
    ids = torch.arange(12).view(2, 6)
    dims = {"ids": {1: torch.export.Dim("length", min=2, max=64)}}
    program = torch.export.export(wrapped, (ids,), dynamic_shapes=dims, strict=False)
    assert {entry.shape for entry in wrapped.manifest.entries} == {(2, None, 8)}
    longer = torch.arange(18).view(2, 9) % 16
    assert_taps(wrapped, program.module()(longer)[1], blocks(heard(model, longer)))


def blocks(rows: Heard) -> Heard:
    return [row for row in rows if row[0].count(".") == 1]


class Broken(nn.Module):
    """A layer that dynamo cannot take whole."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        torch._dynamo.graph_break()
        return x + 1


def test_a_graph_break_loses_no_tap() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Broken(), Broken()).requires_grad_(False), torch.randn(2, 4)
    expected = heard(model, x)
    wrapped = instrument(model, "all")
    torch._dynamo.reset()
    compiled = torch.compile(wrapped, backend="eager")
    for _ in range(2):
        assert_taps(wrapped, compiled(x)[1], expected)
    wrapped.remove()
    torch._dynamo.reset()


def test_a_cache_of_transformers_goes_in_and_out() -> None:
    transformers = pytest.importorskip("transformers")
    model, _, _ = MODELS["llama"]()
    wrapped = instrument(model)
    caches = [transformers.DynamicCache() for _ in range(2)]
    for ids in (torch.arange(1, 7).view(1, 6), torch.tensor([[3]])):
        given = [{"input_ids": ids, "past_key_values": c, "use_cache": True} for c in caches]
        with torch.no_grad():
            plain = model(**given[0])
            output, taps = wrapped(**given[1])
        assert torch.equal(plain.logits, output.logits)
        assert [tuple(tap.shape) for tap in taps] == [(1, ids.shape[1], 32)] * 2
        assert output.past_key_values is caches[1]
    assert [cache.get_seq_length() for cache in caches] == [7, 7]


def test_scripting_is_a_sentence() -> None:
    wrapped = instrument(nn.Sequential(nn.Linear(2, 2)), "leaves")
    with pytest.raises(OptionError, match=r"torch\.jit\.script cannot compile.*Trace it"):
        torch.jit.script(wrapped)
