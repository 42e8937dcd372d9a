"""The tap over any program: what is chosen, what is said to be lost, and what is checked."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import tensortap as tap
from tensortap.errors import OptionError, SelectionError
from tensortap.taps.programs.base import Argument, HeardCall, Place, Run, Runner
from tensortap.taps.programs.state import copied


@dataclass
class Pair:
    """A program of two linears by hand, which can be told to lie."""

    swapped: bool = False  # each linear goes by the other's name
    changed: bool = False  # the taps change what the model computes
    random: bool = False
    writes: bool = False  # the model writes into its input
    drifts: bool = False  # the output depends on how often it ran
    noisy: bool = False  # no two runs are the same
    stateful: str | None = None
    runtime: str = "handmade"
    absent: str = "It was folded."
    notes: list[str] = field(default_factory=list)
    arguments: Sequence[Argument] | None = None
    runs: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.steps = torch.zeros(1)
        self.noise = itertools.count() if self.noisy else itertools.repeat(0)

    @property
    def places(self) -> Sequence[Place]:
        return [
            Place("first", "Linear"),
            Place("none", "Identity", gone="it passes its input on"),
            Place("second", "Linear"),
            Place("both", "Block", "inferred"),
            Place("", "Pair"),
        ]

    def tapped(self, layers: Sequence[str], *, inputs: bool, linears: Sequence[str]) -> Runner:
        names = ("second", "first") if self.swapped else ("first", "second")

        def run(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Run:
            self.runs.append(f"tapped {sorted(linears)}")
            output, middle, given = self._forward(*args, **kwargs)
            calls = [
                HeardCall(names[0], [("", middle)], [("", given)], given),
                HeardCall(names[1], [("", output)], [("", middle)], middle),
                HeardCall("both", [("", output)]),
            ]
            return Run(output + self.changed, calls)

        return run

    def plain(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self.runs.append("plain")
        return self._forward(*args, **kwargs)[0]

    def _forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        given = x.clone()
        self.steps += 1
        with torch.no_grad():
            middle = self.first(x)
            output = self.second(middle) + (torch.rand(1) if self.random else 0)
            if self.drifts:
                output = output + self.steps
            output = output + next(self.noise)
            if self.writes:
                x += 1
        return output, middle, given

    def linears(self) -> Mapping[str, tuple[Tensor, Tensor | None]]:
        return {n: (getattr(self, n).weight, getattr(self, n).bias) for n in ("first", "second")}

    def buffers(self) -> list[Tensor]:
        return [self.steps]

    def describe(self) -> dict[str, Any]:
        return {"class": "Pair", "parameters": 40, "dtypes": {"float32": 40}}

    def divert(
        self, call: Callable[[tuple[Any, ...], Mapping[str, Any]], Any]
    ) -> Callable[[], None] | None:
        return None


def _record(program: Pair, path: Path, times: int = 1, **options: Any) -> tap.Recording:
    with tap.record(program, path, **{"layers": "all", **options}) as recorder:
        for _ in range(times):
            recorder.run(torch.arange(8.0).reshape(2, 4))
            recorder.step()
    return tap.open(path)


def test_every_layer_is_recorded_or_says_why_not(tmp_path: Path) -> None:
    program = Pair()
    run = _record(program, tmp_path / "run", inputs=True)
    assert run.layers == ["first", "second", ""]
    x = torch.arange(8.0).reshape(2, 4)
    assert torch.equal(run["first"].input, x)
    assert torch.equal(run["first"].output, program.first(x))
    assert torch.equal(run[""].output, program.second(program.first(x)))
    reasons = {item["layer"]: item["reason"] for item in run.manifest.skipped}
    assert reasons["none"] == "it passes its input on"
    assert "--accept-inferred" in reasons["both"]
    assert run.manifest.target["absent"] == "It was folded."
    assert run.manifest.target["runtime"] == "handmade"


def test_provenance_is_kept(tmp_path: Path) -> None:
    run = _record(Pair(), tmp_path / "run", accept_inferred=True)
    found = {name: layer.records[0].provenance for name, layer in run.items()}
    assert found == {"first": "scope", "second": "scope", "both": "inferred", "": "hook"}


def test_a_guess_asked_for_by_name_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SelectionError, match=r"'both' cannot be recorded.*--accept-inferred"):
        _record(Pair(), tmp_path / "run", layers=["first", "both"])
    with pytest.raises(SelectionError, match="'none' cannot be recorded: it passes"):
        _record(Pair(), tmp_path / "run", layers="none")
    with pytest.raises(SelectionError, match="None of the 1 selected layers"):
        _record(Pair(), tmp_path / "run", layers="type:Block")
    assert not (tmp_path / "run").exists()


def test_gradients_are_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no backward pass"):
        _record(Pair(), tmp_path / "run", grads=True)


def test_a_sound_program_passes_its_self_check(tmp_path: Path) -> None:
    run = _record(Pair(), tmp_path / "run")
    checks = run.manifest.self_checks
    assert [(c["layer"], c["check"], c["passed"]) for c in checks] == [
        ("", "output", True),
        ("first", "linear", True),
        ("second", "linear", True),
    ]
    assert run.check() == []


def test_layers_that_go_by_each_others_names_are_found_out(tmp_path: Path) -> None:
    run = _record(Pair(swapped=True), tmp_path / "run")
    failed = [c["layer"] for c in run.manifest.self_checks if not c["passed"]]
    assert sorted(failed) == ["first", "second"]
    found = run.check()
    assert {(f.layer, f.kind, f.severity) for f in found} == {
        ("first", "self-check", "error"),
        ("second", "self-check", "error"),
    }
    assert any("Self-check failed" in note for note in run.notes)


def test_layers_that_were_not_selected_are_checked_too(tmp_path: Path) -> None:
    run = _record(Pair(swapped=True), tmp_path / "run", layers="")
    assert run.layers == [""]
    assert sum(not c["passed"] for c in run.manifest.self_checks) == 2


def test_taps_that_change_the_model_are_found_out(tmp_path: Path) -> None:
    run = _record(Pair(changed=True), tmp_path / "run")
    first = run.manifest.self_checks[0]
    assert (first["check"], first["passed"]) == ("output", False)
    assert first["largest"] == pytest.approx(1.0)


def test_the_check_runs_once_for_inputs_of_one_shape(tmp_path: Path) -> None:
    program = Pair()
    _record(program, tmp_path / "run", times=3)
    assert program.runs == ["plain", "tapped ['first', 'second']", "tapped []", "tapped []"]
    assert program.steps.item() == 3.0  # the check's own run left no trace in the state


def test_without_the_check_the_model_runs_once(tmp_path: Path) -> None:
    program = Pair()
    run = _record(program, tmp_path / "run", self_check=False)
    assert program.runs == ["tapped []"]
    assert run.manifest.self_checks == []


def test_a_model_that_writes_into_its_input_sees_it_unwritten(tmp_path: Path) -> None:
    run = _record(Pair(writes=True), tmp_path / "run", inputs=True)
    x = torch.arange(8.0).reshape(2, 4)
    assert torch.equal(run["first"].input, x)
    assert torch.equal(run[""].input, x)
    assert all(c["passed"] for c in run.manifest.self_checks)


def test_random_numbers_are_the_same_with_and_without_taps(tmp_path: Path) -> None:
    run = _record(Pair(random=True), tmp_path / "run", layers=["first", ""])
    output = next(c for c in run.manifest.self_checks if c["check"] == "output")
    assert (output["passed"], output["largest"]) == (True, 0.0)


def test_a_difference_in_a_model_with_state_is_no_chance(tmp_path: Path) -> None:
    run = _record(Pair(drifts=True, changed=True), tmp_path / "run")
    assert [c["passed"] for c in run.manifest.self_checks if c["check"] == "output"] == [False]
    program = Pair(drifts=True)
    sound = _record(program, tmp_path / "sound")
    assert [c["passed"] for c in sound.manifest.self_checks if c["check"] == "output"] == [True]
    assert program.steps.item() == 1.0


def test_what_is_not_repeatable_is_neither_passed_nor_failed(tmp_path: Path) -> None:
    run = _record(Pair(noisy=True), tmp_path / "run", layers=["first", ""])
    assert not [c for c in run.manifest.self_checks if c["check"] == "output"]
    assert any("not repeatable" in note for note in run.notes)


def test_a_state_that_cannot_be_put_back_is_left_alone(tmp_path: Path) -> None:
    program = Pair(stateful="it keeps a cache")
    run = _record(program, tmp_path / "run")
    assert program.runs == ["tapped ['first', 'second']"]
    assert [c["check"] for c in run.manifest.self_checks] == ["linear", "linear"]
    assert any("(it keeps a cache)" in note for note in run.notes)


def test_copies_of_inputs_lie_in_memory_as_they_do(tmp_path: Path) -> None:
    """A product of the same numbers is not the same bit for bit at another alignment."""
    tensors = {"0": torch.randn(3, 4), "1": torch.randn(5)[1:].clone(), "2": torch.arange(7)}
    save_file(tensors, tmp_path / "inputs.safetensors")
    room = torch.randn(40)
    with safe_open(tmp_path / "inputs.safetensors", "pt") as file:
        given = {key: file.get_tensor(key) for key in tensors}
        value = {**given, "odd": room[1:9], "shared": [room[11:20], room[12:14]]}
        found = copied(value)
        for key in (*tensors, "odd"):
            assert torch.equal(found[key], value[key])
            assert found[key].data_ptr() % 64 == value[key].data_ptr() % 64
            assert found[key].data_ptr() != value[key].data_ptr()
        found["shared"][0].zero_()
        assert found["shared"][1].eq(0).all()


def test_what_is_neither_model_nor_callable_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"Cannot record a builtins\.int"):
        tap.record(3, tmp_path / "run")


@pytest.mark.parametrize("name", ["manifest", "weights", "names_from", "custom_ops"])
def test_what_an_eager_model_has_no_use_for_is_refused(name: str, tmp_path: Path) -> None:
    value = [tmp_path / "x"] if name == "custom_ops" else tmp_path / "x"
    with pytest.raises(OptionError, match=f"{name} is for models that are already compiled"):
        tap.record(nn.Linear(2, 2), tmp_path / "run", runtime="eager", **{name: value})


def test_a_program_is_judged_while_it_runs(tmp_path: Path) -> None:
    sound = _record(Pair(), tmp_path / "sound")
    with tap.record(Pair(), tmp_path / "same", layers="all", against=sound) as recorder:
        recorder.run(torch.arange(8.0).reshape(2, 4))
    assert recorder.comparison.same
    with tap.record(Pair(swapped=True), tmp_path / "other", layers="all", against=sound) as found:
        found.run(torch.arange(8.0).reshape(2, 4))
    assert not found.comparison.same
