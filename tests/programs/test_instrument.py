"""tap.instrument: the model as it was, and its layers' outputs beside it, whatever compiles it."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from programs.heard import assert_taps, heard, hooks_on
from programs.models import MODELS
from support import Block, Net
from tensortap.errors import OptionError, SelectionError
from tensortap.taps.instrument.wrapper import instrument
from tensortap.taps.leaves import flatten

NAMES = ["awkward", "resnet", "demo", "llama", "mixtral", "t5"]


@pytest.fixture(scope="module", params=NAMES)
def built(request: pytest.FixtureRequest) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    if request.param in ("llama", "mixtral", "t5"):
        pytest.importorskip("transformers")
    return MODELS[request.param]()


def test_an_eager_run_gives_every_call_and_the_models_own_output(built) -> None:
    model, args, kwargs = built
    expected = heard(model, *args, **kwargs)
    with torch.no_grad():
        before = model(*args, **kwargs)
        wrapped = instrument(model, "all")
        output, taps = wrapped(*args, **kwargs)
        after = model(*args, **kwargs)
    assert_taps(wrapped, taps, expected)
    for other in (output, after):
        for (leaf, left), (same, right) in zip(flatten(before), flatten(other), strict=True):
            assert leaf == same
            assert (left is None and right is None) or torch.equal(left, right)
    assert hooks_on(model) == 0
    assert [(leaf.leaf, leaf.tensor) for leaf in wrapped.manifest.output] == [
        (leaf, tensor is not None) for leaf, tensor in flatten(before)
    ]
    shapes = [entry.shape for entry in wrapped.manifest.entries]
    assert shapes == [tuple(row[3].shape) for row in expected]


def test_the_signature_is_the_models_own(built) -> None:
    model, args, kwargs = built
    wrapped = instrument(model, "all")
    assert inspect.signature(wrapped.forward) == inspect.signature(model.forward)
    code = type(wrapped).forward.__code__
    names = [p.name for p in inspect.signature(model.forward).parameters.values()]
    assert list(code.co_varnames[1 : 1 + len(names)]) == names
    wrapped(*args, **kwargs)
    assert wrapped.manifest.inputs == tuple(n for n in names if n != "kwargs")


class Wide(nn.Module):
    """Every kind of parameter, and every kind of return value."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.returns = Returns()
        self.seen: list[tuple[Any, ...]] = []

    def forward(self, x, /, y=2.0, *more, flag=None, **rest):
        self.seen.append((y, more, flag, sorted(rest)))
        total = self.first(x) * y
        for item in (*more, *rest.values()):
            total = total + item
        return self.returns(total, flag)


@dataclasses.dataclass
class Result:
    main: Tensor
    extra: dict[str, Any]
    none: None = None


class Returns(nn.Module):
    def forward(self, x: Tensor, flag: Any) -> Result:
        return Result(x, {"a": (x + 1, None), 3: [x * 2]})


def test_every_kind_of_parameter_arrives_as_it_would_without() -> None:
    model = Wide().eval()
    wrapped = instrument(model, "all")
    x = torch.ones(2, 4)
    assert inspect.signature(wrapped.forward) == inspect.signature(model.forward)
    for args, kwargs in (
        ((x,), {}),
        ((x, 3.0), {"flag": 1}),
        ((x, 3.0, x, x), {"z": x}),
    ):
        with torch.no_grad():
            model(*args, **kwargs)
            output, _ = wrapped(*args, **kwargs)
        assert model.seen[-1] == model.seen[-2] or model.seen[-1][1]  # tensors have no truth
        assert len(model.seen[-1][1]) == len(args[2:])
        assert torch.equal(output.main, model(*args, **kwargs).main)
    leaves = [e.leaf for e in wrapped.manifest.entries if e.layer == "returns"]
    assert leaves == [".main", ".extra['a'][0]", ".extra[3][0]"]


def test_arguments_that_were_not_given_are_not_handed_on() -> None:
    """A hook of the user's sees the call as it is without the wrapper."""
    model = Net().eval()
    calls: list[tuple[int, list[str]]] = []
    model.register_forward_pre_hook(
        lambda m, args, kwargs: calls.append((len(args), sorted(kwargs))), with_kwargs=True
    )
    ids, mask = torch.arange(6).view(1, 6), torch.ones(1, 6, 1)
    wrapped = instrument(model)
    for given in ({}, {"mask": mask}):
        model(ids, **given)
        wrapped(ids, **given)
    assert calls[0] == calls[1] == (1, [])
    assert calls[2] == calls[3] == (1, ["mask"])


