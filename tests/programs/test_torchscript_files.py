"""TorchScript files: told by a look, recorded without their source; and calls of live objects."""

import subprocess
import sys
import zipfile
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensortap as tap
from tensortap.errors import RecordingError, TargetError
from tensortap.taps.programs.base import Kind, Options, Program
from tensortap.taps.programs.torchscript.kind import KIND
from tensortap.taps.programs.torchscript.program import ScriptProgram


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.act = nn.ReLU(inplace=True)
        self.two = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.act(self.one(x)))


@pytest.fixture(scope="module")
def small() -> nn.Module:
    torch.manual_seed(0)
    return Small().eval().requires_grad_(False)


def test_the_kind_and_the_program_fit_their_protocols(small: nn.Module) -> None:
    kind: Kind = KIND
    program = kind.program(torch.jit.script(small), Options())
    assert isinstance(program, Program)
    assert kind.accepts(torch.jit.trace(small, torch.ones(1, 4)))
    assert not kind.accepts(small)


def test_a_file_is_known_by_what_is_in_it(small: nn.Module, tmp_path: Path) -> None:
    script, weights = tmp_path / "m.pt", tmp_path / "w.pt"
    torch.jit.save(torch.jit.script(small), script)
    torch.save(small.state_dict(), weights)
    assert KIND.recognises(script) and not KIND.recognises(weights)
    with pytest.raises(TargetError, match=r"is what torch\.save writes: weights, or"):
        KIND.program(weights, Options())


def test_nothing_is_unpickled_to_find_out(tmp_path: Path) -> None:
    evil = tmp_path / "evil.pt"
    mark = tmp_path / "ran"
    with zipfile.ZipFile(evil, "w") as archive:
        archive.writestr("evil/data.pkl", f"cos\nsystem\n(S'touch {mark}'\ntR.".encode())
    assert not KIND.recognises(evil)
    with pytest.raises(TargetError, match="which is not loaded since that would run code"):
        KIND.program(evil, Options())
    assert not mark.exists()


def test_what_cannot_be_loaded_is_a_sentence(tmp_path: Path) -> None:
    plain = tmp_path / "plain.pt"
    plain.write_bytes(b"\x80\x02nonsense")
    with pytest.raises(TargetError, match="no zip archive"):
        KIND.program(plain, Options())
    with pytest.raises(TargetError, match="does not exist"):
        KIND.program(tmp_path / "none.pt", Options())
    broken = tmp_path / "broken.pt"
    with zipfile.ZipFile(broken, "w") as archive:
        archive.writestr("m/constants.pkl", b"")
        archive.writestr("m/code/__torch__.py", b"nothing")
    assert KIND.recognises(broken)
    with pytest.raises(TargetError, match=r"'.*broken.pt' cannot be loaded by torch"):
        KIND.program(broken, Options())
    other = tmp_path / "other.pt"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("readme.txt", b"hello")
    with pytest.raises(TargetError, match=r"it has no code.*--runtime export.*torch.jit.save"):
        KIND.program(other, Options())


def test_a_model_without_forward_is_a_sentence() -> None:
    class Exports(nn.Module):
        @torch.jit.export
        def encode(self, x: Tensor) -> Tensor:
            return x + 1

    with pytest.raises(TargetError, match=r"no method 'forward' to run \(it has: encode\)"):
        KIND.program(torch.jit.script(Exports()), Options())


SOURCE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
    def forward(self, x):
        y = self.lin(x)
        return y.relu_(), y + 1

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 2)
    def forward(self, x):
        for block in self.blocks:
            x, y = block(x)
        return self.head(x + y)

torch.manual_seed(0)
model = Model().eval()
x = torch.randn(3, 4)
torch.save(x, "x.pt")
torch.jit.script(model).save("script.pt")
torch.jit.trace(model, x).save("trace.pt")
calls = {}
for name, module in model.named_modules():
    def hook(module, args, output, name=name):
        output = output if type(output) is tuple else (output,)
        calls.setdefault(name, [tensor.clone() for tensor in output])
    module.register_forward_hook(hook)
model(x)
torch.save(calls, "eager.pt")
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files made by another process, from source that is gone then."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "source.py").write_text(SOURCE)
    subprocess.run([sys.executable, "source.py"], cwd=folder, check=True, capture_output=True)
    (folder / "source.py").unlink()
    return folder


