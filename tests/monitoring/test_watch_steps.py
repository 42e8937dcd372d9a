"""What a step is: several optimizers, exceptions, late numbers, sinks that misbehave."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tap


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run"


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


def inputs(count: int) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    return [torch.randn(3, 4, generator=made) * (i + 1) for i in range(count)]


def of(path: Path, port: str, layer: str = "a", leaf: str = "") -> dict[int, list[float]]:
    """The l2 of each record, by step."""
    found: dict[int, list[float]] = {}
    for record in tap.open(path, partial=True)[layer].records:
        if record.port == port and record.leaf == leaf:
            found.setdefault(record.batch, []).append(record.summary.l2)
    return found


def norm(x: torch.Tensor) -> float:
    return tap.summarize(x.detach().clone()).l2


def passes(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    return loss


@pytest.mark.parametrize("when", ["every fourth", "replaced"])
def test_outputs_stand_at_their_own_step_whoever_steps(path: Path, when: str) -> None:
    model, true, kept = Two(), {}, []
    first = torch.optim.SGD(model.parameters(), lr=1e-2)
    second = torch.optim.SGD(model.b.parameters(), lr=1e-2)
    heads: list[float] = []
    model.a.register_forward_hook(lambda m, a, out: heads.append(norm(out)))
    with tap.watch(model, path, layers=["a"], every=1, params=False) as watch:
        for i, x in enumerate(inputs(9)):
            model.zero_grad()
            passes(model, x)
            true[i] = [heads[-1]]
            first.step()
            if when == "every fourth" and i % 4 == 3:
                second.step()
            if when == "replaced" and i == 3:
                kept.append(first)
                first = torch.optim.SGD(model.parameters(), lr=1e-2)
        assert watch.batch == 9
    assert of(path, "output") == true


def test_gradients_are_those_that_their_own_optimizer_sees(path: Path) -> None:
    """A GAN in one module: each half has a backward pass and an optimizer of its own."""
    model = Two()
    halves = {"a": model.a, "b": model.b}
    optimizers = {n: torch.optim.SGD(m.parameters(), lr=1e-2) for n, m in halves.items()}
    true: dict[str, list[float]] = {"a": [], "b": []}
    moved: dict[str, list[float]] = {"a": [], "b": []}
    with tap.watch(model, path, layers=["a"], every=1, updates=True):
        for x in inputs(4):
            for name, optimizer in optimizers.items():
                optimizer.zero_grad()
                passes(model, x)
                true[name].append(norm(halves[name].weight.grad))
                before = halves[name].weight.detach().clone()
                optimizer.step()
                moved[name].append(norm(halves[name].weight - before))
    for name in halves:
        steps = of(path, "grad_param", name, ".weight")
        assert [v for values in steps.values() for v in values] == pytest.approx(true[name])
        steps = of(path, "update", name, ".weight")
        assert [v for values in steps.values() for v in values] == pytest.approx(moved[name])
        assert list(steps) == [0, 2, 4, 6] if name == "a" else [1, 3, 5, 7]


def test_two_optimizers_of_one_step_are_complete_from_the_first_step(path: Path) -> None:
    model = Two()
    pair = [torch.optim.SGD(m.parameters(), lr=1e-1) for m in (model.a, model.b)]
    after = []
    with tap.watch(model, path, layers=["a"], every=1, updates=True):
        for x in inputs(3):
            model.zero_grad()
            passes(model, x)
            for optimizer in pair:
                optimizer.step()
            after.append(norm(model.b.weight))
    assert of(path, "param", "b", ".weight") == {i: [v] for i, v in enumerate(after)}
    assert {i: len(v) for i, v in of(path, "update", "b", ".weight").items()} == {0: 1, 1: 1, 2: 1}


def test_an_optimizer_inside_another_is_one_step(path: Path) -> None:
    class Halving(torch.optim.Optimizer):
        """Takes half of what another one does, as Lookahead does."""

        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner = inner
            super().__init__([p for g in inner.param_groups for p in g["params"]], {})

        def step(self, closure: Any = None) -> None:
            before = [p.detach().clone() for p in self.param_groups[0]["params"]]
            self.inner.step()
            with torch.no_grad():
                for p, old in zip(self.param_groups[0]["params"], before, strict=True):
                    p.lerp_(old, 0.5)

    model = Two()
    optimizer = Halving(torch.optim.SGD(model.parameters(), lr=1e-1))
    true = {}
    with tap.watch(model, path, layers=["a"], every=1, updates=True) as watch:
        for i, x in enumerate(inputs(4)):
            model.zero_grad()
            passes(model, x)
            before = model.a.weight.detach().clone()
            optimizer.step()
            true[i] = [norm(model.a.weight - before)]
        assert watch.batch == 4
    found = of(path, "update", "a", ".weight")
    assert found.keys() == true.keys()
    assert all(found[i] == pytest.approx(true[i]) for i in true)


def test_optimizers_that_step_in_backward(path: Path) -> None:
    """torch's own recipe to save memory: a parameter's optimizer steps when its gradient comes."""
    model, true = Two(), []
    own = {p: torch.optim.SGD([p], lr=1e-2) for p in model.parameters()}

    def stepped(p: torch.Tensor) -> None:
        if p is model.a.weight:
            true.append(norm(p.grad))
        own[p].step()
        own[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(stepped)
    with tap.watch(model, path, layers=["a", "b"], every=1):
        for x in inputs(3):
            passes(model, x)
    assert of(path, "grad_param", "a", ".weight") == {i: [v] for i, v in enumerate(true)}
    for layer in ("a", "b"):
        for leaf in (".weight", ".bias"):
            assert len(of(path, "grad_param", layer, leaf)) == 3
    assert {i: len(v) for i, v in of(path, "grad_output").items()} == {0: 1, 1: 1, 2: 1}


def test_an_optimizer_that_raises_ends_its_step_all_the_same(path: Path) -> None:
    model = Two()

    class Weak(torch.optim.SGD):
        fails = False

        def step(self, closure: Any = None) -> None:
            if self.fails:
                raise ValueError("not now")
            super().step(closure)

    optimizer, heads = Weak(model.parameters(), lr=1e-2), []
    model.a.register_forward_hook(lambda m, a, out: heads.append(norm(out)))
    with tap.watch(model, path, layers=["a"], every=1, params=False):
        for i, x in enumerate(inputs(5)):
            model.zero_grad()
            passes(model, x)
            optimizer.fails = i == 2
            with contextlib.suppress(ValueError):
                optimizer.step()
    assert of(path, "output") == {i: [v] for i, v in enumerate(heads)}


def test_a_layer_that_returns_its_parameter_gets_no_hook_that_stays(path: Path) -> None:
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))

        def forward(self) -> torch.Tensor:
            return self.w

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.learned, self.a = Learned(), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x + self.learned())

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with tap.watch(model, path, layers=["learned", "a"], every=1):
        for x in inputs(5):
            model.zero_grad()
            passes(model, x)
            optimizer.step()
            assert len(model.learned.w._backward_hooks or ()) <= 1
    assert not model.learned.w._backward_hooks
    assert {i: len(v) for i, v in of(path, "grad_output", "learned").items()} == dict.fromkeys(
        range(5), 1
    )


def test_sampled_updates_have_the_ratio_of_exact_ones(tmp_path: Path) -> None:
    torch.manual_seed(0)
    found: dict[str, dict[str, float]] = {}
    for how in ("exact", "sampled"):
        model = nn.Linear(512, 512)
        nn.init.constant_(model.weight, 0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        values: list[Any] = []
        alarms = {"update_norm > 0": "warn"}
        with (
            warnings.catch_warnings(),
            tap.watch(
                model,
                tmp_path / how,
                layers="all",
                every=1,
                updates=how,  # type: ignore[arg-type]
                rules=alarms,
                sinks=lambda v, s, values=values: values.append(v),
            ) as watch,
        ):
            warnings.simplefilter("ignore")
            model.weight.grad = torch.full_like(model.weight, 1e-3)
            model.bias.grad = torch.zeros_like(model.bias)
            optimizer.step()
        found[how] = {**values[0], "norm": watch.alarms[0].value}
    name = "update/(root).weight/ratio"
    name = next(key for key in found["exact"] if key.endswith(".weight/ratio"))
    for key in (name, "norm"):
        assert found["sampled"][key] == pytest.approx(found["exact"][key], rel=1e-3)


def test_the_config_file_says_where_to_write(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(json.dumps({"watch_path": str(tmp_path / "there")}))
    tap.watch(Two(), layers="all", config=tmp_path / "c.json").close()
    assert tap.open(tmp_path / "there").status == "complete"


def test_a_config_that_is_wrong_changes_nothing(tmp_path: Path, path: Path) -> None:
    config = tmp_path / "c.json"
    config.write_text(json.dumps({"watch_every": 2}))
    model = Two()
    with tap.watch(model, path, layers=["a"], config=config) as watch:
        with pytest.raises(tap.TapError, match="nope"):
            watch.set(every=7, layers=["nope"])
        with pytest.raises(tap.TapError):
            watch.set(every=7, rules=["zz.*: dead > 0.5"])
        with pytest.raises(tap.TapError, match="params"):
            watch.set(every=7, params=5)  # type: ignore[arg-type]
        assert watch._stepping.wanted.every == 2
    for wrong in ({"layers": None}, {"layers": 5}, {"params": 5}):
        with pytest.raises(tap.TapError, match="pattern"):
            tap.watch(model, tmp_path / "other", **wrong)


def test_a_snapshot_has_the_parameters_too(path: Path) -> None:
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)
    rules = {"loss > 0.5": "snapshot"}
    with (
        pytest.warns(tap.TapWarning, match="loss"),
        tap.watch(model, path, layers=["a"], every=1, updates=True, rules=rules) as watch,
    ):
        for i, x in enumerate(inputs(4)):
            model.zero_grad()
            passes(model, x)
            before = model.a.weight.detach().clone()
            optimizer.step()
            watch.log(loss=float(i == 2))  # behind the step: still its number
            if i == 2:
                want = {
                    "param": model.a.weight.detach().clone(),
                    "grad_param": model.a.weight.grad.clone(),
                    "update": model.a.weight.detach() - before,
                }
                watch.flush()
    stored = {
        r.port: r for r in tap.open(path)["a"].records if r.batch == 2 and r.leaf == ".weight"
    }
    for port, tensor in want.items():
        assert torch.equal(stored[port].tensor(), tensor), port
    assert [r.batch for r in tap.open(path)["a"].records if r.port == "output" and r.stored] == [2]


def test_a_budget_that_is_too_small_is_said_once(path: Path) -> None:
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)
    with (
        warnings.catch_warnings(record=True) as said,
        tap.watch(
            model, path, layers=["a"], rules={"loss > 1": "snapshot"}, budget=8, params=False
        ) as watch,
    ):
        warnings.simplefilter("always")
        for x in inputs(4):
            passes(model, x)
            optimizer.step()
            assert not said
            watch.log(loss=0)
        watch.log(loss=2)
    assert [str(w.message) for w in said if "budget" in str(w.message)] == [
        "A snapshot needs more than the budget of 8 bytes: some tensors are known by their "
        "summaries alone. Raise budget=."
    ]


def test_a_model_that_trains_in_eval_mode_is_told_of(tmp_path: Path) -> None:
    model = Two().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)
    with (
        pytest.warns(tap.TapWarning, match="training_only=False"),
        tap.watch(model, tmp_path / "a", layers=["a"], every=1),
    ):
        for x in inputs(2):
            passes(model, x)
            optimizer.step()
    with tap.watch(model, tmp_path / "b", layers=["a"], every=1, training_only=False):
        for x in inputs(2):
            passes(model, x)
            optimizer.step()
            with torch.no_grad():
                model(x)
    assert {i: len(v) for i, v in of(tmp_path / "b", "output").items()} == {0: 1, 1: 1}


def test_nan_in_the_gradients_of_parameters_is_named_at_its_step(path: Path) -> None:
    class Poison(torch.autograd.Function):
        at = -1

        @staticmethod
        def forward(ctx: Any, w: torch.Tensor) -> torch.Tensor:
            return w.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * float("nan") if Poison.at == 0 else grad

    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, Poison.apply(self.weight), self.bias)

    model = nn.Sequential(Layer(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with (
        pytest.raises(tap.WatchAlarm, match=r"Step 5: .*grad_param .weight of '0'"),
        tap.watch(model, path, layers="leaves", every=100, rules={"nan": "raise"}),
    ):
        for i, x in enumerate(inputs(8)):
            Poison.at = i - 5
            model.zero_grad()
            passes(model, x)
            optimizer.step()
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_the_sentence_about_one_micro_batch_is_true(path: Path) -> None:
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with (
        pytest.warns(tap.TapWarning) as said,
        tap.watch(model, path, layers=["a", "b"], every=100, params=False),
    ):
        for step in range(3):
            for micro, x in enumerate(inputs(3)):
                if (step, micro) == (2, 1):
                    x[0, 0] = float("nan")
                passes(model, x)
            optimizer.step()
            model.zero_grad()
    (text,) = {str(w.message) for w in said}
    assert "Step 2" in text and "'a', call 1 of 3" in text
    assert "first of" in text and "already" not in text


def test_a_rule_that_joins_a_late_number_with_a_metric(path: Path) -> None:
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with (
        pytest.warns(tap.TapWarning, match="loss"),
        tap.watch(model, path, layers=["a"], rules=["loss > 0.5 and grad_norm > 1e-9"]) as watch,
    ):
        for x in inputs(2):
            passes(model, x)
            optimizer.step()
            watch.log(loss=1.0)
    assert watch.alarms[0].batch == 0 and not watch.notes


@pytest.mark.parametrize("fault", ["hangs", "exits"])
def test_the_recording_is_whole_whatever_a_sink_does(
    path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensortap.monitoring.sinks import sender

    monkeypatch.setattr(sender.Sender.close, "__defaults__", (0.5,))
    release = threading.Event()

    def sink(values: Any, step: int) -> None:
        if step == 3:
            if fault == "exits":
                raise SystemExit(3)
            release.wait(30)

    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    start = time.monotonic()
    with (
        pytest.warns(tap.TapWarning, match="sink"),
        tap.watch(model, path, layers=["a"], every=1, params=False, sinks=sink) as watch,
    ):
        for x in inputs(100):
            passes(model, x)
            optimizer.step()
    assert time.monotonic() - start < 20
    release.set()
    assert watch.failure is None and tap.open(path).status == "complete"
    assert list(of(path, "output")) == list(range(100))


def test_closing_leaves_the_training_error_alone(path: Path) -> None:
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with (
        warnings.catch_warnings(),
        pytest.raises(RuntimeError, match="the real one"),
        tap.watch(model, path, layers=["a"], every=1) as watch,
    ):
        warnings.simplefilter("ignore")
        for x in inputs(3):
            passes(model, x)
            optimizer.step()
        model(x)

        def broken(*args: Any, **options: Any) -> None:
            raise RuntimeError("CUDA error: device-side assert triggered")

        watch._stepping.board.gather = broken  # type: ignore[method-assign]
        raise RuntimeError("the real one")
    run = tap.open(path, partial=True)
    assert run.status == "failed" and {0, 1} <= set(of(path, "output"))


def test_odd_numbers_do_not_end_training(path: Path) -> None:
    import numpy as np

    with (
        warnings.catch_warnings(),
        tap.watch(Two(), path, layers=["a"], clock="manual") as watch,
    ):
        warnings.simplefilter("ignore")
        watch.log(values=1.0)
        watch.log(huge=10**400, meta=torch.empty((), device="meta"))
        watch.epoch(np.int64(3))  # type: ignore[arg-type]
        watch.step()
    run = tap.open(path)
    assert [(r.layer, r.epoch) for r in run.records if r.port == "scalar"] == [("values", 3)]


def test_a_process_that_changes_its_folder_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with tap.watch(model, "rel", layers=["a"], every=1, params=False) as watch:
        for i, x in enumerate(inputs(4)):
            passes(model, x)
            optimizer.step()
            if i == 1:
                monkeypatch.chdir(tmp_path / "elsewhere")
    assert watch.failure is None
    assert list(of(tmp_path / "rel", "output")) == [0, 1, 2, 3]
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_live_page_that_cannot_be_written_ends_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensortap.monitoring import journal

    def fail(*args: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(journal, "write_live", fail)
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with (
        pytest.warns(tap.TapWarning, match=r"live\.json was not written: Input/output error"),
        tap.watch(model, path, layers=["a"], every=1, params=False) as watch,
    ):
        for x in inputs(3):
            passes(model, x)
            optimizer.step()
    assert watch.failure is None and list(of(path, "output")) == [0, 1, 2]


def test_leaving_by_exit_zero_is_no_failure(tmp_path: Path) -> None:
    for code, status in ((0, "complete"), (3, "failed")):
        with pytest.raises(SystemExit), tap.watch(Two(), tmp_path / str(code), layers=["a"]):
            raise SystemExit(code)
        assert tap.open(tmp_path / str(code), partial=True).status == status


def test_warnings_show_the_line_of_the_user(path: Path) -> None:
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with (
        pytest.warns(tap.TapWarning) as said,
        tap.watch(model, path, layers=["a"], params=False),
    ):
        passes(model, torch.full((1, 4), float("inf")))
        optimizer.step()
    assert {Path(w.filename).name for w in said} == {Path(__file__).name}


@pytest.mark.parametrize("by_optimizer", [True, False])
def test_a_clock_by_hand_counts_once(path: Path, by_optimizer: bool) -> None:
    model, true, moved = Two(), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)
    with tap.watch(model, path, layers=["a"], every=1, updates=True, clock="manual") as watch:
        for x in inputs(4):
            model.zero_grad()
            passes(model, x)
            true.append(norm(model.a.weight.grad))
            before = model.a.weight.detach().clone()
            if by_optimizer:
                optimizer.step()
            else:
                with torch.no_grad():
                    for p in model.parameters():
                        p -= 0.1 * p.grad
            moved.append(norm(model.a.weight - before))
            watch.step()
        assert watch.batch == 4
    assert of(path, "grad_param", "a", ".weight") == {i: [v] for i, v in enumerate(true)}
    found = of(path, "update", "a", ".weight")
    assert [v for values in found.values() for v in values] == pytest.approx(moved)
    assert list(of(path, "output")) == [0, 1, 2, 3]


@pytest.mark.parametrize("ask", ["set", "flush", "epoch"])
def test_a_rule_s_function_may_ask_the_watch_for_things(path: Path, ask: str) -> None:
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    asked = {
        "set": lambda: watch.set(every=1),
        "flush": lambda: watch.flush(),
        "epoch": lambda: watch.epoch(1),
    }

    def closer(alarm: tap.Alarm) -> None:
        assert alarm.batch == 5
        asked[ask]()

    rules = {"output: absmax > 50": closer}
    with tap.watch(model, path, layers=["a"], every=3, updates=True, rules=rules) as watch:
        for i, x in enumerate(inputs(9)):
            model.zero_grad()
            passes(model, x if i != 5 else x * 1e3)
            optimizer.step()
            watch.log(it=i)
        assert watch.batch == 9
    run = tap.open(path)
    assert {r.batch: r.summary.mean for r in run["it"].records} == {i: i for i in range(9)}
    steps = [0, 3, 5, 6, 7, 8] if ask == "set" else [0, 3, 5, 6]
    ring = [i for i in (1, 2, 4) if i in of(path, "output")]
    assert list(of(path, "update", "a", ".weight")) == [i for i in steps if i != 5 or ask == "set"]
    assert sorted(of(path, "output")) == sorted({*steps, *ring})


def test_optimizers_that_take_turns_are_both_written(path: Path) -> None:
    model = Two()
    pair = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in (model.a, model.b)]
    with tap.watch(model, path, layers=["a"], every=10, updates=True):
        for x in inputs(2) * 21:
            for optimizer in pair:
                optimizer.zero_grad()
                passes(model, x)
                optimizer.step()
    assert list(of(path, "update", "a", ".weight")) == [0, 20, 40, 60, 80]
    assert list(of(path, "update", "b", ".weight")) == [21, 41, 61, 81]


def test_what_is_raised_is_on_disk(path: Path) -> None:
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    watch = tap.watch(model, path, layers=["a"], every=100, ring=2, rules={"nan": "raise"})
    with pytest.raises(tap.WatchAlarm):
        for i, x in enumerate(inputs(9)):
            passes(model, x if i != 5 else x * float("nan"))
            optimizer.step()
    assert list(of(path, "output")) == [0, 3, 4, 5]
    watch.close()


def test_a_raise_about_a_late_number_leaves_at_once(path: Path) -> None:
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with (
        pytest.raises(tap.WatchAlarm, match="Step 2"),
        tap.watch(model, path, layers=["a"], rules={"loss > 1": "raise"}) as watch,
    ):
        for i, x in enumerate(inputs(9)):
            passes(model, x)
            optimizer.step()
            watch.log(loss=i)
        raise AssertionError("it ran on")
    assert i == 2 and tap.open(path, partial=True).status == "failed"


def test_the_first_bad_gradient_is_the_first_of_the_backward_pass(path: Path) -> None:
    class Poison(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * float("nan")

    class Bad(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Poison.apply(super().forward(x))

    layers = [nn.Linear(4, 4), nn.Linear(4, 4), Bad(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with (
        pytest.warns(tap.TapWarning, match=r"of '2', in the backward pass. It is the first"),
        tap.watch(model, path, layers=["4"], every=100),
    ):
        passes(model, torch.randn(3, 4))
        optimizer.step()


def test_watches_in_several_threads(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def train(number: int) -> None:
        try:
            model = Two()
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
            for turn in range(4):
                with tap.watch(model, tmp_path / f"{number}-{turn}", layers=["a"], params=False):
                    for x in inputs(15):
                        passes(model, x)
                        optimizer.step()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for number in range(3):
        for turn in range(4):
            assert list(of(tmp_path / f"{number}-{turn}", "output")) == [0, 10]
