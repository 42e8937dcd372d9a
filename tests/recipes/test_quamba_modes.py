"""Each mode of recipes/quamba differs from the others exactly where its table says."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import pytest
import torch
from quamba_package import RECIPE

import tensortap as tap
from tensortap.errors import OptionError, TapError, TargetError
from tensortap.selection.sites import sites
from tensortap.taps.plan import shapes_without_running
from tensortap.targets.load import load_target

pytest.importorskip("transformers")

from quamba import target as quamba_target
from quamba.integers import dequantise
from quamba.mode_config import MODE_GROUPS, MODES, ModeConfig, mode_config, table
from quamba.model import TINY, seeded
from quamba.paths import path_difference, path_text
from quamba.target import DEFAULT_DIR, build
from torch import Tensor
from torch.profiler import profile
from transformers import MambaConfig, MambaForCausalLM

MIXER = "backbone.layers.0.mixer"
PAIRS = list(itertools.combinations(MODES, 2))
Tensors = dict[tuple[str, str, str, int], Tensor]


def tiny(mode: str = "fp32", **options: Any) -> tap.Target:
    return build(mode, **{"tiny": True, "seq_len": 40, "samples": 2, **options})


@pytest.fixture(scope="module")
def layer_0(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensors]:
    """All tensors inside the first mixer, in every mode, by module, port, leaf and call."""
    found: dict[str, Tensors] = {}
    for mode in MODES:
        target = tiny(mode)
        path = tmp_path_factory.mktemp("layer_0") / "run"
        layers = [MIXER, f"{MIXER}.**"]
        with tap.record(target.model, path, layers=layers, inputs=True) as rec:
            target(target.batches[0])
        assert rec.failure is None
        run = tap.open(path)
        found[mode] = {
            (name.removeprefix(MIXER).lstrip("."), r.port, r.leaf, r.call): r.tensor()
            for name in run.layers
            for r in run[name].records
        }
    return found


@pytest.fixture(scope="module")
def outputs() -> dict[str, list[Tensor]]:
    """The output of each layer, then the logits, in every mode."""
    found: dict[str, list[Tensor]] = {}
    for mode in MODES:
        target, kept = tiny(mode), []
        for block in target.model.backbone.layers:
            block.register_forward_hook(lambda _, __, output, kept=kept: kept.append(output))
        kept.append(target(target.batches[0]).logits)
        found[mode] = kept
    return found


def comes_from(config: ModeConfig) -> dict[tuple[str, str, str], Hashable]:
    """What the bits of each tensor of layer 0 depend on, by the mode's row alone.

    The codes of the SSM input are the same whether the convolution made them, or they were
    rounded from its grid or from its floats. x_proj multiplies these codes in every int8 mode.
    """
    base = (config.dtype, config.linears)
    conv = (*base, config.conv_input)
    handed = (*conv, config.conv_output)
    taken = (*conv, "codes") if config.int8_scan else handed
    operand = (*conv, config.int8_scan)
    scan = (*taken, config.ssm_arithmetic)
    made: dict[tuple[str, str, str], Hashable] = {
        ("", "input", ""): config.dtype,
        ("in_proj", "input", ""): config.dtype,
        ("in_proj", "output", ""): base,
        ("conv1d", "input", ""): base,
        ("conv1d", "output", ""): handed,
        ("ssm_input", "output", ""): taken,
        ("x_proj", "input", ""): taken,
        ("x_proj", "output", ""): conv,
        ("dt_proj", "input", ""): conv,
        ("dt_proj", "output", ""): conv,
        ("scan", "input", "['u']"): taken,
        ("scan", "input", "['dt']"): operand,
        ("scan", "input", "['B']"): operand,
        ("scan", "input", "['C']"): operand,
        ("scan", "input", "['z']"): (*base, config.int8_scan),
        ("scan", "input", "['A_log']"): (config.dtype, config.int8_scan),
        ("scan", "input", "['D']"): (config.dtype, config.int8_scan),
        ("scan", "output", ""): scan,
        ("out_proj", "input", ""): scan,
    }
    if config.quantised:
        made |= {
            ("in_proj.quantise", "output", "[0]"): base,
            ("in_proj.sums", "output", ""): base,
            ("conv1d.quantise", "output", "[0]"): conv,
            ("conv1d.sums", "output", ""): conv,
            ("x_proj.sums", "input", "[0]"): conv,
            ("x_proj.sums", "output", ""): conv,
            ("dt_proj.sums", "output", ""): conv,
            ("out_proj.quantise", "input", ""): scan,
        }
    return made


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_two_modes_differ_where_the_table_says_and_nowhere_else(
    layer_0: dict[str, Tensors], one: str, other: str
) -> None:
    made = comes_from(MODES[one]), comes_from(MODES[other])
    shared = made[0].keys() & made[1].keys()
    assert len(shared) >= 19
    told = {key: made[0][key] == made[1][key] for key in shared}
    seen = {key: same_bits(layer_0[one][(*key, 0)], layer_0[other][(*key, 0)]) for key in shared}
    assert seen == told


@pytest.mark.parametrize("mode", MODES)
def test_what_is_handed_on_is_what_the_table_says(layer_0: dict[str, Tensors], mode: str) -> None:
    config, found = MODES[mode], layer_0[mode]
    floats = torch.float16 if config.dtype == "fp16" else torch.float32
    conv = found["conv1d", "output", "", 0]
    assert conv.dtype == (torch.int8 if config.conv_output == "codes" else floats)
    ssm = found["ssm_input", "output", "", 0]
    assert ssm.dtype == (torch.int8 if config.int8_scan else floats)
    operands = [found["scan", "input", f"[{name!r}]", 0] for name in ("u", "dt", "B", "C", "z")]
    assert {x.dtype for x in operands} == {torch.int8 if config.int8_scan else floats}
    states = [
        x for (name, port, _, _), x in found.items() if (name, port) == ("scan.state", "output")
    ]
    assert len(states) == 3, "40 tokens are three segments of 16"
    assert all((x.dtype == torch.int8) == config.int8_scan for x in states)
    sums = {name for (name, port, _, _), x in found.items() if x.dtype == torch.int32}
    parts = ("in_proj", "conv1d", "x_proj", "dt_proj", "out_proj")
    assert sums == ({f"{part}.sums" for part in parts} if config.quantised else set())
    if config.quantised and config.conv_output != "codes":
        scale = tiny(mode).model.get_submodule(f"{MIXER}.conv1d").output_scale
        codes = layer_0["0"]["conv1d", "output", "", 0]
        assert torch.equal(conv, dequantise(codes, scale)) == (config.conv_output == "grid")


def test_the_int8_scans_agree_to_the_bit(outputs: dict[str, list[Tensor]]) -> None:
    """0, 2-0 and 2-3 hand the same codes to the same scan: 24 layers and the logits are equal."""
    for mode in ("2-0", "2-3"):
        assert all(map(torch.equal, outputs["0"], outputs[mode]))
    assert not torch.equal(outputs["0"][0], outputs["2-2"][0])


def test_errors_have_the_size_of_eight_bits(outputs: dict[str, list[Tensor]]) -> None:
    """Every int8 mode is near the reference in all layers and logits, and fp16 far nearer."""
    reference = outputs["fp32"]
    worst = {
        mode: max(tap.difference(a, b).relative_mse for a, b in zip(reference, found, strict=True))
        for mode, found in outputs.items()
    }
    assert worst["fp32"] == 0 and 0 < worst["fp16"] < 1e-5
    for mode in MODE_GROUPS["quant_only"]:
        assert 1e-5 < worst[mode] < 0.02
    assert worst["2-4"] < worst["0"]


def test_the_path_difference_is_small_and_said(layer_0: dict[str, Tensors]) -> None:
    target = tiny("0")
    rows = path_difference(target.model, target.batches[0].kwargs["input_ids"])
    assert [row.layer for row in rows] == list(range(24))
    relative = sorted(row.relative for row in rows)
    assert 0 < relative[12] < 1e-6
    assert relative[-1] < 1e-2, "even where a code of the state flips"
    assert all(row.codes < row.values / 1000 for row in rows)
    scans = [layer_0[mode]["scan", "output", "", 0].double() for mode in ("0", "2-1")]
    assert rows[0].max_abs == (scans[0] - scans[1]).abs().max().item()
    assert f"{max(rows, key=lambda row: row.relative).max_abs:.3e}" in path_text(rows)
    with pytest.raises(ValueError, match="PlainScan, not fused"):
        path_difference(tiny("2-1").model, target.batches[0].kwargs["input_ids"])


@pytest.mark.parametrize(("mode", "cast"), [("fp32", torch.float32), ("fp16", torch.float16)])
def test_the_float_modes_are_the_model_of_transformers(
    outputs: dict[str, list[Tensor]], mode: str, cast: torch.dtype
) -> None:
    """Bit for bit, although our mixers run in segments.

    Both without gradients: torch multiplies a matrix and a batch in another order where it has to
    keep them.
    """
    model = seeded(TINY, 0).to(cast).requires_grad_(False)
    logits = model(**tiny(mode).batches[0].kwargs).logits
    assert type(model.backbone.layers[0].mixer).__name__ == "MambaMixer"
    assert torch.equal(logits, outputs[mode][-1])


def test_inputs_are_the_same_in_every_mode_and_not_those_of_calibration() -> None:
    ids = {mode: tiny(mode).batches[0].kwargs["input_ids"] for mode in MODES}
    assert all(torch.equal(found, ids["fp32"]) for found in ids.values())
    calibration = quamba_target._ids(256, 40, 4, quamba_target._CALIBRATION)
    assert not (calibration[:, None] == ids["fp32"]).all(-1).any()
    assert not torch.equal(tiny(seed=1).batches[0].kwargs["input_ids"], ids["fp32"])
    assert len(tiny(samples=3, batch_size=1).batches) == 3


def test_modes_of_one_process_share_a_calibration() -> None:
    quamba_target._calibration.cache_clear()
    for mode in MODES:
        tiny(mode)
    assert quamba_target._calibration.cache_info().misses == 1


def test_a_mode_leaves_the_next_one_alone() -> None:
    """What a user does to one mode's model is not seen in another's."""
    ids = tiny().batches[0].kwargs["input_ids"]
    before = tiny().model(ids).logits
    spoilt = tiny().model
    with torch.no_grad():
        for parameter in spoilt.parameters():
            parameter.zero_()
    assert torch.equal(tiny().model(ids).logits, before)


def test_the_hadamard_transform_is_an_option_of_int8_modes(
    outputs: dict[str, list[Tensor]],
) -> None:
    plain, turned = tiny("0").model, tiny("0", hadamard=True).model
    weights = [m.get_submodule(f"{MIXER}.out_proj").weight for m in (plain, turned)]
    assert not torch.equal(*weights)
    ids = tiny().batches[0].kwargs["input_ids"]
    assert torch.equal(tiny("fp32", hadamard=True).model(ids).logits, outputs["fp32"][-1])
    logits = [outputs["fp32"][-1], outputs["0"][-1], turned(ids).logits]
    errors = [tap.difference(logits[0], found).mse for found in logits[1:]]
    assert errors[1] < errors[0], "out_proj's input has outliers, which the rotation shares out"


def test_the_percentile_clips_the_ssm_input_and_the_state() -> None:
    scales = [
        quamba_target._calibration(
            "quamba-130m-w8a8", None, 0, True, 1, 40, 4, share, False
        ).layers[0]
        for share in (0.99, 1.0)
    ]
    smaller = {name for name in scales[0] if scales[0][name] < scales[1][name]}
    assert smaller == {"u", "state"}
    assert all(torch.equal(scales[0][n], scales[1][n]) for n in scales[0].keys() - smaller)


def test_groups_and_the_guide() -> None:
    assert MODE_GROUPS["all"] == ("fp32", "0", "2-0", "2-1", "2-2", "2-3", "2-4", "3")
    assert MODE_GROUPS["quant_only"] == MODE_GROUPS["all"][1:]
    assert MODE_GROUPS["essential"] == ("fp32", "0", "2-1", "2-2", "2-4")
    assert MODE_GROUPS["fp_only"] == ("fp32",)
    assert table() in (RECIPE / "SSM_MODE_GUIDE.md").read_text(encoding="utf-8")
    with pytest.raises(KeyError, match="There is no mode '4'"):
        mode_config("4")
    with pytest.raises(ValueError, match="int8 codes go to an int8 scan"):
        ModeConfig("x", "static", "codes", "as is", "float", "w8a8", "fp32", "")


def test_the_target_as_the_command_line_loads_it(
    monkeypatch: pytest.MonkeyPatch, outputs: dict[str, list[Tensor]]
) -> None:
    """By its file, where its package is not on the path, and tiny by the environment."""
    monkeypatch.setenv("TENSORTAP_TINY", "1")
    spec = f"{RECIPE / 'quamba' / 'target.py'}:build"
    target = load_target(spec, {"mode": "2-1", "seq_len": 40}, ["samples=2"])
    assert target.mode == "2-1" and target.config is not None
    assert target.config["weights"] == "seeded random weights (seed 0)" and target.config["tiny"]
    assert torch.equal(target(target.batches[0]).logits, outputs["2-1"][-1])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(3)
    config = MambaConfig(vocab_size=50, hidden_size=16, state_size=4, num_hidden_layers=2)
    MambaForCausalLM(config).save_pretrained(folder)
    return folder


def test_a_local_checkpoint(saved: Path) -> None:
    target = tiny(pretrained_dir=str(saved))
    assert target.config is not None and target.config["weights"] == str(saved)
    assert target.notes == ()
    model = MambaForCausalLM.from_pretrained(saved).eval().requires_grad_(False)
    expected = model(**target.batches[0].kwargs).logits
    assert torch.equal(target(target.batches[0]).logits, expected)
    int8 = tiny("0", pretrained_dir=str(saved))
    assert 0 < tap.difference(expected, int8(int8.batches[0]).logits).relative_mse < 0.02


def test_a_checkpoint_is_what_it_is(saved: Path) -> None:
    """Whatever the environment says: tiny is another model, and this one is given."""
    tinier, plain = (tiny("0", pretrained_dir=str(saved), tiny=tiny_) for tiny_ in (True, False))
    assert tinier.config == plain.config and not plain.config["tiny"]
    assert torch.equal(tinier(tinier.batches[0]).logits, plain(plain.batches[0]).logits)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_int8_does_not_hide_what_it_cannot_hold(tmp_path: Path, saved: Path, value: float) -> None:
    model = MambaForCausalLM.from_pretrained(saved)
    with torch.no_grad():
        model.backbone.layers[1].mixer.in_proj.weight[0, 0] = value
    model.save_pretrained(tmp_path)
    target = tiny(pretrained_dir=str(tmp_path))
    assert not target(target.batches[0]).logits.isfinite().all()
    sentence = "NaN or infinities at the input of conv1d of layer 1 in calibration"
    with pytest.raises(TargetError, match=sentence):
        tiny("2-4", pretrained_dir=str(tmp_path))


@pytest.mark.parametrize("mode", MODES)
def test_a_sample_is_the_same_in_any_batch(mode: str) -> None:
    one, both = tiny(mode, samples=1), tiny(mode, samples=2)
    alone, beside = (target(target.batches[0]).logits for target in (one, both))
    exact = torch.equal if MODES[mode].int8_scan else torch.allclose
    assert exact(alone[0], beside[0])


@pytest.mark.parametrize("mode", ["fp32", "0", "2-4"])
def test_the_first_layers_alone_compute_the_same(mode: str) -> None:
    outputs: list[Tensor] = []
    for depth in (None, 1):
        target = tiny(mode, depth=depth)
        block = target.model.get_submodule("backbone.layers.0")
        block.register_forward_hook(lambda _, __, output: outputs.append(output))
        target(target.batches[0])
    assert torch.equal(*outputs)
    assert len(target.model.get_submodule("backbone.layers")) == 1


def test_the_documents_folder_may_be_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (note,) = tiny(pretrained_dir=f"{DEFAULT_DIR}/").notes
    assert note == (
        f"{DEFAULT_DIR}/ does not exist, so the model has seeded random weights (seed 0)."
    )
    assert tiny().notes == ("The model has seeded random weights (seed 0).",)
    Path(DEFAULT_DIR).mkdir(parents=True)
    with pytest.raises(TargetError, match=r"has no config\.json"):
        tiny(pretrained_dir=DEFAULT_DIR)


def _without_weights(folder: Path) -> str:
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    return str(folder)


def _damaged(folder: Path) -> str:
    (folder / "config.json").write_text('{"model_type": "mamba"}')
    (folder / "model.safetensors").write_bytes(b"rubbish")
    return str(folder)


def _another(folder: Path) -> str:
    (folder / "config.json").write_text('{"model_type": "mamba", "hidden_act": "gelu"}')
    (folder / "model.safetensors").write_bytes(b"")
    return str(folder)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda folder: str(folder / "none"), "does not exist. Give a local folder"),
        (str, "has no config.json"),
        (_without_weights, "has no model.safetensors. Other files of weights are pickles"),
        (_damaged, "cannot be loaded"),
        (_another, "expected 'mamba' with 'silu'"),
    ],
)
def test_a_checkpoint_that_is_none(
    tmp_path: Path, make: Callable[[Path], str], sentence: str
) -> None:
    with pytest.raises(TargetError) as caught:
        tiny(pretrained_dir=make(tmp_path))
    assert sentence in str(caught.value) and str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"mode": "2-5"}, "There is no mode '2-5'. The modes are fp32, 0, 2-0,"),
        ({"model": "quamba-1b"}, "There is no model 'quamba-1b' here. Known are quamba-130m-w8a8."),
        ({"seq_len": 0}, "seq_len is 0, expected at least 1."),
        ({"samples": 0}, "samples is 0"),
        ({"calib": -1}, "calib is -1"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"percentile": 99.99}, "percentile is 99.99, expected a share"),
    ],
)
def test_bad_options_are_sentences(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(OptionError) as caught:
        tiny(**options)
    assert sentence in str(caught.value)


def test_a_cache_is_refused() -> None:
    """Rather than ignored, which would give wrong tokens."""
    model = tiny().model
    ids = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(TapError, match="they take no cache and no attention mask"):
        model(ids, use_cache=True)
    with pytest.raises(TapError, match="attention mask"):
        model(ids, attention_mask=torch.ones(1, 4))


@pytest.mark.parametrize("mode", ["fp32", "0", "2-1"])
def test_a_rehearsal_counts_every_call_without_every_step(mode: str) -> None:
    """On shapes alone: a state a segment, and the layer's output has its shape and dtype."""
    mixer = tiny(mode).model.get_submodule(MIXER)
    batch = tap.Target(mixer, torch.zeros(1, 100, TINY.hidden)).batches[0]
    with profile() as seen:
        plan = shapes_without_running(mixer, batch, sites(mixer))
    assert not plan.notes
    assert len([row for row in plan.rows if row.layer == "scan.state"]) == 7, "segments of 16"
    (output,) = (row for row in plan.rows if row.layer == "")
    assert (output.shape, output.dtype) == ((1, 100, TINY.hidden), "float32")
    products = [event for event in seen.events() if event.name == "aten::bmm"]
    assert 7 <= len(products) < 40, "a step a segment and linear layers, not a hundred steps"


@pytest.mark.parametrize(
    ("mode", "strict"), [("fp32", True), ("fp32", False), ("0", False), ("2-1", False)]
)
def test_an_export_has_every_step(mode: str, strict: bool) -> None:
    """It runs on tensors without values too, and what it writes down is computed later."""
    mixer = tiny(mode, samples=1, seq_len=20).model.get_submodule(MIXER)
    x = torch.randn(1, 20, TINY.hidden, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        exported = torch.export.export(mixer, (x,), strict=strict).module()
        torch.testing.assert_close(exported(x), mixer(x), rtol=1e-5, atol=1e-6)
