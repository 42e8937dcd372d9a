"""Who made the error: on models whose culprit is known."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from blame_models import (
    Cached,
    Chain,
    Counting,
    Gain,
    InPlace,
    Masked,
    Shared,
    Skipping,
    batch,
    gain,
    make,
    recorded,
)
from torch import nn

import tensortap as tap
from tensortap.comparing.blame import engine
from tensortap.comparing.blame.stage import Put

KINDS: list[Callable[..., nn.Module]] = [Chain, Skipping, InPlace, Shared, Cached, Counting, Masked]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer", ["blocks.0.down", "blocks.3.up", "stem", "head"])
def test_a_planted_gain_is_found_at_its_leaf(
    kind: Callable[..., nn.Module], layer: str, tmp_path: Path
) -> None:
    model = make(kind)
    path = recorded(tmp_path / "ref", model, batch())
    result = tap.blame(path, gain(model, layer), batch())
    assert result.culprit == layer
    assert result.share == pytest.approx(1.0, abs=1e-4)
    assert result.sentence.startswith(f"{layer} makes 100 % of the final error")
    assert not result.same
    assert result.causes[0].kind == "factor"


@pytest.mark.parametrize("kind", KINDS)
def test_runs_that_are_inferred_would_have_said_the_same(
    kind: Callable[..., nn.Module], tmp_path: Path
) -> None:
    """Every share against the plain definition, with two runs for every layer."""
    model = make(kind)
    path = recorded(tmp_path / "ref", model, batch(), batch(1))
    narrow = [] if kind is Masked else [copy.deepcopy(model).bfloat16()]
    for candidate in (gain(model, "blocks.1.up"), *narrow):
        dtype = next(candidate.parameters()).dtype
        inputs = [batch().to(dtype), batch(1).to(dtype)]
        result = tap.blame(path, candidate, inputs)
        target = tap.Target(candidate, inputs)
        work = engine._Work(tap.open(path), target, "blocks", False, None, None, (), 1 << 30, None)
        for row in result.first_level:
            if math.isnan(row.share):  # beside the blocks, beyond what the runs allow
                assert not row.layer.startswith("blocks")
                continue
            plain = [work.stage.run([Put(row.layer, port)]) for port in ("input", "output")]
            expected = (plain[0] - plain[1]) / work.total
            assert result.forwards <= 2 * 4 + 3
            assert row.share == pytest.approx(expected, rel=1e-9, abs=1e-9), row.layer


def test_the_numbers_are_those_of_the_definition(tmp_path: Path) -> None:
    """made here, accumulated, handed and amplification, from the tensors by hand."""
    model = make(Chain)
    candidate = gain(gain(model, "blocks.0.down", 1.3), "blocks.2.up", 1.2)
    x = batch()
    path = recorded(tmp_path / "ref", model, x)
    own = recorded(tmp_path / "own", candidate, x)
    reference, mine = tap.open(path), tap.open(own)
    result = tap.blame(path, candidate, x)
    for name in ("blocks.1", "blocks.2"):
        row = result[name]
        layer = candidate.get_submodule(name)
        good, true = reference[name].input, reference[name].output
        with torch.no_grad():
            alone = layer(good)
        assert row.made_here == pytest.approx(_error(true, alone), rel=1e-5, abs=1e-12)
        assert row.accumulated == pytest.approx(_error(true, mine[name].output), rel=1e-5)
        assert row.handed == pytest.approx(_error(good, mine[name].input), rel=1e-5)
        inherited = _error(alone, mine[name].output)
        assert row.amplification == pytest.approx(inherited / row.handed, rel=1e-4)
    assert result["blocks.1"].made_here < 1e-6
    head = result["head"]
    given, true = reference["head"].input, reference["head"].output
    with torch.no_grad():
        alone = candidate.head(given)
    inherited = _error(alone, mine["head"].output)
    assert head.amplification == pytest.approx(inherited / head.handed, rel=1e-4)
    assert head.made_here == pytest.approx(_error(true, alone), abs=1e-9)
    assert result.culprit is None or result.share < 1.0


def _error(reference: torch.Tensor, candidate: torch.Tensor) -> float:
    apart = (candidate.double() - reference.double()).norm()
    return float(apart / reference.double().norm())


def test_with_the_output_alone_layers_behind_a_bug_would_be_blamed(tmp_path: Path) -> None:
    """What the definition is for: the layers behind the bug have no share in it."""
    model = make(Chain)
    path = recorded(tmp_path / "ref", model, batch())
    result = tap.blame(path, gain(model, "blocks.1.down"), batch())
    for layer in ("blocks.2", "blocks.3", "head", "stem", "blocks.0"):
        assert abs(result[layer].share) < 1e-6


def test_blocks_that_cannot_be_run_alone_are_patched_and_that_is_said(tmp_path: Path) -> None:
    model = make(Counting)
    path = recorded(tmp_path / "ref", model, batch())
    result = tap.blame(path, gain(model, "blocks.2.up"), batch())
    assert result.culprit == "blocks.2.up"
    assert any("cannot be run alone" in note for note in result.notes)
    assert all(row.how != "within" for row in result.layers)


def test_a_cache_that_grows_is_no_reason_not_to_run_alone(tmp_path: Path) -> None:
    model = make(Cached)
    path = recorded(tmp_path / "ref", model, batch())
    result = tap.blame(path, gain(model, "blocks.2.up"), batch())
    assert result.culprit == "blocks.2.up"
    assert not result.notes
    assert {row.how for row in result.inside("blocks.2")} == {"within", "patched"}


def test_an_error_in_the_models_own_code_is_no_layers(tmp_path: Path) -> None:
    """The mask comes in beside the blocks, which all do what they should."""
    model = make(Masked)
    path = recorded(tmp_path / "ref", model, batch())
    candidate = copy.deepcopy(model)
    candidate.slope = 2.0
    result = tap.blame(path, candidate, batch())
    assert result.culprit == ""
    assert result.beside > 0.5
    assert result.made_in is not None
    assert (result.made_in.after, result.made_in.before) == ("stem", "blocks.0")
    assert (
        "in the model's own forward, after stem, before blocks.0 (blame_models" in result.sentence
    )
    assert all(row.made_here < 1e-6 for row in result.first_level if row.layer)


def test_two_bugs_of_a_size_make_no_single_culprit(tmp_path: Path) -> None:
    model = make(Chain)
    path = recorded(tmp_path / "ref", model, batch())
    candidate = gain(gain(model, "blocks.3.down", 1.1), "blocks.0.down", 1.08)
    result = tap.blame(path, candidate, batch())
    if result.culprit is not None:  # however it comes out, it must be one of the two
        assert result.culprit in ("blocks.0.down", "blocks.3.down")
        assert result.share < 0.99
    else:
        assert result.sentence.startswith("no single culprit: ")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_rounding_is_nobodys_fault(
    kind: Callable[..., nn.Module], dtype: torch.dtype, tmp_path: Path
) -> None:
    model = make(kind)
    if kind is Masked:
        pytest.skip("its mask is float32 and does not go with a narrower model")
    path = recorded(tmp_path / "ref", model, batch())
    result = tap.blame(path, copy.deepcopy(model).to(dtype), batch().to(dtype))
    assert result.culprit is None
    assert result.same
    assert result.sentence.startswith("nobody's fault: rounding explains")
    assert not result.warnings, "the inputs are the same, cast"


def test_a_bug_under_rounding_is_found_above_it(tmp_path: Path) -> None:
    model = make(Chain)
    path = recorded(tmp_path / "ref", model, batch())
    candidate = gain(model, "blocks.1.down", 1.5)
    candidate.blocks[1].down.inner[0].to(torch.bfloat16)
    result = tap.blame(path, candidate.to(torch.bfloat16), batch().to(torch.bfloat16))
    assert result.culprit == "blocks.1.down"
    assert result.share > 0.9


def test_the_same_model_has_nobody_to_blame(tmp_path: Path) -> None:
    model = make(Chain)
    path = recorded(tmp_path / "ref", model, batch())
    result = tap.blame(path, model, batch())
    assert result.same
    assert bool(result)
    assert result.culprit is None
    assert result.final_error == 0
    assert result.forwards == 1
    assert result.sentence == "nothing to blame: the final output is the reference's"


def test_nan_is_traced_to_the_layer_that_makes_it(tmp_path: Path) -> None:
    model = make(Chain)
    path = recorded(tmp_path / "ref", model, batch())
    candidate = gain(model, "blocks.2.up", math.nan)
    result = tap.blame(path, candidate, batch())
    assert result.culprit == "blocks.2.up"
    assert result.share == pytest.approx(1.0, abs=1e-6)
    assert result["blocks.2.up"].made_here == math.inf
    assert result.to_dict()["layers"][0]["layer"] == "stem"


@pytest.mark.parametrize("blocks", [1, 2, 4, 7, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cost_and_bisection(blocks: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """At most 2 N + 3 forwards for N blocks, and log2(N) + 4 with bisect, whatever is descended."""
    model = make(Chain, blocks=blocks)
    path = recorded(tmp_path / "ref", model, batch())
    for place in {0, blocks // 2, blocks - 1}:
        layer = f"blocks.{place}.down"
        candidate = gain(model, layer, 1.5)
        candidate.get_submodule(layer).inner[0].to(dtype)
        candidate.to(dtype)
        calls: list[int] = []
        candidate.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        result = tap.blame(path, candidate, batch().to(dtype))
        assert result.culprit == layer
        assert result.forwards == len(calls) <= 2 * blocks + 3
        assert result.forwards <= result.limit
        calls.clear()
        found = tap.blame(path, candidate, batch().to(dtype), bisect=True)
        assert found.culprit == layer
        assert found.share == pytest.approx(result.share, rel=1e-6)
        assert (
            found.forwards == len(calls) <= math.ceil(math.log2(max(2, blocks))) + 4 == found.limit
        )


def test_progress_is_told(tmp_path: Path) -> None:
    model = make(Chain)
    path = recorded(tmp_path / "ref", model, batch())
    seen: list[tuple[int, int]] = []
    result = tap.blame(
        path, gain(model, "stem"), batch(), progress=lambda done, total: seen.append((done, total))
    )
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1][0] <= result.forwards <= seen[-1][1]


def test_a_recording_of_blocks_and_outputs_alone_will_do(tmp_path: Path) -> None:
    """Inputs are taken from the outputs that they are; what is inside is said to be missing."""
    model = make(Chain)
    path = recorded(tmp_path / "ref", model, batch(), layers="blocks", inputs=False)
    result = tap.blame(path, gain(model, "blocks.2.up"), batch())
    assert result.culprit == "blocks.2"
    assert result.final == "blocks.3"
    assert any("--layers all --inputs" in note for note in result.notes)
    assert any("taken from the outputs" in note for note in result.notes)
    assert "counts as its own" in result["blocks.0"].note


def test_layers_can_be_chosen_and_the_final_one_too(tmp_path: Path) -> None:
    model = make(Chain)
    path = recorded(tmp_path / "ref", model, batch())
    candidate = gain(gain(model, "blocks.1.up", 1.01), "blocks.3.down", 3.0)
    result = tap.blame(path, candidate, batch(), layers=["blocks.*.up", "blocks.*.down"])
    assert result.culprit == "blocks.3.down"
    assert {row.layer for row in result.first_level} == {
        f"blocks.{n}.{end}" for n in range(4) for end in ("up", "down")
    }
    earlier = tap.blame(path, candidate, batch(), final="blocks.2")
    assert earlier.final == "blocks.2"
    assert earlier.culprit == "blocks.1.up"


def test_all_layers_name_the_innermost(tmp_path: Path) -> None:
    model = make(Chain)
    path = recorded(tmp_path / "ref", model, batch())
    result = tap.blame(path, gain(model, "blocks.1.up"), batch(), layers="all")
    assert result.culprit == "blocks.1.up"


def test_a_floor_run_keeps_small_errors_from_being_blamed(tmp_path: Path) -> None:
    model = make(Chain)
    path = recorded(tmp_path / "ref", model, batch())
    rough = recorded(tmp_path / "floor", gain(model, "blocks.0.up", 1.2), batch())
    candidate = gain(model, "blocks.2.down", 1.01)
    assert tap.blame(path, candidate, batch()).culprit == "blocks.2.down"
    assert tap.blame(path, candidate, batch(), floor=rough).culprit is None


def test_several_batches_count_together(tmp_path: Path) -> None:
    model = make(Chain)
    path = recorded(tmp_path / "ref", model, batch(), batch(1), batch(2))
    result = tap.blame(path, gain(model, "head"), [batch(), batch(1), batch(2)])
    assert result.culprit == "head"
    fewer = tap.blame(path, gain(model, "head"), [batch(), batch(1)])
    assert any("3 batches and the candidate 2" in text for text in fewer.warnings)


def test_names_of_a_wrapped_candidate_are_found(tmp_path: Path) -> None:
    model = make(Chain)
    path = recorded(tmp_path / "ref", model, batch())

    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.module(x)

    result = tap.blame(path, Wrapper(gain(model, "blocks.1.up")), batch())
    assert result.culprit == "module.blocks.1.up"


def test_a_compiled_candidate_runs_eagerly(tmp_path: Path) -> None:
    model = make(Chain)
    path = recorded(tmp_path / "ref", model, batch())
    compiled = torch.compile(gain(model, "blocks.1.up"), backend="eager")
    with torch.no_grad():
        compiled(batch())
    assert tap.blame(path, compiled, batch()).culprit == "blocks.1.up"


def test_gain_is_what_it_says() -> None:
    layer = nn.Linear(2, 2)
    x = torch.ones(1, 2)
    assert torch.equal(Gain(layer, 2.0)(x), layer(x) * 2)


@pytest.mark.parametrize("layer", ["stem", "head"])
def test_bisection_finds_what_stands_outside_the_blocks(layer: str, tmp_path: Path) -> None:
    model = make(Chain, blocks=6)
    path = recorded(tmp_path / "ref", model, batch())
    result = tap.blame(path, gain(model, layer), batch(), bisect=True)
    assert result.culprit == layer
    assert result.forwards <= math.ceil(math.log2(6)) + 4


@pytest.mark.parametrize("seed", range(4))
def test_what_all_layers_make_is_no_ones_fault(seed: int, tmp_path: Path) -> None:
    """Weights of every linear on a coarse grid: the first block's error is amplified the most."""
    model = make(Chain, seed)
    path = recorded(tmp_path / "ref", model, batch())
    candidate = copy.deepcopy(model)
    with torch.no_grad():
        for block in candidate.blocks:
            for linear in (block.up, block.down):
                step = linear.weight.abs().amax(-1, keepdim=True) / 15
                linear.weight.copy_((linear.weight / step).round() * step)
    for bisect in (False, True):
        result = tap.blame(path, candidate, batch(), bisect=bisect)
        assert result.culprit is None
        assert not result.same
        assert result.sentence.startswith("no single culprit: ")