def test_taps_are_what_stands_behind_other_peoples_hooks() -> None:
    model = Net().eval()
    model.blocks[0].register_forward_hook(lambda m, a, out: out * 2)
    ids = torch.arange(6).view(1, 6)
    wrapped = instrument(model, "blocks.0")
    doubled = heard(model, ids)
    assert_taps(wrapped, wrapped(ids)[1], [row for row in doubled if row[0] == "blocks.0"])
    assert len(model.blocks[0]._forward_hooks) == 1


def test_a_model_that_raises_keeps_no_hooks() -> None:
    model = Net().eval()
    wrapped = instrument(model)
    with pytest.raises(TypeError):
        wrapped("no tensor")
    assert hooks_on(model) == 0
    assert len(wrapped(torch.arange(6).view(1, 6))[1]) == 3


def test_the_manifest_is_asked_for_too_early() -> None:
    wrapped = instrument(Net().eval())
    with pytest.raises(OptionError, match="Run, trace or export it once"):
        _ = wrapped.manifest


def test_what_cannot_be_instrumented_is_said() -> None:
    scripted = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(OptionError, match=r"got TorchScript.*tap\.record"):
        instrument(scripted)
    with pytest.raises(OptionError, match="got int"):
        instrument(3)  # type: ignore[arg-type]
    wrapped = instrument(Net())
    with pytest.raises(OptionError, match="instrumented already"):
        instrument(wrapped)
    with pytest.raises(OptionError, match="The root has no tap"):
        instrument(Net(), "")
    with pytest.raises(SelectionError, match="No layer matches 'nothing'"):
        instrument(Net(), "nothing")
    with pytest.raises(OptionError, match="TorchScript, which takes no hooks"):
        instrument(nn.Sequential(scripted), "0")


def test_notes_name_the_root_silent_layers_and_none() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"logits": None, "other": self.used(x)}

    wrapped = instrument(Odd(), "all")
    assert wrapped.notes == ("The root has no tap: what it returns is the output itself.",)
    wrapped(torch.ones(1, 2))
    notes = wrapped.manifest.notes
    assert notes == (
        "1 selected layers returned no tensor in this run: 'idle'.",
        "The model's own output at ['logits'] is None in this run.",
    )


def test_a_fused_encoder_layer_leaves_its_path_only_while_it_has_taps() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    model = nn.Sequential(layer)
    x = torch.randn(2, 5, 16)
    with torch.inference_mode():
        before = model(x)
        wrapped = instrument(model, "all")
        assert "leaves its fused path" in wrapped.notes[0]
        output, taps = wrapped(x)
        assert torch.equal(model(x), before)
    torch.testing.assert_close(output, before)
    assert len(taps) > 5


def test_a_compiled_model_is_instrumented_inside() -> None:
    model = Net().eval()
    wrapped = instrument(torch.compile(model))
    assert wrapped.model is model
    assert any("was compiled" in note for note in wrapped.notes)
    assert len(wrapped(torch.arange(6).view(1, 6))[1]) == 3


def test_it_can_be_copied_and_pickled() -> None:
    model = nn.Sequential(Block(), Block()).eval()
    wrapped = instrument(model, "leaves")
    x = torch.randn(2, 8)
    _, taps = wrapped(x)
    for other in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        _, again = other(x)
        assert other.manifest == wrapped.manifest
        assert all(torch.equal(a, b) for a, b in zip(taps, again, strict=True))
        assert other.model is not model


def test_gradients_are_those_of_the_model() -> None:
    torch.manual_seed(0)
    model = Net().eval()
    ids = torch.arange(6).view(1, 6)
    model(ids).sum().backward()
    expected = model.head.weight.grad.clone(), model.embedding.weight.grad.clone()
    model.zero_grad()
    instrument(model)(ids)[0].sum().backward()
    assert torch.equal(model.head.weight.grad, expected[0])
    assert torch.equal(model.embedding.weight.grad, expected[1])
