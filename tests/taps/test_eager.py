"""The eager tap: every layer, at the right moment, with the right values."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tensortap as tap
from support import Net, hooked_outputs


def test_records_every_output_as_plain_hooks_see_it(net: Net, ids, recorded) -> None:
    run = recorded(net, ids)
    expected = hooked_outputs(net, ids)
    called = [name for name, module in net.named_modules() if not isinstance(module, nn.ModuleList)]
    assert set(run.layers) == set(called)
    for name in called:
        assert torch.equal(run[name].output, expected[name][0]), name


def test_order_is_that_in_which_calls_finish(net: Net, ids, recorded) -> None:
    run = recorded(net, ids)
    assert run.layers[0] == "embedding"
    assert run.layers[-1] == ""
    assert run.layers.index("blocks.0.down") < run.layers.index("blocks.0")
    assert run.layers.index("blocks.0") < run.layers.index("blocks.1.norm")


def test_input_rows_do_not_change_the_order_of_layers(net: Net, ids, recorded) -> None:
    assert recorded(net, ids, inputs=True).layers == recorded(net, ids).layers


def test_input_is_what_the_layer_received(net: Net, ids, recorded) -> None:
    run = recorded(net, ids, inputs=True)
    assert torch.equal(run["blocks.0"].input, run["embedding"].output)
    assert torch.equal(run["embedding"].input, ids)
    assert torch.equal(run["blocks.1"].input, run["blocks.0"].output)


def test_an_input_that_the_layer_overwrites_is_recorded_as_it_came(recorded) -> None:
    class Overwrites(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.mul_(0)
            return x + 1

    x = torch.ones(4)
    run = recorded(nn.Sequential(Overwrites()), x, inputs=True)
    assert torch.equal(run["0"].input, torch.ones(4))
    assert torch.equal(run["0"].output, torch.ones(4))


@pytest.mark.parametrize("inference", [False, True])
def test_in_place_activation_does_not_rewrite_the_layer_before(recorded, inference: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(inplace=True))
    x = torch.randn(3, 4)
    expected = nn.functional.linear(x, model[0].weight, model[0].bias)
    with torch.inference_mode(inference):
        run = recorded(model, x)
    assert expected.min() < 0
    assert torch.equal(run["0"].output, expected.detach())
    assert torch.equal(run["1"].output, expected.detach().relu())


@pytest.mark.parametrize("how", ["data", "numpy", "residual"])
def test_writes_that_move_no_version_counter_do_not_reach_the_recording(recorded, how: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Identity()
            self.after = nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x + 0)
            if how == "data":
                y.data.zero_()
            elif how == "numpy":
                y.numpy()[:] = 0
            else:
                y += 5
            return self.after(y)

    with torch.no_grad():
        run = recorded(Model(), torch.ones(8))
    assert torch.equal(run["layer"].output, torch.ones(8))
    assert torch.equal(run["after"].output, torch.full((8,), 6.0 if how == "residual" else 0.0))


def test_a_layer_called_twice_is_two_records_in_order(recorded) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.layer(x))

    model, x = Twice(), torch.randn(2, 4)
    run = recorded(model, x)
    first, second = run["layer"].records
    assert (first.call, second.call) == (0, 1)
    assert first.order < second.order
    assert torch.equal(first.tensor(), model.layer(x).detach())
    assert torch.equal(second.tensor(), model.layer(model.layer(x)).detach())


def test_recursion_pairs_each_input_with_its_own_output(recorded) -> None:
    class Nested(nn.Module):
        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            return x + 1 if depth == 0 else self(x * 10, depth - 1) + 1

    run = recorded(nn.Sequential(Nested()), torch.ones(1), inputs=True)
    layer = run["0"]
    pairs = [
        (i.tensor().item(), o.tensor().item())
        for i, o in zip(layer.port("input"), layer.port("output"), strict=True)
        if i.call == o.call
    ]
    assert pairs == [(100.0, 101.0), (10.0, 102.0), (1.0, 103.0)]


def test_steps_count_batches_and_reset_calls(net: Net, ids, tmp_path) -> None:
    with tap.record(net, tmp_path / "r", layers="head") as rec:
        net(ids)
        net(ids)
        rec.step()
        net(ids + 1)
        rec.moment(epoch=3)
        net(ids)
        rec.moment(epoch=3, batch=7)
        net(ids)
    moments = [(r.epoch, r.batch, r.call) for r in tap.open(tmp_path / "r").records]
    assert moments == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (3, 0, 0), (3, 7, 0)]


def test_shared_modules_are_recorded_once_a_call_under_one_name(recorded) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = self.first

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    run = recorded(Tied(), torch.randn(2, 4), layers="second")
    assert run.layers == ["first"]
    assert [r.call for r in run["first"].records] == [0, 1]


def test_views_do_not_drag_their_storage_to_disk(tmp_path) -> None:
    class Slice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, :2].t()

    big = torch.randn(4, 1 << 18)
    with tap.record(nn.Sequential(Slice()), tmp_path / "r", layers="leaves") as rec:
        out = rec.run(big)
    run = tap.open(tmp_path / "r")
    assert torch.equal(run["0"].output, out)
    assert run.nbytes < 1 << 20


def test_the_same_tensor_is_stored_once_and_referred_to_twice(net: Net, ids, recorded) -> None:
    run = recorded(net, ids, inputs=True)
    assert run["blocks.1"].first("input").tensor_id == run["blocks.0"].first("output").tensor_id
    ids_on_disk = {record.tensor_id for record in run.records}
    assert len(ids_on_disk) < len(run.records)


def test_memory_that_the_allocator_reuses_is_not_taken_for_the_same_tensor(recorded) -> None:
    class Reuses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step = nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for value in range(20):
                t = torch.full((64,), float(value))
                self.step(t)
                del t
            return x

    records = recorded(Reuses(), torch.ones(1))["step"].records
    assert [r.tensor()[0].item() for r in records] == [float(v) for v in range(20)]


def test_what_comes_out_behind_other_hooks_is_recorded(net: Net, ids, tmp_path) -> None:
    early = net.head.register_forward_hook(lambda m, a, out: out + 1)
    with tap.record(net, tmp_path / "r", layers="head", inputs=True) as rec:
        late = net.head.register_forward_hook(lambda m, a, out: out * 2)
        pre = net.head.register_forward_pre_hook(lambda m, a: (a[0] * 0,))
        out = rec.run(ids)
    run = tap.open(tmp_path / "r")
    assert torch.equal(run["head"].output, out)
    assert torch.equal(run["head"].input, torch.zeros_like(run["head"].input))
    for handle in (early, late, pre):
        assert handle.id in {**net.head._forward_hooks, **net.head._forward_pre_hooks}


def test_wrapper_prefixes_stay_and_compiled_ones_go(ids, recorded) -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, *args: object) -> object:
            return self.module(*args)

    assert "module.blocks.0" in recorded(Wrapper(Net().eval()), ids).layers


def test_autocast_records_the_dtype_that_was_computed(net: Net, ids, recorded) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run = recorded(net, ids)
    assert run["head"].records[0].dtype == "bfloat16"
    assert run["embedding"].records[0].dtype == "float32"


def test_layers_called_by_forward_are_named_as_missed(recorded) -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heard = nn.Linear(2, 2)
            self.missed = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.missed.forward(self.heard(x))

    run = recorded(Skips(), torch.ones(1, 2))
    assert any("'missed'" in note and ".forward()" in note for note in run.notes)
    assert "heard" in run and "missed" not in run


def test_nothing_ran_is_said(net: Net, tmp_path) -> None:
    with tap.record(net, tmp_path / "r", layers="head") as rec:
        pass
    assert any("None of the 1 selected layers ran" in note for note in rec.notes)


def test_moments_are_checked(net: Net, tmp_path) -> None:
    with tap.record(net, tmp_path / "r") as rec:
        with pytest.raises(ValueError, match="batch must be a whole number from 0, got -1"):
            rec.moment(batch=-1)
    with pytest.raises(tap.TapError, match="not running"):
        rec.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": "everything"}, "keep must be 'tensors', 'sketch' or 'summary', got 'everything'"),
        ({"outputs": False}, "Nothing to record"),
        ({"budget": 10}, "at least 1 MiB"),
        ({"layers": "hed"}, "head"),
        ({"stop": True}, "against=RUN"),
    ],
)
def test_wrong_options_are_sentences(net: Net, tmp_path, options, message) -> None:
    with pytest.raises(tap.TapError, match=message) as caught:
        tap.record(net, tmp_path / "r", **options)
    assert isinstance(caught.value, ValueError)


def test_what_is_no_module_is_refused_in_words(tmp_path) -> None:
    with pytest.raises(tap.TapError, match=r"Cannot record a builtins.dict"):
        tap.record({}, tmp_path / "r")


def test_default_on_a_model_without_blocks_falls_back_to_leaves_and_says_so(tmp_path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
    with tap.record(model, tmp_path / "r") as rec:
        model(torch.ones(1, 2))
    assert rec.layers == ["0", "1"]
    assert any("leaves" in note for note in rec.notes)


def test_odd_inputs_do_not_stop_a_recording(recorded) -> None:
    class Dense(nn.Module):
        def forward(self, x: torch.Tensor, y: object = None) -> torch.Tensor:
            return x.to_dense() * 2

    run = recorded(Dense(), torch.eye(3).to_sparse(), "text", inputs=True)
    assert torch.equal(run[""].output, torch.eye(3) * 2)
    assert torch.equal(run[""].input, torch.eye(3))


def test_lazy_modules_are_recorded_from_their_first_call(recorded) -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.ReLU())
    run = recorded(model, torch.ones(2, 5))
    assert run["0"].output.shape == (2, 3)


def test_a_dtype_that_cannot_be_summarised_is_named_and_the_rest_goes_on(recorded) -> None:
    odd = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)

    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return odd, x

    for keep in ("tensors", "summary"):
        run = recorded(nn.Sequential(Odd()), torch.ones(2), keep=keep)
        assert [r.leaf for r in run["0"].records] == ["[1]"]
        assert any("float4_e2m1fn_x2" in note and "[0]" in note for note in run.notes)


def test_many_threads_record_at_once_and_inputs_keep_to_their_outputs(tmp_path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    class Double(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    model = nn.Sequential(Double(), Double())
    options = {"layers": "leaves", "budget": 4 << 20, "inputs": True}
    with tap.record(model, tmp_path / "r", **options) as rec:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda i: model(torch.full((100, 1000), float(i))), range(64)))
    assert rec.failure is None
    run = tap.open(tmp_path / "r")
    for name in ("0", "1"):
        inputs = {r.call: r.tensor() for r in run[name].port("input")}
        outputs = {r.call: r.tensor() for r in run[name].port("output")}
        assert sorted(inputs) == sorted(outputs) == list(range(64))
        assert all(torch.equal(outputs[call], inputs[call] * 2) for call in inputs)


def test_a_forked_child_records_nothing_and_waits_for_nobody(tmp_path) -> None:
    import subprocess
    import sys

    code = """
import os, sys, torch, tensortap as tap
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Identity())
values = [torch.full((1000,), float(i)) for i in range(1500)]
with tap.record(model, sys.argv[1], layers="leaves", budget=1 << 20) as rec:
    child = os.fork()
    if child == 0:
        for value in values:
            model(value)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    rec.run(torch.ones(3))
"""
    path = str(tmp_path / "r")
    subprocess.run([sys.executable, "-W", "ignore", "-c", code, path], check=True, timeout=60)
    assert len(tap.open(path).records) == 1