def test_layers_behind_the_final_one_are_left_out(tmp_path: Path) -> None:
    model = make(Chain)
    path = recorded(tmp_path / "ref", model, batch())
    result = tap.blame(path, gain(model, "blocks.1.up"), batch(), final="blocks.2")
    assert [row.layer for row in result.first_level] == ["stem", "blocks.0", "blocks.1", "blocks.2"]
    assert result.behind == pytest.approx(0.0, abs=1e-9)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_candidate_on_a_gpu_against_a_reference_of_the_cpu(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    model = make(Cached)
    path = recorded(tmp_path / "ref", model, batch())
    inputs = batch().to("cuda", dtype)
    clean = copy.deepcopy(model).to("cuda", dtype)
    assert tap.blame(path, clean, inputs).same
    candidate = gain(model, "blocks.2.down", 1.5)
    candidate.blocks[2].down.inner[0].to("cuda", dtype)
    candidate.to("cuda", dtype)
    before = torch.cuda.get_rng_state()
    for bisect in (False, True):
        result = tap.blame(path, candidate, inputs, bisect=bisect)
        assert result.culprit == "blocks.2.down"
        assert result.share > 0.9
    assert torch.equal(before, torch.cuda.get_rng_state())


class Looped(Chain):
    """All blocks run twice, one behind the other: each feeds itself by way of the others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for _ in range(2):
            for block in self.blocks:
                x = block(x)
        return self.head(x)


@pytest.mark.parametrize("bisect", [False, True])
def test_blocks_that_run_in_a_loop(bisect: bool, tmp_path: Path) -> None:
    model = make(Looped)
    path = recorded(tmp_path / "ref", model, batch())
    result = tap.blame(path, gain(model, "blocks.1.up", 1.3), batch(), bisect=bisect)
    assert result.culprit in ("blocks.1", "blocks.1.up")
    assert result.share == pytest.approx(1.0, abs=0.05)


class Apart(Chain):
    """The residual stream runs outside of the blocks: no output cuts it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@pytest.mark.parametrize("blocks", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_that_are_no_chain(blocks: int, dtype: torch.dtype, tmp_path: Path) -> None:
    model = make(Apart, blocks=blocks)
    path = recorded(tmp_path / "ref", model, batch())
    candidate = gain(model, "blocks.0.up", 2.0)
    candidate.blocks[0].up.inner[0].to(dtype)
    calls: list[int] = []
    candidate.to(dtype).register_forward_hook(lambda *_: calls.append(1))
    for bisect in (False, True):
        calls.clear()
        result = tap.blame(path, candidate, batch().to(dtype), bisect=bisect)
        assert result.culprit == "blocks.0.up"
        most = math.ceil(math.log2(max(2, blocks))) + 4 if bisect else 2 * blocks + 3
        assert len(calls) == result.forwards <= most
        assert result.limit == most


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("blocks", [1, 4])
def test_a_head_that_is_quantised_like_all_is_not_blamed(
    blocks: int, seed: int, tmp_path: Path
) -> None:
    model = make(Chain, seed, blocks=blocks)
    path = recorded(tmp_path / "ref", model, batch())
    candidate = copy.deepcopy(model)
    with torch.no_grad():
        for module in candidate.modules():
            if isinstance(module, nn.Linear):
                step = module.weight.abs().amax(-1, keepdim=True) / 127
                module.weight.copy_((module.weight / step).round() * step)
    assert tap.blame(path, candidate, batch()).culprit is None
    assert tap.blame(path, candidate, batch(), bisect=True).culprit is None


def test_a_model_that_is_one_layer(tmp_path: Path) -> None:
    model = nn.Linear(8, 4)
    path = recorded(tmp_path / "ref", model, batch())
    candidate = copy.deepcopy(model)
    with torch.no_grad():
        candidate.weight.mul_(1.1)
    for bisect in (False, True):
        result = tap.blame(path, candidate, batch(), bisect=bisect)
        assert result.culprit == ""
        assert result.sentence.startswith("(root) makes 100 % of the final error")


def test_a_final_output_of_zeros(tmp_path: Path) -> None:
    class Nothing(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 0

    model = make(Nothing)
    path = recorded(tmp_path / "ref", model, batch())
    assert tap.blame(path, model, batch()).same
    assert tap.blame(path, gain(model, "head"), batch(), bisect=True).same


def test_dropout_in_training_mode_is_warned_about(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4)).eval()
    path = recorded(tmp_path / "ref", model, batch())
    result = tap.blame(path, copy.deepcopy(model).train(), batch())
    assert any("training mode" in warning for warning in result.warnings)


def test_a_model_without_blocks_is_descended_into(tmp_path: Path) -> None:
    """A bug in the own code of a container is the container's."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
            self.scale = nn.Parameter(torch.tensor(1.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(self.one(x).relu()) * self.scale

    model = nn.Sequential(nn.Linear(8, 8), Scaled(), nn.Tanh(), nn.Linear(8, 4)).eval()
    path = recorded(tmp_path / "ref", model, batch())
    candidate = copy.deepcopy(model)
    with torch.no_grad():
        candidate[1].scale.mul_(1.5)
    assert tap.blame(path, candidate, batch()).culprit == "1"
    assert tap.blame(path, gain(model, "1.two"), batch()).culprit == "1.two"


@pytest.mark.parametrize("size", [1e200, 1e-200])
def test_sizes_whose_squares_are_no_numbers(size: float, tmp_path: Path) -> None:
    class Sized(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * size

    model = make(Sized).double()
    path = recorded(tmp_path / "ref", model, batch().double())
    result = tap.blame(path, gain(model, "blocks.1.up"), batch().double())
    assert result.culprit == "blocks.1.up"
    assert tap.blame(path, model, batch().double()).same


def test_nan_on_both_sides_is_the_same(tmp_path: Path) -> None:
    model = gain(make(Chain), "head", math.nan)
    path = recorded(tmp_path / "ref", model, batch())
    assert tap.blame(path, model, batch()).same


def test_inputs_with_a_history(tmp_path: Path) -> None:
    model = make(Chain)
    path = recorded(tmp_path / "ref", model, batch())
    given = batch().requires_grad_() * 1
    assert tap.blame(path, gain(model, "stem"), given).culprit == "stem"


def test_leaves_without_inputs_in_the_reference(tmp_path: Path) -> None:
    """What is not known is not blamed, and does not stand beside the culprit."""
    model = make(Chain)
    path = recorded(tmp_path / "ref", model, batch(), layers="type:Linear", inputs=False)
    result = tap.blame(path, gain(model, "blocks.2.up"), batch(), layers="type:Linear")
    assert result.culprit in ("blocks.2.up", None)
    assert any("its share is unknown" in row.note for row in result.layers)


def test_a_floor_of_zero_is_not_believed(tmp_path: Path) -> None:
    model = make(Chain)
    path = recorded(tmp_path / "ref", model, batch())
    again = recorded(tmp_path / "again", model, batch())
    candidate = copy.deepcopy(model).bfloat16()
    result = tap.blame(path, candidate, batch().bfloat16(), floor=again)
    assert result.same
    assert any("to the last bit" in note for note in result.notes)


def test_a_final_layer_inside_a_block(tmp_path: Path) -> None:
    model = make(Chain)
    path = recorded(tmp_path / "ref", model, batch())
    for bisect in (False, True):
        result = tap.blame(
            path, gain(model, "blocks.1.up"), batch(), final="blocks.1.down", bisect=bisect
        )
        assert result.culprit == "blocks.1.up"


def test_a_mask_that_is_lost_is_not_the_blocks_fault(tmp_path: Path) -> None:
    """None stands where the reference has a tensor: it is put there all the same."""

    class Loses(Masked):
        lost = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = torch.linspace(0.5, 1.5, x.shape[1])[None, :, None]
            x = self.stem(x)
            for block in self.blocks:
                x = block(x, mask=None if self.lost else mask)
            return self.head(x)

    class Gentle(nn.Module):
        def __init__(self, step: nn.Module) -> None:
            super().__init__()
            self.step = step

        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            return self.step(x, mask=torch.ones(1) if mask is None else mask)

    model = make(Loses)
    model.blocks = nn.ModuleList(Gentle(block) for block in model.blocks)
    path = recorded(tmp_path / "ref", model, batch())
    candidate = copy.deepcopy(model)
    candidate.lost = True
    result = tap.blame(path, candidate, batch())
    assert result.culprit == ""
    assert "in the model's own forward, after stem, before blocks.0" in result.sentence
    assert all(row.made_here < 1e-6 for row in result.first_level if row.layer)


def test_a_layer_that_runs_on_two_inputs_costs_no_more(tmp_path: Path) -> None:
    class Siamese(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ends = []
            for side in (x, x.flip(0)):
                y = self.stem(side)
                for block in self.blocks:
                    y = block(y)
                ends.append(y)
            return self.head(ends[0] - ends[1])

    model = make(Siamese, blocks=3)
    path = recorded(tmp_path / "ref", model, batch())
    result = tap.blame(path, gain(model, "blocks.1.up", 1.3), batch())
    assert result.culprit == "blocks.1.up"
    assert result.forwards <= 2 * 3 + 3


def test_bisection_does_not_blame_the_block_behind_a_missing_one(tmp_path: Path) -> None:
    model = make(Chain, blocks=8)
    path = recorded(tmp_path / "ref", model, batch())
    swapped = copy.deepcopy(model)
    swapped.blocks[3] = nn.Identity()
    for bisect in (False, True):
        result = tap.blame(path, swapped, batch(), bisect=bisect)
        assert result.culprit in ("blocks.3", None)
        assert any("has no layer 'blocks.3.norm'" in text for text in result.warnings)

    class Skips(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for number, block in enumerate(self.blocks):
                x = x if number == 3 else block(x)
            return self.head(x)

    candidate = make(Skips, blocks=8)
    for bisect in (False, True):
        result = tap.blame(path, candidate, batch(), bisect=bisect)
        assert result.culprit == ""
        assert result.made_in is not None
        assert (result.made_in.after, result.made_in.before) == ("blocks.2", "blocks.4")
        assert any("never called 'blocks.3'" in text for text in result.warnings)


def test_a_candidate_of_another_width_blames_nobody(tmp_path: Path) -> None:
    path = recorded(tmp_path / "ref", make(Chain), batch())
    for bisect in (False, True):
        result = tap.blame(path, make(Chain, width=24), batch(), bisect=bisect)
        assert result.culprit is None
        assert any("do not fit" in text for text in result.warnings)


def test_other_numbers_of_calls_are_said(tmp_path: Path) -> None:
    class Twice(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for number, block in enumerate(self.blocks):
                x = block(block(x)) if number == 3 else block(x)
            return self.head(x)

    path = recorded(tmp_path / "ref", make(Chain), batch())
    result = tap.blame(path, make(Twice), batch())
    assert any("ran 2 times in the candidate and once" in text for text in result.warnings)


@pytest.mark.parametrize("seed", range(3))
def test_quantisers_in_hooks_are_usual_too(seed: int, tmp_path: Path) -> None:
    """Inputs of all linears are rounded by hooks of the user: what all do is no one's fault."""
    model = make(Chain, seed)
    path = recorded(tmp_path / "ref", model, batch())
    candidate = copy.deepcopy(model)

    def rounded(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        step = args[0].abs().amax() / 15
        return ((args[0] / step).round() * step,)

    for module in candidate.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(rounded)
    result = tap.blame(path, candidate, batch())
    assert result.culprit is None
    assert not result.same
