"""Targets from functions in files and modules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tensortap.errors import OptionError, TargetError
from tensortap.targets import Batch, Target, load_target

HEAD = "import torch\nfrom torch import nn\nmodel, x = nn.Linear(2, 2), torch.ones(1, 2)\n"


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def make(body: str, name: str = "target.py") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(HEAD + body)
        return str(path)

    return make


class TestInputs:
    one, two = torch.ones(1), torch.zeros(1)

    @pytest.mark.parametrize(
        ("inputs", "expected"),
        [
            (one, [((one,), {})]),
            ((one, two), [((one, two), {})]),
            ((), [((), {})]),
            ({"x": one}, [((), {"x": one})]),
            ([one, two], [((one,), {}), ((two,), {})]),
            ([(one, two), {"x": one}], [((one, two), {}), ((), {"x": one})]),
            ([Batch((one,), {"y": two})], [((one,), {"y": two})]),
        ],
    )
    def test_every_form_becomes_batches(self, inputs: Any, expected: list[Any]) -> None:
        batches = Target(nn.Linear(1, 1), inputs).batches
        assert [(batch.args, batch.kwargs) for batch in batches] == expected

    @pytest.mark.parametrize(
        ("inputs", "words"),
        [
            ([], "empty list"),
            ("text", "the str 'text'"),
            (None, "None"),
            ([one, [two]], "Item 1 .* a list of 1"),
            ({1: one}, "the key 1"),
        ],
    )
    def test_rubbish_is_told(self, inputs: Any, words: str) -> None:
        with pytest.raises(TargetError, match=words):
            Target(nn.Linear(1, 1), inputs)

    def test_model_has_to_be_a_module(self) -> None:
        with pytest.raises(TargetError, match=r"the int 3, expected a torch\.nn\.Module"):
            Target(3, torch.ones(1))

    def test_run_replaces_the_call(self) -> None:
        target = Target(nn.Identity(), self.one, run=lambda model, batch: model(batch.args[0]) + 41)
        assert target(target.batches[0]) == 42
        assert Target(nn.Identity(), self.one)(Batch((self.one,))) == 1


class TestFiles:
    def test_tuple_and_target(self, write: Any) -> None:
        spec = write("def build():\n    return model, (x,)\n") + ":build"
        target = load_target(spec, {})
        assert isinstance(target.model, nn.Linear)
        assert target.name == spec
        assert target(target.batches[0]).shape == (1, 2)

    def test_target_keeps_its_own_fields(self, write: Any) -> None:
        body = (
            "import tensortap.targets as t\n"
            "def build(mode='a'):\n"
            "    return t.Target(model, x, prompt=['hi'], name='mine', config={'a': 1})\n"
        )
        target = load_target(write(body) + ":build", {"mode": "int8"})
        assert (target.prompt, target.name, target.config) == (["hi"], "mine", {"a": 1})
        assert target.mode == "int8"

    def test_siblings_import_and_the_path_is_left_alone(self, write: Any) -> None:
        write("value = 7\n", "sibling_of_target.py")
        write("value = 8\n", "late_sibling.py")
        body = (
            "import sibling_of_target\n"
            "def build():\n"
            "    import late_sibling\n"
            "    return model, {'input': x * sibling_of_target.value * late_sibling.value}\n"
        )
        before = list(sys.path)
        target = load_target(write(body) + ":build", {})
        assert sys.path == before
        assert target.batches[0].kwargs["input"][0, 0] == 56

    def test_a_name_of_the_standard_library_hides_nothing(self, write: Any) -> None:
        import json

        load_target(write("def build():\n    return model, x\n", "json.py") + ":build", {})
        assert sys.modules["json"] is json

    def test_two_files_of_one_name(self, write: Any) -> None:
        one = write("def build():\n    return model, x * 1\n", "a/t.py")
        two = write("def build():\n    return model, x * 2\n", "b/t.py")
        values = [load_target(f"{p}:build", {}).batches[0].args[0][0, 0].item() for p in (one, two)]
        assert values == [1, 2]

    def test_dataclasses_in_a_target_file(self, write: Any) -> None:
        body = (
            "from __future__ import annotations\nfrom dataclasses import dataclass\n"
            "@dataclass\nclass C:\n    n: int = 1\ndef build():\n    return model, x * C().n\n"
        )
        path = Path(write(""))
        path.write_text(body.split("\n", 1)[0] + "\n" + HEAD + body.split("\n", 1)[1])
        assert load_target(f"{path}:build", {}).batches

    def test_module_in_the_working_directory(self, write: Any, tmp_path: Path) -> None:
        write("def build():\n    return model, x\n", "some_pkg/mod.py")
        code = (
            "from tensortap.targets import load_target\nimport sys\n"
            "sys.path = [p for p in sys.path if p]\n"
            "print(load_target('some_pkg.mod:build', {}).name)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env={"PYTHONPATH": str(Path(sys.modules["tensortap"].__path__[0]).parent)},
        )
        assert done.stdout.strip() == "some_pkg.mod:build", done.stderr


class TestPlainModels:
    """A function, a class or a variable that gives a model and no inputs: files give these."""

    BODY = (
        "class Net(nn.Module):\n"
        "    def __init__(self, width: int = 2):\n"
        "        super().__init__()\n"
        "        self.fc = nn.Linear(width, 3)\n"
        "    def forward(self, x):\n"
        "        return self.fc(x)\n"
        "def build():\n    return Net()\n"
        "net = Net()\n"
        "whole = __import__('tensortap').Target(net, torch.ones(1, 2))\n"
    )

    @pytest.mark.parametrize("name", ["build", "Net", "net", "whole"])
    def test_inputs_come_from_files(self, name: str, write: Any, tmp_path: Path) -> None:
        batch = np.random.default_rng(0).random((4, 2), dtype=np.float32)
        np.save(tmp_path / "batch.npy", batch)
        target = load_target(f"{write(self.BODY)}:{name}", inputs_from=[tmp_path / "batch.npy"])
        assert type(target.model).__name__ == "Net"
        (given,) = target.batches
        assert torch.equal(given.args[0], torch.from_numpy(batch))
        assert target(given).shape == (4, 3)

    def test_options_reach_a_class(self, write: Any, tmp_path: Path) -> None:
        np.save(tmp_path / "batch.npy", np.zeros((1, 5), np.float32))
        target = load_target(
            f"{write(self.BODY)}:Net", {}, ["width=5"], inputs_from=[tmp_path / "batch.npy"]
        )
        assert target.model.fc.in_features == 5

    def test_a_variable_may_be_a_target(self, write: Any) -> None:
        assert load_target(f"{write(self.BODY)}:whole").batches[0].args[0].tolist() == [[1, 1]]

    def test_a_function_is_no_model(self, write: Any, tmp_path: Path) -> None:
        np.save(tmp_path / "batch.npy", np.zeros((1, 5), np.float32))
        spec = f"{write('def build():' + chr(10) + '    return lambda x: x' + chr(10))}:build"
        with pytest.raises(TargetError, match="returned a function, expected"):
            load_target(spec, inputs_from=[tmp_path / "batch.npy"])


class TestSentences:
    @pytest.mark.parametrize(
        ("body", "function", "words"),
        [
            ("def build():\n    return model, x\n", "biuld", ["no function 'biuld'", "'build'"]),
            ("build = 3\n", "build", ["the int 3", "neither a function nor a model"]),
            ("", "model", ["gives a model (Linear) and no inputs", "--inputs-from FILE (.safet"]),
            ("raise KeyError('gone')\n", "build", ["KeyError", "gone", "target.py:4"]),
            ("import no_such_package\n", "build", ["ModuleNotFoundError", "no_such_package"]),
            ("def build(:\n", "build", ["SyntaxError", "target.py:4"]),
            ("raise SystemExit(3)\n", "build", ["SystemExit"]),
            ("def build():\n    return model\n", "build", ["gives a model", "(model, inputs)"]),
            ("def build():\n    pass\n", "build", ["returned None"]),
            (
                "def build():\n    return 1, x\n",
                "build",
                ["something else", "the int 1"],
            ),
            ("def build():\n    return model, 'x'\n", "build", ["something else", "the str 'x'"]),
            ("def build():\n    return model, x, x\n", "build", ["a tuple of 3"]),
            (
                "def build():\n    return nn.Linear(2, 2)(torch.ones(3)), x\n",
                "build",
                ["failed: RuntimeError", "target.py:5"],
            ),
            (
                "def build(depth, width):\n    pass\n",
                "build",
                ["'depth' and 'width'", "--set depth=…"],
            ),
        ],
    )
    def test_a_bad_file(self, write: Any, body: str, function: str, words: list[str]) -> None:
        with pytest.raises(TargetError) as caught:
            load_target(f"{write(body)}:{function}", {})
        for word in words:
            assert word in str(caught.value)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("spec", "words"),
        [
            ("model", "no target. Expected file.py:function"),
            (":build", "no target"),
            ("nowhere/model.py:build", "does not exist"),
            ("no_such_package.mod:build", "no module 'no_such_package'"),
            ("tensortap.no_such:build", "no module 'tensortap.no_such'"),
        ],
    )
    def test_a_bad_name(self, spec: str, words: str) -> None:
        with pytest.raises(TargetError, match=words):
            load_target(spec, {})

    def test_a_near_file(self, write: Any) -> None:
        path = write("", "my_model.py")
        with pytest.raises(TargetError, match=r"Did you mean .*my_model\.py"):
            load_target(path.replace("my_model", "my_modle") + ":build", {})

    def test_a_failed_import_leaves_no_module(self, write: Any) -> None:
        before = set(sys.modules)
        with pytest.raises(TargetError):
            load_target(write("1 / 0\n") + ":build", {})
        assert not {n for n in set(sys.modules) - before if n.startswith("_tensortap_target")}

    def test_prompts_are_for_checkpoints(self, write: Any) -> None:
        with pytest.raises(OptionError, match="--prompt is for hf:DIR"):
            load_target(write("def build(): ...\n") + ":build", {}, prompts=["hi"])


class TestOptions:
    def load(self, write: Any, signature: str, options: Any = (), sets: Any = ()) -> dict[str, Any]:
        body = (
            "import typing\nfrom pathlib import Path\n"
            f"def build({signature}):\n"
            "    values = dict(locals())\n"
            "    values.update(values.pop('extra', {}))\n"
            "    return model, {'values': values}\n"
        )
        target = load_target(write(body) + ":build", dict(options), list(sets))
        values: dict[str, Any] = target.batches[0].kwargs["values"]
        return values

    @pytest.mark.parametrize(
        ("parameter", "text", "expected"),
        [
            ("v", "3", 3),
            ("v", "[1, 2]", [1, 2]),
            ("v", "true", True),
            ("v", "0x", "0x"),
            ("v=None", "a=b", "a=b"),
            ("v: int", "3", 3),
            ("v: float", "3", 3.0),
            ("v: str", "3", "3"),
            ("v: bool", "no", False),
            ("v: 'int | None'", "none", None),
            ("v: int | str", "x3", "x3"),
            ("v: str | int", "3", 3),
            ("v: typing.Optional[float]", "1e-3", 1e-3),
            ("v: typing.Literal['a', 2]", "2", 2),
            ("v: Path", "a/b", Path("a/b")),
            ("v: list[int]", "[1]", [1]),
            ("v: tuple[int, ...]", "[1, 2]", (1, 2)),
            ("v: torch.dtype", "bf16", torch.bfloat16),
            ("v: torch.device", "cpu", torch.device("cpu")),
            ("v: 'NotImported'", "3", 3),
            ("**extra", "3", 3),
        ],
    )
    def test_set_is_read_by_annotation(
        self, write: Any, parameter: str, text: str, expected: Any
    ) -> None:
        value = self.load(write, parameter, sets=[f"v={text}"])["v"]
        assert value == expected and type(value) is type(expected)

    @pytest.mark.parametrize(
        ("parameter", "expected"),
        [("dtype", "bf16"), ("dtype: str", "bf16"), ("dtype: torch.dtype", torch.bfloat16)],
    )
    def test_dtype_is_typed_by_annotation(self, write: Any, parameter: str, expected: Any) -> None:
        assert self.load(write, parameter, {"dtype": "bf16"})["dtype"] == expected

    def test_a_mode_that_looks_like_a_number_stays_text(self, write: Any) -> None:
        assert self.load(write, "mode", {"mode": "0"})["mode"] == "0"

    def test_options_left_out_keep_the_default(self, write: Any) -> None:
        options = {"seq_len": None, "seed": 5, "mode": None}
        assert self.load(write, "seq_len=9, *, seed=0", options) == {"seq_len": 9, "seed": 5}

    @pytest.mark.parametrize(
        ("signature", "options", "sets", "words"),
        [
            ("a=1, b=2", {"samples": 1}, [], "does not take 'samples'. It takes a, b"),
            ("", {}, ["x=1"], "does not take 'x'. It takes no options"),
            ("a: int = 1", {}, ["a=x"], "takes 'a' as int, got 'x'"),
            ("a: bool = True", {}, ["a=maybe"], "'maybe' is not one of true"),
            ("a: torch.dtype = None", {}, ["a=int3"], "no dtype"),
            ("a: torch.device = None", {}, ["a=abacus"], "device 'abacus'"),
            ("a=1", {}, ["a"], "not of the form key=value"),
            ("a=1", {}, ["a=1", "a=2"], "given twice"),
            ("seed=1", {"seed": 1}, ["seed=2"], "given twice"),
            ("a: list[int] = ()", {}, ["a=1"], "got '1'"),
        ],
    )
    def test_what_does_not_fit_is_told(
        self, write: Any, signature: str, options: Any, sets: list[str], words: str
    ) -> None:
        with pytest.raises(OptionError) as caught:
            self.load(write, signature, options, sets)
        assert words in str(caught.value)

    def test_the_functions_own_errors_of_ours_pass(self, write: Any) -> None:
        body = (
            "from tensortap.errors import OptionError\n"
            "def build():\n    raise OptionError('No such mode.')\n"
        )
        with pytest.raises(OptionError, match=r"^No such mode\.$"):
            load_target(write(body) + ":build", {})
