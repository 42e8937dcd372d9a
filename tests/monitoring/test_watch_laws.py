"""Laws of `tap.watch` in eager mode, from outside: what it says is true, and nothing changes."""

from __future__ import annotations

import copy
import gc
import io
import os
import random
import signal
import subprocess
import sys
import tracemalloc
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from watch_truth import (
    Cell,
    Stack,
    adamw,
    assert_recorded,
    assert_same,
    floats,
    net,
    ports,
    recorded,
    steps,
    tokens,
    train,
    truth,
)

import tensortap as tap
from support import Net

ALL: dict[str, Any] = {"grads": True, "params": True, "updates": True}
BLOCKS = ("blocks.0", "blocks.1")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "train"


# What it says is true.


def test_every_value_is_that_of_the_true_tensor(path: Path) -> None:
    model, data = net(), tokens(3)
    wanted = truth(model, BLOCKS, data)
    torch.manual_seed(5)
    with tap.watch(model, path, every=1, **ALL) as watch:
        train(model, adamw(model), data)
    assert watch.failure is None and watch.alarms == []
    assert {port for _, port, _, _, _ in wanted} == {
        "output",
        "grad_output",
        "param",
        "grad_param",
        "update",
    }
    assert_recorded(path, wanted)


def test_micro_batches_are_calls_of_one_step(path: Path) -> None:
    model, data = net(), tokens(2, per_step=3)
    wanted = truth(model, BLOCKS, data)
    assert ("blocks.0", "grad_output", "", 1, 2) in wanted
    torch.manual_seed(5)
    with tap.watch(model, path, every=1, **ALL):
        train(model, adamw(model), data)
    assert_recorded(path, wanted)


def test_gradients_are_what_the_optimizer_sees(path: Path) -> None:
    """Clipped, since they are clipped before the step."""
    model, data = net(), tokens(1)[0]
    optimizer = adamw(model)
    with tap.watch(model, path, every=1):
        model(data[0]).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
    own = recorded(path)
    for name, grad in grads.items():
        owner, _, leaf = name.rpartition(".")
        assert_same(own[owner, "grad_param", f".{leaf}", 0, 0].summary, grad, name, 1e-12)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("micro", [1, 2])
def test_checkpointed_layers_are_recorded_once(path: Path, reentrant: bool, micro: int) -> None:
    torch.manual_seed(0)
    model, data = Stack(3, reentrant=reentrant), floats(2, per_step=micro)
    layers = [f"blocks.{n}" for n in range(3)]
    wanted = truth(model, layers, data)
    assert len(ports(wanted, "grad_output")) == 3 * 2 * micro
    with tap.watch(model, path, every=1, **ALL):
        train(model, adamw(model), data)
    assert_recorded(path, wanted)


@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_inside_a_checkpointed_part_are_recorded_once(path: Path, reentrant: bool) -> None:
    torch.manual_seed(0)
    model, data = Stack(2, reentrant=reentrant), floats(2)
    layers = ["first", "blocks.0.inner", "blocks.1.inner"]
    wanted = truth(model, layers, data)
    with tap.watch(model, path, layers=layers, every=1, **ALL):
        train(model, adamw(model), data)
    assert_recorded(path, wanted)


class Odd(nn.Module):
    """Returns what models return: tensors in tuples, dicts and dataclasses, None, numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair()
        self.table = Table()
        self.nothing = Nothing()
        self.made = Made()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _, (z, _) = self.pair(x)
        named = self.table(y + z)
        self.nothing(x)
        return self.made(named["a"]).values * named["deep"]["b"]


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> Any:
        return x * self.weight, None, (x + self.weight, 3)


class Table(Pair):
    def forward(self, x: torch.Tensor) -> Any:
        return {"a": x * self.weight, "deep": {"b": x - self.weight, "count": 2}}


class Nothing(nn.Module):
    def forward(self, x: torch.Tensor) -> None:
        return None


@dataclass
class Answer:
    values: torch.Tensor
    cache: torch.Tensor | None = None


class Made(Pair):
    def forward(self, x: torch.Tensor) -> Answer:
        return Answer(x * self.weight)


def test_nested_outputs_have_a_record_a_leaf(path: Path) -> None:
    torch.manual_seed(0)
    model, data = Odd(), floats(2)
    names = ["pair", "table", "nothing", "made"]
    with tap.watch(model, path, layers=names, every=1, params=False) as watch:
        train(model, adamw(model), data)
    assert watch.failure is None
    own = recorded(path)
    leaves = {(layer, leaf) for layer, port, leaf, *_ in own if port == "output"}
    assert leaves == {
        ("pair", "[0]"),
        ("pair", "[2][0]"),
        ("table", "['a']"),
        ("table", "['deep']['b']"),
        ("made", ".values"),
    }
    grads = {(layer, leaf) for layer, port, leaf, *_ in own if port == "grad_output"}
    assert grads == leaves
    x = data[0][0]
    assert_same(own["pair", "output", "[2][0]", 0, 0].summary, x + 1, "pair", 1e-6)


class Shared(nn.Module):
    """One layer under two names, run three times a step."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, 6)
        self.two = self.one
        self.last = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.two(torch.tanh(self.one(torch.tanh(self.one(x))))))


