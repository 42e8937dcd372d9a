"""The built-in modes: casts and torchao's, on any model; what they leave alone, and say."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tensortap as tap
from tensortap.demo import DemoModel
from tensortap.errors import MissingExtraError, OptionError, TargetError
from tensortap.targets import Target
from tensortap.targets.modes import ao
from tensortap.targets.modes.builtin import (
    CASTS,
    GROUPS,
    apply_mode,
    in_mode,
    is_builtin,
    unavailable,
)

pytest.importorskip("torchao")
CPU = torch.device("cpu")
HERE = ("fp32", "fp16", "bf16", "fp64", "int8", "int8wo", "int4wo", "fp8wo", "fake:w8a8")
INNER = {
    "int8": torch.int8,
    "int8wo": torch.int8,
    "int4wo": torch.int8,
    "fp8wo": torch.float8_e4m3fn,
}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return DemoModel(vocabulary=50, hidden=64, layers=2, heads=4).eval()


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(50, (2, 7), generator=torch.Generator().manual_seed(1))


def error(made: Tensor, expected: Tensor) -> float:
    difference = made.detach().double() - expected.detach().double()
    return float(difference.norm() / expected.detach().double().norm())


def told(target: Target) -> str:
    return "\n".join(target.notes)


def test_groups_hold_built_in_modes_alone() -> None:
    assert set(GROUPS) == {"all", "essential", "quant_only", "fp_only"}
    for names in GROUPS.values():
        assert all(is_builtin(name) for name in names)
        assert len(set(names)) == len(names)
        assert set(names) <= set(GROUPS["all"])
    assert not set(GROUPS["quant_only"]) & set(CASTS)
    assert is_builtin("fake:rubbish") and not is_builtin("int9") and not is_builtin("fakery")


@pytest.mark.parametrize("name", HERE)
def test_a_mode_is_as_near_to_fp32_as_its_numbers_are_fine(
    name: str, model: nn.Module, ids: Tensor, tmp_path: Path
) -> None:
    made = in_mode(model, name, inputs=ids)
    with torch.no_grad():
        expected, got = model(ids), made(ids)
        with tap.record(made, tmp_path / "run", layers="all", inputs=True):
            assert torch.equal(made(ids), got), "recording changed a bit"
    least, most = {
        "fp32": (0, 0),
        "fp64": (1e-9, 1e-5),
        "fp16": (1e-5, 1e-2),
        "bf16": (1e-4, 5e-2),
        "int4wo": (2e-2, 0.4),
        "fp8wo": (5e-3, 0.15),
    }.get(name, (5e-4, 6e-2))
    assert least <= error(got, expected) <= most
    names = [layer for layer, _ in model.named_modules()]
    run = tap.open(tmp_path / "run")
    assert set(run.layers) <= set(names) and "blocks.1.mlp.down" in run.layers
    assert [layer for layer, _ in made.named_modules()] == names
    assert [type(part) for part in made.modules()] == [type(part) for part in model.modules()]


def test_more_bits_are_nearer(model: nn.Module, ids: Tensor) -> None:
    expected = model(ids)
    errors = {
        name: error(in_mode(model, name, inputs=ids)(ids), expected)
        for name in ("int8", "int8wo", "int4wo", "fake:w8a8", "fake:w4a4", "fake:w2a2")
    }
    assert errors["int8wo"] < errors["int8"] < errors["fake:w4a4"] < errors["fake:w2a2"]
    assert errors["fake:w8a8"] < errors["int4wo"] < errors["fake:w4a4"]


@pytest.mark.parametrize("name", list(INNER))
def test_weights_really_are_quantised_and_nothing_else_is_touched(
    name: str, model: nn.Module, ids: Tensor
) -> None:
    made = in_mode(model, name, inputs=ids)
    for layer, part in made.named_modules():
        if isinstance(part, nn.Linear):
            assert part.weight.qdata.dtype == INNER[name], layer
            if name == "int4wo":
                assert -8 <= int(part.weight.qdata.min()) < int(part.weight.qdata.max()) <= 7
            step = part.weight.dequantize() - model.get_submodule(layer).weight
            assert 0 < float(step.detach().abs().max()) < 0.05
    linears = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    for key, value in model.named_parameters():
        if key not in linears:
            assert torch.equal(value, made.get_parameter(key)), key


def test_int8_is_integer_arithmetic() -> None:
    """Weights by row and activations by token: what torchao computes is what the integers say."""
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 16), torch.randn(5, 64)
    made = in_mode(layer, "int8", inputs=x)
    weight, scale = made.weight.qdata.double(), made.weight.scale.double()
    top = 63.5 if made.weight.reduce_range else 127.5  # torchao's grid ends at -128
    steps = (x.abs().amax(-1, keepdim=True) / top).double()
    operand = (x.double() / steps).round().clamp(-top - 0.5, top - 0.5)
    expected = (operand @ weight.T) * steps * scale.T + layer.bias.double()
    assert error(made(x), expected) < 1e-6
    assert error(made(x), layer(x)) > 1e-3


@pytest.mark.parametrize("name", HERE)
def test_in_mode_leaves_the_model_as_it_was(name: str, model: nn.Module, ids: Tensor) -> None:
    before = {key: value.clone() for key, value in model.state_dict().items()}
    heard: list[str] = []
    hook = model.head.register_forward_hook(lambda *_: heard.append("head"))
    keys = [set(vars(part)) for part in model.modules()]
    hooks = [dict(part._forward_hooks) for part in model.modules()]
    state = torch.get_rng_state()
    try:
        made = in_mode(model, name, inputs=ids)
        heard.clear()
        made(ids)
        assert heard == ["head"], "a copy has the hooks too"
        assert [dict(part._forward_hooks) for part in model.modules()] == hooks
    finally:
        hook.remove()
    assert [set(vars(part)) for part in model.modules()] == keys
    assert torch.equal(torch.get_rng_state(), state)
    for key, value in model.state_dict().items():
        assert value.dtype == before[key].dtype and torch.equal(value, before[key])


def test_apply_mode_converts_in_place_and_says_so(ids: Tensor) -> None:
    own = DemoModel(vocabulary=50, hidden=32, layers=1, heads=2).eval()
    target = apply_mode(Target(own, {"input_ids": ids}, notes=("before",)), "int8")
    assert target.model is own and target.mode == "int8"
    assert target.notes[0] == "before"
    assert "'int8' quantises the weights of 7 layers, 88% of the model's parameters" in told(target)


def test_casts_take_floating_point_inputs_along() -> None:
    target = Target(nn.Linear(4, 4), [torch.ones(1, 4), torch.zeros(2, 4)])
    for name, dtype in (("bf16", torch.bfloat16), ("fp64", torch.float64)):
        made = apply_mode(Target(nn.Linear(4, 4), target.inputs), name)
        assert made(made.batches[1]).dtype == dtype
        assert "from float32 to" in told(made)
    assert apply_mode(target, "fp32").notes == ()


class Odd(nn.Module):
    """Weights that are read by their layers, and by others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(10, 64)
        self.plain = nn.Linear(64, 64)
        self.named = nn.Linear(64, 64)
        self.product = nn.Linear(64, 64)
        self.head = nn.Linear(64, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.plain(self.embedding(ids))
        assert self.plain.weight.dtype == x.dtype and self.product.weight.shape[1] == 64
        x = F.linear(x, self.named.weight, bias=self.named.bias)  # torchao would lose this bias
        return self.head(x @ self.product.weight.t() + self.product.bias)


@pytest.mark.parametrize("name", ["int8", "int4wo"])
def test_weights_that_other_code_reads_stay(name: str) -> None:
    model, ids = Odd(), torch.arange(10)[None]
    expected, table = model(ids), model.embedding.weight.detach().clone()
    target = apply_mode(Target(model, ids), name)
    assert error(target(target.batches[0]), expected) < (0.03 if name == "int8" else 0.4)
    assert "('named'): other code reads its weight (linear)" in told(target)
    assert "('product'): other code reads its weight (t)" in told(target)
    assert "'embedding.weight' shared its values with a layer that is quantised" in told(target)
    assert torch.equal(model.embedding.weight, table)
    assert type(model.embedding.weight.data) is Tensor
    assert hasattr(model.head.weight, "qdata") and hasattr(model.plain.weight, "qdata")


def test_linears_that_share_a_weight_go_on_sharing_it() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.ReLU())
    model[1].weight = model[0].weight
    model.append(model[0])  # the same layer twice is converted once
    made = in_mode(model, "int8", inputs=torch.randn(2, 8))
    assert made[0].weight is made[1].weight and made[3] is made[0]
    assert made(torch.randn(2, 8)).shape == (2, 8)


