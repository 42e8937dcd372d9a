"""Which modes a target has: MODES and MODE_GROUPS, tensortap.toml, and those built in."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tensortap.errors import OptionError, TargetError
from tensortap.targets import load_target
from tensortap.targets.modes import builtin, declared
from tensortap.targets.modes.declared import folder_name, mode_names

LISTED = """
import torch
MODES = ("fp32", "0", "2-1", "essential")
MODE_GROUPS = {"essential": ("fp32", "0"), "quant_only": ["0", "2-1"]}

def build(mode="fp32", width=2, dtype="float32"):
    model = torch.nn.Linear(width, 2)
    model.mode = mode
    return model, torch.ones(1, width)
"""
OPEN = """
import torch
def build(mode):
    model = torch.nn.Linear(2, 2)
    model.mode = mode
    return model, torch.ones(1, 2)
"""
CLOSED = """
import torch
def build(width: int = 2):
    torch.manual_seed(0)
    return torch.nn.Linear(width, 2), torch.ones(1, width)
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")

    def make(source: str, toml: str | None = None, folder: Path = tmp_path) -> str:
        (tmp_path / "model.py").write_text(source)
        if toml is not None:
            (folder / "tensortap.toml").write_text(toml)
        return f"{tmp_path / 'model.py'}:build"

    return make


class TestListed:
    def test_groups_lists_and_names_in_order_each_once(self, write) -> None:
        spec = write(LISTED.replace(', "essential")', ")"))
        assert mode_names(spec, ["essential"]) == ("fp32", "0")
        assert mode_names(spec, ["2-1,fp32", "quant_only"]) == ("2-1", "fp32", "0")
        assert mode_names(spec, ["all"]) == ("fp32", "0", "2-1")

    def test_a_mode_beats_a_group_of_its_name(self, write) -> None:
        assert mode_names(write(LISTED), ["essential"]) == ("essential",)

    def test_a_built_in_mode_joins_them(self, write) -> None:
        assert mode_names(write(LISTED), ["0", "bf16", "fake:w8a8"]) == ("0", "bf16", "fake:w8a8")

    @pytest.mark.parametrize("word", ["2-11", "esential", "fp_only"])
    def test_unknown_ones_are_said_with_what_there_is(self, write, word: str) -> None:
        with pytest.raises(
            OptionError, match=r"has no mode .*Its modes are fp32, 0, 2-1"
        ) as caught:
            mode_names(write(LISTED), [word])
        assert "quant_only" in str(caught.value)

    def test_an_empty_piece_is_refused(self, write) -> None:
        with pytest.raises(OptionError, match="no name"):
            mode_names(write(LISTED), ["fp32,,0"])

    def test_the_function_gets_its_own_modes(self, write) -> None:
        spec = write(LISTED)
        assert load_target(spec, {"mode": "2-1"}).model.mode == "2-1"
        assert load_target(spec, {"mode": "2-1"}).mode == "2-1"
        with pytest.raises(OptionError, match=r"has no mode '2-2'. Did you mean '2-1'"):
            load_target(spec, {"mode": "2-2"})

    def test_a_built_in_one_is_made_of_its_default(self, write) -> None:
        target = load_target(write(LISTED), {"mode": "bf16"})
        assert (target.model.mode, target.mode) == ("fp32", "bf16")
        assert target.model.weight.dtype == torch.bfloat16

    @pytest.mark.parametrize(
        ("line", "said"),
        [
            ('MODES = "fp32"', "expected names in a tuple"),
            ("MODES = (0, 1)", "holds 0, expected names"),
            ('MODES = ("a,b",)', "without ','"),
            ("MODES = ('a',)\nMODE_GROUPS = ['a']", "expected a dict"),
        ],
    )
    def test_rubbish_beside_the_function(self, write, line: str, said: str) -> None:
        with pytest.raises(TargetError, match=said):
            mode_names(write(f"{line}\ndef build(mode): pass"), ["all"])

    def test_a_group_with_an_unknown_mode(self, write) -> None:
        source = "MODES = ('a',)\nMODE_GROUPS = {'all': ('a', 'b')}\ndef build(mode): pass"
        with pytest.raises(OptionError, match=r"'all' has an unknown mode.*no mode 'b'"):
            mode_names(write(source), ["a"])

    def test_modes_beside_a_function_that_takes_none(self, write) -> None:
        with pytest.raises(TargetError, match="does not take 'mode'"):
            mode_names(write("MODES = ('a',)\ndef build(): pass"), ["a"])

    def test_a_function_that_is_imported_brings_its_modes_along(self, write, tmp_path) -> None:
        (tmp_path / "inner_with_modes.py").write_text(LISTED)
        spec = write("from inner_with_modes import build")
        try:
            assert mode_names(spec, ["quant_only"]) == ("0", "2-1")
        finally:
            sys.modules.pop("inner_with_modes", None)