@pytest.mark.parametrize("name", ["script.pt", "trace.pt"])
def test_a_file_is_recorded_without_its_source(made: Path, tmp_path: Path, name: str) -> None:
    x = torch.load(made / "x.pt", weights_only=True)
    expected = torch.load(made / "eager.pt", weights_only=True)
    with tap.record(made / name, tmp_path / "run", layers="all") as rec:
        rec.run(x)
    run = tap.open(tmp_path / "run")
    assert set(run.layers) == {*expected, ""}
    for layer, (first, *_) in expected.items():
        records = {record.leaf: record for record in run[layer].records}
        assert all(r.provenance == ("scope" if layer else "hook") for r in records.values())
        if name == "script.pt":
            leaves = ["[0]", "[1]"] if layer.startswith("blocks") and layer[-1].isdigit() else [""]
            assert list(records) == leaves
            for leaf, tensor in zip(leaves, expected[layer], strict=True):
                assert torch.equal(records[leaf].tensor(), tensor)
        else:
            assert any(torch.equal(r.tensor(), first) for r in records.values())
    assert not run.check()


def heard(program: Any, call: Any) -> tuple[list[Any], Any]:
    """What `call` gives while calls of the object are diverted."""
    seen: list[Any] = []

    def other(args: tuple[Any, ...], kwargs: Any) -> Any:
        seen.append((args, dict(kwargs)))
        return program.plain(args, kwargs)

    undo = program.divert(other)
    try:
        return seen, call()
    finally:
        undo()


@pytest.mark.parametrize("how", ["script", "trace", "loaded", "frozen"])
def test_calls_of_the_users_object_come_to_us(small: nn.Module, tmp_path: Path, how: str) -> None:
    x = torch.randn(2, 4)
    module = torch.jit.trace(small, x) if how == "trace" else torch.jit.script(small)
    if how == "loaded":
        module.save(tmp_path / "m.pt")
        module = torch.jit.load(tmp_path / "m.pt")
    if how == "frozen":
        module = torch.jit.freeze(module)
    program = KIND.program(module, Options())
    expected = module(x)
    before = vars(module).get("forward")  # torch caches it there
    seen, output = heard(program, lambda: module(x))
    assert len(seen) == 1 and seen[0][0][0] is x
    assert torch.equal(output, expected)
    assert vars(module).get("forward") is before
    seen.clear()
    assert torch.equal(module(x), expected) and not seen


def test_a_script_inside_of_something_else_is_diverted_there(small: nn.Module) -> None:
    script = torch.jit.script(small)
    x = torch.randn(2, 4)

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = script

        def forward(self, x: Tensor) -> Tensor:
            return self.part(x=x) * 2

    holder, listed = Holder(), [script]
    program = ScriptProgram(script)
    seen, output = heard(program, lambda: holder(x))
    assert torch.equal(output, small(x) * 2) and seen == [((), {"x": x})]
    seen, output = heard(program, lambda: listed[0](x))
    assert torch.equal(output, small(x)) and len(seen) == 1


def test_a_diversion_within_another_ends_with_the_outer_one(small: nn.Module) -> None:
    script = torch.jit.script(small)
    program = ScriptProgram(script)
    undo = program.divert(lambda args, kwargs: "outer")
    inner = program.divert(lambda args, kwargs: "inner")
    assert undo is not None and inner is not None
    assert script(1) == "inner"
    inner()
    assert script(1) == "outer"
    undo()
    assert isinstance(script(torch.ones(1, 4)), Tensor)


def test_a_model_goes_to_one_recording_at_a_time(small: nn.Module, tmp_path: Path) -> None:
    """Each would run it with taps of its own, and only one of them be heard."""
    script, x = torch.jit.script(small), torch.ones(1, 4)
    with tap.record(script, tmp_path / "outer", layers="one"):
        inner = tap.record(script, tmp_path / "inner", layers="two")
        with pytest.raises(RecordingError, match="is being recorded already"):
            inner.__enter__()
        script(x)
    assert tap.open(tmp_path / "outer").layers == ["one"]
    with tap.record(script, tmp_path / "next", layers="two"):
        script(x)
    assert tap.open(tmp_path / "next").layers == ["two"]


def test_calls_of_several_threads_keep_together(small: nn.Module, tmp_path: Path) -> None:
    script = torch.jit.script(small)
    given = [torch.full((1, 4), float(number)) for number in range(4)]

    def call(x: Tensor) -> None:
        for _ in range(10):
            script(x)

    with tap.record(script, tmp_path / "run", layers="all"):
        threads = [Thread(target=call, args=(x,)) for x in given]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    run = tap.open(tmp_path / "run")
    calls: dict[int, dict[str, Tensor]] = {}
    for record in run.records:
        calls.setdefault(record.call, {})[record.layer] = record.tensor()
    assert len(calls) == 40
    for values in calls.values():
        assert torch.allclose(small.two(values["act"]), values["two"])  # type: ignore[operator]
        assert torch.equal(values["two"], values[""])