@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
def test_attention_and_fused_encoders_are_right_and_said() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    x = torch.randn(2, 5, 32)
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=mask)
        target = apply_mode(Target(model, {"src": x, "src_key_padding_mask": mask}), "int8")
        made = target(target.batches[0])
    assert 1e-4 < error(made[~mask], expected[~mask]) < 0.05
    assert "leaves 2 layers as they are ('layers.0.self_attn.out_proj'" in told(target)
    assert "runs layer by layer in this mode" in told(target)
    assert hasattr(model.layers[0].linear1.weight, "qdata")
    attention = nn.MultiheadAttention(16, 2)
    with pytest.raises(OptionError, match=r"can convert none of the model's linears. 'out_proj'"):
        apply_mode(Target(attention, (torch.ones(3, 1, 16),) * 3), "int8")


def test_what_torchao_cannot_do_stays_with_a_reason() -> None:
    model = nn.Sequential(nn.Linear(40, 32), nn.Linear(32, 1), nn.Linear(1, 8), nn.Linear(8, 8))
    x = torch.randn(3, 40)
    target = apply_mode(Target(model, x), "int4wo")
    assert "leaves 3 layers as they are ('0', '2', '3'): its rows are no multiple of 32" in told(
        target
    )
    assert target(target.batches[0]).shape == (3, 8)
    narrow = nn.Sequential(nn.Linear(1, 8), nn.Linear(8, 8), nn.Conv1d(3, 3, 1))
    target = apply_mode(Target(narrow, torch.randn(3, 1)), "int8")
    assert "leaves 1 layer as it is ('0'): torchao refuses it" in told(target)
    assert "leaves 1 layer as it is ('2'): torchao converts linears alone" in told(target)
    assert target(target.batches[0]).shape == (3, 8)