def test_a_shared_layer_is_recorded_call_by_call(path: Path) -> None:
    torch.manual_seed(0)
    model, data = Shared(), floats(2)
    wanted = truth(model, ["one", "last"], data)
    assert ("one", "grad_output", "", 0, 2) in wanted
    with tap.watch(model, path, layers=["one", "last"], every=1, **ALL):
        train(model, adamw(model), data)
    assert_recorded(path, wanted)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        y = y.mul_(-3.0).relu_()
        return self.b(y).add_(100.0)


def test_what_is_done_in_place_afterwards_is_not_recorded(path: Path) -> None:
    torch.manual_seed(0)
    model, data = InPlace(), floats(2)
    wanted = truth(model, ["a", "b"], data)
    assert wanted["a", "output", "", 0, 0].min() < 0
    with tap.watch(model, path, layers=["a", "b"], every=1, params=False):
        train(model, adamw(model), data)
    assert_recorded(path, ports(wanted, "output", "grad_output", "grad_param"))


# When.


def test_steps_of_the_cadence_and_no_others(path: Path) -> None:
    model = net()
    with tap.watch(model, path, every=3) as watch:
        train(model, adamw(model), tokens(8))
        assert watch.batch == 8
    assert steps(path) == [0, 3, 6]


def test_the_cadence_changes_while_running(path: Path) -> None:
    model = net()
    optimizer = adamw(model)
    with tap.watch(model, path, every=4) as watch:
        train(model, optimizer, tokens(5))  # 0, 4
        watch.set(every=2)
        train(model, optimizer, tokens(4))  # 6, 8
        watch.set(every=100)
        train(model, optimizer, tokens(4))
    assert steps(path) == [0, 4, 6, 8]


def test_layers_change_while_running(path: Path) -> None:
    model = net()
    optimizer = adamw(model)
    with tap.watch(model, path, every=1, params=False, grads=False) as watch:
        train(model, optimizer, tokens(2))
        watch.set(layers=["blocks.1", "final_norm"])
        assert set(watch.layers) == {"blocks.1", "final_norm"}
        train(model, optimizer, tokens(2))
    seen = {(layer, batch) for layer, _, _, batch, _ in recorded(path)}
    assert {layer for layer, batch in seen if batch < 2} == {"blocks.0", "blocks.1"}
    assert {layer for layer, batch in seen if batch >= 2} == {"blocks.1", "final_norm"}


def test_evaluation_between_steps_is_no_part_of_training(path: Path) -> None:
    model, data = net(), tokens(3)
    wanted = truth(model, BLOCKS, data)
    optimizer = adamw(model)

    def evaluate() -> None:
        state = torch.get_rng_state()
        model.eval()
        model(data[0][0])  # with gradients enabled
        with torch.no_grad():
            model(data[1][0])
        model.train()
        with torch.no_grad():
            model(data[2][0])  # somebody forgot eval()
        torch.set_rng_state(state)

    torch.manual_seed(5)
    with tap.watch(model, path, every=1, **ALL):
        evaluate()
        train(model, optimizer, data, before_step=evaluate, after_step=evaluate)
    assert_recorded(path, wanted)


def test_another_models_optimizer_is_not_our_clock(path: Path) -> None:
    model, other = net(), net()
    optimizer, others = adamw(model), adamw(other)
    data = tokens(3)
    with tap.watch(model, path, every=1) as watch:
        train(model, optimizer, data, after_step=lambda: train(other, others, tokens(2)))
        assert watch.batch == 3
    assert steps(path) == [0, 1, 2]
    calls = {call for _, _, _, _, call in recorded(path)}
    assert calls == {0}


