"""Exported programs: every layer as eager hooks hear it, or gone with a reason."""

from __future__ import annotations

import copy
import io
import os
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from forked_commands import Commands
from programs.eager_calls import compare_calls, eager_calls, run_all, same
from programs.models import MODELS
from tensortap.errors import OptionError, TargetError
from tensortap.taps.leaves import flatten
from tensortap.taps.programs.base import Options, Program
from tensortap.taps.programs.exported.kind import KIND, open_exported

# Layers of which some returned tensors are read by nobody, or whose order the graph does not keep.
PARTLY = {"demo": 0, "llama": 0, "mamba": 0, "mixtral": 2, "bert": 0, "t5": 14, "resnet": 0}
GONE = {"resnet": 2}


def export(model: nn.Module, args: Any, kwargs: Any = None, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options.setdefault("strict", False)
        with torch.no_grad():
            return torch.export.export(model, args, kwargs or {}, **options)


@pytest.mark.parametrize("name", sorted(PARTLY))
def test_every_layer_is_as_eager_or_gone(name: str, tmp_path: Path) -> None:
    if name not in ("demo", "resnet"):
        pytest.importorskip("transformers")
    model, args, kwargs = MODELS[name]()
    output, eager = eager_calls(model, args, kwargs)
    exported = export(model, args, kwargs)
    programs = [open_exported(exported, Options())]
    if name in ("llama", "resnet"):
        torch.export.save(exported, tmp_path / "model.pt2")
        programs.append(open_exported(tmp_path / "model.pt2", Options()))
    for program in programs:
        run = run_all(program, args, kwargs)
        found = compare_calls(program, run, eager)
        assert found["wrong"] == []
        assert len(found["gone"]) == GONE.get(name, 0)
        assert len(found["partly"]) == PARTLY[name], found["partly"]
        pairs = zip(flatten(output), flatten(run.output), strict=True)
        assert all(same(one, other) for (_, one), (_, other) in pairs)
        lost = {place.name for place in program.places if place.gone}
        assert [c.layer for c in run.calls] == [layer for layer, _ in eager if layer not in lost]
        types = {n: type(m).__name__ for n, m in model.named_modules()}
        assert all(p.type == types[p.name] for p in program.places if p.name and not p.gone)
        for call in run.calls:
            if call.operand is not None:
                weight, bias = program.linears()[call.layer]
                made = nn.functional.linear(call.operand, weight, bias)
                assert same(made, call.outputs[0][1])


def test_a_program_is_one_and_describes_itself(tmp_path: Path) -> None:
    model, args, kwargs = MODELS["demo"]()
    torch.export.save(export(model, args, kwargs), tmp_path / "m.pt2")
    program = open_exported(tmp_path / "m.pt2", Options())
    assert isinstance(program, Program)
    described = program.describe()
    assert described["parameters"] == sum(p.numel() for p in model.parameters())
    assert described["dtypes"] == {"float32": described["parameters"]}
    assert described["file"] == str(tmp_path / "m.pt2")
    assert described["class"].endswith(type(model).__name__)
    assert program.weights == {n: tuple(p.shape) for n, p in model.named_parameters()}


# Forms of modules.


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.act = nn.ReLU(inplace=True)
        self.same = nn.Identity()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.same(self.linear(x))
        self.act(h)
        return h, h.sum()


class Forms(nn.Module):
    """Called twice, in place, tuples, dicts, keywords, state, regions without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.frozen = Inner()
        self.halves = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.halves.weight
        self.unused = nn.Linear(8, 2)
        self.register_buffer("count", torch.zeros(8))

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> dict[str, Any]:
        self.unused(x)
        y, _ = self.inner(x)
        y, total = self.inner(y)
        with torch.no_grad():
            y, _ = self.frozen(y)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = self.halves(y)
        w = self.tied(y)
        w[:, 0] = 1.0
        w += 1
        self.count.add_(y.mean(0))
        return {"y": y * scale, "pair": (z.float(), total), "w": w * self.count}


@pytest.fixture(scope="module")
def forms() -> tuple[nn.Module, Any, Any, Any]:
    torch.manual_seed(0)
    model = Forms().eval()
    args, kwargs = (torch.randn(4, 8),), {"scale": torch.tensor(2.0)}
    batch = torch.export.Dim("batch", min=2)
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(
            model, args, kwargs, dynamic_shapes={"x": {0: batch}, "scale": None}, strict=False
        )
    return model, args, kwargs, exported


def _fresh(forms: tuple[nn.Module, Any, Any, Any], x: torch.Tensor) -> tuple[Any, Any, Any]:
    """An eager run, and the program's run from the same state."""
    model, _, kwargs, exported = forms
    with torch.no_grad():
        model.count.zero_()
    output, eager = eager_calls(model, (x,), kwargs)
    program = open_exported(exported, Options())
    program.module.count.zero_()
    run = run_all(program, (x,), kwargs)
    return (output, eager), program, run


@pytest.mark.parametrize("batch", [4, 7])
def test_forms_of_modules(forms: tuple[nn.Module, Any, Any, Any], batch: int) -> None:
    (output, eager), program, run = _fresh(forms, torch.randn(batch, 8))
    found = compare_calls(program, run, eager)
    assert found["wrong"] == []
    assert sorted(found["gone"]) == ["frozen.same", "inner.same", "inner.same"]
    assert found["partly"] == []  # not even of the sums that nobody reads
    assert len([call for call in run.calls if call.layer == "inner.linear"]) == 2
    for (leaf, one), (other_leaf, other) in zip(flatten(output), flatten(run.output), strict=True):
        assert leaf == other_leaf
        assert same(one, other)


def test_state_is_shared_by_plain_and_tapped_runs(forms: tuple[nn.Module, Any, Any, Any]) -> None:
    x = torch.randn(4, 8)
    _, program, _ = _fresh(forms, x)
    after_one = [buffer.clone() for buffer in program.buffers()]
    program.plain((x,), forms[2])
    after_two = list(program.buffers())
    assert any(not torch.equal(a, b) for a, b in zip(after_one, after_two, strict=True))
    assert any(torch.allclose(2 * a, b) for a, b in zip(after_one, after_two, strict=True))


def test_a_copy_is_taken_before_anyone_writes(forms: tuple[nn.Module, Any, Any, Any]) -> None:
    (_, eager), _, run = _fresh(forms, torch.randn(4, 8))
    tied = next(call for call in run.calls if call.layer == "tied")
    assert same(tied.outputs[0][1], dict(eager)["tied"][0][1])
    assert not bool((tied.outputs[0][1][:, 0] == 1).all())


def test_the_users_program_is_left_alone(forms: tuple[nn.Module, Any, Any, Any]) -> None:
    exported = forms[3]
    before = exported.graph_module.code
    module = exported.module()
    code = module.code
    program = open_exported(module, Options())
    run_all(program, (torch.randn(4, 8),), forms[2])
    assert exported.graph_module.code == before
    assert module.code == code


def test_inputs_by_name_position_and_what_is_wrong(forms: tuple[nn.Module, Any, Any, Any]) -> None:
    program = open_exported(forms[3], Options())
    x, scale = torch.randn(4, 8), torch.tensor(2.0)

    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        program.module.count.zero_()
        return program.plain(args, kwargs)["y"]

    assert [(a.name, a.dtype, a.shape) for a in program.arguments or ()] == [
        ("x", torch.float32, (None, 8)),
        ("scale", torch.float32, ()),
    ]
    expected = run(x, scale=scale)
    assert same(run(x=x, scale=scale), expected)
    assert same(run(x, scale), expected)
    with pytest.raises(TargetError, match="not given 'scale'"):
        run(x)
    with pytest.raises(TargetError, match="takes no argument 'mask'"):
        run(x, scale=scale, mask=x)
    with pytest.raises(TargetError, match="takes 2 arguments"):
        run(x, scale, x)
    with pytest.raises(TargetError, match="by position and by name"):
        run(x, x=x, scale=scale)
    with pytest.raises(TargetError, match="does not take these inputs"):
        run(torch.randn(4, 9), scale=scale)


def test_the_users_module_runs_with_taps_while_diverted(
    forms: tuple[nn.Module, Any, Any, Any],
) -> None:
    module = forms[3].module()
    x, kwargs = torch.randn(4, 8), forms[2]
    program = open_exported(module, Options())
    seen = []

    def call(args: Any, kwargs: Any) -> Any:
        seen.append(args)
        return program.plain(args, kwargs)  # which must not come back here

    undo = program.divert(call)
    assert undo is not None
    module(x, **kwargs)
    assert len(seen) == 1
    undo()
    module(x, **kwargs)
    assert len(seen) == 1
    assert "forward" not in module.__dict__
    assert open_exported(forms[3], Options()).divert(call) is None


# Signatures, caches, strictness.


def test_preserved_signatures_give_exact_leaves(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y, _ = self.inner(x)
            return self.inner(y)[0]

    model, x = Model().eval(), torch.randn(3, 8)
    exported = export(model, (x,), preserve_module_call_signature=("inner",))
    torch.export.save(exported, tmp_path / "m.pt2")
    _, eager = eager_calls(model, (x,))
    program = open_exported(tmp_path / "m.pt2", Options())
    run = run_all(program, (x,))
    expected = [leaves for layer, leaves in eager if layer == "inner"]
    found = [call.outputs for call in run.calls if call.layer == "inner"]
    assert [[leaf for leaf, _ in leaves] for leaves in found] == [["[0]", "[1]"]] * 2
    for one, other in zip(expected, found, strict=True):
        assert all(same(a, b) for (_, a), (_, b) in zip(one, other, strict=True))


def test_strict_exports_too() -> None:
    model, args, kwargs = MODELS["demo"]()
    _, eager = eager_calls(model, args, kwargs)
    program = open_exported(export(model, args, kwargs, strict=True), Options())
    found = compare_calls(program, run_all(program, args, kwargs), eager)
    assert found["wrong"] == found["partly"] == found["gone"] == []


def test_decomposed_programs_too() -> None:
    model, args, kwargs = MODELS["demo"]()
    _, eager = eager_calls(model, args, kwargs)
    exported = export(model, args, kwargs).run_decompositions()
    run = run_all(open_exported(exported, Options()), args, kwargs)
    assert [call.layer for call in run.calls] == [layer for layer, _ in eager]
    for call, (_, leaves) in zip(run.calls, eager, strict=True):
        torch.testing.assert_close(call.outputs[0][1], leaves[0][1])


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(8, 8)
        self.out = nn.Linear(8, 8)

    def forward(
        self, x: torch.Tensor, cache: dict[str, tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[torch.Tensor, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
        old, mask = cache["0"]
        keys = torch.cat([old, self.key(x)], 1)
        scores = (x @ keys.transpose(1, 2) + mask).softmax(-1)
        return self.out(scores @ keys), {"0": (keys, mask)}


def test_a_cache_goes_in_and_out(tmp_path: Path) -> None:
    model = Cached().eval()
    args = (torch.randn(1, 1, 8), {"0": (torch.randn(1, 5, 8), torch.zeros(1))})
    past = torch.export.Dim("past", min=2, max=64)
    exported = export(model, args, dynamic_shapes=(None, {"0": ({1: past}, None)}))
    torch.export.save(exported, tmp_path / "m.pt2")
    program = open_exported(tmp_path / "m.pt2", Options())
    assert [a.name for a in program.arguments or ()] == ["x", "cache.0.0", "cache.0.1"]
    assert (program.arguments or ())[1].shape == (1, None, 8)
    x, cache = args
    for _ in range(3):
        output, eager = eager_calls(model, (x, cache))
        run = run_all(program, (x, cache))
        assert compare_calls(program, run, eager)["wrong"] == []
        assert same(run.output[1]["0"][0], output[1]["0"][0])
        flat = {"x": x, "cache.0.0": cache["0"][0], "cache.0.1": cache["0"][1]}
        assert same(program.plain((), flat)[0], output[0])
        cache = output[1]


def test_a_cache_of_transformers_goes_in_and_out(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    executorch = pytest.importorskip("transformers.integrations.executorch")
    executorch.register_dynamic_cache_export_support()
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=67,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    cache = transformers.DynamicCache(config=config)
    with torch.no_grad():
        model(input_ids=torch.randint(0, 67, (1, 5)), past_key_values=cache)

    def given() -> dict[str, Any]:
        return {"input_ids": torch.tensor([[3]]), "past_key_values": copy.deepcopy(cache)}

    torch.export.save(export(model, (), given()), tmp_path / "m.pt2")
    program = open_exported(tmp_path / "m.pt2", Options())
    assert [argument.name for argument in program.arguments or ()] == [
        "input_ids",
        *(f"past_key_values.{part}.{layer}" for part in (0, 1) for layer in (0, 1)),
    ]
    output, eager = eager_calls(model, (), given())
    run = run_all(program, (), given())
    assert same(run.output.logits, output.logits)
    for call, (layer, leaves) in zip(run.calls, eager, strict=True):
        assert call.layer == layer
        if layer != "model.rotary_emb":  # keys and values leave as well, but behind the output
            assert same(call.outputs[0][1], leaves[0][1])


# Files.


def test_files_are_told_apart(tmp_path: Path) -> None:
    model, args, kwargs = MODELS["demo"]()
    good = tmp_path / "good.pt2"
    torch.export.save(export(model, args, kwargs), good)
    assert KIND.recognises(good)
    other = tmp_path / "other.pt2"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("other/data/aotinductor/model/x.so", b"")
        archive.writestr("other/models/model.json", b"{}")
    assert not KIND.recognises(other)
    with pytest.raises(TargetError, match="AOTInductor"):
        open_exported(other, Options())
    text = tmp_path / "text.pt2"
    text.write_text("no zip")
    assert not KIND.recognises(text)
    with pytest.raises(TargetError, match=r"no archive of torch\.export"):
        open_exported(text, Options())
    empty = tmp_path / "empty.pt2"
    with zipfile.ZipFile(empty, "w") as archive:
        archive.writestr("a.txt", "a")
    with pytest.raises(TargetError, match=r"holds no exported program.*--runtime torchscript"):
        open_exported(empty, Options())
    broken = tmp_path / "broken.pt2"
    with zipfile.ZipFile(broken, "w") as archive:
        archive.writestr("broken/models/model.json", "{}")
    with pytest.raises(TargetError, match="cannot be loaded"):
        open_exported(broken, Options())
    with pytest.raises(TargetError, match="does not exist"):
        open_exported(tmp_path / "none.pt2", Options())


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_file_runs_no_code_when_it_is_loaded(tmp_path: Path) -> None:
    model, args, kwargs = MODELS["demo"]()
    torch.export.save(export(model, args, kwargs), tmp_path / "good.pt2")
    payload = io.BytesIO()
    torch.save(((Evil(tmp_path / "ran"),), {}), payload)
    with (
        zipfile.ZipFile(tmp_path / "good.pt2") as source,
        zipfile.ZipFile(tmp_path / "evil.pt2", "w") as target,
    ):
        for name in source.namelist():
            whole = payload.getvalue() if "sample_inputs" in name else source.read(name)
            target.writestr(name.replace("good/", "evil/"), whole)
    with pytest.raises(TargetError, match="could run code"):
        open_exported(tmp_path / "evil.pt2", Options())
    assert not (tmp_path / "ran").exists()
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
    open_exported(tmp_path / "good.pt2", Options())


def test_other_objects_are_not_accepted() -> None:
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))
    assert not KIND.accepts(traced)  # its layers are live: hooks do
    assert not KIND.accepts(nn.Linear(2, 2))
    with pytest.raises(OptionError, match="no exported program"):
        open_exported(nn.Linear(2, 2), Options())


@pytest.mark.slow
def test_outputs_of_a_library_are_known_in_a_process_that_did_not_import_it(
    tmp_path: Path, forked: Commands
) -> None:
    pytest.importorskip("transformers")
    model, args, kwargs = MODELS["llama"]()
    torch.export.save(export(model, args, kwargs), tmp_path / "m.pt2")
    code = (
        "import sys; from pathlib import Path\n"
        "assert 'transformers' not in sys.modules\n"
        "from tensortap.taps.programs.base import Options\n"
        "from tensortap.taps.programs.exported.kind import open_exported\n"
        f"print(len(open_exported(Path({str(tmp_path / 'm.pt2')!r}), Options()).places))"
    )
    done = forked.python(code)
    assert done.code == 0, done.stderr[-2000:]
    assert int(done.stdout) == len(open_exported(tmp_path / "m.pt2", Options()).places)


def test_what_torch_compile_adds_to_names_is_dropped() -> None:
    class Wrapped(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.inner = torch.compile(model)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.inner(*args, **kwargs)

    model, args, kwargs = MODELS["demo"]()
    names = [layer for layer, _ in eager_calls(model, args, kwargs)[1]]
    program = open_exported(export(torch.compile(model), args, kwargs), Options())
    assert [place.name for place in program.places] == [*names, ""]
    assert set(program.weights) == {name for name, _ in model.named_parameters()}
    program = open_exported(export(Wrapped(model), args, kwargs), Options())
    assert [place.name for place in program.places] == [*(f"inner.{name}" for name in names), ""]


class Aside(nn.Module):
    """Keeps what its caller reads, and returns what nobody does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = self.a(x) * 2
        return self.b(self.last)


class AsideUser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.aside = Aside()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.aside(x)
        return self.aside.last + 1


def test_what_was_read_of_a_layer_need_not_be_what_it_returned() -> None:
    model, x = AsideUser().eval(), torch.randn(2, 4)
    _, eager = eager_calls(model, (x,))
    run = run_all(open_exported(export(model, (x,)), Options()), (x,))
    (call,) = [call for call in run.calls if call.layer == "aside"]
    assert [leaf for leaf, _ in call.outputs] == ["?0", "?1"]
    assert same(call.outputs[1][1], dict(eager)["aside"][0][1])
