"""Tensors inside anything: tuples, dicts, dataclasses, ModelOutput, None; odd tensors too."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import nn

from tensortap.taps.leaves import flatten

Pair = namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass
class Out:
    logits: Any
    cache: Any = None


T = torch.arange(3.0)


@pytest.mark.parametrize(
    ("value", "leaves"),
    [
        (T, [""]),
        ((T, T), ["[0]", "[1]"]),
        ([T, (T, [T])], ["[0]", "[1][0]", "[1][1][0]"]),
        ({"mask": T, 3: T}, ["['mask']", "[3]"]),
        (OrderedDict(a=T), ["['a']"]),
        (Pair(T, None), [".left", ".right"]),
        (Out(T, (T,)), [".logits", ".cache[0]"]),
        (None, [""]),
        ((T, None, "text", 3, object()), ["[0]", "[1]"]),
        ("text", []),
    ],
)
def test_flatten_names_leaves_as_one_would_write_them(value: Any, leaves: list[str]) -> None:
    assert [leaf for leaf, _ in flatten(value)] == leaves


def test_a_value_that_holds_itself_ends() -> None:
    loop: list[Any] = [T]
    loop.append(loop)
    assert len(flatten(loop)) == 64


def test_model_output_tells_its_none_fields() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    found = dict(flatten(outputs.CausalLMOutputWithPast(logits=None, loss=T)))
    assert found[".loss"] is T
    assert found[".logits"] is None


class Returns(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(x)


def test_nested_outputs_are_recorded_leaf_by_leaf(recorded) -> None:
    make = lambda x: {"h": (x, None), "aux": Out(x * 2)}  # noqa: E731
    run = recorded(Returns(make), torch.ones(2))
    found = {r.leaf: r.tensor().tolist() for r in run[""].records}
    assert found == {"['h'][0]": [1, 1], "['aux'].logits": [2, 2]}
    assert any("['h'][1]" in note and "None" in note for note in run.notes)


def test_an_output_that_is_none_is_said_in_words(recorded) -> None:
    run = recorded(nn.Sequential(Returns(lambda x: None)), torch.ones(2))
    assert len(run) == 0
    assert any("None" in note for note in run.notes)


def test_keyword_inputs_come_in_the_order_of_the_signature(recorded) -> None:
    class Layer(nn.Module):
        def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return hidden

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(mask=torch.zeros(1), hidden=x)

    layer = recorded(Model(), torch.ones(2), inputs=True)["layer"]
    assert [r.leaf for r in layer.port("input")] == ["['hidden']", "['mask']"]
    assert torch.equal(layer.input, torch.ones(2))


def test_kinds_of_tensors_get_their_treatment(recorded) -> None:
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)

    class Sub(torch.Tensor):
        pass

    kinds = {
        "sparse": dense.to_sparse(),
        "csr": dense.to_sparse_csr(),
        "nested": nested,
        "meta": torch.empty(2, device="meta"),
        "sub": dense.as_subclass(Sub),
        "conj": torch.tensor([1 + 2j]).conj(),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(7),
        "bool": torch.tensor([True, False]),
    }
    run = recorded(Returns(lambda x: kinds), torch.ones(1))
    found = {r.leaf: r for r in run[""].records}
    assert torch.equal(found["['sparse']"].tensor(), dense)
    assert torch.equal(found["['csr']"].tensor(), dense)
    assert torch.equal(found["['nested'].values()"].tensor(), torch.ones(5))
    assert torch.equal(found["['sub']"].tensor(), dense)
    assert found["['conj']"].tensor().tolist() == [1 - 2j]
    assert found["['empty']"].shape == (0, 3)
    assert found["['scalar']"].tensor().item() == 7
    assert found["['bool']"].tensor().tolist() == [True, False]
    assert any("['meta']" in note and "meta tensor holds no values" in note for note in run.notes)


def test_quantised_tensors_are_recorded_as_the_values_they_stand_for(recorded) -> None:
    x = torch.tensor([0.1, 0.26, -1.0])
    quantised = torch.quantize_per_tensor(x, 0.25, 0, torch.qint8)
    run = recorded(Returns(lambda _: quantised), x)
    assert run[""].output.tolist() == [0.0, 0.25, -1.0]
    assert run[""].records[0].dtype == "float32"


def test_of_a_dtensor_the_local_part_is_recorded(recorded, tmp_path) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/init", rank=0, world_size=1)
    try:
        sharded = distribute_tensor(torch.arange(6.0), init_device_mesh("cpu", (1,)), [Shard(0)])
        run = recorded(Returns(lambda _: sharded), torch.ones(1))
    finally:
        dist.destroy_process_group()
    assert [r.leaf for r in run[""].records] == [".to_local()"]
    assert torch.equal(run[""].output, torch.arange(6.0))


def test_a_tensor_that_cannot_be_brought_over_is_named_and_the_rest_goes_on(recorded) -> None:
    class Stuck(torch.Tensor):
        @staticmethod
        def __new__(cls, inner: torch.Tensor) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape)

        def __tensor_flatten__(self) -> Any:
            raise RuntimeError("the accelerator is gone")

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise RuntimeError("the accelerator is gone")

    run = recorded(Returns(lambda x: (Stuck(x), x)), torch.ones(2))
    assert [r.leaf for r in run[""].records] == ["[1]"]
    assert any("[0]" in note and "the accelerator is gone" in note for note in run.notes)