def test_two_optimizers_make_one_step(path: Path) -> None:
    model, data = net(), tokens(4)
    matrices = torch.optim.SGD([p for p in model.parameters() if p.ndim > 1], lr=0.01)
    others = torch.optim.AdamW([p for p in model.parameters() if p.ndim <= 1], lr=0.01)
    with tap.watch(model, path, every=1, **ALL):
        for (batch,) in data:
            model(batch).square().mean().backward()
            matrices.step()
            others.step()
            matrices.zero_grad()
            others.zero_grad()
    own = recorded(path)
    outputs = [place for place in own if place[:2] == ("blocks.0", "output")]
    assert len(outputs) == 4
    for _, _, _, batch, _ in outputs:
        if batch in (1, 2):  # the first step teaches it, the last may be cut off
            assert ("blocks.0.up", "update", ".weight", batch, 0) in own
            assert ("blocks.0.up", "update", ".bias", batch, 0) in own
            assert own["blocks.0.up", "update", ".bias", batch, 0].summary.absmax > 0
            assert own["blocks.0.up", "update", ".weight", batch, 0].summary.absmax > 0


def test_a_manual_clock(path: Path) -> None:
    model, data = net(), tokens(4)
    with tap.watch(model, path, every=2, clock="manual", params=False) as watch:
        for (batch,) in data:
            model(batch).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter -= 0.1 * parameter.grad
            watch.step()
    assert steps(path) == [0, 2]


def test_epochs_and_numbers_of_ones_own(path: Path) -> None:
    model = net()
    optimizer = adamw(model)
    with tap.watch(model, path, every=1) as watch:
        for epoch in range(2):
            watch.epoch(epoch)
            for (batch,) in tokens(2):
                loss = model(batch).square().mean()
                loss.backward()
                watch.log({"loss": loss})
                optimizer.step()
                optimizer.zero_grad()
    run = tap.open(path)
    assert run.steps == [(0, 0), (0, 1), (1, 2), (1, 3)]
    losses = run["loss"].port("scalar")
    assert [record.batch for record in losses] == [0, 1, 2, 3]
    assert losses[0].summary.count == 1 and losses[0].summary.mean > 0


# Nothing changes.


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    return [
        *(p.detach().clone() for p in model.parameters()),
        *(
            value.clone()
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ),
        torch.get_rng_state(),
    ]


@pytest.mark.parametrize("micro", [1, 2])
def test_training_is_the_same_to_the_bit(path: Path, micro: int) -> None:
    ends = []
    for watched in (False, True):
        model, data = net(), tokens(6, per_step=micro)
        optimizer = adamw(model)
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        if watched:
            with tap.watch(model, path, every=2, rules=("nan", "grad_norm > 1e9"), **ALL):
                train(model, optimizer, data)
        else:
            train(model, optimizer, data)
        ends.append((states(model, optimizer), random.random(), np.random.random()))
    (plain, *dice), (own, *own_dice) = ends
    assert dice == own_dice
    assert len(plain) == len(own)
    for a, b in zip(plain, own, strict=True):
        assert torch.equal(a, b)


def test_sgd_without_a_gradient_for_some(path: Path) -> None:
    """Frozen and unused parameters: no gradient, no update, no trouble."""
    model, data = net(), tokens(3)
    model.embedding.weight.requires_grad_(False)
    model.spare = nn.Linear(3, 3)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with tap.watch(model, path, every=1, **ALL) as watch:
        train(model, optimizer, data)
    assert watch.failure is None
    own = recorded(path)
    assert ("embedding", "grad_param", ".weight", 0, 0) not in own
    assert ("spare", "grad_param", ".weight", 0, 0) not in own
    assert ("embedding", "param", ".weight", 0, 0) in own
    update = own.get(("spare", "update", ".weight", 0, 0))
    assert update is None or update.summary.absmax == 0


HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
)


