"""Nothing is called diverged that is not: the same model run again, elsewhere, otherwise."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from planted import BUGS, make_inputs, make_model, massive, permuted, plant, split
from torch import Tensor, nn

import tensortap as tap
from forked_commands import Commands
from tensortap.comparing.compare import compare
from tensortap.comparing.results import Comparison

SHAPES = {
    "small": {"width": 64, "heads": 4, "layers": 4, "length": 24},
    "narrow": {"width": 32, "heads": 2, "layers": 6, "length": 9},
    "deep": {"width": 48, "heads": 4, "layers": 9, "length": 17},
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
seeds = pytest.mark.parametrize("seed", range(2))


Record = Callable[..., tap.Recording]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small models run faster on one thread, and a test may ask for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def record(tmp_path: Path) -> Record:
    count = 0

    def run(model: nn.Module, *batches: Tensor, layers: str | list[str] = "all") -> tap.Recording:
        nonlocal count
        count += 1
        path = tmp_path / str(count)
        with torch.no_grad(), tap.record(model, path, layers=layers, inputs=True) as rec:
            for ids in batches:
                model(ids)
                rec.step()
        assert rec.failure is None
        return tap.open(path)

    return run


def clean(result: Comparison) -> bool:
    """Whether everything was compared and nothing diverged; says what did."""
    bad = [row for row in result.layers if row.verdict not in ("identical", "within")]
    assert not bad, [(row.layer, row.verdict, row.why) for row in bad[:5]]
    return result.same


def test_a_model_against_itself_is_identical(record: Record) -> None:
    model, ids = make_model(), make_inputs()
    result = compare(record(model, ids), record(model, ids))
    assert {row.verdict for row in result.layers} == {"identical"}
    assert result.same_input is True
    assert result.sentence.startswith("Identical")
    one = record(model, ids)
    assert {row.verdict for row in compare(one, one).layers} == {"identical"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_number_of_threads(record: Record, dtype: torch.dtype) -> None:
    model = make_model(width=256, heads=8, layers=3, length=70, dtype=dtype)
    ids = make_inputs(samples=3, length=70)
    runs = []
    for number in (1, 2, 5):
        torch.set_num_threads(number)
        runs.append(record(model, ids))
    for other in runs[1:]:
        assert clean(compare(runs[0], other))


def test_another_process(record: Record, tmp_path: Path, forked: Commands) -> None:
    code = """
import sys, torch, tensortap as tap
from planted import make_inputs, make_model
torch.set_num_threads(1)
model = make_model()
with torch.no_grad(), tap.record(model, sys.argv[1], layers="all", inputs=True):
    model(make_inputs())