class TestOpen:
    def test_any_name_is_handed_on(self, write) -> None:
        spec = write(OPEN)
        assert mode_names(spec, ["x", "int8"]) == ("x", "int8")
        assert load_target(spec, {"mode": "int8"}).model.mode == "int8"

    @pytest.mark.parametrize("group", ["all", "essential"])
    def test_groups_are_not_known(self, write, group: str) -> None:
        with pytest.raises(OptionError, match="write MODES and MODE_GROUPS beside"):
            mode_names(write(OPEN), [group])


class TestBuiltIn:
    def test_any_function_has_the_built_in_groups(self, write) -> None:
        notes: list[str] = []
        spec = write(CLOSED)
        assert mode_names(spec, ["fp_only"]) == builtin.GROUPS["fp_only"]
        named = mode_names(spec, ["all"], note=notes.append)
        left = [name for name in builtin.GROUPS["all"] if name not in named]
        assert len(left) == len(notes)
        assert all(f"'{name}'" in note for name, note in zip(left, notes, strict=True))

    def test_one_that_cannot_run_is_left_out_of_a_group_and_told(self, write, monkeypatch) -> None:
        why = "This machine has none."
        monkeypatch.setattr(
            declared, "unavailable", lambda name, device: why if name == "bf16" else None
        )
        notes: list[str] = []
        assert mode_names(write(CLOSED), ["fp_only"], note=notes.append) == ("fp32", "fp16")
        assert notes == [f"The mode 'bf16' of the group 'fp_only' is left out: {why}"]
        assert mode_names(write(CLOSED), ["bf16"]) == ("bf16",)

    def test_they_are_applied_behind_the_function(self, write) -> None:
        target = load_target(write(CLOSED), {"mode": "fp16"})
        assert target.model.weight.dtype == torch.float16
        assert target.batches[0].args[0].dtype == torch.float16
        assert target.mode == "fp16"

    def test_a_dtype_that_says_otherwise(self, write) -> None:
        with pytest.raises(OptionError, match="--mode fp16 and --dtype bf16 are not the same"):
            load_target(write(CLOSED), {"mode": "fp16", "dtype": "bf16"})

    def test_unknown_names(self, write) -> None:
        with pytest.raises(OptionError, match=r"has no mode 'int9'. Did you mean 'int8'\?.*int8wo"):
            load_target(write(CLOSED), {"mode": "int9"})

    def test_a_compiled_model_has_none(self) -> None:
        with pytest.raises(OptionError, match="A compiled model has one mode"):
            mode_names("model.onnx", ["int8"])


