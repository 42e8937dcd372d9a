"""TorchScript models that change as they run: a recording must not make them run on."""

import copy
from pathlib import Path
from typing import Any, Dict, List, Optional  # noqa: UP035

import pytest
import torch
from torch import Tensor, nn

import tensortap as tap
from tensortap.taps.programs.torchscript.program import ScriptProgram
from tensortap.taps.programs.torchscript.state import state_of
from tensortap.taps.programs.torchscript.tree import Tree


class Counter(nn.Module):
    n: int

    def __init__(self) -> None:
        super().__init__()
        self.n = 0
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.n = self.n + 1
        return self.fc(x) * self.n


class Reassigned(nn.Module):
    last: Optional[Tensor]  # noqa: UP045

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("st", torch.zeros(4))
        self.last = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        last = self.last
        if last is not None:
            y = y + last
        self.last = y
        self.st = self.st * 0.5 + y.sum(0)
        return y + self.st


class Written(nn.Module):
    """Writes into what is no buffer, through a view, in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.loose = torch.zeros(4)
        self.register_buffer("st", torch.full((4,), 0.0))

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        for i in range(2):
            self.loose[i : i + 2].add_(float(y.sum()))
        self.fc.bias.data.mul_(1.5)
        self.st.div_(0.0)  # NaN, which is equal to nothing
        return y + self.loose + torch.nan_to_num(self.st, nan=3.0)


class Grows(nn.Module):
    cache: List[Tensor]  # noqa: UP006

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.cache = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        self.cache.append(y)
        return y * len(self.cache)


class Counts(nn.Module):
    seen: Dict[str, int]  # noqa: UP006

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.seen = {"n": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.seen["n"] += 1
        return self.fc(x) * self.seen["n"]


class Holds(nn.Module):
    """Writes into a tensor that a list holds."""

    cache: List[Tensor]  # noqa: UP006

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.cache = [torch.zeros(4)]

    def forward(self, x: Tensor) -> Tensor:
        held = self.cache[0]
        held.add_(1.0)
        return self.fc(x) + held


class ReturnsState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("st", torch.zeros(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.st.add_(self.fc(x))
        return self.st


STATES = [Counter, Reassigned, Written, Grows, Counts, Holds, ReturnsState]
KEPT = [Counter, Reassigned, Written, ReturnsState]


def _steps(model: Any, recorder: Any = None) -> list[Tensor]:
    outputs = []
    with torch.no_grad():
        for step in range(3):
            outputs.append(model(torch.full((2, 4), step + 1.0)).clone())
            if recorder is not None:
                recorder.step()
    return outputs


@pytest.mark.parametrize("kind", STATES)
def test_a_recording_does_not_run_the_state_on(kind: type[nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = kind()
    expected = _steps(torch.jit.script(copy.deepcopy(model)))
    script = torch.jit.script(copy.deepcopy(model))
    with tap.record(script, tmp_path / "run", layers="all") as recorder:
        found = _steps(script, recorder)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    run = tap.open(tmp_path / "run")
    checks = [check for check in run.manifest.self_checks if check["check"] == "output"]
    assert all(check["passed"] for check in checks)
    assert bool(checks) is (kind in KEPT)
    told = [note for note in run.notes if "was not checked: a run more would change" in note]
    assert len(told) == (0 if kind in KEPT else 1)


@pytest.mark.parametrize("kind", [Counter, Reassigned, Grows, Counts])
def test_frozen_and_op_by_op_neither(kind: type[nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = kind().eval()
    for how in ("ops", "frozen"):
        scripts = [torch.jit.script(copy.deepcopy(model)) for _ in range(2)]
        if how == "frozen":
            scripts = [torch.jit.freeze(script) for script in scripts]
        expected = _steps(scripts[0])
        runtime = "ops" if how == "ops" else None
        with tap.record(scripts[1], tmp_path / how, layers="all", runtime=runtime) as recorder:
            found = _steps(scripts[1], recorder)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), how


class Decays(nn.Module):
    """Changes a parameter as it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        self.fc.weight.mul_(0.5)
        return y