def traces(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Everything by which a watch could be noticed from outside."""
    from torch.nn.modules import module as modules
    from torch.optim import optimizer as optimizers

    return {
        "hooks": [[list(getattr(m, kind).items()) for kind in HOOKS] for m in model.modules()],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "forwards": ["forward" in vars(m) for m in model.modules()],
        "parameters": [
            (p._backward_hooks, p._post_accumulate_grad_hooks, sorted(vars(p)))
            for p in model.parameters()
        ],
        "global": [
            list(getattr(modules, name).items())
            for name in ("_global_forward_hooks", "_global_forward_pre_hooks")
        ],
        "optimizers": [
            list(optimizers._global_optimizer_pre_hooks.items()),
            list(optimizers._global_optimizer_post_hooks.items()),
            list(optimizer._optimizer_step_pre_hooks.items()),
            list(optimizer._optimizer_step_post_hooks.items()),
        ],
    }


def test_closing_leaves_everything_as_it_was(path: Path) -> None:
    model = net()
    optimizer = adamw(model)
    heard: list[str] = []
    model.blocks[0].register_forward_hook(lambda m, a, o: heard.append("before"))
    was = traces(model, optimizer)
    watch = tap.watch(model, path, every=1, **ALL)
    assert traces(model, optimizer) != was
    train(model, optimizer, tokens(2))
    watch.close()
    assert traces(model, optimizer) == was
    watch.close()  # twice is harmless
    train(model, optimizer, tokens(2))
    assert heard == ["before"] * 4
    assert steps(path) == [0, 1]


def test_hooks_of_others_stay_in_their_order(path: Path) -> None:
    model = net()
    heard: list[str] = []
    block = model.blocks[0]
    block.register_forward_hook(lambda m, a, o: heard.append("first"))
    with tap.watch(model, path, every=1):
        block.register_forward_hook(lambda m, a, o: heard.append("second"))
        block.register_forward_hook(lambda m, a, o: o * 2)
        train(model, adamw(model), tokens(1))
    assert heard == ["first", "second"]
    train(model, adamw(model), tokens(1))
    assert heard == ["first", "second"] * 2


class Breaks(Cell):
    """Raises in its fifth forward pass, in the middle of the model's."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.left = 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left < 0:
            raise ZeroDivisionError("the layer broke")
        return super().forward(x)


def test_a_layer_that_raises_leaves_no_hook_and_what_was_recorded(path: Path) -> None:
    model = Stack(3)
    model.blocks[1] = Breaks(6)
    optimizer = adamw(model)
    was = traces(model, optimizer)
    with (
        pytest.raises(ZeroDivisionError, match="the layer broke"),
        tap.watch(model, path, every=2, **ALL),
    ):
        train(model, optimizer, floats(9))
    assert traces(model, optimizer) == was
    run = tap.open(path)
    assert run.manifest.status == "failed"
    assert run.manifest.failure is not None and "the layer broke" in run.manifest.failure
    own = recorded(path)
    assert {0, 1, 2, 3} <= set(steps(path))  # 1 and 3 from the ring: training broke off
    assert ("blocks.0", "output", "", 4, 0) in own  # the step that broke, as far as it came
    assert ("blocks.1", "output", "", 4, 0) not in own


def test_a_watched_model_is_copied_and_saved(path: Path) -> None:
    model, data = net(), tokens(3)
    optimizer = adamw(model)
    with tap.watch(model, path, every=1) as watch:
        train(model, optimizer, data[:1])
        twin = copy.deepcopy(model)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        twin.train()(data[1][0])  # an average of weights that runs beside: not what is watched
        loaded.train()(data[1][0])
        train(twin, adamw(twin), data)
        train(model, optimizer, data[1:])
        assert watch.batch == 3
    own = recorded(path)
    assert {call for _, _, _, _, call in own} == {0}
    assert steps(path) == [0, 1, 2]
    for a, b in zip(loaded.parameters(), twin.parameters(), strict=True):
        assert a.shape == b.shape


def test_memory_does_not_grow(path: Path) -> None:
    model, data = net(), tokens(50)
    optimizer = adamw(model)
    with tap.watch(model, path, every=100, ring=5, **ALL) as watch:
        train(model, optimizer, data * 2)
        watch.flush()
        gc.collect()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            train(model, optimizer, data * 4)
            watch.flush()
            gc.collect()
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
    assert watch.batch == 300
    assert grown < 400_000, f"{grown} bytes more after 200 steps"


def test_a_closed_watch_holds_nothing_of_the_model(path: Path) -> None:
    import weakref

    model = net()
    watch = tap.watch(model, path, every=1, **ALL)
    optimizer = adamw(model)
    train(model, optimizer, tokens(2))
    watch.close()
    gone = weakref.ref(model.blocks[0].up.weight)
    del model, optimizer, watch
    gc.collect()
    assert gone() is None


KILLED = """
import torch, tensortap as tap
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
watch = tap.watch(model, PATH, layers="leaves", every=1)
step = 0
while True:
    model(torch.randn(2, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step == 20:
        watch.flush()
        print("flushed", flush=True)
"""


def test_a_killed_training_leaves_a_readable_recording(path: Path) -> None:
    code = f"PATH = {str(path)!r}\n{KILLED}"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "flushed\n"
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    run = tap.open(path)
    assert run.manifest.status == "recording"
    assert set(range(20)) <= set(steps(path))
    assert run["0"].port("output")[0].summary.count == 8


# Bad input.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": 0}, "every"),
        ({"every": "often"}, "every"),
        ({"ring": -1}, "ring"),
        ({"layers": "blokcs.*"}, "blokcs"),
        ({"clock": "sundial"}, "sundial"),
        ({"rules": ["grad_nrom > 3"]}, "grad_nrom"),
        ({"rules": "nan -> explode"}, "explode"),
        ({"sinks": "tensorbord"}, "tensorbord"),
        ({"outputs": False, "grads": False, "params": False}, "outputs"),
    ],
)
def test_bad_options_are_sentences_and_leave_nothing(
    path: Path, options: dict[str, Any], words: str
) -> None:
    model = net()
    optimizer = adamw(model)
    was = traces(model, optimizer)
    with pytest.raises(ValueError, match=words) as caught:
        tap.watch(model, path, **options)
    assert isinstance(caught.value, tap.TapError)
    assert traces(model, optimizer) == was
    assert not path.exists()