class TestToml:
    TOML = """
[modes.half]
mode = "bf16"
groups = ["essential"]
[modes.wide]
set = { width = 3 }
groups = ["essential", "big"]
[modes.fp32]
[mode_groups]
quick = ["fp32", "half"]
"""

    def test_tables_and_groups(self, write) -> None:
        spec = write(CLOSED, self.TOML)
        assert mode_names(spec, ["all"]) == ("half", "wide", "fp32")
        assert mode_names(spec, ["essential", "quick"]) == ("half", "wide", "fp32")
        assert mode_names(spec, ["big"]) == ("wide",)

    def test_what_a_table_means(self, write) -> None:
        spec = write(CLOSED, self.TOML)
        half, wide = (load_target(spec, {"mode": name}) for name in ("half", "wide"))
        assert (half.mode, half.model.weight.dtype) == ("half", torch.bfloat16)
        assert (wide.mode, wide.model.in_features) == ("wide", 3)
        assert load_target(spec, {"mode": "fp32"}).mode == "fp32"

    def test_the_command_line_counts_and_says_so(self, write) -> None:
        target = load_target(write(CLOSED, self.TOML), {"mode": "wide"}, ["width=5"])
        assert target.model.in_features == 5
        assert any("width = 3" in note and "5" in note for note in target.notes)

    def test_a_function_that_takes_modes_gets_the_tables_name_or_its_mode(self, write) -> None:
        spec = write(OPEN, '[modes.a]\n[modes.b]\nmode = "other"\n[modes.c]\nseed = 1\n')
        found = {name: load_target(spec, {"mode": name}) for name in ("a", "b")}
        assert {name: target.model.mode for name, target in found.items()} == {
            "a": "a",
            "b": "other",
        }
        assert found["b"].mode == "b"

    def test_found_in_the_working_directory_too(self, write, tmp_path: Path) -> None:
        spec = write(CLOSED, self.TOML, folder=tmp_path / "elsewhere")
        assert mode_names(spec, ["big"]) == ("wide",)

    def test_beside_the_target_first(self, write, tmp_path: Path) -> None:
        (tmp_path / "elsewhere" / "tensortap.toml").write_text("[modes.far]")
        assert mode_names(write(CLOSED, self.TOML), ["all"]) == ("half", "wide", "fp32")

    def test_a_mode_may_be_another_target(self, write, tmp_path: Path) -> None:
        (tmp_path / "other.py").write_text(CLOSED.replace("= 2", "= 7"))
        spec = write(CLOSED, '[modes.other]\ntarget = "other.py:build"\n')
        target = load_target(spec, {"mode": "other"})
        assert (target.model.in_features, target.mode) == (7, "other")

    def test_a_mode_may_be_a_compiled_model(self, write, tmp_path: Path) -> None:
        torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)).save(tmp_path / "m.pt")
        import numpy as np

        np.savez(tmp_path / "in.npz", input=np.ones((1, 2), np.float32))
        spec = write(CLOSED, '[modes.script]\ntarget = "m.pt"\n')
        target = load_target(spec, {"mode": "script"}, inputs_from=[tmp_path / "in.npz"])
        assert target.mode == "script"

    @pytest.mark.parametrize(
        ("toml", "said"),
        [
            ("[modes", "is no TOML file"),
            ("[mode.a]", "has the key 'mode'.*Did you mean 'modes'"),
            ("modes = 3", "'modes' .* expected a table"),
            ("[modes]\na = 1", "expected a table: write"),
            ("[modes.a]\ndtyp = 'x'", "has the key 'dtyp'.*Did you mean 'dtype'"),
            ("[modes.a]\nseed = true", "'seed' .* expected a whole number"),
            ("[modes.a]\ngroups = 'x'", "expected a list of names"),
            ("[modes.a]\nset = {seed = 1}", "stands in 'set'"),
            ("[modes.a]\ngroups = [1]", "expected a list of names"),
            ("[modes.odd]", "has no mode 'odd'"),
            ('[modes."a,b"]', "has a mode or group 'a,b', expected a name without ','"),
            ("[mode_groups]\n' x' = ['fp32']", "has a mode or group ' x'"),
            ("[mode_groups]\ng = ['g']", "no mode 'g'. It is a mode group.*--modes g"),
            ("[modes.fp32]\n[mode_groups]\nx = ['nothing']", "'x' has an unknown mode"),
        ],
    )
    def test_rubbish(self, write, toml: str, said: str) -> None:
        spec = write(CLOSED, toml)
        with pytest.raises(OptionError, match=said):
            mode_names(spec, ["all"])
            load_target(spec, {"mode": "odd"})


def test_a_group_is_no_mode() -> None:
    with pytest.raises(OptionError, match=r"It is a mode group.*: --modes essential") as caught:
        load_target("tensortap.demo:build", {"mode": "essential"})
    assert "Did you mean" not in str(caught.value)


def test_a_seed_for_a_function_that_takes_none() -> None:
    def build():
        return torch.nn.Linear(2, 2), torch.ones(1, 2)

    first, same, other = (load_target(build, {"seed": seed}) for seed in (3, 3, 4))
    assert torch.equal(first.model.weight, same.model.weight)
    assert not torch.equal(first.model.weight, other.model.weight)
    assert "takes no seed: torch was seeded with 3 before" in first.notes[0]
    with pytest.raises(OptionError, match="does not take 'seed'"):
        load_target(build, sets=["seed=x"])


def test_a_function_itself() -> None:
    def build(mode: str = "x"):
        return torch.nn.Linear(1, 1), torch.ones(1, 1)

    target = load_target(build, {"mode": "y"})
    assert target.mode == "y"
    assert target.name.endswith("build")
    with pytest.raises(TargetError, match="a Linear, expected the name"):
        load_target(torch.nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("mode", "folder"), [("2-1", "2-1"), ("fake:w8a8:0.9999", "fake-w8a8-0.9999"), ("a/b", "a-b")]
)
def test_folders(mode: str, folder: str) -> None:
    assert folder_name(mode) == folder


def test_no_folder() -> None:
    with pytest.raises(OptionError, match="no name for a mode"):
        folder_name("..")