def test_a_layer_without_rows_runs() -> None:
    made = in_mode(nn.Linear(8, 3), "int8")
    assert made(torch.ones(0, 8)).shape == (0, 3)
    assert made(input=torch.ones(2, 0, 8)).shape == (2, 0, 3)


@pytest.mark.parametrize(
    ("model", "x", "mode", "said"),
    [
        (nn.Conv1d(2, 2, 1), torch.ones(1, 2, 3), "int8", "Conv1d has no nn.Linear. For conv"),
        (nn.LayerNorm(4), torch.ones(1, 4), "fake:w8a8", "the model has none that it could"),
        (nn.Linear(4, 4).double(), torch.ones(1, 4).double(), "int8", "a model in float64.* first"),
        (lambda x: x, torch.ones(1), "bf16", "the target's model is a function: a compiled model"),
        (nn.Linear(4, 4), torch.ones(1, 4), "int9", "no built-in mode 'int9'. There are fp32, "),
        (nn.Linear(4, 4), torch.ones(1, 4), "fp8", "'fp8' cannot run on cpu here: .*fp8wo"),
        (nn.LazyLinear(4), torch.ones(1, 4), "int8", "has no shape before the first run"),
        (nn.Linear(4, 4, device="meta"), torch.ones(1, 4), "fake:w8", "load the weights first"),
    ],
    ids=["conv", "norm", "float64", "function", "unknown", "fp8", "lazy", "meta"],
)
def test_what_cannot_be_is_a_sentence(model: object, x: Tensor, mode: str, said: str) -> None:
    if mode == "fp8" and unavailable("fp8", CPU) is None:
        pytest.skip("float8 products run here")
    with pytest.raises(OptionError, match=said):
        apply_mode(Target(model, x), mode)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_compiled_models_and_models_in_a_mode_are_a_sentence() -> None:
    with pytest.raises(OptionError, match="a compiled model cannot be changed any more"):
        apply_mode(
            Target(torch.jit.trace(nn.Linear(4, 4), torch.ones(1, 4)), torch.ones(1, 4)), "int8"
        )
    target = apply_mode(Target(nn.Linear(4, 4), torch.ones(1, 4)), "int8")
    for again in ("int8", "int4wo", "fake:w8"):
        with pytest.raises(OptionError, match="it is quantised already"):
            apply_mode(target, again)
    with pytest.raises(OptionError, match="Calibration is over 0 batches"):
        apply_mode(Target(nn.Linear(4, 4), torch.ones(1, 4)), "fake:w8a8", calib=0)


@pytest.mark.parametrize("name", ["int8", "int8wo", "fp8wo"])
def test_a_quantised_model_is_not_cast(name: str) -> None:
    made = in_mode(nn.Sequential(nn.Linear(32, 8)), name)
    with pytest.raises(OptionError, match=r"casts plain weights, and '0.weight' is an? \w+Tensor"):
        in_mode(made, "bf16")
    assert in_mode(made, "fp32")(torch.ones(1, 32)).dtype == torch.float32
    with pytest.raises(OptionError, match="The mode is the int 3, expected a name"):
        in_mode(made, 3)  # type: ignore[arg-type]


