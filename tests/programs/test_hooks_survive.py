"""Whether a hook that was set before compiling is still called: docs/compiled.md, claim by claim.

A hook that listens keeps a count here. One that changes what its layer returns is another matter:
what it computes is traced as a part of the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Tuple  # noqa: UP035  (TorchScript knows this spelling)

import pytest
import torch
from torch import Tensor, nn

X = torch.linspace(-1, 1, 8).view(2, 4)


class Heard:
    """A model with a hook on its first layer, and how often that was called."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
        self.model.requires_grad_(False)
        self.calls = 0
        self.handle = self.model[0].register_forward_hook(self.hear)

    def hear(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.calls += 1

    def calls_of(self, run: Any) -> int:
        before = self.calls
        run()
        return self.calls - before


@pytest.fixture
def heard() -> Heard:
    return Heard()


def test_eager_calls_it_every_time(heard: Heard) -> None:
    assert heard.calls_of(lambda: (heard.model(X), heard.model(X))) == 2


def test_a_loaded_script_module_takes_no_hook(heard: Heard, tmp_path: Path) -> None:
    heard.handle.remove()
    torch.jit.save(torch.jit.trace(heard.model, X), tmp_path / "model.pt")
    loaded = torch.jit.load(tmp_path / "model.pt")
    for module in loaded.modules():
        with pytest.raises(RuntimeError, match="not supported on ScriptModules"):
            module.register_forward_hook(heard.hear)


def test_trace_calls_it_while_tracing_and_never_again(heard: Heard, tmp_path: Path) -> None:
    traced = torch.jit.trace(heard.model, X, check_trace=False)
    assert heard.calls > 0
    torch.jit.save(traced, tmp_path / "model.pt")
    loaded = torch.jit.load(tmp_path / "model.pt")
    assert heard.calls_of(lambda: (traced(X), loaded(X))) == 0


def test_what_a_hook_computes_is_traced(heard: Heard, tmp_path: Path) -> None:
    plain = heard.model(X)
    heard.model[2].register_forward_hook(lambda module, args, output: output * 2)
    torch.jit.save(torch.jit.trace(heard.model, X), tmp_path / "model.pt")
    assert torch.equal(torch.jit.load(tmp_path / "model.pt")(X), plain * 2)


def test_script_refuses_a_python_hook(heard: Heard) -> None:
    with pytest.raises(Exception, match=r"hook|Hook|hear"):
        torch.jit.script(heard.model)


def doubled(self, input: Tuple[Tensor], output: Tensor) -> Tensor:  # noqa: UP006
    return output * 2


def test_script_compiles_a_typed_hook_into_the_file(heard: Heard, tmp_path: Path) -> None:
    heard.handle.remove()
    plain = heard.model(X)
    heard.model[2].register_forward_hook(doubled)
    torch.jit.save(torch.jit.script(heard.model), tmp_path / "model.pt")
    assert torch.equal(torch.jit.load(tmp_path / "model.pt")(X), plain * 2)


@pytest.mark.parametrize("strict", [True, False])
def test_export_leaves_it_out(heard: Heard, strict: bool, tmp_path: Path) -> None:
    program = torch.export.export(heard.model, (X,), strict=strict)
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2")
    assert heard.calls_of(lambda: (program.module()(X), loaded.module()(X))) == 0


def test_compile_calls_a_hook_that_was_there_before_the_first_call(heard: Heard) -> None:
    compiled = torch.compile(heard.model, backend="eager", fullgraph=True)
    compiled(X)
    assert heard.calls_of(lambda: compiled(X)) == 1


def test_compile_never_calls_one_that_came_later_until_a_reset(heard: Heard) -> None:
    heard.handle.remove()
    compiled = torch.compile(heard.model, backend="eager", fullgraph=True)
    compiled(X)
    heard.model[0].register_forward_hook(heard.hear)
    assert heard.calls_of(lambda: compiled(X)) == 0
    torch._dynamo.reset()
    compiled(X)
    assert heard.calls_of(lambda: compiled(X)) == 1


def test_onnx_leaves_it_out(heard: Heard, tmp_path: Path) -> None:
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package)
    onnxruntime = pytest.importorskip("onnxruntime")
    path = tmp_path / "model.onnx"
    torch.onnx.export(heard.model, (X,), path, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(path)
    feed = {session.get_inputs()[0].name: X.numpy()}
    assert heard.calls_of(lambda: session.run(None, feed)) == 0


def test_openvino_leaves_it_out(heard: Heard) -> None:
    openvino = pytest.importorskip("openvino")
    model = openvino.compile_model(openvino.convert_model(heard.model, example_input=X), "CPU")
    assert heard.calls_of(lambda: model(X.numpy())) == 0


@pytest.mark.slow
def test_aotinductor_leaves_it_out(heard: Heard, tmp_path: Path) -> None:
    program = torch.export.export(heard.model, (X,))
    path = str(tmp_path / "model.pt2")
    torch._inductor.aoti_compile_and_package(program, package_path=path)
    package = torch._inductor.aoti_load_package(path)
    assert heard.calls_of(lambda: package(X)) == 0