"""
    done = forked.python(code, tmp_path / "there", paths=[Path(__file__).parent])
    assert done.code == 0, done.stderr
    result = compare(record(make_model(), make_inputs()), tmp_path / "there")
    assert clean(result)
    assert result.same_input is True


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 2), (3, 1)])
def test_another_batch_size_compares_sample_by_sample(
    record: Record, sizes: tuple[int, ...]
) -> None:
    model, ids = make_model(), make_inputs(samples=4)
    whole, parts = record(model, ids), record(model, *ids.split(sizes))
    assert clean(compare(whole, parts))
    assert clean(compare(parts, whole))
    token = next(bug for bug in BUGS if bug.name == "one bad token")
    first = compare(whole, record(plant(model, token), *ids.split(sizes))).first_divergence
    assert first is not None
    assert first.layer == token.layer


@seeds
@shapes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_low_precision_against_a_floor(
    record: Record, seed: int, shape: dict[str, int], dtype: torch.dtype
) -> None:
    """The candidate is no copy of the floor run: it adds up in another order."""
    ids = make_inputs(seed, length=shape["length"])
    reference = record(make_model(seed, **shape), ids)
    model = make_model(seed, dtype=dtype, **shape)
    floor = record(model, ids)
    for parts in (2, 4) if dtype == torch.bfloat16 else (4,):
        candidate = record(split(model, parts), ids)
        assert clean(compare(reference, candidate, floor=floor))
    assert clean(compare(reference, floor, floor=candidate))


@seeds
@shapes
def test_hidden_units_in_another_order(record: Record, seed: int, shape: dict[str, int]) -> None:
    ids = make_inputs(seed, length=shape["length"])
    reference = record(make_model(seed, **shape), ids, layers="blocks")
    model = make_model(seed, dtype=torch.bfloat16, **shape)
    floor = record(model, ids, layers="blocks")
    candidate = record(permuted(model, seed), ids, layers="blocks")
    assert clean(compare(reference, candidate, floor=floor))


@seeds
@shapes
def test_healthy_models_need_no_floor(record: Record, seed: int, shape: dict[str, int]) -> None:
    ids = make_inputs(seed, length=shape["length"])
    model = make_model(seed, **shape)
    reference = record(model, ids)
    assert clean(compare(reference, record(split(model, 3), ids)))
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        other = record(make_model(seed, dtype=dtype, **shape), ids)
        assert clean(compare(reference, other))
    assert clean(compare(other, reference))


@seeds
@pytest.mark.parametrize("kind", ["token", "channel"])
def test_massive_activations(record: Record, seed: int, kind: str) -> None:
    ids = make_inputs(seed)
    reference = record(massive(make_model(seed), kind), ids)
    for dtype in (torch.bfloat16, torch.float16):
        model = massive(make_model(seed), kind).to(dtype)
        floor = record(model, ids)
        assert clean(compare(reference, floor))
        assert clean(compare(reference, record(split(model, 4), ids), floor=floor))


def test_convolutions_with_dead_rows(record: Record) -> None:
    """Behind a ReLU most rows of a few values are zero, and the rest is what cancelled."""
    for seed in range(4):
        torch.manual_seed(seed)
        parts: list[nn.Module] = []
        for _ in range(5):
            norm = nn.BatchNorm2d(24)
            norm.running_mean.normal_(0, 2)
            norm.running_var.uniform_(0.3, 3)
            parts += [nn.Conv2d(24, 24, 3, padding=1), norm, nn.ReLU()]
        model, images = nn.Sequential(*parts).eval(), torch.randn(2, 24, 8, 8)
        reference = record(model, images)
        for dtype in (torch.bfloat16, torch.float16):
            other = copy.deepcopy(model).to(dtype)
            assert clean(compare(reference, record(other, images.to(dtype))))


def test_the_end_alone_of_a_deep_model(record: Record) -> None:
    shape = {"width": 32, "heads": 2, "layers": 60, "length": 12}
    ids = make_inputs(length=12)
    ends = [
        record(make_model(dtype=dtype, **shape), ids, layers=["final_norm", "head"])
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert clean(compare(*ends))


@seeds
@pytest.mark.parametrize("size", [0.01, 1.0, 300.0])
def test_a_repeat_run_as_floor(record: Record, seed: int, size: float) -> None:
    """A repeat run is equal to the last bit; another order of sums is not, and is clean."""
    model, ids = make_model(seed), make_inputs(seed)
    with torch.no_grad():
        model.embedding.weight.mul_(size)
    reference, again = record(model, ids), record(model, ids)
    assert clean(compare(reference, record(split(model, 4), ids), floor=again))


def test_llama_from_transformers(record: Record) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=101,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    ids = torch.randint(101, (2, 20), generator=torch.Generator().manual_seed(3))

    def run(dtype: torch.dtype, attention: str) -> tap.Recording:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=attention
        ).eval()
        return record(model.to(dtype), ids)

    reference = run(torch.float32, "eager")
    assert clean(compare(reference, run(torch.float32, "sdpa")))
    floor = run(torch.bfloat16, "eager")
    assert clean(compare(reference, floor))
    assert clean(compare(reference, run(torch.bfloat16, "sdpa"), floor=floor))