def test_in_mode_needs_inputs_for_static_scales_alone() -> None:
    with pytest.raises(OptionError, match="calibrated on inputs, and none were given"):
        in_mode(nn.Linear(4, 4), "fake:w8a8")
    assert in_mode(nn.Linear(4, 4), "fake:w8")(torch.ones(1, 4)).shape == (1, 4)
    with pytest.raises(OptionError, match="got a function"):
        in_mode(lambda x: x, "fp32")  # type: ignore[arg-type]
    model = nn.Linear(4, 4)
    model.made = model.weight * 2  # a tensor with a history, which torch does not copy
    with pytest.raises(TargetError, match="Linear cannot be copied, and a mode is made of a copy"):
        in_mode(model, "fp32")


def test_whether_a_mode_can_run_is_found_out_by_trying() -> None:
    for name in HERE:
        assert unavailable(name, CPU) is None
    before = ao.why_not.cache_info().misses
    assert unavailable("int8", CPU) is None
    assert ao.why_not.cache_info().misses == before, "tried once"
    if not torch.cuda.is_available():
        assert "cannot run on cuda here" in str(unavailable("int8", torch.device("cuda")))
    with pytest.raises(OptionError, match="Write fake:w8a8"):
        unavailable("fake:8", CPU)


@pytest.fixture
def without_torchao(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    ao.why_not.cache_clear()
    yield
    ao.why_not.cache_clear()


def test_without_torchao_a_sentence_says_what_to_install(without_torchao: None) -> None:
    reason = str(unavailable("int8", CPU))
    assert reason.startswith("The mode 'int8' needs torchao")
    assert reason.endswith("pip install 'tensortap[quant]'")
    for name in ("int8", "fp8"):
        with pytest.raises(MissingExtraError, match="needs torchao, and that is not installed"):
            apply_mode(Target(nn.Linear(4, 4), torch.ones(1, 4)), name)
    assert in_mode(nn.Linear(4, 4), "fake:w8").weight.shape == (4, 4)


def test_torchao_says_nothing_of_its_own_on_stderr() -> None:
    code = (
        "import logging, torch; from torch import nn;"
        "from tensortap.targets.modes.builtin import in_mode;"
        "print(type(in_mode(nn.Linear(32, 4), 'int8').weight.data).__name__,"
        "logging.root.manager.disable)"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(root / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["Int8Tensor", str(logging.NOTSET)]
    assert done.stderr == ""


def test_a_compiled_model_is_converted_inside() -> None:
    torch.manual_seed(0)
    inner, x = (
        nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)).eval(),
        torch.ones(2, 32),
    )
    for name in ("int8", "fake:w4a4"):
        plain = nn.Sequential(*(part for part in inner)).eval()
        model = torch.compile(in_mode(plain, "fp32"), backend="eager")
        before = model(x)
        target = apply_mode(Target(model, x), name)
        assert not torch.equal(target(target.batches[0]), before), "compiled code was kept"
        assert torch.equal(target(target.batches[0]), in_mode(plain, name, inputs=x)(x))


def test_a_recording_knows_how_coarse_the_numbers_are(
    model: nn.Module, ids: Tensor, tmp_path: Path
) -> None:
    """Else every quantised mode would be measured by what float32 rounds."""
    names = {
        "fp32": "float32",
        "int8": "int8",
        "int4wo": "int4",
        "fp8wo": "float8_e4m3fn",
        "fake:w8a4": "fake int4",
        "fake:w8": "fake int8",
    }
    for name, kind in names.items():
        path = tmp_path / kind
        made = in_mode(model, name, inputs=ids)
        with torch.no_grad(), tap.record(made, path, layers="blocks") as rec:
            made(ids)
            rec.step()
        counts = tap.open(path).manifest.target["dtypes"]
        assert counts[kind] > 0.8 * sum(counts.values()), name
        assert sum(counts.values()) == sum(p.numel() for p in model.parameters())
        result = tap.compare(tmp_path / "float32", path)
        assert result.same, f"{name}: {result.sentence}"
    wrong = in_mode(model, "int8", inputs=ids)
    with torch.no_grad():
        wrong.blocks[1].mlp.up.bias.add_(3.0)
        with tap.record(wrong, tmp_path / "wrong", layers="blocks"):
            wrong(ids)
    assert tap.compare(tmp_path / "float32", tmp_path / "wrong").first_divergence is not None