@pytest.mark.parametrize("how", ["script", "export"])
def test_a_parameter_that_is_written_into_is_put_back(how: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Decays().requires_grad_(False)
    one, other = (
        torch.jit.script(copy.deepcopy(model))
        if how == "script"
        else torch.export.export(copy.deepcopy(model), (torch.ones(2, 4),)).module()
        for _ in range(2)
    )
    expected = _steps(one)
    with tap.record(other, tmp_path / "run", layers="all") as recorder:
        found = _steps(other, recorder)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    checks = tap.open(tmp_path / "run").manifest.self_checks
    assert [(check["check"], check["passed"]) for check in checks] == [("output", True)]


def test_neither_does_one_inside_of_an_object(tmp_path: Path) -> None:
    class Holder:
        def __init__(self, script: Any) -> None:
            self.models = [script]

        def __call__(self, x: Tensor) -> Tensor:
            output: Tensor = self.models[0](x)
            return output

    torch.manual_seed(0)
    model = Reassigned()
    expected = _steps(torch.jit.script(copy.deepcopy(model)))
    holder = Holder(torch.jit.script(copy.deepcopy(model)))
    with tap.record(holder, tmp_path / "run", layers="all") as recorder:
        found = _steps(holder, recorder)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_what_is_made_in_a_run_may_be_written_into() -> None:
    class Local(nn.Module):
        def forward(self, x: Tensor, more: List[Tensor]) -> Tensor:  # noqa: UP006
            made = [x]
            for _ in range(2):
                y = x * 2
                y.add_(1.0)
                made.append(y)
            left, right = torch.chunk(made[-1] + 0.0, 2, dim=1)
            left.mul_(2.0)
            x[0] = 1.0
            return left + right + len(made) + len(more)

    program = ScriptProgram(torch.jit.script(Local()))
    assert program.stateful is None


def test_kept_is_what_a_run_changes() -> None:
    script = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    state = state_of(Tree(script._c))
    assert sorted(name for _, name in state.attributes) == [
        "num_batches_tracked",
        "running_mean",
        "running_var",
    ]
    before = {key: value.clone() for key, value in script.state_dict().items()}
    undo = state.keep()
    script(torch.randn(3, 4))
    assert int(script.state_dict()["1.num_batches_tracked"]) == 1
    undo()
    assert all(torch.equal(value, before[key]) for key, value in script.state_dict().items())


def test_an_optional_that_became_a_list_is_not_kept() -> None:
    class Forgets(nn.Module):
        past: Optional[List[Tensor]]  # noqa: UP006, UP045

        def __init__(self) -> None:
            super().__init__()
            self.past = None

        def forward(self, x: Tensor) -> Tensor:
            self.past = None
            return x + 1

    script = torch.jit.script(Forgets())
    program = ScriptProgram(script)
    assert program.stateful is None
    script.past = [torch.zeros(1)]
    assert program.stateful == "it changes its attribute 'past'"


def test_a_frozen_batch_norm_in_eval_mode_is_checked(tmp_path: Path) -> None:
    """Its statistics are constants, which it reads: nothing is written, so the check is made."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.BatchNorm2d(4)).eval()
    frozen = torch.jit.freeze(torch.jit.trace(model, torch.randn(1, 3, 8, 8)))
    assert any("batch_norm" in node.kind() for node in frozen.graph.nodes())  # else it is no test
    with tap.record(frozen, tmp_path / "run", layers="all") as rec:
        rec.run(torch.randn(1, 3, 8, 8))
    assert not any("writes into a constant" in note for note in rec.notes)
    assert [check.check for check in rec.tap.self_checks if check.passed] == ["output"]


class Either(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        if bool(x.sum() > 0):
            y = self.one(x)
        else:
            y = self.other(x)
        return y


def test_a_branch_that_was_not_taken_is_said_to_be_one(tmp_path: Path) -> None:
    with tap.record(torch.jit.script(Either()), tmp_path / "run", layers="all") as rec:
        rec.run(torch.ones(1, 3))
    (note,) = [note for note in rec.notes if "'other'" in note]
    assert "a branch or a loop that no run went into" in note and ".forward()" not in note
    with tap.record(torch.jit.script(Either()), tmp_path / "no", layers="other") as rec:
        rec.run(torch.ones(1, 3))
    (note,) = [note for note in rec.notes if "'other'" in note]
    assert "1 of 1 selected" in note and "Call the model" not in note