def test_a_recording_that_is_there_is_not_overwritten(path: Path) -> None:
    model = net()
    with tap.watch(model, path, every=1):
        train(model, adamw(model), tokens(1))
    optimizer = adamw(model)
    was = traces(model, optimizer)
    with pytest.raises(tap.TapError, match="overwrite"):
        tap.watch(model, path)
    assert traces(model, optimizer) == was
    with tap.watch(model, path, every=1, overwrite=True):
        train(model, optimizer, tokens(2))
    assert steps(path) == [0, 1]


def test_a_loop_without_an_optimizer_is_told_so(path: Path) -> None:
    model = net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tap.TapWarning)
        with tap.watch(model, path, every=1) as watch:
            model(tokens(1)[0][0]).square().mean().backward()
    assert any("step" in note and "manual" in note for note in watch.notes)


# Other things that people do.


def test_a_compiled_eager_mixture_of_dtypes(path: Path) -> None:
    """bf16 autocast: the outputs are in bfloat16, and so is what is said of them."""
    torch.manual_seed(0)
    model, (batch,) = Stack(2), floats(1)[0]
    optimizer = adamw(model)
    with tap.watch(model, path, layers=["blocks.0.inner"], every=1):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(batch).float().square().mean()
        loss.backward()
        optimizer.step()
    own = recorded(path)
    assert own["blocks.0.inner", "output", "", 0, 0].dtype == "bfloat16"
    assert own["blocks.0.inner", "param", ".weight", 0, 0].dtype == "float32"


def test_a_layer_that_is_frozen_has_outputs_and_no_gradient(path: Path) -> None:
    torch.manual_seed(0)
    model = Stack(2)
    for parameter in (*model.first.parameters(), *model.blocks[0].parameters()):
        parameter.requires_grad_(False)
    with tap.watch(model, path, every=1, params=False):
        train(model, adamw(model), floats(1))
    own = recorded(path)
    assert ("blocks.0", "output", "", 0, 0) in own
    assert ("blocks.0", "grad_output", "", 0, 0) not in own
    assert ("blocks.1", "grad_output", "", 0, 0) in own


def test_generators_of_batches_may_end_a_run_anywhere(path: Path) -> None:
    """A last step that has forwards and no optimizer step is kept as far as it came."""
    model, data = net(), tokens(3)
    optimizer = adamw(model)
    with tap.watch(model, path, every=1, params=False):
        train(model, optimizer, data[:2])
        model(data[2][0])
    own = recorded(path)
    assert ("blocks.1", "output", "", 2, 0) in own
    assert ("blocks.1", "grad_output", "", 2, 0) not in own


def test_two_watches_of_one_model(tmp_path: Path) -> None:
    model, data = net(), tokens(4)
    wanted = truth(model, BLOCKS, data)
    torch.manual_seed(5)
    with (
        tap.watch(model, tmp_path / "a", every=1, params=False),
        tap.watch(model, tmp_path / "b", layers=["final_norm"], every=2, **ALL),
    ):
        train(model, adamw(model), data)
    assert_recorded(tmp_path / "a", ports(wanted, "output", "grad_output", "grad_param"))
    assert steps(tmp_path / "b") == [0, 2]


@pytest.fixture(autouse=True)
def no_unexpected_warning() -> Iterator[None]:
    """What is not expected is not said."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", tap.TapWarning)
        yield


def test_the_model_of_these_tests_drops_out() -> None:
    """Or the tests of random states would prove nothing."""
    model: Net = net()
    batch = tokens(1)[0][0]
    assert not torch.equal(model(batch), model(batch))
